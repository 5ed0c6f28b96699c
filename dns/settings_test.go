package dns

import (
	"errors"
	"net"
	"testing"
	"time"

	"github.com/miekg/dns"
)

// What a Server is told holds from the next question on, by every transport.
func TestUse(t *testing.T) {
	r := start(t, &Server{RateLimit: 1000})
	rcode := func(tr Transport, name string) int {
		t.Helper()
		q, err := new(dns.Msg).SetQuestion(name, dns.TypeA).Pack()
		if err != nil {
			t.Fatal(err)
		}
		var m dns.Msg
		if err := m.Unpack(r.raw(t, tr, q)); err != nil {
			t.Fatal(err)
		}
		return m.Rcode
	}
	for _, tr := range transports {
		if got := rcode(tr, "none.other.test."); got != dns.RcodeRefused {
			t.Errorf("%s: a name of others is answered with %s", tr, dns.RcodeToString[got])
		}
	}
	counted := r.rules.Load().rate
	r.Use(&Settings{Zones: []string{"other.test"}, RateLimit: 1000})
	for _, tr := range transports {
		if got := rcode(tr, "none.other.test."); got != dns.RcodeNameError {
			t.Errorf("%s: a name of the new zone is answered with %s", tr, dns.RcodeToString[got])
		}
	}
	if r.rules.Load().rate != counted {
		t.Error("the responses that were counted are forgotten")
	}
	if r.Use(&Settings{RateLimit: 5}); r.rules.Load().rate == counted {
		t.Error("another limit has no effect")
	}
	if r.Use(&Settings{RateLimit: -1}); r.rules.Load().rate != nil {
		t.Error("no limit is one")
	}
}

// Drain ends one listener, and the others go on.
func TestDrainEndsOneListener(t *testing.T) {
	s := &Server{}
	defer s.Close()
	udp := func() *net.UDPConn {
		c, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	one, two := udp(), udp()
	if s.Drain(one) {
		t.Error("a socket that nobody serves is drained")
	}
	ended := make(chan string, 3)
	serve := func(name string, f func() error) {
		go func() {
			if err := f(); !errors.Is(err, ErrServerClosed) {
				t.Errorf("%s: Serve returned %v", name, err)
			}
			ended <- name
		}()
	}
	tcp, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	serve("one", func() error { return s.ServeUDP(t.Context(), one, "") })
	serve("two", func() error { return s.ServeUDP(t.Context(), two, "") })
	serve("tcp", func() error { return s.ServeTCP(t.Context(), tcp, "") })
	drain := func(name string, socket interface{ Close() error }) {
		t.Helper()
		for begun := time.Now(); !s.Drain(socket); time.Sleep(time.Millisecond) { // Serve has yet to begin
			if time.Since(begun) > 20*time.Second {
				t.Fatalf("%s cannot be drained", name)
			}
		}
		if got := <-ended; got != name {
			t.Errorf("%s has ended, and %s was drained", got, name)
		}
	}
	drain("one", one)
	drain("tcp", tcp)
	if _, err := net.Dial("tcp", tcp.Addr().String()); err == nil {
		t.Error("a listener that was drained accepts")
	}
	drain("two", two)
}
