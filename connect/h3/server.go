package h3

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"time"

	"github.com/quic-go/quic-go"

	"culvert.dev/connect"
	"culvert.dev/connect/internal/mux"
	"culvert.dev/tunnel"
)

// Limits of a connection that a Server leaves at zero.
const (
	DefaultStreams = 100             // tunnels at once
	DefaultIdle    = 5 * time.Minute // without a tunnel

	idleTimeout = 30 * time.Second // without a packet, until a connection has ended; after half of it a PING is sent
)

// proto is what requests and outcomes are of.
const proto = "connect-h3"

// A Server is the proxy side of CONNECT over HTTP/3. It makes a tunnel.Request
// of each, as a tunnel.Protocol does for what comes over TCP, and hands it to
// a tunnel.Handler.
//
// Its fields are not to be changed once it serves. It must not be copied.
type Server struct {
	// TLS has the certificates. QUIC is always TLS 1.3; the ALPN is "h3", and
	// there is neither 0-RTT nor resumption, whatever TLS says. It may say who a
	// client is: see Identified.
	TLS *tls.Config

	// Auth, Via, CurrentVia and ProxyName are those of connect.Protocol.
	Auth       connect.Authenticator
	Delegate   connect.DelegateFunc
	Via        string
	CurrentVia func() string
	ProxyName  string

	// Name is the listener's, as configured, for logs; "" means its address.
	Name string

	// Streams is how many tunnels one connection may have at once; 0 means
	// DefaultStreams.
	Streams int

	// Idle is how long a connection may be without a tunnel; 0 means
	// DefaultIdle.
	Idle time.Duration

	// Service decides about CONNECT requests, for a protocol that is built on this
	// one. Nil means plain CONNECT by Auth and Via.
	Service connect.Service

	// Extended decide about extended CONNECT requests (RFC 9220), each about those of its
	// name. Auth and Via do not apply to them. A Server without any offers neither extended
	// CONNECT nor DATAGRAM frames, and answers 501.
	Extended []connect.ExtendedService

	// Limits are those of tunnel.Server. A handshake counts as a preamble until
	// it is complete; from there FirstByteTimeout is the time for the first request.
	Limits        tunnel.Limits
	CurrentLimits tunnel.LimitsFunc // if set, takes the place of Limits

	// Grow is by how many bytes the windows of all connections together may
	// grow beyond what each begins with; 0 means 256 MiB. They do not grow by more
	// than the Budget's Backlogs, nor while memory is scarce.
	Grow int64

	Budget  *tunnel.Budget        // how short memory is, and what clients hold; nil means a Server by itself
	Observe func(*tunnel.Outcome) // told of what ended without reaching the Handler; must not block. May be nil
	Log     *slog.Logger          // panics; nil discards

	clients tunnel.Clients // of a Server without a Budget

	mu         sync.Mutex // guards what follows
	handshakes int        // unfinished ones
	grown      int64
	conns      map[*quic.Conn]*serverConn
	sockets    map[*quic.Transport]struct{}
	draining   bool
	closed     bool
	panicked   time.Time      // when a stack was last logged
	wg         sync.WaitGroup // connections
}

// An idMaker makes connection ids, all of one length.
type idMaker interface{ NewID() []byte }

type generator struct {
	idMaker
	n int
}

func (g generator) GenerateConnectionID() (quic.ConnectionID, error) {
	return quic.ConnectionIDFromBytes(g.NewID()), nil
}

func (g generator) ConnectionIDLen() int { return g.n }

// Serve serves the connections that come to pc until Shutdown or Close, and then
// returns tunnel.ErrServerClosed. It returns earlier only where pc fails. It owns
// pc. The context of each request is derived from ctx.
//
// Where pc has a method NewID() []byte, that makes the connection ids: such a pc is
// a part of a socket, which finds its packets by them.
func (s *Server) Serve(ctx context.Context, pc net.PacketConn, h tunnel.Handler) error {
	defer pc.Close()
	if s.TLS == nil {
		return errors.New("h3: a Server needs a TLS configuration")
	}
	name := s.Name
	if name == "" {
		name = pc.LocalAddr().String()
	}
	tr := &quic.Transport{
		Conn: serverSocket(pc), ConnectionIDLength: 8, VerifySourceAddress: s.mustRetry,
		ConnContext: func(ctx context.Context, info *quic.ClientInfo) (context.Context, error) {
			return s.admitHandshake(ctx, info, name)
		},
	}
	if ids, ok := pc.(idMaker); ok {
		tr.ConnectionIDGenerator = generator{ids, len(ids.NewID())}
	}
	if !s.track(tr) {
		return tunnel.ErrServerClosed
	}
	cfg := quicConfig()
	cfg.MaxIdleTimeout, cfg.KeepAlivePeriod = idleTimeout, idleTimeout/2
	cfg.MaxIncomingStreams = int64(mux.OrDefault(s.Streams, DefaultStreams))
	cfg.AllowConnectionWindowIncrease = s.allowGrowth
	cfg.EnableDatagrams = len(s.Extended) > 0
	ln, err := tr.Listen(tlsConfig(s.TLS), cfg)
	if err != nil {
		s.untrack(tr)
		return fmt.Errorf("h3: listen on %s: %w", pc.LocalAddr(), err)
	}
	var running sync.WaitGroup
	defer running.Wait()
	defer s.untrack(tr)
	for {
		qc, err := ln.Accept(ctx)
		if err != nil {
			s.endConns(tr)
			if s.isClosed() || ctx.Err() != nil {
				return tunnel.ErrServerClosed
			}
			return fmt.Errorf("h3: accept on %s: %w", name, err)
		}
		s.accept(ctx, qc, tr, &running, h)
	}
}

// guardTLS turns a panic in a callback of cfg into an error, which ends one
// handshake: QUIC calls them in goroutines of its own.
func guardTLS(cfg *tls.Config) {
	if f := cfg.GetCertificate; f != nil {
		cfg.GetCertificate = func(hello *tls.ClientHelloInfo) (cert *tls.Certificate, err error) {
			defer caught(&err)
			return f(hello)
		}
	}
	if f := cfg.GetClientCertificate; f != nil {
		cfg.GetClientCertificate = func(info *tls.CertificateRequestInfo) (cert *tls.Certificate, err error) {
			defer caught(&err)
			return f(info)
		}
	}
	if f := cfg.VerifyPeerCertificate; f != nil {
		cfg.VerifyPeerCertificate = func(raw [][]byte, chains [][]*x509.Certificate) (err error) {
			defer caught(&err)
			return f(raw, chains)
		}
	}
	if f := cfg.VerifyConnection; f != nil {
		cfg.VerifyConnection = func(cs tls.ConnectionState) (err error) {
			defer caught(&err)
			return f(cs)
		}
	}
}

// caught is deferred to turn a panic into an error.
func caught(err *error) {
	if v := recover(); v != nil {
		*err = tunnel.Caught(v)
	}
}

// tlsConfig returns base as QUIC needs it.
func tlsConfig(base *tls.Config) *tls.Config {
	cfg := base.Clone()
	guardTLS(cfg)
	cfg.NextProtos = []string{"h3"}
	cfg.MinVersion = tls.VersionTLS13
	cfg.SessionTicketsDisabled = true
	if choose := cfg.GetConfigForClient; choose != nil {
		cfg.GetConfigForClient = func(hello *tls.ClientHelloInfo) (_ *tls.Config, err error) {
			defer caught(&err)
			chosen, err := choose(hello)
			if chosen == nil || err != nil {
				return chosen, err
			}
			return tlsConfig(chosen), nil
		}
	}
	return cfg
}

// accept serves a connection whose handshake is complete.
func (s *Server) accept(ctx context.Context, qc *quic.Conn, tr *quic.Transport, running *sync.WaitGroup, h tunnel.Handler) {
	a, ok := qc.Context().Value(attemptKey{}).(*attempt)
	if !ok {
		_ = qc.CloseWithError(quic.ApplicationErrorCode(InternalError), "")
		return
	}
	err := s.admitConn(a)
	if err != nil {
		_ = qc.CloseWithError(quic.ApplicationErrorCode(ExcessiveLoad), err.Error())
		s.reportAttempt(a, err)
		return
	}
	k := &serverConn{s: s, a: a, tr: tr, requests: mux.Server{Service: s.service(), Extended: s.Extended, Handler: h}, idleSince: mux.Clock(), local: addrPort(qc.LocalAddr()).Port()}
	k.c = &conn{qc: qc, side: k}
	cs := qc.ConnectionState().TLS
	k.tls.ServerName, _ = tunnel.ParseName(cs.ServerName) // TLS has refused a malformed one, or does not care
	if k.tls.Peer = a.peer; a.peer.Method != "" {
		k.tls.Chain = cs.PeerCertificates
	}
	k.tls.Version, k.tls.CipherSuite, k.tls.Certificate = cs.Version, cs.CipherSuite, a.shown
	k.tls.Exporter = exporter{qc}.export
	s.mu.Lock()
	if s.conns == nil {
		s.conns = make(map[*quic.Conn]*serverConn)
	}
	s.conns[qc] = k
	draining, closed := s.draining, s.closed
	s.wg.Add(1)
	s.mu.Unlock()
	running.Go(func() {
		defer s.wg.Done()
		defer s.forget(k)
		defer s.recovered() // from panics that the connection itself has not caught
		switch {
		case closed:
			k.c.fail(errClosed)
		case draining:
			k.drain()
		}
		k.run(ctx)
	})
}

// forget removes a connection that has ended.
func (s *Server) forget(k *serverConn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.conns, k.c.qc)
	s.grown -= k.grown
}

// recovered is deferred where a panic ends nothing more: it is logged.
func (s *Server) recovered() {
	if v := recover(); v != nil {
		s.logPanic(tunnel.Caught(v))
	}
}

// An exporter exports keying material of a connection.
type exporter struct{ conn *quic.Conn }

func (e exporter) export(label string, context []byte, length int) ([]byte, error) {
	cs := e.conn.ConnectionState().TLS
	return cs.ExportKeyingMaterial(label, context, length)
}

// allowGrowth reports whether the window of qc may grow by n bytes, and counts them
// if so.
func (s *Server) allowGrowth(qc *quic.Conn, n uint64) (may bool) {
	defer s.recovered()
	s.mu.Lock()
	defer s.mu.Unlock()
	most := s.Grow
	if most == 0 {
		most = 256 << 20
	}
	if b := s.Budget; b != nil && b.BacklogLimit() > 0 {
		most = min(most, b.BacklogLimit())
	}
	if s.grown+int64(n) > most || s.Budget.Pressure() != tunnel.Calm {
		return false
	}
	k := s.conns[qc]
	if k == nil {
		return false
	}
	k.grown += int64(n)
	s.grown += int64(n)
	return true
}

// Drain sends GOAWAY on every connection: it takes no more tunnels and ends with
// the last one that it has. New connections are refused. Drain does not wait.
func (s *Server) Drain() {
	s.mu.Lock()
	s.draining = true
	s.mu.Unlock()
	for _, k := range s.connsOf(nil) {
		k.drain()
	}
}

// connsOf returns the connections of a socket, of all where tr is nil.
func (s *Server) connsOf(tr *quic.Transport) []*serverConn {
	s.mu.Lock()
	defer s.mu.Unlock()
	var conns []*serverConn
	for _, k := range s.conns {
		if tr == nil || k.tr == tr {
			conns = append(conns, k)
		}
	}
	return conns
}

// Shutdown drains and waits until every connection has ended, and then ends
// Serve. When ctx ends first, Shutdown closes what is left and returns the
// context's error. It is safe to call again and at once with Close.
func (s *Server) Shutdown(ctx context.Context) error {
	s.Drain()
	idle := make(chan struct{})
	go func() {
		s.wg.Wait()
		close(idle)
	}()
	select {
	case <-idle:
		return s.Close()
	case <-ctx.Done():
		_ = s.Close()
		<-idle
		return ctx.Err()
	}
}

// Close ends every connection, which aborts the tunnels on it, and ends Serve.
func (s *Server) Close() error {
	s.mu.Lock()
	s.closed = true
	sockets := make([]*quic.Transport, 0, len(s.sockets))
	for tr := range s.sockets {
		sockets = append(sockets, tr)
	}
	s.mu.Unlock()
	for _, tr := range sockets {
		s.endConns(tr)
	}
	return nil
}

// endConns ends the connections of a socket, and its use.
func (s *Server) endConns(tr *quic.Transport) {
	for _, k := range s.connsOf(tr) {
		k.c.fail(errClosed)
	}
	_ = tr.Close()
}

func (s *Server) track(tr *quic.Transport) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed || s.draining {
		return false
	}
	if s.sockets == nil {
		s.sockets = make(map[*quic.Transport]struct{})
	}
	s.sockets[tr] = struct{}{}
	return true
}

func (s *Server) untrack(tr *quic.Transport) {
	_ = tr.Close()
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.sockets, tr)
}

func (s *Server) isClosed() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.closed
}

// service returns the Service, or that of plain CONNECT.
func (s *Server) service() connect.Service {
	if s.Service != nil {
		return s.Service
	}
	return &mux.PlainService{Protocol: connect.Protocol{Auth: s.Auth, Via: s.Via, CurrentVia: s.CurrentVia, Delegate: s.Delegate}, Proto: proto}
}

// reportAttempt reports a handshake or connection that ended without a request.
func (s *Server) reportAttempt(a *attempt, err error) {
	s.report(&tunnel.Request{Proto: proto, Listener: a.listener, Source: a.addr, Start: a.start}, err)
}

// report reports a request that did not reach the Handler.
func (s *Server) report(req *tunnel.Request, err error) {
	if s.Observe == nil {
		return
	}
	o := &tunnel.Outcome{
		Start: req.Start, Proto: req.Proto, Listener: req.Listener, Source: req.Source, Peer: req.Peer,
		Reason: tunnel.ReasonOf(err), Err: err, Lasted: time.Since(req.Start),
	}
	if req.Addr.IsValid() || req.Name != (tunnel.Name{}) {
		o.Target = req.Target()
	}
	s.Observe(o)
}

// reportPanic logs the panic v in the service of req and reports the request.
func (s *Server) reportPanic(req *tunnel.Request, v any) {
	p := tunnel.Caught(v)
	s.logPanic(p)
	s.report(req, &tunnel.Error{Reason: tunnel.Internal, Err: p})
}

// logPanic logs a panic, with its stack once a minute at most: an attacker who knows
// the input may send it often.
func (s *Server) logPanic(p *tunnel.Panic) {
	s.mu.Lock()
	quiet := !s.panicked.IsZero() && time.Since(s.panicked) < time.Minute
	if !quiet {
		s.panicked = time.Now()
	}
	s.mu.Unlock()
	log := s.Log
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	if quiet {
		log.Error("panic in a tunnel, its stack was logged less than a minute ago", "panic", p.Value)
	} else {
		log.Error("panic in a tunnel", "panic", p.Value, "stack", string(p.Stack))
	}
}

// handshakeError returns the error, with its Reason, of a handshake that failed.
func handshakeError(err error) *tunnel.Error {
	if te, ok := errors.AsType[*quic.TransportError](err); ok && te.ErrorCode.IsCryptoError() {
		return refuse(tunnel.BadHello, "the TLS handshake failed: %w", err)
	}
	if ne := net.Error(nil); errors.As(err, &ne) && ne.Timeout() {
		return refuse(tunnel.HelloTimeout, "the handshake was not complete in time: %w", err)
	}
	return refuse(tunnel.Gone, "the client left in the middle of its handshake: %w", err)
}

// newRequest returns a request with the addresses, identity and listener of its connection.
func (k *serverConn) newRequest() *tunnel.Request {
	source := addrPort(k.c.qc.RemoteAddr()) // as of now: a client may change it
	return &tunnel.Request{Proto: proto, Listener: k.a.listener, Source: source, LocalPort: k.local, Peer: k.tls.Peer, TLS: &k.tls, Start: time.Now()}
}
