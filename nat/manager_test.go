package nat

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"culvert.dev/internal/testnet"
)

var https = Port{Name: ":443", Network: "tcp", Internal: 443}

// A site is a Manager behind a router in memory.
type site struct {
	*Manager
	router *router
	stop   func() // ends Run and waits for it
}

// startSite runs a manager in a bubble of synctest.
func startSite(t *testing.T, r *router, s Settings, change func(*Manager)) *site {
	t.Helper()
	m := &Manager{
		Dial: r.dial,
		FindRoute: func(context.Context, netip.Addr) (Route, error) {
			return Route{Router: routerAddr, Local: localAddr}, nil
		},
		ListenAnnouncements: func(string) (net.PacketConn, error) { return nil, errors.New("no multicast here") },
		Verify:              func(context.Context, Port, netip.AddrPort) error { return nil },
		Secret:              []byte("secret"),
	}
	if change != nil {
		change(m)
	}
	m.Use(s)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- m.Run(ctx) }()
	stopped := false
	stop := func() {
		if stopped {
			return
		}
		stopped = true
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run returned %v", err)
		}
	}
	t.Cleanup(stop)
	return &site{m, r, stop}
}

// after lets time pass and returns the first mapping and the Status.
func (s *site) after(d time.Duration) (Mapping, Status) {
	time.Sleep(d)
	synctest.Wait()
	status := s.Status()
	if len(status.Mappings) == 0 {
		return Mapping{}, status
	}
	return status.Mappings[0], status
}

func tcpSettings() Settings { return Settings{Ports: []Port{https}} }

func bubble(t *testing.T, f func(t *testing.T)) {
	t.Helper()
	synctest.Test(t, f)
}

// Whatever the router speaks, its port is mapped and verified within five seconds, kept for
// days, and deleted at the end.
func TestManagerMaps(t *testing.T) {
	for _, tt := range []struct {
		name     string
		pcp, pmp bool
		protocol string
		drop     int // requests that get lost at first
	}{
		{"PCP and NAT-PMP", true, true, "pcp", 0},
		{"PCP", true, false, "pcp", 0},
		{"NAT-PMP", false, true, "nat-pmp", 0},
		{"NAT-PMP over a bad line", false, true, "nat-pmp", 2},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				r := newRouter(t)
				r.pcp, r.pmp, r.drop = tt.pcp, tt.pmp, tt.drop
				s := startSite(t, r, tcpSettings(), nil)
				got, status := s.after(5 * time.Second)
				want := netip.MustParseAddrPort("203.0.113.7:443")
				if at, ok := got.Public(); !ok || at != want || got.Protocol != tt.protocol {
					t.Fatalf("after 5 s the mapping is %+v, want %s verified by %s", got, want, tt.protocol)
				}
				if status.Kind != SingleNAT {
					t.Errorf("the NAT is %s, want %s", status.Kind, SingleNAT)
				}
				for range 72 {
					if got, _ := s.after(time.Hour); got.State != Verified {
						t.Fatalf("the mapping was lost: %+v", got)
					}
				}
				// A lifetime of two hours is renewed every hour.
				if n := r.count(tt.protocol + " map"); n < 72 || n > 74 {
					t.Errorf("%d requests in 72 hours, want one at half of each lifetime", n)
				}
				s.stop()
				r.do(func() {
					if r.deleted != 1 || len(r.mappings) != 0 {
						t.Errorf("%d deletions and %d mappings left, want one and none", r.deleted, len(r.mappings))
					}
				})
			})
		})
	}
}

// A mapping is renewed soon after the machine was suspended, as the router goes on counting.
func TestManagerAfterSuspension(t *testing.T) {
	bubble(t, func(t *testing.T) {
		var clock testnet.Clock
		r := newRouter(t)
		r.pcp, r.pmp = false, true
		s := startSite(t, r, tcpSettings(), func(m *Manager) { m.now = clock.Now })
		if got, _ := s.after(5 * time.Second); got.State != Verified {
			t.Fatalf("the mapping is %+v", got)
		}
		before := r.count("nat-pmp map")
		clock.Jump(12 * time.Hour)
		if got, _ := s.after(2 * time.Minute); got.State != Verified || r.count("nat-pmp map") != before+1 {
			t.Errorf("%d requests after twelve hours of sleep, want one; %+v", r.count("nat-pmp map")-before, got)
		}
		clock.Jump(-24 * time.Hour)
		if got, _ := s.after(2 * time.Hour); got.State != Verified || r.count("nat-pmp map") < before+2 {
			t.Errorf("no request after the clock was set back; %+v", got)
		}
	})
}

// Faults of routers, and what becomes of the mapping.
func TestManagerFaults(t *testing.T) {
	first, second := netip.MustParseAddr("203.0.113.7"), netip.MustParseAddr("203.0.113.99")
	stun := tcpSettings()
	stun.STUN = []string{stunServer.String()}
	for _, tt := range []struct {
		name     string
		settings Settings
		before   func(*router) // the router is asked for the first time
		then     func(*router) // ten minutes later; called with mu held
		want     string        // STATE ADDRESS two minutes later
		contains string        // in the error, the problem or the explanation
	}{
		{name: "router restarts with PCP", then: (*router).restart, want: "verified 203.0.113.7:443"},
		{name: "router restarts with NAT-PMP", before: func(r *router) { r.pcp = false }, then: (*router).restart, want: "verified 203.0.113.7:443"},
		{name: "epoch jumps forwards", then: func(r *router) { r.started = r.started.Add(-time.Hour) }, want: "verified 203.0.113.7:443"},
		{name: "outside address changes with NAT-PMP", before: func(r *router) { r.pcp = false }, then: func(r *router) { r.outside = second }, want: "verified 203.0.113.99:443"},
		{name: "outside address changes with PCP, which resets the epoch", before: func(r *router) { r.pmp = false }, then: func(r *router) { r.outside, r.started = second, time.Now() }, want: "verified 203.0.113.99:443"},
		{name: "outside address changes without a word, and STUN sees it", settings: stun, before: func(r *router) { r.pmp, r.seen = false, first }, then: func(r *router) { r.outside, r.seen = second, second }, want: "verified 203.0.113.99:443"},
		{name: "port is somebody else's", before: func(r *router) { r.taken[443] = true }, want: "verified 203.0.113.7:444"},
		{name: "mapping is stolen", before: func(r *router) { r.pcp = false }, then: func(r *router) { r.restart(); r.taken[443] = true }, want: "verified 203.0.113.7:444"},
		{name: "mapping is refused", before: func(r *router) { r.refuse = 2 }, want: "pending invalid AddrPort", contains: "switched off, or not allowed"},
		{name: "mapping is refused at renewal, and is kept until it expires", then: func(r *router) { r.restart(); r.refuse = 8 }, want: "verified 203.0.113.7:443", contains: "no room"},
		{name: "router goes silent, and the mapping is kept until it expires", then: func(r *router) { r.pcp, r.pmp = false, false }, want: "verified 203.0.113.7:443", contains: "none of PCP, NAT-PMP and UPnP"},
		{name: "router speaks none", before: func(r *router) { r.pcp, r.pmp = false, false }, want: "pending invalid AddrPort", contains: "none of PCP, NAT-PMP and UPnP"},
		{name: "router comes late", before: func(r *router) { r.pcp, r.pmp = false, false }, then: func(r *router) { r.pcp = true }, want: "verified 203.0.113.7:443"},
		{name: "provider has a NAT", before: func(r *router) { r.outside = netip.MustParseAddr("100.70.1.2") }, want: "mapped 100.70.1.2:443", contains: "CGNAT"},
		{name: "two routers", before: func(r *router) { r.outside = netip.MustParseAddr("10.0.0.2") }, want: "mapped 10.0.0.2:443", contains: "double NAT"},
		{name: "two routers, of which STUN knows", settings: stun, before: func(r *router) { r.seen = second }, want: "verified 203.0.113.7:443", contains: "double NAT"},
		{name: "answers of others first", before: func(r *router) {
			r.lie = func(answer []byte) [][]byte {
				forged := slices.Clone(answer)
				if len(forged) == pcpMapSize {
					forged[30] ^= 1 // of the nonce
					forged[59] = 66
				}
				return [][]byte{{1}, forged[:len(forged)-1], forged, answer}
			}
		}, want: "verified 203.0.113.7:443"},
		{name: "STUN answers wrongly", settings: stun, before: func(r *router) {
			r.seen = second
			r.lie = func(answer []byte) [][]byte {
				if IsSTUN(answer) {
					answer[10] ^= 1 // of the transaction id
				}
				return [][]byte{answer}
			}
		}, want: "verified 203.0.113.7:443", contains: "the router has the outside address 203.0.113.7"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				r := newRouter(t)
				if tt.before != nil {
					tt.before(r)
				}
				if tt.settings.Ports == nil {
					tt.settings = tcpSettings()
				}
				s := startSite(t, r, tt.settings, nil)
				s.after(10*time.Minute + 17*time.Second)
				if tt.then != nil {
					r.do(func() { tt.then(r) })
				}
				got, status := s.after(2 * time.Minute)
				if now := got.State + " " + got.External.String(); now != tt.want {
					t.Errorf("got %q, want %q: %+v", now, tt.want, status)
				}
				if all := got.Error + "\n" + status.Problem + "\n" + status.Explanation; !strings.Contains(all, tt.contains) {
					t.Errorf("got %q, want it to say %q", all, tt.contains)
				}
			})
		})
	}
}

// After a power cut the router starts later than this host: its port is mapped some seconds after
// it answers, not at the next question half a minute later.
func TestManagerStartsBeforeTheRouter(t *testing.T) {
	for _, late := range []time.Duration{3 * time.Second, 8 * time.Second, 12 * time.Second, 40 * time.Second} {
		bubble(t, func(t *testing.T) {
			r := newRouter(t)
			r.pcp, r.pmp = false, false
			s := startSite(t, r, tcpSettings(), nil)
			s.after(late)
			r.do(func() { r.pmp = true })
			// A pause is as long as all before it.
			if got, status := s.after(late + 2*maxSearchTime); got.State != Verified {
				t.Errorf("the router answered after %v, and %v later there is %+v", late, late+2*maxSearchTime, status)
			}
		})
	}
}

// A gateway that starts before the network does says so, once, and maps its ports soon after there
// is a route.
func TestManagerStartsBeforeTheNetwork(t *testing.T) {
	bubble(t, func(t *testing.T) {
		var up atomic.Bool
		var log bytes.Buffer // written by Run alone, which waits while it is read
		s := startSite(t, newRouter(t), tcpSettings(), func(m *Manager) {
			m.Log = slog.New(slog.NewTextHandler(&log, nil))
			m.FindRoute = func(context.Context, netip.Addr) (Route, error) {
				if !up.Load() {
					return Route{}, errors.New("there is no route")
				}
				return Route{Router: routerAddr, Local: localAddr}, nil
			}
		})
		const problem = "there is no route: set nat.router if there is one"
		if got, status := s.after(time.Minute); got.State != Pending || status.Problem != problem {
			t.Errorf("without a route there is %+v", status)
		}
		if n := strings.Count(log.String(), `level=WARN msg="no port can be mapped; trying again" error="`+problem+`"`); n != 1 {
			t.Errorf("the log says it %d times, want once:\n%s", n, &log)
		}
		up.Store(true)
		if got, status := s.after(routeInterval + 2*time.Second); got.State != Verified {
			t.Errorf("with a route there is %+v", status)
		}
		s.stop()
		if n := strings.Count(log.String(), "no port can be mapped"); n != 1 {
			t.Errorf("the log says it %d times in the end, want once:\n%s", n, &log)
		}
	})
}

// STUN servers that say nothing are named, also beside those of which nothing is known.
func TestManagerNamesSilentSTUNServers(t *testing.T) {
	bubble(t, func(t *testing.T) {
		settings := tcpSettings()
		settings.STUN = []string{"nosuch.example:3478", "203.0.113.9:3478"}
		s := startSite(t, newRouter(t), settings, func(m *Manager) {
			m.Lookup = func(_ context.Context, host string) ([]netip.Addr, error) {
				return nil, &net.DNSError{Err: "no such host", Name: host, IsNotFound: true}
			}
		})
		const want = "nosuch.example:3478: no such host; 203.0.113.9:3478 does not answer"
		if _, status := s.after(time.Minute); status.Unseen != want {
			t.Errorf("the status says %q, want %q", status.Unseen, want)
		}
	})
}

// A gateway outside that is there a little later verifies the port a little later, too.
func TestManagerIsVerifiedSoon(t *testing.T) {
	bubble(t, func(t *testing.T) {
		var reachable atomic.Bool
		s := startSite(t, newRouter(t), tcpSettings(), func(m *Manager) {
			m.Verify = func(context.Context, Port, netip.AddrPort) error {
				if !reachable.Load() {
					return errors.New("connection refused")
				}
				return nil
			}
		})
		if got, _ := s.after(4 * time.Second); got.State != Mapped {
			t.Errorf("got %+v, want it mapped", got)
		}
		reachable.Store(true)
		if got, _ := s.after(2 * minReverify); got.State != Verified {
			t.Errorf("got %+v, want it verified", got)
		}
	})
}

// A gateway that comes back after a crash gets its mapping again from a router of PCP, as it
// has the same nonce.
func TestManagerAfterACrash(t *testing.T) {
	for _, tt := range []struct {
		secret string
		want   string
	}{{"secret", Verified}, {"another", Pending}} {
		bubble(t, func(t *testing.T) {
			r := newRouter(t)
			r.pmp = false
			m := &Manager{Secret: []byte("secret")}
			client := &PCP{Router: routerAddr, Dial: r.dial}
			if _, err := client.Map(t.Context(), m.request(&mapping{Port: https}, time.Hour)); err != nil {
				t.Fatal(err)
			}
			s := startSite(t, r, tcpSettings(), func(m *Manager) { m.Secret = []byte(tt.secret) })
			if got, _ := s.after(5 * time.Second); got.State != tt.want {
				t.Errorf("with secret %q the mapping is %+v, want %s", tt.secret, got, tt.want)
			}
		})
	}
}

// A mapping is verified only after somebody outside has connected, and no more after three
// failures in a row.
func TestManagerVerifies(t *testing.T) {
	bubble(t, func(t *testing.T) {
		var fails atomic.Bool
		fails.Store(true)
		s := startSite(t, newRouter(t), tcpSettings(), func(m *Manager) {
			m.Verify = func(_ context.Context, p Port, public netip.AddrPort) error {
				if p != https || public != netip.MustParseAddrPort("203.0.113.7:443") {
					t.Errorf("asked to verify %v at %s", p, public)
				}
				if fails.Load() {
					return errors.New("connection refused")
				}
				return nil
			}
		})
		if got, _ := s.after(5 * time.Second); got.State != Mapped || got.Error != "connection refused" {
			t.Errorf("got %+v, want it mapped only, with the error", got)
		}
		fails.Store(false)
		if got, _ := s.after(10 * time.Minute); got.State != Verified || got.Error != "" {
			t.Errorf("got %+v, want it verified", got)
		}
		fails.Store(true)
		if got, _ := s.after(11 * time.Minute); got.State != Verified && got.Error == "" {
			t.Errorf("got %+v, want one failure to change nothing yet", got)
		}
		if got, _ := s.after(time.Hour); got.State != Mapped {
			t.Errorf("got %+v, want it mapped only", got)
		}
	})
}

// Without NAT the address of the host itself is verified.
func TestManagerWithoutNAT(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := newRouter(t)
		r.pcp, r.pmp = false, false
		s := startSite(t, r, tcpSettings(), func(m *Manager) {
			m.FindRoute = func(context.Context, netip.Addr) (Route, error) {
				return Route{Router: routerAddr, Local: netip.MustParseAddr("198.51.100.4")}, nil
			}
		})
		got, status := s.after(5 * time.Second)
		if at, ok := got.Public(); !ok || at.String() != "198.51.100.4:443" || status.Kind != NoNAT {
			t.Errorf("got %+v, want the host's own address", status)
		}
	})
}

// Settings change while it runs: ports come and go, and those that stay keep their mapping.
func TestManagerUsesOtherSettings(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := newRouter(t)
		s := startSite(t, r, tcpSettings(), nil)
		s.after(5 * time.Second)
		quic := Port{Name: "udp://:443", Network: "udp", Internal: 443, External: 8443}
		s.Use(Settings{Ports: []Port{https, quic}})
		_, status := s.after(5 * time.Second)
		if len(status.Mappings) != 2 || status.Mappings[1].External.String() != "203.0.113.7:8443" {
			t.Errorf("got %+v, want the port of UDP, too", status.Mappings)
		}
		if n := r.count("pcp map"); n != 2 {
			t.Errorf("%d requests, want one for each port", n)
		}
		s.Use(Settings{Ports: []Port{quic}, Protocols: []string{"nat-pmp"}})
		got, status := s.after(5 * time.Second)
		if len(status.Mappings) != 1 || got.Protocol != "nat-pmp" || got.State != Verified {
			t.Errorf("got %+v, want the port of UDP alone, by NAT-PMP", status.Mappings)
		}
		s.Use(Settings{})
		if _, status := s.after(5 * time.Second); len(status.Mappings) != 0 {
			t.Errorf("got %+v, want no mapping", status.Mappings)
		}
		r.do(func() {
			if len(r.mappings) != 0 {
				t.Errorf("the router still has %d mappings, want none", len(r.mappings))
			}
		})
	})
}

// The host moves to another network: everything begins again, at the other router.
func TestManagerMovesToAnotherRouter(t *testing.T) {
	bubble(t, func(t *testing.T) {
		var moved atomic.Bool
		r := newRouter(t)
		s := startSite(t, r, tcpSettings(), func(m *Manager) {
			m.FindRoute = func(context.Context, netip.Addr) (Route, error) {
				if moved.Load() {
					return Route{Router: netip.MustParseAddr("10.9.9.1"), Local: netip.MustParseAddr("10.9.9.2")}, nil
				}
				return Route{Router: routerAddr, Local: localAddr}, nil
			}
		})
		s.after(time.Minute)
		moved.Store(true)
		if got, status := s.after(2 * time.Minute); got.State != Pending || status.Outside.IsValid() {
			t.Errorf("got %+v, want nothing of the router before it", status)
		}
		moved.Store(false)
		if got, _ := s.after(2 * time.Minute); got.State != Verified {
			t.Errorf("got %+v, want it mapped again", got)
		}
	})
}
