package h2

import (
	"context"
	"errors"
	"sync"
	"time"

	"golang.org/x/net/http2"

	"culvert.dev/connect"
	"culvert.dev/connect/internal/mux"
	"culvert.dev/tunnel"
)

// Limits of a connection that a Protocol leaves at zero.
const (
	DefaultStreams = 100             // tunnels at once
	DefaultIdle    = 5 * time.Minute // without a stream

	pingInterval = 30 * time.Second // without a frame, until a PING is sent
	pongTimeout  = 15 * time.Second // for the answer to a PING
)

// preface is the client's connection preface, RFC 9113 section 3.4.
const preface = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

// sniffLen is the length of the part of the preface that no other protocol sends.
const sniffLen = len("PRI * HTTP/2.0\r\n")

// A Protocol is the proxy side of CONNECT over HTTP/2, and a tunnel.Protocol
// whose connections carry many tunnels. The zero value serves every client that can
// connect: the Handler decides what may be reached.
//
// Its fields are not to be changed once it serves. It must not be copied.
type Protocol struct {
	// These are those of connect.Protocol.
	Auth         connect.Authenticator
	Intermediary connect.Intermediary
	Delegate     connect.DelegateFunc
	Via          string
	CurrentVia   func() string
	ProxyName    string

	// Streams is how many tunnels one connection may have at once; 0 means
	// DefaultStreams. A connection holds at most 64 KiB of unread bytes for
	// each of them, and 16 MiB more.
	Streams int

	// Idle is how long a connection may be without a tunnel; 0 means
	// DefaultIdle.
	Idle time.Duration

	// Service decides about CONNECT requests, for a protocol that is built on this
	// one. Nil means plain CONNECT by Auth and Via, with the name "connect-h2".
	Service connect.Service

	// Extended decide about extended CONNECT requests (RFC 8441), each about those of its
	// name. Auth and Via do not apply to them. A Protocol without any does not offer
	// extended CONNECT in its SETTINGS, and answers 501.
	Extended []connect.ExtendedService

	mu       sync.Mutex // guards what follows
	conns    map[*server]struct{}
	draining bool
}

var (
	_ tunnel.Protocol         = (*Protocol)(nil)
	_ tunnel.PreambleDetector = (*Protocol)(nil)
)

// Name returns "connect-h2", or the name of the Service.
func (p *Protocol) Name() string { return p.service().Name() }

// Sniff returns Yes for the first line of the client's preface: HTTP/2 with prior
// knowledge, RFC 9113 section 3.3.
func (*Protocol) Sniff(b []byte) tunnel.Verdict {
	n := min(len(b), sniffLen)
	switch {
	case string(b[:n]) != preface[:n]:
		return tunnel.No
	case n == sniffLen:
		return tunnel.Yes
	}
	return tunnel.More
}

// HasPreamble implements tunnel.PreambleDetector: the preface is complete, or cannot be one. From
// there on a connection has a goroutine.
func (*Protocol) HasPreamble(prefix []byte) bool {
	n := min(len(prefix), len(preface))
	return n == len(preface) || string(prefix[:n]) != preface[:n]
}

// Drain sends GOAWAY on every connection: it takes no more tunnels and ends with
// the last one that it has. Later connections are ended at once. Drain does not
// wait.
func (p *Protocol) Drain() {
	p.mu.Lock()
	p.draining = true
	conns := make([]*server, 0, len(p.conns))
	for s := range p.conns {
		conns = append(conns, s)
	}
	p.mu.Unlock()
	for _, s := range conns {
		s.drain()
	}
}

// track lists s. It returns false while draining.
func (p *Protocol) track(s *server) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.draining {
		return false
	}
	if p.conns == nil {
		p.conns = make(map[*server]struct{})
	}
	p.conns[s] = struct{}{}
	return true
}

func (p *Protocol) untrack(s *server) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.conns, s)
}

// service returns the Service, or that of plain CONNECT.
func (p *Protocol) service() connect.Service {
	if p.Service != nil {
		return p.Service
	}
	return &mux.PlainService{Protocol: connect.Protocol{Auth: p.Auth, Intermediary: p.Intermediary, Via: p.Via, CurrentVia: p.CurrentVia, Delegate: p.Delegate}, Proto: "connect-h2"}
}

func (p *Protocol) streams() int { return mux.OrDefault(p.Streams, DefaultStreams) }

// ServeConn implements tunnel.Protocol. It calls h for each CONNECT, on a
// goroutine of its own, and returns when the connection has ended and c is
// closed. If the client did something that ends a connection, the error is about that.
func (p *Protocol) ServeConn(ctx context.Context, c *tunnel.Conn, h tunnel.Handler) (err error) {
	s := &server{p: p, tc: c, requests: mux.Server{Service: p.service(), Extended: p.Extended, Handler: h}}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	s.ctx = ctx
	s.c = newConn(c, s, false)
	s.c.holding = tunnel.NewBufferAccount(ctx, true)
	// The Server closes c where it ends ctx. Others may not.
	stop := context.AfterFunc(ctx, func() {
		defer func() {
			if v := recover(); v != nil {
				_ = s.c.caught(v)
				_ = c.Close()
			}
		}()
		s.c.fail(&connError{http2.ErrCodeNo, refuse(tunnel.Drain, "stopped")})
	})
	s.timer = time.AfterFunc(pongTimeout/3, s.tick)
	if !p.track(s) {
		s.drain()
	}
	defer p.untrack(s)
	err = s.c.run(s.preface)
	stop()
	cancel()
	s.c.mu.Lock()
	s.stopped = true
	s.c.mu.Unlock()
	s.timer.Stop()
	s.running.Wait()
	if p := s.c.panicked.Load(); p != nil {
		panic(p) // on the goroutine where the Server catches it
	}
	return s.endError(err)
}

// preface reads the client's connection preface and sends the settings.
func (s *server) preface() error {
	b, err := s.c.br.Peek(len(preface))
	if err != nil {
		return err
	}
	if string(b) != preface {
		return &connError{http2.ErrCodeProtocol, refuse(tunnel.BadPreamble, "not the preface of HTTP/2: %q", b)}
	}
	if _, err := s.c.br.Discard(len(preface)); err != nil {
		return err
	}
	settings := []http2.Setting{
		{ID: http2.SettingMaxConcurrentStreams, Val: uint32(s.p.streams())},
		{ID: http2.SettingInitialWindowSize, Val: streamWindow},
		{ID: http2.SettingMaxHeaderListSize, Val: maxList},
	}
	if len(s.p.Extended) > 0 {
		settings = append(settings, http2.Setting{ID: http2.SettingEnableConnectProtocol, Val: 1})
	}
	s.c.begin(settings...)
	return s.c.first()
}

// endError returns what ServeConn returns for a connection that ended with err.
func (s *server) endError(err error) error {
	if errors.Is(err, errDrained) || errors.Is(err, errIdle) {
		return nil
	}
	if ce, ok := errors.AsType[*connError](err); ok {
		return ce.err
	}
	if s.c.input.hasRequest.Load() {
		return nil
	}
	return tunnel.PreambleErrorAfter(s.c.input.n, err)
}
