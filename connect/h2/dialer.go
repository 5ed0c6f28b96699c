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
	"culvert.dev/tunnel"
)

// What a Dialer does where its fields say nothing.
const (
	DefaultWait     = 15 * time.Second
	DefaultParallel = 4
	DefaultPing     = 10 * time.Second
	DefaultPong     = 5 * time.Second
)

const (
	spread     = 8 // streams on every connection, before there is one more
	maxInterim = 8 // 1xx answers before the one that counts
	tries      = 3 // connections that may refuse a stream unseen before the dial fails
)

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

	// Single has each stream on a connection of its own, which ends with it.
	Single bool

	// Ping is how long a connection may be silent before it is asked for a
	// sign of life, Pong how long the answer may take: one that is dead is
	// found after both. 0 means DefaultPing and DefaultPong.
	Ping, Pong time.Duration

	// Idle is how long a connection without a stream is kept; 0 means
	// DefaultIdle.
	Idle time.Duration

	mu     sync.Mutex           // guards what follows
	pool   []*client            // that take more streams
	conns  map[*client]struct{} // all of them
	closed bool
	wg     sync.WaitGroup // connections
}

var _ tunnel.Dialer = (*Dialer)(nil)

// DialContext asks the proxy for addr, a "host:port" that
// connect.ParseAuthority takes; network is "tcp". The ctx covers the dial and
// nothing after.
//
// The net.Conn is a *Stream and belongs to the caller. A refusal is a
// *tunnel.Error with the Reason that connect.ReplyReason finds.
func (d *Dialer) DialContext(ctx context.Context, network, addr string) (net.Conn, error) {
	if network != "tcp" {
		return nil, net.UnknownNetworkError(network)
	}
	to, err := connect.ParseAuthority(addr)
	if err != nil {
		return nil, &tunnel.Error{Reason: tunnel.BadRequest, Err: err}
	}
	s, err := d.Open(ctx, &Head{Authority: to.String()})
	if err != nil {
		return nil, err
	}
	return s, nil
}

// Open is DialContext for a request of the caller's making: an extended
// CONNECT where head has a Protocol, and with head.Fields besides those of the
// Dialer. It calls Answer with head.Authority, and sets head.Answer.
//
// An extended CONNECT is sent to a proxy that has said it takes them, and is
// ErrNotSpoken for any other.
func (d *Dialer) Open(ctx context.Context, head *Head) (*Stream, error) {
	asker := connect.Asker{Version: "2", Via: d.Via, Authorization: d.Authorization, Header: d.Header}
	pseudo, fields, err := asker.Lists(ctx, head)
	if err != nil {
		return nil, err
	}
	for try := 1; ; try++ {
		k, err := d.reserve(ctx)
		if err != nil {
			return nil, err
		}
		s, err := k.open(ctx, pseudo, fields, head)
		if err == nil {
			return s, nil
		}
		// The proxy has not seen the request: another connection may do.
		if !errors.Is(err, errUnseen) || try == tries || ctx.Err() != nil {
			return nil, err
		}
	}
}

// ErrNotSpoken is for a proxy that does not speak HTTP/2, or that does and asks
// for a request of this kind by HTTP/1.1.
var ErrNotSpoken = errors.New("HTTP/2 is not the way")

// errUnseen is for a request that the proxy is sure not to have acted on.
var errUnseen = errors.New("h2: the proxy took no more streams on this connection")

// reserve finds a connection with room for a stream, or opens one, and counts
// the stream in.
func (d *Dialer) reserve(ctx context.Context) (*client, error) {
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("h2: proxy %q: %w", d.Proxy, err)
	}
	d.mu.Lock()
	if d.closed {
		d.mu.Unlock()
		return nil, errClosed
	}
	k := d.pick()
	if k == nil {
		k = d.start(ctx)
	}
	k.used++
	d.mu.Unlock()
	select {
	case <-k.ready:
	default:
		tunnel.WillWait(ctx)
		select {
		case <-k.ready:
		case <-ctx.Done():
			k.giveBack()
			return nil, fmt.Errorf("h2: proxy %q was given up: %w", d.Proxy, ctx.Err())
		}
	}
	if k.failed != nil {
		return nil, k.failed
	}
	return k, nil
}

// pick returns the connection with the fewest streams, nil where a new one is
// to be opened. The caller holds mu.
func (d *Dialer) pick() *client {
	if d.Single {
		return nil
	}
	var best *client
	for _, k := range d.pool {
		if k.used < k.most && (best == nil || k.used < best.used) {
			best = k
		}
	}
	parallel := d.Parallel
	if parallel <= 0 {
		parallel = DefaultParallel
	}
	if best != nil && best.used >= spread && len(d.pool) < parallel {
		return nil
	}
	return best
}

// start opens a connection, which the caller does not wait for. The caller
// holds mu.
func (d *Dialer) start(ctx context.Context) *client {
	k := &client{d: d, most: d.streams(), ready: make(chan struct{}), met: make(chan struct{})}
	d.pool = append(d.pool, k)
	if d.conns == nil {
		d.conns = make(map[*client]struct{})
	}
	d.conns[k] = struct{}{}
	// Others may wait for this connection when the one who asked for it has
	// given up.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), d.wait())
	k.cancel = cancel
	d.wg.Go(func() {
		defer cancel()
		k.run(ctx)
		d.mu.Lock()
		defer d.mu.Unlock()
		delete(d.conns, k)
	})
	return k
}

func (d *Dialer) streams() int {
	if d.Streams > 0 {
		return d.Streams
	}
	return DefaultStreams
}

func (d *Dialer) wait() time.Duration { return orElse(d.Wait, DefaultWait) }

// remove takes k from the pool. The caller holds mu.
func (d *Dialer) remove(k *client) {
	for i := range d.pool {
		if d.pool[i] == k {
			d.pool = append(d.pool[:i:i], d.pool[i+1:]...)
			return
		}
	}
}

// Close ends every connection, with the streams on it, and waits for their
// ends.
func (d *Dialer) Close() error {
	d.mu.Lock()
	d.closed = true
	conns := make([]*client, 0, len(d.conns))
	for k := range d.conns {
		conns = append(conns, k)
	}
	d.pool = nil
	d.mu.Unlock()
	for _, k := range conns {
		k.stop()
	}
	d.wg.Wait()
	return nil
}

// Conns returns how many connections there are that take more streams.
func (d *Dialer) Conns() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return len(d.pool)
}

// dial reaches the proxy.
func (d *Dialer) dial(ctx context.Context) (net.Conn, error) {
	way := d.Dialer
	if way == nil {
		way = new(net.Dialer)
	}
	raw, err := way.DialContext(ctx, "tcp", d.Proxy)
	if err != nil {
		return nil, d.failure("cannot be reached", err)
	}
	if d.TLS == nil {
		return raw, nil
	}
	cfg := d.TLS.Clone()
	if cfg.ServerName == "" {
		cfg.ServerName, _, _ = net.SplitHostPort(d.Proxy)
	}
	if !slices.Contains(cfg.NextProtos, "h2") {
		cfg.NextProtos = append([]string{"h2"}, cfg.NextProtos...)
	}
	t := tls.Client(raw, cfg)
	if err := t.HandshakeContext(ctx); err != nil {
		_ = raw.Close()
		return nil, d.failure("did not complete the TLS handshake", err)
	}
	if p := t.ConnectionState().NegotiatedProtocol; p != "h2" {
		_ = raw.Close()
		return nil, d.failure("does not speak HTTP/2", fmt.Errorf("%w: it chose the protocol %q", ErrNotSpoken, p))
	}
	return t, nil
}

// failure is for a proxy that cannot be used.
func (d *Dialer) failure(what string, err error) error { return connect.Unusable(d.Proxy, what, err) }

// refusal makes an error of an answer that is not 2xx.
func (d *Dialer) refusal(s *Stream, head *Head, addr string) error {
	_ = s.SetReadDeadline(time.Now().Add(farewell))
	defer s.Close()
	return connect.Refused(d.Proxy, addr, head, s)
}

func orElse(d, otherwise time.Duration) time.Duration {
	if d > 0 {
		return d
	}
	return otherwise
}
