package gateway

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"sync"

	"culvert.dev/internal/udp"
	"culvert.dev/sni"
	"culvert.dev/tunnel"
)

// Datagrams are what is carried from an address of UDP: those for one Service,
// or QUIC by the names in its hellos.
type Datagrams struct {
	Service tunnel.Name // zero: QUIC
	Port    uint16      // of Service; 0 where it has only one
	Silent  bool        // QUIC clients are told nothing where they are refused

	// HTTP3, if set, is where QUIC to names of the gateway's own ends; all of
	// QUIC does where it is Alone.
	HTTP3 *HTTP3
}

// Proto is how requests by d are called where nothing is said of them.
func (d *Datagrams) Proto() string { return d.Protos()[0] }

// Protos are how requests by d may be called.
func (d *Datagrams) Protos() []string {
	switch {
	case !d.Service.IsZero():
		return []string{"udp"}
	case d.HTTP3 == nil:
		return []string{"quic"}
	case d.HTTP3.TerminateAll:
		return []string{"connect-h3"}
	}
	return []string{"quic", "connect-h3"}
}

// datagrams are the listeners of UDP and who serves them.
type datagrams struct {
	server    *udp.Server
	listeners []datagramListener
	pinned    []http3Listener
	http3     []*HTTP3 // at all of them
}

type datagramListener struct {
	udp.Listener
	http3 *HTTP3 // nil for none
}

// listen opens the socket of l.
func (d *datagrams) listen(ctx context.Context, l Listener) (net.Addr, error) {
	conn, err := udp.Listen(ctx, l.Address)
	if err != nil {
		return nil, err
	}
	h := l.Datagrams.HTTP3
	if h != nil {
		d.http3 = append(d.http3, h)
	}
	if h != nil && h.TerminateAll {
		d.pinned = append(d.pinned, http3Listener{h, conn, l.Address})
		return conn.LocalAddr(), nil
	}
	ln := datagramListener{Listener: udp.Listener{
		Conn: conn, Name: l.Address, Service: l.Datagrams.Service, Port: l.Datagrams.Port, Silent: l.Datagrams.Silent,
	}, http3: h}
	if h != nil {
		ln.Own, ln.Local = h.Owns, udp.NewLocal(conn)
	}
	if ln.Service.IsZero() {
		ln.Open = func() udp.Opening { return new(sni.QUIC) }
	}
	d.listeners = append(d.listeners, ln)
	return conn.LocalAddr(), nil
}

// close gives back sockets that were never served.
func (d *datagrams) close() {
	if d == nil {
		return
	}
	for _, ln := range d.listeners {
		_ = ln.Conn.Close()
	}
	for _, p := range d.pinned {
		_ = p.conn.Close()
	}
}

// shutdown drains what ends here, and waits for it.
func (d *datagrams) shutdown(ctx context.Context) {
	var wg sync.WaitGroup
	for _, h := range d.http3 {
		wg.Go(func() { _ = h.server.Shutdown(ctx) })
	}
	wg.Wait()
}

// stop ends everything.
func (d *datagrams) stop() {
	for _, h := range d.http3 {
		_ = h.server.Close()
	}
	_ = d.server.Close()
}

// run serves every listener, each by a function given to run.
func (d *datagrams) run(ctx context.Context, run func(func() error), h tunnel.Handler, log *slog.Logger) {
	for _, p := range d.pinned {
		run(func() error { return p.run(ctx, h, log) })
	}
	for _, ln := range d.listeners {
		run(func() error {
			if err := d.server.Serve(ctx, ln.Listener); !errors.Is(err, tunnel.ErrServerClosed) {
				return err
			}
			return nil
		})
		if ln.http3 != nil {
			run(func() error {
				defer ln.Local.Close()
				return ln.http3.serve(ctx, ln.Local, h)
			})
		}
		log.Info("serving", "listener", ln.Name, "address", ln.Conn.LocalAddr().String())
	}
}
