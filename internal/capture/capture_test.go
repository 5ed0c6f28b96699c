//go:build linux && netns

package capture

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"culvert.dev/internal/testnet"
	"culvert.dev/internal/testnet/netns"
	"culvert.dev/internal/udp"
	"culvert.dev/tunnel"
)

const patience = 30 * time.Second

// A rig is a host whose captured connections are answered with where they were going to.
type rig struct {
	*netns.NS
	beside   *netns.NS
	rules    Rules
	outcomes chan *tunnel.Outcome
}

// newRig serves captured connections of a new namespace. A host beside it, at 10.9.0.2 and
// fd09::2, has the port 80.
func newRig(t *testing.T) *rig {
	t.Helper()
	beside := netns.New(t, "beside")
	r := &rig{NS: netns.New(t, "host"), beside: beside, outcomes: make(chan *tunnel.Outcome, 100)}
	r.rules = r.serve(t, "captured ", "127.0.0.1", "::1")
	netns.Link(t, r.NS, "10.9.0.1/24", beside, "10.9.0.2/24")
	netns.Link(t, r.NS, "fd09::1/64", beside, "fd09::2/64")
	r.Route(t, "default", "10.9.0.2")
	r.Route(t, "fd00::/8", "fd09::2")
	// It refuses connections to VIPs at once, and has another address.
	for _, args := range [][]string{{"route", "add", "local", "240.0.0.0/4", "dev", "lo"}, {"route", "add", "local", "fd77::/16", "dev", "lo"}, {"addr", "add", "10.9.0.3/24", "dev", "veth0"}} {
		if out, err := beside.Command(t.Context(), "ip", args...).CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
	}
	for _, addr := range []string{"10.9.0.2:80", "[fd09::2]:80"} {
		ln, err := beside.Listen("tcp", addr)
		if err != nil {
			t.Fatal(err)
		}
		answer(t, ln)
	}
	return r
}

// serve answers captured connections at hosts with a greeting and where they were going to.
func (r *rig) serve(t *testing.T, greeting string, hosts ...string) Rules {
	t.Helper()
	srv := &tunnel.Server{
		Observe: func(o *tunnel.Outcome) { r.outcomes <- o },
		Handler: tunnel.HandlerFunc(func(_ context.Context, req *tunnel.Request) {
			s, err := req.Accept()
			if err != nil {
				return
			}
			_, _ = io.WriteString(s, greeting+req.Target())
			_ = s.Close()
		}),
	}
	var wg sync.WaitGroup
	serve := func(listen func(context.Context, string) (net.Listener, error)) (port uint16) {
		for _, host := range hosts {
			var ln net.Listener
			if err := r.Do(func() (err error) {
				ln, err = listen(t.Context(), net.JoinHostPort(host, fmt.Sprint(port)))
				return err
			}); err != nil {
				t.Fatal(err)
			}
			port = ln.Addr().(*net.TCPAddr).AddrPort().Port()
			wg.Go(func() {
				_ = srv.Serve(context.WithoutCancel(t.Context()), tunnel.Listener{Listener: ln, Protocols: []tunnel.Protocol{&Protocol{}}})
			})
		}
		return port
	}
	rules := Rules{Port: serve(tunnel.Listen), TransparentPort: serve(tunnel.ListenTransparent), Mark: Mark}
	t.Cleanup(func() { _ = srv.Close(); wg.Wait() })
	return rules
}

// answer answers connections with "direct", and then with what they send.
func answer(t *testing.T, ln net.Listener) {
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			wg.Go(func() {
				defer c.Close()
				_, _ = io.WriteString(c, "direct")
				_, _ = io.Copy(c, c)
			})
		}
	})
	t.Cleanup(func() { _ = ln.Close(); wg.Wait() })
}

func (r *rig) install(t *testing.T, rules Rules) *Capture {
	t.Helper()
	if rules.Port == 0 {
		rules.Port, rules.Mark = r.rules.Port, r.rules.Mark
	}
	var c *Capture
	if err := r.Do(func() (err error) { c, err = Install(rules); return err }); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return c
}

// dial returns what a connection from ns begins with, or the error.
func dial(t *testing.T, ns *netns.NS, addr string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	c, err := ns.Dial(ctx, "tcp", addr)
	if err != nil {
		return err.Error()
	}
	defer c.Close()
	return begin(c)
}

func begin(c net.Conn) string {
	_ = c.SetDeadline(time.Now().Add(patience))
	var b [100]byte
	n, err := c.Read(b[:])
	if err != nil {
		return err.Error()
	}
	return string(b[:n])
}

func expect(t *testing.T, what, got, want string) {
	t.Helper()
	if !strings.Contains(got, want) {
		t.Errorf("%s: got %q, want %q", what, got, want)
	}
}

func prefixes(list ...string) (all []netip.Prefix) {
	for _, s := range list {
		all = append(all, netip.MustParsePrefix(s))
	}
	return all
}

func TestVIPs(t *testing.T) {
	r := newRig(t)
	c := r.install(t, Rules{VIPs: true})
	v4, v6 := netip.MustParseAddr("240.0.0.7"), netip.MustParseAddr("fd77::7")
	if err := c.SetVIPs([]netip.Addr{v6, v4, v4}); err != nil {
		t.Fatal(err)
	}
	expect(t, "a VIP", dial(t, r.NS, "240.0.0.7:5432"), "captured 240.0.0.7:5432")
	expect(t, "a VIP of IPv6", dial(t, r.NS, "[fd77::7]:5432"), "captured [fd77::7]:5432")
	expect(t, "another address", dial(t, r.NS, "10.9.0.2:80"), "direct")
	expect(t, "another address of IPv6", dial(t, r.NS, "[fd09::2]:80"), "direct")
	if err := c.SetVIPs([]netip.Addr{v6, netip.MustParseAddr("10.9.0.2")}); err != nil {
		t.Fatal(err)
	}
	expect(t, "a VIP that was added", dial(t, r.NS, "10.9.0.2:80"), "captured 10.9.0.2:80")
	expect(t, "a VIP that was removed", dial(t, r.NS, "240.0.0.7:5432"), "refused")
	if err := c.Close(); err != nil {
		t.Error(err)
	}
	testnet.Eventually(t, patience, func() bool { return dial(t, r.NS, "10.9.0.2:80") == "direct" }, "the rules have gone")
}

func TestRanges(t *testing.T) {
	r := newRig(t)
	r.install(t, Rules{CIDRs: prefixes("10.0.0.0/8", "fd00::/8"), Except: prefixes("10.9.0.2/32")})
	expect(t, "in the range", dial(t, r.NS, "10.1.2.3:443"), "captured 10.1.2.3:443")
	expect(t, "in the range of IPv6", dial(t, r.NS, "[fd09::2]:80"), "captured [fd09::2]:80")
	expect(t, "an exception", dial(t, r.NS, "10.9.0.2:80"), "direct")
	ln, err := r.Listen("tcp", "10.9.0.1:80")
	if err != nil {
		t.Fatal(err)
	}
	answer(t, ln)
	expect(t, "an address of this host", dial(t, r.NS, "10.9.0.1:80"), "direct")
}

// Everything is captured, but not the process that captures: by the mark.
func TestNotItself(t *testing.T) {
	r := newRig(t)
	r.install(t, Rules{All: true})
	expect(t, "a program", dial(t, r.NS, "10.9.0.2:80"), "captured 10.9.0.2:80")
	for _, addr := range []string{"10.9.0.2:80", "[fd09::2]:80"} {
		var c net.Conn
		d := &tunnel.NetDialer{Sockets: tunnel.Sockets{Mark: Mark}}
		if err := r.Do(func() (err error) {
			c, err = d.DialEndpoint(t.Context(), tunnel.Endpoint{Addr: netip.MustParseAddrPort(addr)})
			return err
		}); err != nil {
			t.Fatal(err)
		}
		expect(t, "with the mark to "+addr, begin(c), "direct")
		_ = c.Close()
	}
	// To the listener itself: no rule has led there.
	got := dial(t, r.NS, fmt.Sprintf("127.0.0.1:%d", r.rules.Port))
	expect(t, "the listener itself", got, "reset")
	if o := <-r.outcomes; o.Reason != tunnel.Loop || !strings.Contains(o.Err.Error(), "this process itself") {
		t.Errorf("the listener itself: %s, %v; want %s", o.Reason, o.Err, tunnel.Loop)
	}
}

// dialAs is dial by a program of a user.
func (r *rig) dialAs(t *testing.T, uid int, host, port string) string {
	t.Helper()
	cmd := r.Command(t.Context(), "setpriv", "--reuid", fmt.Sprint(uid), "--clear-groups", "nc", "-N", "-v", "-w", "20", host, port)
	cmd.Dir = "/"
	out, _ := cmd.CombinedOutput()
	return string(out)
}

// Sockets of every kind have the mark, so that no rule of ours leads them to this process.
func TestSocketsHaveTheMark(t *testing.T) {
	r := newRig(t)
	sockets := tunnel.Sockets{Mark: Mark}
	open := map[string]func() (any, error){
		"TCP":        func() (any, error) { return sockets.DialContext(t.Context(), "tcp", "10.9.0.2:80") },
		"TCP, IPv6":  func() (any, error) { return sockets.DialContext(t.Context(), "tcp", "[fd09::2]:80") },
		"UDP":        func() (any, error) { return sockets.DialContext(t.Context(), "udp", "10.9.0.2:80") },
		"datagrams":  func() (any, error) { return sockets.ListenPacket(t.Context(), "udp", ":0") },
		"DNS":        func() (any, error) { return sockets.Resolver().Dial(t.Context(), "udp", "10.9.0.2:53") },
		"DNS by TCP": func() (any, error) { return sockets.Dialer().Resolver.Dial(t.Context(), "tcp", "10.9.0.2:80") },
		"sessions of UDP": func() (any, error) {
			return (&udp.Dialer{Guard: &tunnel.Guard{}, Sockets: sockets}).DialEndpoint(t.Context(), tunnel.Endpoint{Addr: netip.MustParseAddrPort("10.9.0.2:80"), Named: true})
		},
	}
	for what, open := range open {
		var c any
		if err := r.Do(func() (err error) { c, err = open(); return err }); err != nil {
			t.Errorf("%s: %v", what, err)
			continue
		}
		raw, err := c.(syscall.Conn).SyscallConn()
		if err != nil {
			t.Fatal(err)
		}
		var mark int
		if err := errors.Join(raw.Control(func(fd uintptr) { mark, err = syscall.GetsockoptInt(int(fd), syscall.SOL_SOCKET, syscall.SO_MARK) }), err); err != nil || mark != Mark {
			t.Errorf("%s: the mark is %#x, %v; want %#x", what, mark, err, Mark)
		}
		_ = c.(io.Closer).Close()
	}
}

func TestUsers(t *testing.T) {
	r := newRig(t)
	r.install(t, Rules{UIDs: []uint32{65534}})
	expect(t, "the user", r.dialAs(t, 65534, "10.9.0.2", "80"), "captured 10.9.0.2:80")
	expect(t, "the user by IPv6", r.dialAs(t, 65534, "fd09::2", "80"), "captured [fd09::2]:80")
	expect(t, "another user", r.dialAs(t, 65533, "10.9.0.2", "80"), "direct")
	expect(t, "root", r.dialAs(t, 0, "10.9.0.2", "80"), "direct")
}

func TestCgroups(t *testing.T) {
	root := cgroupRoots[0]
	if _, err := os.Stat(root + "/cgroup.procs"); err != nil {
		root = cgroupRoots[1]
	}
	dir, err := os.MkdirTemp(root, "culvert-test")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.Remove(dir) })
	r := newRig(t)
	c := r.install(t, Rules{Cgroups: []string{strings.TrimPrefix(dir, root)}})
	script := "nc -N -w 10 10.9.0.2 80"
	if out, _ := r.Command(t.Context(), "sh", "-c", script).CombinedOutput(); string(out) != "direct" {
		t.Errorf("in another cgroup: %q, want direct", out)
	}
	inside := func() string {
		// ip netns exec hides the cgroups.
		out, _ := exec.CommandContext(t.Context(), "sh", "-c", "echo $$ >"+dir+"/cgroup.procs; exec ip netns exec "+r.Name+" "+script).CombinedOutput()
		return string(out)
	}
	expect(t, "in the cgroup", inside(), "captured 10.9.0.2:80")
	// One that was made anew is another one for the kernel.
	testnet.Eventually(t, patience, func() bool { return os.Remove(dir) == nil }, "no program is in the cgroup")
	if err := c.Refresh(); err != nil {
		t.Errorf("without the cgroup: %v", err)
	}
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	expect(t, "in the cgroup made anew", inside(), "direct")
	if err := c.Refresh(); err != nil {
		t.Fatal(err)
	}
	expect(t, "in the cgroup made anew, after Refresh", inside(), "captured 10.9.0.2:80")
	for _, bad := range []string{"", "/", "no/such/cgroup"} {
		if _, err := Install(Rules{Cgroups: []string{bad}}); err == nil || !strings.Contains(err.Error(), "cgroup") {
			t.Errorf("cgroup %q: %v", bad, err)
		}
	}
}

// A connection that stands goes on, with and without connection tracking before.
func TestEstablishedConnections(t *testing.T) {
	r := newRig(t)
	c, err := r.Dial(t.Context(), "tcp", "10.9.0.2:80")
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	expect(t, "before", begin(c), "direct")
	r.install(t, Rules{All: true})
	if _, err := io.WriteString(c, "still"); err != nil {
		t.Fatal(err)
	}
	expect(t, "after", begin(c), "still")
	expect(t, "a new one", dial(t, r.NS, "10.9.0.2:80"), "captured 10.9.0.2:80")
}

// What the host routes for another one goes to the transparent listener, with its addresses.
func TestRouted(t *testing.T) {
	r := newRig(t)
	client := netns.New(t, "client")
	netns.Link(t, client, "10.8.0.2/24", r.NS, "10.8.0.1/24")
	netns.Link(t, client, "fd08::2/64", r.NS, "fd08::1/64")
	client.Route(t, "default", "10.8.0.1")
	client.Route(t, "fd00::/8", "fd08::1")
	if out, err := r.Command(t.Context(), "sysctl", "-w", "net.ipv4.ip_forward=1", "net.ipv6.conf.all.forwarding=1").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	c := r.install(t, Rules{VIPs: true, TransparentPort: r.rules.TransparentPort})
	if err := c.SetVIPs([]netip.Addr{netip.MustParseAddr("240.0.0.7"), netip.MustParseAddr("fd77::7")}); err != nil {
		t.Fatal(err)
	}
	expect(t, "a VIP", dial(t, client, "240.0.0.7:5432"), "captured 240.0.0.7:5432")
	expect(t, "a VIP of IPv6", dial(t, client, "[fd77::7]:5432"), "captured [fd77::7]:5432")
	if err := c.Close(); err != nil {
		t.Error(err)
	}
}

// Rules of others that are there already stay, and ours come first.
func TestRulesOfOthers(t *testing.T) {
	r := newRig(t)
	nft := func(rule string) {
		t.Helper()
		if out, err := r.Command(t.Context(), "nft", rule).CombinedOutput(); err != nil {
			t.Fatalf("nft %s: %v: %s", rule, err, out)
		}
	}
	nft("add table ip other")
	nft("add chain ip other output { type nat hook output priority -100 ; }")
	nft("add rule ip other output ip daddr 240.0.0.0/4 dnat to 10.9.0.2")
	expect(t, "before", dial(t, r.NS, "240.0.0.7:80"), "direct")
	c := r.install(t, Rules{VIPs: true})
	if err := c.SetVIPs([]netip.Addr{netip.MustParseAddr("240.0.0.7")}); err != nil {
		t.Fatal(err)
	}
	expect(t, "with ours", dial(t, r.NS, "240.0.0.7:80"), "captured 240.0.0.7:80")
	expect(t, "with theirs", dial(t, r.NS, "240.0.0.8:80"), "direct")
	nft("flush ruleset")
	expect(t, "with theirs flushed", dial(t, r.NS, "240.0.0.7:80"), "captured 240.0.0.7:80")
}

// Rules that stay are replaced and removed by later processes.
func TestStay(t *testing.T) {
	r := newRig(t)
	for range 2 {
		if err := r.install(t, Rules{All: true, Stay: true}).Close(); err != nil {
			t.Fatal(err)
		}
		expect(t, "stays", dial(t, r.NS, "10.9.0.2:80"), "captured 10.9.0.2:80")
	}
	for range 2 {
		if err := r.Do(func() error { return Remove(Rules{}) }); err != nil {
			t.Fatal(err)
		}
		expect(t, "removed", dial(t, r.NS, "10.9.0.2:80"), "direct")
	}
}
