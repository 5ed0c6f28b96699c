package h2

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"slices"
	"sync"
	"time"

	"culvert.dev/connect"
	"culvert.dev/connect/internal/mux"
	"culvert.dev/internal/records"
	"culvert.dev/tunnel"
)

// What a Dialer does where its fields say nothing.
const (
	DefaultWait     = 15 * time.Second
	DefaultParallel = mux.DefaultParallel
	DefaultPing     = 10 * time.Second
	DefaultPong     = 20 * time.Second // a proxy may pause, and a path be gone, for ten seconds
)

// maxFirst is how much is sent before the answer. Every peer takes as much (RFC 9113 section
// 6.9.2), and little is lost where it refuses.
const maxFirst = 16 << 10

const maxInterim = 8 // 1xx answers before the one that counts

// A Dialer reaches its destinations through an HTTP proxy, by CONNECT over
// HTTP/2: cleartext with prior knowledge, or TLS. It is a tunnel.Dialer, so
// one can be the way to another. It keeps connections to the proxy and shares
// them between its dials. Close it to end them.
//
// Its fields are not to be changed once it dials. It must not be copied.
type Dialer struct {
	// Proxy, Dialer, Authorization, Header and Via are those of
	// connect.Dialer.
	Proxy         string
	Dialer        tunnel.Dialer
	Authorization string
	Header        func(ctx context.Context, addr string) (connect.Fields, error)
	SessionHeader connect.SessionFields
	Via           string

	// TLS, if set, is used to the proxy, with the ALPN "h2" and what else its
	// NextProtos name; without a ServerName it asks for the host of Proxy. Nil
	// means plaintext.
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

	// Single gives each stream a connection of its own, which ends with it.
	Single bool

	// Sole says that there is one connection and that no other can be dialed. Requests use it
	// for as long as it lasts: while it is silent they wait, where otherwise the next ones
	// would go to a new connection.
	Sole bool

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
		d.pool.Proxy, d.pool.Parallel, d.pool.Streams, d.pool.Single, d.pool.Wait = d.Proxy, d.Parallel, d.streams(), d.Single, d.wait()
		d.pool.New = func() *client { return &client{d: d, settingsArrived: make(chan struct{})} }
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

// Open is DialContext for a request of the caller's making: an extended CONNECT if head
// has a Protocol, and with head.Fields besides those of the Dialer. It returns a *Stream
// and the field lines of the 200, and calls Answer with them and head.Authority.
//
// An extended CONNECT is sent to a proxy that has said it takes them, and is
// ErrNotSpoken for any other.
func (d *Dialer) Open(ctx context.Context, head *Head) (_ net.Conn, answer connect.Fields, err error) {
	return d.OpenWith(ctx, head, nil)
}

// OpenWith is Open for a caller that knows what the stream begins with: first is sent along
// with the request, before the answer, which saves a round trip. The caller writes it all the
// same: the first Writes begin with it, and send what follows it. A peer that refuses the
// request discards it. It is for peers that are known to keep what comes before they answer.
//
// Up to maxFirst bytes are sent so, the others by Write. The slice is not kept.
func (d *Dialer) OpenWith(ctx context.Context, head *Head, first []byte) (_ net.Conn, answer connect.Fields, err error) {
	asker := connect.Asker{Version: "2", Via: d.Via, Authorization: d.Authorization, Header: d.Header}
	pseudo, fields, err := asker.Lists(ctx, head)
	if err != nil {
		return nil, nil, err
	}
	var s *Stream
	err = d.conns().Try(ctx, func(k *client) (err error) {
		s, answer, err = k.open(ctx, pseudo, fields, head, first)
		return err
	})
	if err != nil {
		return nil, nil, err
	}
	return s, answer, nil
}

// ErrNotSpoken is the error for a proxy that does not speak HTTP/2, or that asks for
// this kind of request by HTTP/1.1.
var ErrNotSpoken = errors.New("the proxy does not take this request by HTTP/2")

func (d *Dialer) streams() int { return mux.OrDefault(d.Streams, DefaultStreams) }

func (d *Dialer) wait() time.Duration { return mux.OrDefault(d.Wait, DefaultWait) }

// Close ends every connection, with the streams on it, and waits for their
// ends.
func (d *Dialer) Close() error {
	d.conns().Close()
	return nil
}

// Conns returns how many connections there are that take more streams.
func (d *Dialer) Conns() int { return d.conns().Conns() }

// dial reaches the proxy.
func (d *Dialer) dial(ctx context.Context) (net.Conn, error) {
	dialer := d.Dialer
	if dialer == nil {
		dialer = new(net.Dialer)
	}
	if d.TLS == nil {
		raw, err := dialer.DialContext(ctx, "tcp", d.Proxy)
		if err != nil {
			return nil, d.failure("cannot be reached", err)
		}
		return raw, nil
	}
	cfg := d.TLS.Clone()
	if cfg.ServerName == "" {
		cfg.ServerName, _, _ = net.SplitHostPort(d.Proxy)
	}
	if !slices.Contains(cfg.NextProtos, "h2") {
		cfg.NextProtos = append([]string{"h2"}, cfg.NextProtos...)
	}
	c, err := connect.DialHandshake(ctx, dialer, "tcp", d.Proxy, func(ctx context.Context, raw net.Conn) (net.Conn, error) {
		t := records.Client(raw, cfg.Clone())
		if err := t.HandshakeContext(ctx); err != nil {
			_ = raw.Close()
			return nil, err
		}
		return t, nil
	})
	if failed, ok := err.(*connect.HandshakeError); ok {
		return nil, d.failure("did not complete the TLS handshake", failed.Err)
	} else if err != nil {
		return nil, d.failure("cannot be reached", err)
	}
	t := c.(*records.Conn)
	if p := t.ConnectionState().NegotiatedProtocol; p != "h2" {
		_ = t.NetConn().Close()
		return nil, d.failure("does not speak HTTP/2", fmt.Errorf("%w: it chose the protocol %q", ErrNotSpoken, p))
	}
	return t, nil
}

// failure returns the error for a proxy that cannot be used.
func (d *Dialer) failure(what string, err error) error { return connect.Unusable(d.Proxy, what, err) }

// refusal returns the error for an answer that is not 2xx.
func (d *Dialer) refusal(s *Stream, head *Head, addr string) error {
	_ = s.SetReadDeadline(time.Now().Add(lingerTimeout))
	defer s.Close()
	return connect.Refused(d.Proxy, addr, head, s)
}
