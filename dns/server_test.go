package dns

import (
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"culvert.dev/internal/testnet"
	"github.com/miekg/dns"
)

// A server is a DNS server on loopback, by UDP and TCP, that answers from
// records and misbehaves on demand.
type server struct {
	addr string

	mu      sync.Mutex // guards what follows
	records map[string][]string
	before  func(w dns.ResponseWriter, q *dns.Msg) bool // true: it has dealt with q
	asked   map[string]int                              // by "name type"
	ids     map[uint16]bool
	ports   map[int]bool
}

func serve(t *testing.T, records ...string) *server {
	t.Helper()
	s := &server{asked: map[string]int{}, ids: map[uint16]bool{}, ports: map[int]bool{}}
	s.set(t, records...)
	var pc net.PacketConn
	var ln net.Listener
	for range 100 { // until one port is free for both
		var err error
		if ln, err = net.Listen("tcp", "127.0.0.1:0"); err != nil {
			t.Fatal(err)
		}
		s.addr = ln.Addr().String()
		if pc, err = net.ListenPacket("udp", s.addr); err == nil {
			break
		}
		ln.Close()
	}
	if pc == nil {
		t.Fatal("no port is free for UDP and TCP")
	}
	for _, srv := range []*dns.Server{{PacketConn: pc, Handler: s}, {Listener: ln, Handler: s}} {
		started, done := make(chan struct{}), make(chan struct{})
		srv.NotifyStartedFunc = func() { close(started) }
		go func() { defer close(done); _ = srv.ActivateAndServe() }()
		<-started
		t.Cleanup(func() { _ = srv.Shutdown(); <-done })
	}
	return s
}

// set makes records all there is: "name TTL IN A 192.0.2.1". A name alone
// exists without records.
func (s *server) set(t *testing.T, records ...string) {
	t.Helper()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.records = map[string][]string{}
	for _, r := range records {
		name := strings.ToLower(strings.Fields(r)[0])
		if !strings.Contains(r, " ") {
			s.records[name] = nil
			continue
		}
		if _, err := dns.NewRR(r); err != nil {
			t.Fatal(err)
		}
		s.records[name] = append(s.records[name], r)
	}
}

func (s *server) do(before func(w dns.ResponseWriter, q *dns.Msg) bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.before = before
}

func (s *server) count(what string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.asked[what]
}

func (s *server) ServeDNS(w dns.ResponseWriter, q *dns.Msg) {
	s.mu.Lock()
	s.asked[strings.ToLower(q.Question[0].Name)+" "+dns.TypeToString[q.Question[0].Qtype]]++
	s.ids[q.Id] = true
	if a, ok := w.RemoteAddr().(*net.UDPAddr); ok {
		s.ports[a.Port] = true
	}
	before := s.before
	s.mu.Unlock()
	if before != nil && before(w, q) {
		return
	}
	_ = w.WriteMsg(s.answer(q))
}

func (s *server) answer(q *dns.Msg) *dns.Msg {
	s.mu.Lock()
	defer s.mu.Unlock()
	m := new(dns.Msg)
	m.SetReply(q)
	name := strings.ToLower(q.Question[0].Name)
	records, exists := s.records[name]
	for range 20 { // follow as a recursive server does
		var next string
		for _, r := range records {
			rr, _ := dns.NewRR(r)
			switch rr := rr.(type) {
			case *dns.CNAME:
				m.Answer = append(m.Answer, rr)
				next = rr.Target
			default:
				if rr.Header().Rrtype == q.Question[0].Qtype {
					m.Answer = append(m.Answer, rr)
				}
			}
		}
		if next == "" {
			break
		}
		records, exists = s.records[next]
	}
	if !exists {
		m.Rcode = dns.RcodeNameError
		soa, _ := dns.NewRR("test. 3 IN SOA ns.test. root.test. 1 2 3 4 3600")
		m.Ns = append(m.Ns, soa)
	}
	return m
}

// A clock is set by hand.
type clock struct {
	mu  sync.Mutex
	now time.Time
}

func (c *clock) add(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.now = c.now.Add(d)
}

// jump moves the wall clock alone.
func (c *clock) jump(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.now = testnet.JumpClock(c.now, d)
}

func resolver(t *testing.T, servers ...string) (*Resolver, *clock) {
	c := &clock{now: time.Now()}
	return &Resolver{
		Servers: servers, Hosts: filepath.Join(t.TempDir(), "none"),
		now: func() time.Time {
			c.mu.Lock()
			defer c.mu.Unlock()
			return c.now
		},
	}, c
}

// lookup returns the addresses, or what is wrong in a word.
func lookup(t *testing.T, r *Resolver, host string) string {
	t.Helper()
	addrs, err := r.Lookup(t.Context(), host)
	if err == nil {
		return strings.Trim(fmt.Sprint(addrs), "[]")
	}
	var de *net.DNSError
	switch {
	case !errors.As(err, &de):
		t.Errorf("Lookup(%q): %T, want a *net.DNSError", host, err)
	case de.IsNotFound:
		return "not found"
	case de.Timeout():
		return "timeout"
	}
	return "error"
}

func expect(t *testing.T, r *Resolver, host, want string) {
	t.Helper()
	if got := lookup(t, r, host); got != want {
		t.Errorf("Lookup(%q) = %s, want %s", host, got, want)
	}
}
