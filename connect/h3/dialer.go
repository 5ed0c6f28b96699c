package h3

import (
	"context"
	"crypto/tls"
	"errors"
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/quic-go/quic-go"

	"culvert.dev/connect"
	"culvert.dev/connect/internal/mux"
	"culvert.dev/internal/race"
	"culvert.dev/tunnel"
)

// What a Dialer does where its fields say nothing.
const (
	DefaultWait     = 15 * time.Second
	DefaultParallel = mux.DefaultParallel
	DefaultPing     = 10 * time.Second
	DefaultPong     = 20 * time.Second // a proxy may pause, and a path be gone, for ten seconds
)

const (
	tunneledPacket = 1200 // bytes

	maxInterim = 8 // 1xx answers before the one that counts
	maxAddrs   = 3 // addresses of the proxy that are tried
)

// A Dialer reaches its destinations through an HTTP proxy, by CONNECT over
// HTTP/3. It is a tunnel.Dialer. It keeps connections to the proxy and shares
// them between its dials. Close it to end them.
//
// Its connections survive that this host's address or port changes on the way
// to the proxy, as behind a NAT that forgets.
//
// Its fields are not to be changed once it dials. It must not be copied.
type Dialer struct {
	// Proxy, Authorization, Header and Via are those of connect.Dialer.
	Proxy         string
	Authorization string
	Header        func(ctx context.Context, addr string) (connect.Fields, error)
	SessionHeader connect.SessionFields
	Via           string

	// Lookup finds the addresses of the proxy's host, where that is a name; nil
	// means the resolver of this host.
	Lookup func(ctx context.Context, host string) ([]netip.Addr, error)

	// Listen opens the UDP socket of one connection, which sends to nothing but the
	// proxy at to, an address of host. A guard may refuse the address here. The
	// Dialer closes the socket. Nil means the function Listen.
	Listen func(ctx context.Context, host string, to netip.AddrPort) (net.PacketConn, error)

	// Tunneled says that the sockets of Listen lead through a tunnel of datagrams. Packets
	// then have 1,200 bytes, which every path takes (RFC 9000 section 14), and no larger
	// ones are tried.
	Tunneled bool

	// TLS is used to the proxy, with the ALPN "h3" and without 0-RTT; without a
	// ServerName it asks for the host of Proxy. Nil means the roots of this host.
	TLS *tls.Config

	// Answer, if set, sees the field lines of each 200.
	Answer func(ctx context.Context, addr string, fields connect.Fields)

	// Wait is how long reaching the proxy and its answer may take, each; 0
	// means DefaultWait.
	Wait time.Duration

	// Parallel is how many connections there may be for the sake of speed: one
	// more is opened when each of those there are has many streams. Beyond it,
	// one is opened only when the others take no more. 0 means
	// DefaultParallel.
	Parallel int

	// Streams is the most a connection is used for at once, whatever the proxy
	// allows; 0 means DefaultStreams.
	Streams int

	// Ping is how long a connection may be silent before a PING is sent, and Pong
	// how long its answer may take: a dead connection is found after both. 0 means
	// DefaultPing and DefaultPong.
	Ping, Pong time.Duration

	// Idle is how long a connection without a stream is kept; 0 means
	// DefaultIdle.
	Idle time.Duration

	once sync.Once // for pool
	pool mux.Pool[*client]
}

// conns returns the pool, made by the Dialer's fields.
func (d *Dialer) conns() *mux.Pool[*client] {
	d.once.Do(func() {
		d.pool.Proxy, d.pool.Parallel, d.pool.Streams, d.pool.Wait = d.Proxy, d.Parallel, mux.OrDefault(d.Streams, DefaultStreams), mux.OrDefault(d.Wait, DefaultWait)
		d.pool.New = func() *client { return &client{d: d, firstRejected: -1, streams: make(map[quic.StreamID]*Stream)} }
	})
	return &d.pool
}

var _ tunnel.Dialer = (*Dialer)(nil)

// DialContext asks the proxy for addr, a "host:port" that
// connect.ParseAuthority takes; network is "tcp". The ctx covers the dial and
// nothing after.
//
// The net.Conn is a *Stream and belongs to the caller. A refusal is a
// *tunnel.Error with the Reason that connect.ReplyReason finds.
func (d *Dialer) DialContext(ctx context.Context, network, addr string) (net.Conn, error) {
	to, err := connect.ParseDial(network, addr)
	if err != nil {
		return nil, err
	}
	s, _, err := d.Open(ctx, &Head{Authority: to.String()})
	return s, err
}

// Open is DialContext for a request of the caller's making: an extended CONNECT if list
// has a Protocol, and with list.Fields besides those of the Dialer. It returns a *Stream
// and the field lines of the 200, and calls Answer with them and list.Authority.
//
// An extended CONNECT is sent to a proxy that has said it takes them. For any other the
// error wraps errors.ErrUnsupported.
func (d *Dialer) Open(ctx context.Context, list *Head) (_ net.Conn, answer connect.Fields, err error) {
	asker := connect.Asker{Version: "3", Via: d.Via, Authorization: d.Authorization, Header: d.Header}
	pseudo, fields, err := asker.Lists(ctx, list)
	if err != nil {
		return nil, nil, err
	}
	var s *Stream
	err = d.conns().Try(ctx, func(k *client) (err error) {
		s, answer, err = k.open(ctx, pseudo, fields, list)
		return err
	})
	if err != nil {
		return nil, nil, err
	}
	return s, answer, nil
}

// Close ends every connection, with the streams on it, and waits for their
// ends. What was written to streams that were closed before has a moment to
// arrive.
func (d *Dialer) Close() error {
	d.conns().Close()
	return nil
}

// Conns returns how many connections there are that take more streams.
func (d *Dialer) Conns() int { return d.conns().Conns() }

// dial connects to the proxy. The caller closes the transport after the connection.
func (d *Dialer) dial(ctx context.Context) (*quic.Conn, *quic.Transport, error) {
	to, err := connect.ParseAuthority(d.Proxy)
	if err != nil {
		return nil, nil, &tunnel.Error{Reason: tunnel.BadRequest, Err: err}
	}
	cfg := &tls.Config{}
	if d.TLS != nil {
		cfg = d.TLS.Clone()
	}
	if cfg.ServerName == "" {
		cfg.ServerName, _, _ = net.SplitHostPort(d.Proxy)
	}
	guardTLS(cfg)
	cfg.NextProtos, cfg.MinVersion, cfg.ClientSessionCache = []string{"h3"}, tls.VersionTLS13, nil
	addrs := []netip.Addr{to.Addr}
	if !to.Addr.IsValid() {
		if addrs, err = d.lookup(ctx, to.Name.String()); err != nil {
			return nil, nil, connect.Unusable(d.Proxy, "has no address", err)
		}
	}
	if len(addrs) == 0 {
		return nil, nil, connect.Unusable(d.Proxy, "cannot be reached", errors.New("the lookup found none"))
	}
	c, err := race.First(ctx, min(len(addrs), maxAddrs), func(ctx context.Context, i int) (dialed, error) {
		return d.dialOne(ctx, netip.AddrPortFrom(addrs[i].Unmap(), to.Port), cfg)
	}, dialed.close)
	if err != nil {
		return nil, nil, connect.Unusable(d.Proxy, "cannot be reached", err)
	}
	return c.qc, c.tr, nil
}

// A dialed is a connection and the transport it has for itself.
type dialed struct {
	qc *quic.Conn
	tr *quic.Transport
}

func (c dialed) close() {
	_ = c.qc.CloseWithError(quic.ApplicationErrorCode(NoError), "")
	_ = c.tr.Close()
	_ = c.tr.Conn.Close()
}

func (d *Dialer) lookup(ctx context.Context, host string) ([]netip.Addr, error) {
	if d.Lookup != nil {
		return d.Lookup(ctx, host)
	}
	return net.DefaultResolver.LookupNetIP(ctx, "ip", host)
}

// dialOne dials one address.
func (d *Dialer) dialOne(ctx context.Context, to netip.AddrPort, cfg *tls.Config) (dialed, error) {
	pc, err := d.listen(ctx, to)
	if err != nil {
		return dialed{}, err
	}
	ping, pong := mux.OrDefault(d.Ping, DefaultPing), mux.OrDefault(d.Pong, DefaultPong)
	conf := quicConfig()
	conf.MaxIdleTimeout, conf.KeepAlivePeriod = ping+pong, ping
	conf.MaxIncomingStreams = -1 // RFC 9114 section 6.1: a server opens none
	conf.EnableDatagrams = true
	if d.Tunneled {
		conf.InitialPacketSize, conf.DisablePathMTUDiscovery = tunneledPacket, true
	}
	var socket *lossTolerant
	if c, ok := pc.(*net.UDPConn); ok {
		socket = &lossTolerant{UDPConn: c}
		pc = socket
	}
	tr := &quic.Transport{Conn: pc}
	qc, err := tr.Dial(ctx, net.UDPAddrFromAddrPort(to), cfg, conf)
	if err != nil {
		_ = tr.Close()
		_ = pc.Close()
		return dialed{}, err
	}
	if socket != nil {
		socket.on.Store(true)
	}
	return dialed{qc, tr}, nil
}

func (d *Dialer) listen(ctx context.Context, to netip.AddrPort) (net.PacketConn, error) {
	if d.Listen == nil {
		return Listen(ctx, tunnel.Sockets{}, to)
	}
	host, _, err := net.SplitHostPort(d.Proxy)
	if err != nil {
		return nil, err
	}
	return d.Listen(ctx, host, to)
}

// Listen opens a UDP socket of the address family of to, at any local address and
// port. It is the default of Dialer.Listen, with ordinary sockets.
func Listen(ctx context.Context, sockets tunnel.Sockets, to netip.AddrPort) (net.PacketConn, error) {
	network := "udp4"
	if to.Addr().Is6() {
		network = "udp6"
	}
	c, err := sockets.ListenPacket(ctx, network, ":0")
	if tunnel.NoLocalPort(err) {
		return nil, tunnel.Refusef(tunnel.Overload, "h3: no local port is left: %w", err)
	}
	return c, err
}
