package gateway

import (
	"context"
	"errors"
	"log/slog"
	"net"

	"culvert.dev/sni"
	"culvert.dev/tunnel"
	"culvert.dev/udp"
)

// Datagrams are what is carried from an address of UDP: those for one Service,
// or QUIC by the names in its hellos.
type Datagrams struct {
	Service tunnel.Name // zero: QUIC
	Port    uint16      // of Service; 0 where it has only one
	Silent  bool        // QUIC clients are told nothing where they are refused

	// End serves the QUIC connections to names for which Own is true, which
	// end here, until ctx is done. c is a socket of theirs alone, which also
	// makes their connection ids; it is closed after End has returned. Both are
	// nil where none end here.
	End func(ctx context.Context, c *udp.Local) error
	Own func(tunnel.Name) bool
}

// Proto is how requests by d are called.
func (d *Datagrams) Proto() string {
	if d.Service.IsZero() {
		return "quic"
	}
	return "udp"
}

// datagrams are the listeners of UDP and who serves them.
type datagrams struct {
	server    *udp.Server
	listeners []datagramListener
}

type datagramListener struct {
	udp.Listener
	end func(context.Context, *udp.Local) error
}

// listen opens the socket of l.
func (d *datagrams) listen(ctx context.Context, l Listener) (net.Addr, error) {
	conn, err := udp.Listen(ctx, l.Address)
	if err != nil {
		return nil, err
	}
	ln := datagramListener{Listener: udp.Listener{
		Conn: conn, Name: l.Address, Service: l.Datagrams.Service, Port: l.Datagrams.Port, Silent: l.Datagrams.Silent, Own: l.Datagrams.Own,
	}, end: l.Datagrams.End}
	if ln.Service.IsZero() {
		ln.Open = func() udp.Opening { return new(sni.QUIC) }
	}
	if ln.end != nil {
		ln.Local = udp.NewLocal(conn)
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
}

// run serves every listener, each by a function given to run.
func (d *datagrams) run(ctx context.Context, run func(func() error), log *slog.Logger) {
	for _, ln := range d.listeners {
		run(func() error {
			if err := d.server.Serve(ctx, ln.Listener); !errors.Is(err, tunnel.ErrServerClosed) {
				return err
			}
			return nil
		})
		if ln.end != nil {
			run(func() error {
				defer ln.Local.Close()
				return ln.end(ctx, ln.Local)
			})
		}
		log.Info("serving", "listener", ln.Name, "address", ln.Conn.LocalAddr().String())
	}
}
