package dns

import (
	"bytes"
	"context"
	"crypto/tls"
	"log/slog"
	"net/netip"
	"runtime/debug"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/miekg/dns"
)

// brokenTable panics for names that begin with "panic".
type brokenTable struct{ Names }

func (b brokenTable) Answer(q Question, a *Answer) {
	if strings.HasPrefix(q.Name, "panic") {
		panic("planned")
	}
	b.Names.Answer(q, a)
}

// brokenBelow is a clock that panics for those that function calls.
func brokenBelow(function string) func() time.Time {
	return func() time.Time {
		if bytes.Contains(debug.Stack(), []byte(function)) {
			panic("planned")
		}
		return time.Now()
	}
}

// syncBuffer is a log.
type syncBuffer struct {
	mu sync.Mutex // guards b
	b  bytes.Buffer
}

func (s *syncBuffer) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Write(p)
}

func (s *syncBuffer) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.String()
}

// A panic costs the question that met it, by whatever it came, and is logged.
func TestPanics(t *testing.T) {
	up := serve(t, "a.test. 60 IN A 192.0.2.1", "a.zone.test. 60 IN A 192.0.2.2")
	handshake := &tls.Config{InsecureSkipVerify: true, VerifyConnection: func(tls.ConnectionState) error { panic("planned") }}
	p, err := pair()
	if err != nil {
		t.Fatal(err)
	}
	ln, err := tls.Listen("tcp", "127.0.0.1:0", &tls.Config{Certificates: []tls.Certificate{p.TLS}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = ln.Close() })
	go func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			_ = c.(*tls.Conn).SetDeadline(time.Now().Add(10 * time.Second))
			_ = c.(*tls.Conn).Handshake()
			_ = c.Close()
		}
	}()
	table := brokenTable{gateways()}
	for _, c := range []struct {
		name, ask string
		lookup    func(context.Context, string) ([]netip.Addr, time.Duration, error)
		forward   *Forwarder
	}{
		{name: "in the table", ask: "panic.mesh.internal"},
		{name: "in the lookup of a target", ask: "one.mesh.internal", lookup: func(context.Context, string) ([]netip.Addr, time.Duration, error) { panic("planned") }},
		{name: "in a flight", ask: "a.test", forward: &Forwarder{Upstreams: []Upstream{{Addr: up.addr}}, now: brokenBelow("runFlight")}},
		{name: "in a question to a server", ask: "a.zone.test", forward: &Forwarder{
			Upstreams: []Upstream{{Addr: up.addr}}, Zones: map[string][]Upstream{"zone.test": {{Addr: ln.Addr().String(), TLS: handshake}}}}},
		{name: "after the answer of others", ask: "a.test", forward: &Forwarder{Upstreams: []Upstream{{Addr: up.addr}}, now: brokenBelow("finish(")}},
	} {
		t.Run(c.name, func(t *testing.T) {
			var log syncBuffer
			s := &Server{Names: func() Names { return table }, Lookup: c.lookup, Forward: c.forward, RecursionClients: loopback}
			s.Log = slog.New(slog.NewTextHandler(&log, nil))
			if c.forward != nil {
				c.forward.Log = s.Log
			}
			r := start(t, s)
			for _, tr := range transports {
				if got, _, _ := strings.Cut(summary(r.ask(t, tr, q(c.ask, dns.TypeA))), " "); got != "SERVFAIL" {
					t.Errorf("%s: %s, want SERVFAIL", tr, got)
				}
				if got := summary(r.ask(t, tr, q("web.mesh.internal", dns.TypeA))); !strings.HasSuffix(got, "web.mesh.internal. 5 IN A 10.0.0.1") {
					t.Errorf("%s: the next question: %s", tr, got)
				}
			}
			if s.forwards.taken+s.unproven.taken != 0 {
				t.Errorf("%d and %d places are left taken", s.forwards.taken, s.unproven.taken)
			}
			if !strings.Contains(log.String(), "planned") || !strings.Contains(log.String(), "recover_test.go") {
				t.Errorf("the log says no panic: %s", log.String())
			}
		})
	}

	t.Run("of a Resolver", func(t *testing.T) {
		m, err := hedge(t.Context(), nil, time.Second, func(context.Context, int) (*dns.Msg, error) { panic("planned") })
		if m != nil || err == nil || !strings.Contains(err.Error(), "planned") {
			t.Errorf("hedge = %v, %v, want the panic as an error", m, err)
		}
	})
}
