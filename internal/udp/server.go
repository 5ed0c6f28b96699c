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

const (
	// briefIdleTimeout is that of a session that is not proven, or that has lasted no
	// longer than provenAfter: a question and its answer, or no client at all.
	briefIdleTimeout = 10 * time.Second
	provenAfter      = 2 * time.Second

	// sweepInterval is how often expired sessions are looked for.
	sweepInterval = time.Second
)

// Limits of datagrams that wait for a route.
const (
	maxWaiting       = 64 << 10 // bytes that one session may have sent before its route is known
	firstWaiting     = 4 << 10  // of them, bytes that a session may always have: a hello
	maxAllWaiting    = 16 << 20 // bytes of all sessions beyond that
	reportsPerSecond = 10       // Outcomes of datagrams that belong to no session
)

// A Listener is a socket whose datagrams go to one Service, or to services by the
// names in QUIC.
type Listener struct {
	Conn *net.UDPConn // from Listen; the Server closes it
	Name string       // as configured, for logs; "" means its address

	Service tunnel.Name // not zero: every datagram is for it
	Port    uint16      // of Service; 0 where it has only one

	// To, in place of Service, fills in the request of each new session. It must not
	// wait.
	To func(req *tunnel.Request)

	Open func() Opening // otherwise: returns the reader of a new QUIC connection

	// Answer, if set beside Open, gets datagrams that begin with 0 to 3, as STUN does beside QUIC
	// (RFC 9443 section 2), before anything else: it returns what is sent back, nil for nothing, and
	// whether the datagram was for it. It must not block.
	Answer func(datagram []byte, from netip.AddrPort) (answer []byte, taken bool)

	Silent bool // send no refusals

	Local *Local // takes the connections for which Own is true; nil means none
	Own   func(tunnel.Name) bool
}

// An Opening reads the first datagrams of one QUIC connection. The sni
// package's QUIC is one.
type Opening interface {
	// ReadHello takes in a datagram of the client: Yes once req has its Name and
	// ALPN, More where the datagram may be part of it, or must be dropped if
	// there is an error, and No with the reason where it never will be.
	ReadHello(datagram []byte, req *tunnel.Request) (tunnel.Verdict, error)

	// Refuse returns the datagram that refuses the client, nil where there is none.
	Refuse(err error) []byte

	// Check reports whether a later datagram of the client may go to the
	// service. ServiceDatagram gets those of the service. They may be called at once.
	Check(datagram []byte) bool
	ServiceDatagram(datagram []byte)
}

// A Server carries datagrams. Its fields may not be changed after the first
// Serve.
type Server struct {
	Router *tunnel.Router // decides, and lists what is open
	Dialer *Dialer        // to the services; nil means one without a Guard
	Budget *tunnel.Budget // counts the second sockets of sessions, and has the clients' accounts; nil means no limit

	// Limits are those of connections: a session is half open until its client's
	// address is proven, and HandshakeTimeout limits its hello. UDPIdleTimeout is for
	// sessions whose route has no limit.
	Limits        tunnel.Limits
	CurrentLimits tunnel.LimitsFunc // if set, takes the place of Limits

	Observe func(*tunnel.Outcome) // gets the Outcomes of sessions without a request; must not block. May be nil
	Log     *slog.Logger          // nil discards

	clients tunnel.Clients // of a Server without a Budget

	mu        sync.Mutex // guards what follows, and the maps of the listeners
	listeners map[*activeListener]struct{}
	half      list // sessions that are not proven
	sockets   sockets
	sessions  int
	waiting   int                    // bytes
	waitingBy map[*tunnel.Client]int // of them, bytes of each source
	draining  bool
	closed    bool
	sweeping  bool
	quit      chan struct{} // closed by Close; made by the first Serve
	wg        sync.WaitGroup

	dropped, refused atomic.Uint64
	lines            meter
}

// An activeListener is a Listener that is served, and its sessions.
type activeListener struct {
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

func (s *Server) limits() *tunnel.Limits { return s.CurrentLimits.Or(&s.Limits) }

// Serve carries what comes to ln until Close, and then returns
// tunnel.ErrServerClosed. It owns ln.Conn. ctx is that of every session.
//
// One listener of several may be closed by itself, by its Conn: then Serve returns
// net.ErrClosed, and the sessions of that listener have ended, as only its socket
// reaches their clients.
func (s *Server) Serve(ctx context.Context, ln Listener) error {
	defer ln.Conn.Close()
	if ln.Name == "" {
		ln.Name = ln.Conn.LocalAddr().String()
	}
	if ln.Service.IsZero() && ln.Open == nil && ln.To == nil {
		return fmt.Errorf("udp: listener %s has no protocol", ln.Name)
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	d := &activeListener{s: s, ln: &ln, wire: newWire(ln.Conn), ctx: ctx, sessions: make(map[*session]struct{}),
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

// run reads the listener's socket until it is closed.
func (d *activeListener) run() error {
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
			// An ICMP message for an earlier answer, or no memory: the socket goes
			// on.
			backoff = min(max(2*backoff, time.Millisecond), time.Second)
			d.s.log().Debug("cannot receive datagrams; retrying", "listener", d.ln.Name, "err", err, "retry_in", backoff)
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

// datagram handles b. A panic of its reader costs this datagram only: an Opening is
// never called with mu held.
func (d *activeListener) datagram(b []byte, c client) {
	defer func() {
		if v := recover(); v != nil {
			d.s.log().Error("panic in a datagram", "panic", v, "stack", string(debug.Stack()))
			d.drop(c, tunnel.Refusef(tunnel.Internal, "panic: %v", v))
		}
	}()
	if d.ln.Open != nil {
		if d.ln.Answer != nil && len(b) > 0 && b[0] < 4 {
			if answer, taken := d.ln.Answer(b, c.addr); taken {
				if answer != nil {
					_ = d.wire.send(answer, c.addr, c.local)
				}
				return
			}
		}
		d.quic(b, c)
	} else {
		d.plain(b, c)
	}
}

func (s *Server) track(d *activeListener) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return false
	}
	if s.listeners == nil {
		s.listeners, s.quit = make(map[*activeListener]struct{}), make(chan struct{})
	}
	s.listeners[d] = struct{}{}
	return true
}

// untrack removes d and ends its sessions.
func (s *Server) untrack(d *activeListener) {
	s.mu.Lock()
	all := d.all()
	s.mu.Unlock()
	for _, k := range all {
		k.end(tunnel.Drain, nil)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.listeners, d)
}

// all returns the sessions. The caller holds mu.
func (d *activeListener) all() []*session { return slices.Collect(maps.Keys(d.sessions)) }

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
	for d := range s.listeners {
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

// Stats returns the present numbers.
func (s *Server) Stats() Stats {
	s.mu.Lock()
	defer s.mu.Unlock()
	return Stats{Sessions: s.sessions, HalfOpen: s.half.n, Dropped: s.dropped.Load(), Refused: s.refused.Load()}
}

// sweep ends expired sessions for as long as there are sessions. It takes the place of
// a timer for each.
func (s *Server) sweep() {
	defer s.wg.Done()
	t := time.NewTicker(sweepInterval)
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
		for d := range s.listeners {
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

// drop counts a datagram that belongs to no session, and reports some of them.
func (d *activeListener) drop(c client, err error) {
	s := d.s
	s.dropped.Add(1)
	if !s.lines.take(time.Now()) {
		return
	}
	now := time.Now()
	s.report(&tunnel.Outcome{Start: now, Proto: d.proto(), Listener: d.ln.Name, Source: c.addr, Reason: tunnel.ReasonOf(err), Err: err})
}

func (s *Server) report(o *tunnel.Outcome) {
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

// A meter allows reportsPerSecond.
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
	return m.n <= reportsPerSecond
}

// limit is n, or otherwise where n is zero.
func limit(n, otherwise time.Duration) time.Duration {
	if n == 0 {
		return otherwise
	}
	return n
}
