package udp

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"runtime/debug"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"culvert.dev/tunnel"
)

// DefaultIdleTimeout is how long a session may be without a datagram either way. QUIC
// ends its own connections earlier, and NAT forgets UDP after two minutes at
// the most (RFC 4787 section 4.3).
const DefaultIdleTimeout = 2 * time.Minute

const (
	// brief is the same for a session that is not proven, or has lasted no
	// longer than proof: a question and its answer, or nobody.
	brief = 10 * time.Second
	proof = 2 * time.Second

	// often is how often sessions are looked through.
	often = time.Second
)

// Limits of what waits for a route.
const (
	maxWaiting     = 64 << 10 // bytes that one session may have sent before its route is known
	firstWaiting   = 4 << 10  // of them, bytes that no other session's take the room of: a hello
	maxAllWaiting  = 16 << 20 // bytes of all sessions beyond that
	linesPerSecond = 10       // Outcomes of datagrams that nobody knows what to do with
)

// A Listener is a socket and what is carried from there: to the one Service,
// or QUIC by name.
type Listener struct {
	Conn *net.UDPConn // from Listen; the Server closes it
	Name string       // as configured, for logs; "" means its address

	Service tunnel.Name // not zero: every datagram is for it
	Port    uint16      // of Service; 0 where it has only one

	// To, in place of Service, says what a new session is for: it fills in its
	// request. It must not wait.
	To func(req *tunnel.Request)

	Open   func() Opening // otherwise: reads who a new QUIC connection is for
	Silent bool           // tell nobody why not

	Local *Local // takes the connections for which Own is true; nil means none
	Own   func(tunnel.Name) bool
}

// An Opening reads the first datagrams of one QUIC connection. The sni
// package's QUIC is one.
type Opening interface {
	// Ask takes in a datagram of the client: Yes once req has its Name and
	// ALPN, More where the datagram may be part of it, or must be dropped if
	// there is an error, and No with the reason where it never will be.
	Ask(datagram []byte, req *tunnel.Request) (tunnel.Verdict, error)

	// Refuse returns the datagram that tells the client no, nil where there is
	// nothing to say.
	Refuse(err error) []byte

	// Check reports whether a later datagram of the client may go to the
	// service. Heard is told of the service's. They may be called at once.
	Check(datagram []byte) bool
	Heard(datagram []byte)
}

// A Server carries datagrams. Its fields may not be changed after the first
// Serve.
type Server struct {
	Router *tunnel.Router // decides, and lists what is open
	Dialer *Dialer        // to the services; nil means one without a Guard
	Budget *tunnel.Budget // a second socket of a session is taken from it, and it has the clients' accounts; nil means no limit

	// Limits are those of connections: a session is half open until its
	// client is proven to be where it says, and HandshakeTimeout is for its hello.
	Limits      tunnel.Limits
	IdleTimeout time.Duration // of a session whose route says nothing; 0 means DefaultIdleTimeout

	Observe func(*tunnel.Outcome) // told of sessions that came to no request; must not block. May be nil
	Log     *slog.Logger          // nil discards

	clients tunnel.Clients // of a Server without a Budget

	mu       sync.Mutex // guards what follows, and the doors' maps
	doors    map[*door]struct{}
	half     list // sessions that are not proven
	sockets  sockets
	sessions int
	waiting  int                    // bytes
	waits    map[*tunnel.Client]int // of them, bytes of each source
	draining bool
	closed   bool
	sweeping bool
	quit     chan struct{} // closed by Close; made by the first Serve
	wg       sync.WaitGroup

	dropped, refused atomic.Uint64
	lines            meter
}

// A door is a listener at work.
type door struct {
	s    *Server
	ln   *Listener
	wire *wire
	port uint16
	ctx  context.Context // of sessions

	sessions map[*session]struct{}
	byAddr   map[client][]*path
	byID     map[string]*session
	callers  map[caller]*candidates
	idLen    [maxIDLen + 1]int         // how many of byID have this length
	answers  map[netip.AddrPort]client // of a Local's sessions
}

// Serve carries what comes to ln until Close, and then returns
// tunnel.ErrServerClosed. It owns ln.Conn. ctx is that of every session.
//
// One listener of several may be closed by itself, by its Conn: Serve returns
// net.ErrClosed then, and the sessions that came by it have ended: only that
// socket could tell their clients anything.
func (s *Server) Serve(ctx context.Context, ln Listener) error {
	defer ln.Conn.Close()
	if ln.Name == "" {
		ln.Name = ln.Conn.LocalAddr().String()
	}
	if ln.Service.IsZero() && ln.Open == nil && ln.To == nil {
		return fmt.Errorf("udp: listener %s carries nothing", ln.Name)
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	d := &door{s: s, ln: &ln, wire: newWire(ln.Conn), ctx: ctx, sessions: make(map[*session]struct{}),
		byAddr: make(map[client][]*path), byID: make(map[string]*session), callers: make(map[caller]*candidates), answers: make(map[netip.AddrPort]client)}
	if a, ok := ln.Conn.LocalAddr().(*net.UDPAddr); ok {
		d.port = a.AddrPort().Port()
	}
	if ln.Open != nil {
		dontFragment(ln.Conn)
	}
	if ln.Local != nil {
		ln.Local.attach(d)
	}
	if !s.track(d) {
		return tunnel.ErrServerClosed
	}
	defer s.untrack(d)
	return d.run()
}

// run is the one reader of the listener's socket.
func (d *door) run() error {
	b := new(buffer)
	oob := make([]byte, oobSize)
	var backoff time.Duration
	for {
		n, from, local, err := d.wire.receive(b[:], oob)
		if err != nil {
			if d.s.isClosed() {
				return tunnel.ErrServerClosed
			}
			if errors.Is(err, net.ErrClosed) {
				return err
			}
			// An ICMP message of an earlier answer, or memory: neither is the
			// socket's end.
			backoff = min(max(2*backoff, time.Millisecond), time.Second)
			d.s.log().Debug("receive failed", "listener", d.ln.Name, "err", err, "wait", backoff)
			select {
			case <-d.ctx.Done():
				return tunnel.ErrServerClosed
			case <-time.After(backoff):
			}
			continue
		}
		backoff = 0
		d.datagram(b[:n], client{from, local})
	}
}

// datagram takes b on. A panic of whoever reads it costs this one only: an
// Opening is never asked with mu held.
func (d *door) datagram(b []byte, c client) {
	defer func() {
		if v := recover(); v != nil {
			d.s.log().Error("panic in a datagram", "panic", v, "stack", string(debug.Stack()))
			d.drop(c, tunnel.Refusef(tunnel.Internal, "panic: %v", v))
		}
	}()
	if d.ln.Open != nil {
		d.quic(b, c)
	} else {
		d.plain(b, c)
	}
}

func (s *Server) track(d *door) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return false
	}
	if s.doors == nil {
		s.doors, s.quit = make(map[*door]struct{}), make(chan struct{})
	}
	s.doors[d] = struct{}{}
	return true
}

// untrack ends what came through d.
func (s *Server) untrack(d *door) {
	s.mu.Lock()
	all := d.all()
	s.mu.Unlock()
	for _, k := range all {
		k.end(tunnel.Drain, nil)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.doors, d)
}

// all returns the sessions. The caller holds mu.
func (d *door) all() []*session { return slices.Collect(maps.Keys(d.sessions)) }

// Drain lets no new sessions in. Those that are open go on; tunnel.Relay waits
// for them and ends them.
func (s *Server) Drain() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.draining = true
}

// Close ends every session, closes the listeners and waits for the goroutines
// of both.
func (s *Server) Close() error {
	s.mu.Lock()
	if !s.closed && s.quit != nil {
		close(s.quit)
	}
	s.closed, s.draining = true, true
	var all []*session
	for d := range s.doors {
		_ = d.ln.Conn.Close()
		all = append(all, d.all()...)
	}
	s.mu.Unlock()
	for _, k := range all {
		k.end(tunnel.Drain, nil)
	}
	s.wg.Wait()
	return nil
}

func (s *Server) isClosed() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.closed
}

// Stats are numbers for metrics.
type Stats struct {
	Sessions int    // open or waiting for a route
	HalfOpen int    // of them, not proven
	Dropped  uint64 // datagrams that were of no session and made none
	Refused  uint64 // sessions that came to no service
}

// Stats says how the Server is.
func (s *Server) Stats() Stats {
	s.mu.Lock()
	defer s.mu.Unlock()
	return Stats{Sessions: s.sessions, HalfOpen: s.half.n, Dropped: s.dropped.Load(), Refused: s.refused.Load()}
}

// sweep ends sessions whose time is up, as long as there are any. It stands
// for a timer per session.
func (s *Server) sweep() {
	defer s.wg.Done()
	t := time.NewTicker(often)
	defer t.Stop()
	for {
		var now time.Time
		select {
		case <-s.quit:
			return
		case now = <-t.C:
		}
		var over []*session
		var why []tunnel.Reason
		s.mu.Lock()
		left := 0
		for d := range s.doors {
			for k := range d.sessions {
				left++
				if r, is := k.expired(now); is {
					over, why = append(over, k), append(why, r)
				} else {
					k.prune(now)
				}
			}
		}
		if left == 0 {
			s.sweeping = false
			s.mu.Unlock()
			return
		}
		s.mu.Unlock()
		for i, k := range over {
			func() {
				defer k.recovered()
				k.expire(why[i])
			}()
		}
	}
}

// drop counts a datagram that is of no session. Some of them are told of.
func (d *door) drop(c client, err error) {
	s := d.s
	s.dropped.Add(1)
	if !s.lines.take(time.Now()) {
		return
	}
	now := time.Now()
	s.tell(&tunnel.Outcome{Start: now, Proto: d.proto(), Listener: d.ln.Name, Source: c.addr, Reason: tunnel.ReasonOf(err), Err: err})
}

func (s *Server) tell(o *tunnel.Outcome) {
	if s.Observe != nil {
		s.Observe(o)
	}
}

func (s *Server) log() *slog.Logger {
	if s.Log == nil {
		return slog.New(slog.DiscardHandler)
	}
	return s.Log
}

func (s *Server) dialer() *Dialer {
	if s.Dialer == nil {
		return &Dialer{}
	}
	return s.Dialer
}

// A meter lets linesPerSecond through.
type meter struct {
	mu     sync.Mutex
	second time.Time
	n      int
}

func (m *meter) take(now time.Time) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if now.Sub(m.second) >= time.Second {
		m.second, m.n = now, 0
	}
	m.n++
	return m.n <= linesPerSecond
}

// limit is n, or otherwise where n is zero.
func limit(n, otherwise time.Duration) time.Duration {
	if n == 0 {
		return otherwise
	}
	return n
}
