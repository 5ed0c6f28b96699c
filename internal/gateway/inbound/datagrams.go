package inbound

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"sync"

	"culvert.dev/connect"
	"culvert.dev/connect/connectudp"
	"culvert.dev/connect/h3"
	"culvert.dev/identity"
	"culvert.dev/internal/termination"
	"culvert.dev/internal/udp"
	"culvert.dev/registry"
	"culvert.dev/sni"
	"culvert.dev/tunnel"
)

// Datagrams are what is carried from an address of UDP: those for one Service, or QUIC
// by the names in its hellos.
type Datagrams struct {
	Service tunnel.Name               // zero: QUIC
	Port    uint16                    // of Service; 0 where it has only one
	To      func(req *tunnel.Request) // in place of Service: fills in where a session goes
	Silent  bool                      // QUIC clients are told nothing where they are refused

	// Answer is that of a udp.Listener, for QUIC; nil answers nothing.
	Answer func(datagram []byte, from netip.AddrPort) (answer []byte, taken bool)

	// HTTP3, if set, is where QUIC to names of the gateway's own ends; all of
	// QUIC does where it is Alone.
	HTTP3 *HTTP3
}

// newDatagrams makes what a listener of Datagrams carries.
func (o *Listener) newDatagrams(s *registry.ListenerSettings) (*Datagrams, error) {
	d := &Datagrams{Service: s.Service, Port: s.Port, Silent: s.RefuseSilently, Answer: o.answer}
	if len(s.TLS) == 0 {
		return d, nil
	}
	// Every one of a listener has the same protocols.
	d.HTTP3 = &HTTP3{Auth: o.verifier, CurrentVia: o.builder.CurrentVia, TerminateAll: len(s.Protocols) == 0, ConnectUDP: slices.Contains(s.TLS[0].Protocols, "connect-udp")}
	return d, d.HTTP3.useItems(o.builder.Identity, s.TLS)
}

// answer answers STUN, where the settings in force say so.
func (o *Listener) answer(datagram []byte, from netip.AddrPort) (answer []byte, taken bool) {
	c := o.config.Load()
	if c == nil || c.Settings == nil || !c.Settings.STUN || o.builder.STUN == nil {
		return nil, false
	}
	return o.builder.STUN(datagram, from)
}

// Proto is how requests by d are called where nothing is said of them.
func (d *Datagrams) Proto() string { return d.Protos()[0] }

// Protos are how requests by d may be called.
func (d *Datagrams) Protos() []string {
	switch {
	case !d.Service.IsZero() || d.To != nil:
		return []string{"udp"}
	case d.HTTP3 == nil:
		return []string{"quic"}
	}
	ends := []string{"connect-h3"}
	if d.HTTP3.ConnectUDP {
		ends = append(ends, "connect-udp")
	}
	if d.HTTP3.TerminateAll {
		return ends
	}
	return append([]string{"quic"}, ends...)
}

// connectUDP makes the protocol of CONNECT-UDP.
func (b *Builder) connectUDP(auth connect.Authenticator, front connect.Intermediary) *connectudp.Protocol {
	return &connectudp.Protocol{Protocol: connect.Protocol{Auth: auth, Intermediary: front, CurrentVia: b.CurrentVia, Delegate: b.delegate()}, Dialer: b.UDP, Dropped: b.DroppedDatagrams, Budget: b.Budget}
}

// An HTTP3 ends QUIC at an address of UDP and takes CONNECT over HTTP/3. Its
// keys may be changed while it serves; it has none before Use.
type HTTP3 struct {
	Auth connect.Authenticator // nil asks for no credentials

	CurrentVia func() string // returns this gateway's pseudonym

	// TerminateAll says that nothing else is at the address: all connections end here, or
	// are refused.
	TerminateAll bool

	ConnectUDP bool // CONNECT-UDP is taken, too

	Server h3.Server // whose fields OpenSocket sets

	items termination.Protocol // knows which end here, and how
}

// Use has QUIC ended by items from the next connection on. Where it returns an error,
// nothing has changed.
func (p *HTTP3) Use(items ...termination.Item) error {
	items = slices.Clone(items)
	for i := range items {
		items[i].ALPN = []termination.Offer{{Name: "h3"}}
	}
	return p.items.Use(items...)
}

// useItems is Use for items of a listener.
func (p *HTTP3) useItems(store *identity.Store, items []registry.ListenerTLS) error {
	var all []termination.Item
	for i := range items {
		k, err := keys(store, &items[i])
		if err != nil {
			return err
		}
		all = append(all, termination.Item{Keys: k, Any: items[i].Any})
	}
	return p.Use(all...)
}

// Owns reports whether connections to n end here.
func (p *HTTP3) Owns(n tunnel.Name) bool { return p.items.Owns(n) }

// prepare sets what of the server belongs to the gateway.
func (p *HTTP3) prepare(b *Builder, name string) {
	s := &p.Server
	s.TLS = &tls.Config{GetConfigForClient: func(hello *tls.ClientHelloInfo) (*tls.Config, error) {
		name, err := tunnel.ParseName(hello.ServerName)
		if err != nil && hello.ServerName != "" {
			return nil, err
		}
		if cfg := p.items.Config(name, func(peer tunnel.Peer) { h3.Identified(hello.Context(), peer) }, func(c *tls.Certificate) { h3.Shown(hello.Context(), c.Leaf) }); cfg != nil {
			return cfg, nil
		}
		return nil, fmt.Errorf("gateway: no certificate for HTTP/3 with the server name %q", hello.ServerName)
	}}
	s.Auth, s.CurrentVia, s.Name, s.Delegate = p.Auth, p.CurrentVia, name, b.delegate()
	if p.ConnectUDP {
		s.Extended = []connect.ExtendedService{b.connectUDP(p.Auth, connect.Intermediary{})}
	}
	s.CurrentLimits, s.Budget, s.Observe, s.Log = b.Limits, b.Budget, b.Observe, b.Log
}

// A Socket is an open socket of UDP, and what is carried from it.
type Socket struct {
	*Datagrams
	Conn *net.UDPConn
	ln   udp.Listener
}

// OpenSocket opens the socket of d. Logs call it name.
func (b *Builder) OpenSocket(ctx context.Context, address, name string, d *Datagrams) (*Socket, error) {
	conn, err := udp.Listen(ctx, address)
	if err != nil {
		return nil, err
	}
	s := &Socket{Datagrams: d, Conn: conn, ln: udp.Listener{Conn: conn, Name: name, Service: d.Service, Port: d.Port, To: d.To, Silent: d.Silent}}
	if d.HTTP3 != nil {
		d.HTTP3.prepare(b, name)
		if !d.HTTP3.TerminateAll {
			s.ln.Own, s.ln.Local = d.HTTP3.Owns, udp.NewLocal(conn)
		}
	}
	if d.Service.IsZero() && d.To == nil {
		s.ln.Open = func() udp.Opening { return new(sni.QUIC) }
		s.ln.Answer = d.Answer
	}
	return s, nil
}

// Name returns what logs call s.
func (s *Socket) Name() string { return s.ln.Name }

// Serve carries what comes to s until s or the servers are closed. It returns nil then.
func (s *Socket) Serve(ctx context.Context, server *udp.Server, h tunnel.Handler) error {
	served := func(err error) error {
		if errors.Is(err, tunnel.ErrServerClosed) || errors.Is(err, net.ErrClosed) {
			return nil
		}
		return err
	}
	if s.HTTP3 != nil && s.HTTP3.TerminateAll {
		return served(s.HTTP3.Server.Serve(ctx, s.Conn, h))
	}
	var wg sync.WaitGroup
	var failed error
	if s.HTTP3 != nil {
		wg.Go(func() {
			defer s.ln.Local.Close()
			failed = served(s.HTTP3.Server.Serve(ctx, s.ln.Local, h))
		})
	}
	err := served(server.Serve(ctx, s.ln))
	if s.HTTP3 != nil {
		_ = s.HTTP3.Server.Close()
	}
	wg.Wait()
	return errors.Join(err, failed)
}

// Close closes the socket. Its sessions end, as nothing else reaches their clients.
func (s *Socket) Close() {
	if s.HTTP3 != nil {
		_ = s.HTTP3.Server.Close()
	}
	_ = s.Conn.Close()
}
