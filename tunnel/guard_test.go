package tunnel_test

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"sync"
	"testing"

	"culvert.dev/tunnel"
)

func tcpAddr(s string) *net.TCPAddr { return net.TCPAddrFromAddrPort(netip.MustParseAddrPort(s)) }

func TestGuardOwnPorts(t *testing.T) {
	const loop, prohibited, ok = tunnel.Loop, tunnel.Prohibited, tunnel.Done
	for _, tt := range []struct {
		own   string // "admin ADDR" for an admin port
		admin bool
		dial  string
		want  tunnel.Reason // of a route that names the address
	}{
		{"127.0.0.1:443", false, "127.0.0.1:443", loop},
		{"127.0.0.1:443", false, "[::ffff:127.0.0.1]:443", loop},
		{"[::ffff:127.0.0.1]:443", false, "127.0.0.1:443", loop},
		{"127.0.0.1:443", false, "0.0.0.0:443", loop}, // Linux connects that to loopback
		{"127.0.0.1:443", false, "[::]:443", loop},
		{"[::1]:443", false, "[::]:443", loop},
		{"127.0.0.1:443", false, "127.0.0.1:444", ok},
		{"127.0.0.1:443", false, "127.0.0.2:443", ok},
		{"127.0.0.1:443", false, "198.51.100.1:443", ok},
		{"198.51.100.1:443", false, "198.51.100.1:443", loop},
		{"198.51.100.1:443", false, "[::ffff:198.51.100.1]:443", loop},
		{"198.51.100.1:443", false, "127.0.0.1:443", ok},
		{"[2001:db8::1]:443", false, "[2001:db8::1]:443", loop},
		{"[2001:db8::1]:443", false, "[2001:db8:0::0:1]:443", loop},
		{"[fe80::1%eth0]:443", false, "[fe80::1%eth0]:443", loop},
		{"[fe80::1%eth0]:443", false, "[fe80::1]:443", loop},
		{"[fe80::1%eth0]:443", false, "[fe80::1%2]:443", loop},
		{"0.0.0.0:443", false, "127.0.0.1:443", loop},
		{"0.0.0.0:443", false, "127.255.0.9:443", loop},
		{"0.0.0.0:443", false, "[::ffff:127.0.0.9]:443", loop},
		{"0.0.0.0:443", false, "0.0.0.0:443", loop},
		{"[::]:443", false, "[::1]:443", loop},
		{"[::]:443", false, "127.0.0.1:443", loop}, // a wildcard IPv6 socket takes IPv4 too
		{"[::]:443", false, "[::]:443", loop},
		{"[::]:443", false, "0.0.0.0:443", loop},
		{"[::]:443", false, "198.51.100.1:443", ok},
		{"[::]:443", false, "127.0.0.1:80", ok},
		{"127.0.0.1:9090", true, "127.0.0.1:9090", prohibited},
		{"127.0.0.1:9090", true, "[::ffff:127.0.0.1]:9090", prohibited},
		{"[::]:9090", true, "127.0.0.1:9090", prohibited},
	} {
		var g tunnel.Guard
		if tt.admin {
			g.OwnAdmin(tcpAddr(tt.own))
		} else {
			g.OwnListener(tcpAddr(tt.own))
		}
		dial := netip.MustParseAddrPort(tt.dial)
		if got := tunnel.ReasonOf(g.Check(dial, true)); got != tt.want {
			t.Errorf("own %s, dial %s, named by its route: got %s, want %s", tt.own, tt.dial, got, tt.want)
		}
		// Unnamed, it is refused for the same reason, or for being loopback.
		if got := tunnel.ReasonOf(g.Check(dial, false)); tt.want != ok && got != tt.want {
			t.Errorf("own %s, dial %s: got %s, want %s", tt.own, tt.dial, got, tt.want)
		}
	}
}

// TestGuardWildcardIsEveryAddress checks that a listener on all addresses is
// recognised on each that this host has.
func TestGuardWildcardIsEveryAddress(t *testing.T) {
	addrs, err := net.InterfaceAddrs()
	if err != nil {
		t.Fatal(err)
	}
	for _, wildcard := range []string{"0.0.0.0:443", "[::]:443"} {
		var g tunnel.Guard
		g.OwnListener(tcpAddr(wildcard))
		g.OwnAdmin(tcpAddr("[::]:9090"))
		for _, a := range addrs {
			ip, ok := netip.AddrFromSlice(a.(*net.IPNet).IP)
			if !ok {
				continue
			}
			for _, ip := range []netip.Addr{ip, ip.Unmap()} {
				if got := tunnel.ReasonOf(g.Check(netip.AddrPortFrom(ip, 443), true)); got != tunnel.Loop {
					t.Errorf("own %s, dial %s: got %s, want loop", wildcard, ip, got)
				}
				if got := tunnel.ReasonOf(g.Check(netip.AddrPortFrom(ip, 9090), true)); got != tunnel.Prohibited {
					t.Errorf("own admin on all, dial %s: got %s, want prohibited", ip, got)
				}
			}
		}
	}
}

func TestGuardForbidden(t *testing.T) {
	var filled tunnel.Guard
	filled.OwnListener(tcpAddr("192.0.2.1:443"))
	filled.OwnListener(&net.UnixAddr{Name: "/run/x"}) // has no port to dial
	for name, g := range map[string]*tunnel.Guard{"nil": nil, "zero": {}, "filled": &filled} {
		for _, dial := range []string{"127.0.0.1:80", "127.9.9.9:80", "[::1]:80", "[::ffff:127.0.0.1]:80"} {
			ap := netip.MustParseAddrPort(dial)
			if got := tunnel.ReasonOf(g.Check(ap, false)); got != tunnel.Prohibited {
				t.Errorf("%s guard, %s: got %s, want prohibited", name, dial, got)
			}
			if err := g.Check(ap, true); err != nil {
				t.Errorf("%s guard, %s, named by its route: %v", name, dial, err)
			}
		}
		for _, dial := range []string{"198.51.100.1:80", "10.0.0.1:80", "[2001:db8::1]:80"} {
			if err := g.Check(netip.MustParseAddrPort(dial), false); err != nil {
				t.Errorf("%s guard, %s: %v", name, dial, err)
			}
		}
	}
}

func TestGuardAtOnce(t *testing.T) {
	var g tunnel.Guard
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for range 50 {
				g.OwnListener(tcpAddr("[::]:443"))
				if err := g.Check(netip.MustParseAddrPort("198.51.100.1:443"), true); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
}

// TestNetDialer checks that the guard is asked about what is dialed, before a
// packet is sent, and that failures have their reasons.
func TestNetDialer(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	accepted := make(chan net.Conn, 16)
	go func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				close(accepted)
				return
			}
			accepted <- c
		}
	}()
	addr := netip.MustParseAddrPort(ln.Addr().String())
	mapped := netip.AddrPortFrom(netip.AddrFrom16(addr.Addr().As16()), addr.Port())
	gone, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	closed := netip.MustParseAddrPort(gone.Addr().String())
	_ = gone.Close()
	var own tunnel.Guard
	own.OwnListener(ln.Addr())
	for _, tt := range []struct {
		name  string
		guard *tunnel.Guard
		ep    tunnel.Endpoint
		want  tunnel.Reason
	}{
		{"named", nil, tunnel.Endpoint{Addr: addr, Named: true}, tunnel.Done},
		{"named, mapped", nil, tunnel.Endpoint{Addr: mapped, Named: true}, tunnel.Done},
		{"not named", nil, tunnel.Endpoint{Addr: addr}, tunnel.Prohibited},
		{"not named, mapped", nil, tunnel.Endpoint{Addr: mapped}, tunnel.Prohibited},
		{"own", &own, tunnel.Endpoint{Addr: addr, Named: true}, tunnel.Loop},
		{"own, mapped", &own, tunnel.Endpoint{Addr: mapped, Named: true}, tunnel.Loop},
		{"own, as nowhere", &own, tunnel.Endpoint{Addr: netip.AddrPortFrom(netip.IPv4Unspecified(), addr.Port()), Named: true}, tunnel.Loop},
		{"closed port", nil, tunnel.Endpoint{Addr: closed, Named: true}, tunnel.DialFailed},
	} {
		d := &tunnel.NetDialer{Guard: tt.guard}
		c, err := d.DialEndpoint(t.Context(), tt.ep)
		if got := tunnel.ReasonOf(err); got != tt.want {
			t.Errorf("%s: got %s, %v; want %s", tt.name, got, err, tt.want)
		}
		if err == nil {
			_ = c.Close()
			_ = (<-accepted).Close()
		} else if c != nil {
			t.Errorf("%s: a connection and an error", tt.name)
		}
	}
	d := &tunnel.NetDialer{}
	if _, err := d.DialContext(t.Context(), "tcp", addr.String()); tunnel.ReasonOf(err) != tunnel.Prohibited {
		t.Errorf("DialContext: %v, want prohibited: nobody named the address", err)
	}
	if _, err := d.DialContext(t.Context(), "tcp", "localhost:80"); err == nil {
		t.Error("DialContext resolved a name")
	}
	_ = ln.Close()
	if _, ok := <-accepted; ok {
		t.Error("a refused address was dialed")
	}
	ctx, cancel := context.WithTimeout(t.Context(), 0)
	defer cancel()
	var e *tunnel.Error
	if _, err := d.DialEndpoint(ctx, tunnel.Endpoint{Addr: addr, Named: true}); !errors.As(err, &e) || e.Reason != tunnel.DialTimeout {
		t.Errorf("dial without time: %v, want dial-timeout", err)
	}
}

// What is given up may be dialed again; what was owned twice is owned still.
func TestGuardDisown(t *testing.T) {
	var g tunnel.Guard
	one, other := netip.MustParseAddrPort("127.0.0.1:443"), netip.MustParseAddrPort("127.0.0.2:443")
	check := func(when string, wantOne, wantOther bool) {
		t.Helper()
		for addr, want := range map[netip.AddrPort]bool{one: wantOne, other: wantOther} {
			if got := tunnel.ReasonOf(g.Check(addr, true)) == tunnel.Loop; got != want {
				t.Errorf("%s: %s is refused as our own: %v, want %v", when, addr, got, want)
			}
		}
	}
	g.Disown(tcpAddr("127.0.0.1:443")) // nothing is ours yet
	g.OwnListener(tcpAddr("127.0.0.1:443"))
	g.OwnListener(tcpAddr("127.0.0.1:443"))
	g.OwnListener(tcpAddr("127.0.0.2:443"))
	check("owned", true, true)
	g.Disown(tcpAddr("[::ffff:127.0.0.1]:443"))
	check("one of two given up", true, true)
	g.Disown(tcpAddr("127.0.0.1:443"))
	check("given up", false, true)
	g.Disown(tcpAddr("127.0.0.1:443"))
	g.Disown(&net.UnixAddr{Name: "x"})
	g.Disown(tcpAddr("127.0.0.2:443"))
	check("all given up", false, false)
}

// Listeners come and go while addresses are looked at.
func TestGuardDisownWhileChecked(t *testing.T) {
	var g tunnel.Guard
	g.OwnListener(tcpAddr("0.0.0.0:443"))
	var wg sync.WaitGroup
	for i := range 4 {
		wg.Go(func() {
			a := tcpAddr("198.51.100.1:443")
			for range 200 {
				if i%2 == 0 {
					g.OwnListener(a)
					g.Disown(a)
				} else if tunnel.ReasonOf(g.Check(netip.MustParseAddrPort("127.0.0.1:443"), true)) != tunnel.Loop {
					t.Error("the listener that stays is not refused")
				}
			}
		})
	}
	wg.Wait()
}
