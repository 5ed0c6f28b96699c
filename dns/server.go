package dns

import (
	"cmp"
	"context"
	"errors"
	"io"
	"log/slog"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"culvert.dev/tunnel"
)

// ErrServerClosed is what the Serve methods return after Shutdown or Close.
var ErrServerClosed = errors.New("dns: server closed")

// Limits of a Server that are not for configuration.
const (
	defaultTTL = 5 * time.Second
	maxNoTTL   = time.Minute // of a no

	defaultRate     = 1000
	defaultForwards = 1000
	forwardsEach    = 100 // of one client

	defaultConns = 200
	connsEach    = 16  // of one client
	pipelined    = 100 // questions of a connection that wait for an answer

	tcpIdle    = 10 * time.Second // between questions
	tcpCrowded = 2 * time.Second  // the same, when more than half of the connections are taken
	tcpRead    = 3 * time.Second  // for a question, from its first byte
	tcpWrite   = 5 * time.Second
)

// A Server answers questions by UDP, TCP, TLS and HTTPS; by all with the same
// rules. Fields are set before the first call and not changed. It must not be
// copied.
type Server struct {
	// Zones are the server's own: what Names does not have there does not
	// exist, and no question for them goes out.
	Zones []string
	// Claimed are domains outside of Zones in which Names may have names later.
	// While Names can't tell, an upstream's NXDOMAIN there is not passed on, and
	// the answer is SERVFAIL; other answers are forwarded as usual. "" is every
	// name.
	Claimed []string
	// Names returns the table that holds now, or nil if none was ever loaded:
	// then the zones' names are answered SERVFAIL. It is called once for a
	// question and must be quick. Nil means that there is no table, and none
	// to come.
	Names func() Names
	// Views tell the network of the asker where the listener does not. The
	// longest prefix counts.
	Views []View
	// ViewOf tells it where Views don't: networks of a table change with it. It
	// must be quick. Nil means that there is no other source.
	ViewOf func(netip.Addr) string

	// Lookup finds the addresses of the table's Targets, and how long they are
	// good for, as Resolver.LookupTTL does. It should cache, and return within 1.8
	// seconds, after which the question is answered without it. Nil means that
	// targets have no address.
	Lookup func(ctx context.Context, host string) ([]netip.Addr, time.Duration, error)
	// Usable tells whether an address of a Target, with its port, is worth
	// telling; others are told only where there is nothing else to tell. It
	// must be quick. Nil means that all are.
	Usable func(netip.AddrPort) bool

	// TTL of the table's answers; 0 means 5 s, less than 0 means TTL 0.
	TTL time.Duration
	// NegativeTTL is how long it is believed that a name or type is not
	// there; 0 means 5 s, less than 0 means 0, more than 60 s means 60 s.
	NegativeTTL time.Duration

	// Forward answers questions about names that are not the server's; nil refuses
	// them with REFUSED. Close and Shutdown leave it open.
	Forward *Forwarder
	// RecursionClients are the ranges of clients that may ask for names outside of Zones. If it is
	// empty, no client may: no address is trusted for being private or loopback.
	RecursionClients []netip.Prefix

	// RateLimit is how many responses a second go out by UDP to a /24 or /56
	// outside RecursionClients and RateLimitExempt; 0 means 1000, negative no limit.
	RateLimit       int
	RateLimitExempt []netip.Prefix

	MaxForwards int // questions waiting for upstreams, and as many by UDP for Targets; 0 means 1000, of one client 100
	MaxConns    int // connections by TCP and TLS, and as many by HTTPS; 0 means 200, of one client 16

	// Observe is called at the end of every question, or what should have
	// been one, by the goroutine that answers: it must be quick. The Result
	// is its own only until it returns. Nil means none.
	Observe func(*Result)
	Log     *slog.Logger // nil discards

	now  func() time.Time // nil means time.Now
	once sync.Once        // for what follows

	rules     atomic.Pointer[rules]
	views     []sourceView
	forwards  shares
	unproven  shares // those that wait for Targets and came by UDP
	conns     shares
	webConns  shares
	refusals  refusalLog
	exchanges sync.Pool

	mu      sync.Mutex // guards what follows
	closing bool
	stops   map[*stopper]struct{}
	lookups map[string]*hostLookup // under way, by host
	wg      sync.WaitGroup         // of stops
}

type sourceView struct {
	source netip.Prefix
	view   string
}

// A Transport is how a question came.
type Transport string

// The transports.
const (
	UDP   Transport = "udp"
	TCP   Transport = "tcp"
	TLS   Transport = "tls"
	HTTPS Transport = "https"
)

// A Source is where an answer was found.
type Source string

// The sources. An answer that is a refusal has none.
const (
	FromTable    Source = "table"
	FromCache    Source = "cache"
	FromStale    Source = "stale" // from the cache, after its time
	FromUpstream Source = "upstream"
)

// A Result is what became of one message.
type Result struct {
	Transport Transport
	View      string
	From      netip.AddrPort
	Type      Type
	Rcode     int           // -1: no answer
	Reason    tunnel.Reason // why it was not answered; "" if it was
	Source    Source
	Size      int // bytes of the answer
	Took      time.Duration
}

// Code is the response code as a word, "NXDOMAIN"; "none" for no answer.
func (r *Result) Code() string {
	if r.Rcode == rcodeDrop {
		return "none"
	}
	return rcodeWord(r.Rcode)
}

// init makes the fields into what the hot path uses.
func (s *Server) init() {
	s.once.Do(func() {
		s.rules.Store(newRules(&Settings{
			Zones: s.Zones, Claimed: s.Claimed, TTL: s.TTL, NegativeTTL: s.NegativeTTL, Forward: s.Forward,
			RecursionClients: s.RecursionClients, RateLimit: s.RateLimit, RateLimitExempt: s.RateLimitExempt,
		}, nil))
		for _, v := range s.Views {
			for _, p := range v.Sources {
				s.views = append(s.views, sourceView{p.Masked(), v.Name})
			}
		}
		slices.SortStableFunc(s.views, func(a, b sourceView) int { return cmp.Compare(b.source.Bits(), a.source.Bits()) })
		s.forwards.all, s.forwards.each = cmp.Or(s.MaxForwards, defaultForwards), forwardsEach
		s.unproven.all, s.unproven.each = s.forwards.all, forwardsEach
		s.conns.all, s.conns.each = cmp.Or(s.MaxConns, defaultConns), connsEach
		s.webConns.all, s.webConns.each = s.conns.all, connsEach
		s.exchanges.New = func() any { return &exchange{s: s} }
	})
}

func wireTTL(d, limit time.Duration) uint32 { return uint32(min(max(d, 0), limit) / time.Second) }

func (s *Server) clock() time.Time {
	if s.now != nil {
		return s.now()
	}
	return time.Now()
}

// table returns the table that holds now, and whether one is missing.
func (s *Server) table() (n Names, missing bool) {
	if s.Names == nil {
		return nil, false
	}
	n = s.Names()
	return n, n == nil
}

// Age is how long ago the source of the table said that it is true, and false
// if no table was ever loaded.
func (s *Server) Age() (time.Duration, bool) {
	n, _ := s.table()
	if n == nil {
		return 0, false
	}
	return max(s.clock().Sub(n.Updated()), 0), true
}

// view returns the network of a, by the address of the socket alone.
func (s *Server) view(a netip.Addr) string {
	for _, v := range s.views {
		if v.source.Contains(a) {
			return v.view
		}
	}
	if s.ViewOf != nil {
		return s.ViewOf(a)
	}
	return ""
}

func within(list []netip.Prefix, a netip.Addr) bool {
	for _, p := range list {
		if p.Contains(a) {
			return true
		}
	}
	return false
}

// A stopper is a listener or connection under way.
type stopper struct {
	drain func() // take nothing new; what is under way may end
	close io.Closer
	of    io.Closer   // the socket of a listener; nil for a connection
	ended atomic.Bool // Drain was called for it
}

// track makes Shutdown and Close know of a listener or connection until
// untrack. Of is the socket of a listener, for Drain. It is nil when the server is closing.
func (s *Server) track(ctx context.Context, of io.Closer, drain func(), c io.Closer) *stopper {
	s.init()
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closing || ctx.Err() != nil {
		return nil
	}
	if s.stops == nil {
		s.stops = map[*stopper]struct{}{}
	}
	k := &stopper{drain: drain, close: c, of: of}
	s.stops[k] = struct{}{}
	s.wg.Add(1)
	return k
}

func (s *Server) untrack(k *stopper) {
	s.mu.Lock()
	delete(s.stops, k)
	s.mu.Unlock()
	s.wg.Done()
}

func (s *Server) isClosing() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.closing
}

// each marks the server as closing, and calls f for each of its stoppers.
func (s *Server) each(f func(*stopper)) {
	s.mu.Lock()
	s.closing = true
	stops := make([]*stopper, 0, len(s.stops))
	for k := range s.stops {
		stops = append(stops, k)
	}
	s.mu.Unlock()
	for _, k := range stops {
		f(k)
	}
}

// Drain takes no more questions from one socket that a Serve method was given. Serve
// answers those that it has, and returns; connections end when their clients are quiet.
// It is false where no Serve method has the socket.
func (s *Server) Drain(socket io.Closer) bool {
	s.mu.Lock()
	var found *stopper
	for k := range s.stops {
		if k.of == socket {
			found = k
		}
	}
	s.mu.Unlock()
	if found == nil {
		return false
	}
	found.ended.Store(true)
	found.drain()
	return true
}

// Shutdown takes no more questions, answers those it has, and returns when that
// is done. If ctx ends first, it closes the rest and returns ctx's error. It
// may be called more than once, and at once.
func (s *Server) Shutdown(ctx context.Context) error {
	s.each(func(k *stopper) { k.drain() })
	done := make(chan struct{})
	go func() { s.wg.Wait(); close(done) }()
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		_ = s.Close()
		<-done
		return ctx.Err()
	}
}

// Close ends everything at once. It does not wait.
func (s *Server) Close() error {
	s.each(func(k *stopper) { _ = k.close.Close() })
	return nil
}
