//go:build linux && netns

package capture

import (
	"bufio"
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

	"culvert.dev/internal/capture/nft"
	"culvert.dev/internal/testnet"
)

// state is what the kernel has of captures: tables, and rules and routes of both families.
func (r *rig) state(t *testing.T) string {
	t.Helper()
	const script = "nft -n list ruleset; for f in -4 -6; do ip $f rule; ip $f -o route show table all; done"
	out, err := r.Command(t.Context(), "sh", "-c", script).CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	var kept []string
	for line := range strings.Lines(string(out)) {
		// The addresses of the test's own links come and go by themselves.
		if !strings.Contains(line, "dev veth") {
			kept = append(kept, line)
		}
	}
	return strings.Join(kept, "")
}

// Agents of two users on one host have each their own programs, VIPs and listener.
func TestTwoAgents(t *testing.T) {
	r := newRig(t)
	before := r.state(t)
	vips := []netip.Addr{netip.MustParseAddr("240.0.0.7"), netip.MustParseAddr("fd77::7"), netip.MustParseAddr("10.9.0.2")}
	var captures []*Capture
	for i, uid := range []uint32{64001, 64002} {
		rules := r.serve(t, fmt.Sprintf("of %d ", uid), "127.0.0.1", "::1")
		rules.Name, rules.VIPs, rules.UIDs = fmt.Sprint(uid), true, []uint32{uid}
		c := r.install(t, rules)
		if err := c.SetVIPs(vips); err != nil {
			t.Fatal(err)
		}
		captures = append(captures, c)
		if tables := strings.Count(r.state(t), "table inet culvert-640"); tables != i+1 {
			t.Errorf("%d tables, want %d", tables, i+1)
		}
	}
	for _, uid := range []int{64001, 64002} {
		expect(t, "a VIP", r.dialAs(t, uid, "240.0.0.7", "443"), fmt.Sprintf("of %d 240.0.0.7:443", uid))
		expect(t, "a VIP of IPv6", r.dialAs(t, uid, "fd77::7", "443"), fmt.Sprintf("of %d [fd77::7]:443", uid))
	}
	expect(t, "another user", r.dialAs(t, 64003, "10.9.0.2", "80"), "direct")
	// The VIPs of one are not the other's.
	if err := captures[0].SetVIPs(vips[:2]); err != nil {
		t.Fatal(err)
	}
	expect(t, "no VIP of the first", r.dialAs(t, 64001, "10.9.0.2", "80"), "direct")
	expect(t, "a VIP of the second", r.dialAs(t, 64002, "10.9.0.2", "80"), "of 64002 10.9.0.2:80")
	if err := captures[0].Close(); err != nil {
		t.Error(err)
	}
	expect(t, "after the first", r.dialAs(t, 64001, "240.0.0.7", "443"), "refused")
	expect(t, "the second goes on", r.dialAs(t, 64002, "240.0.0.7", "443"), "of 64002 240.0.0.7:443")
	if err := captures[1].Close(); err != nil {
		t.Error(err)
	}
	if after := r.state(t); after != before {
		t.Errorf("after both:\n%s\nwant\n%s", after, before)
	}
}

// Programs and destinations have both to be those of the rules.
func TestDestinationsOfPrograms(t *testing.T) {
	r := newRig(t)
	c := r.install(t, Rules{CIDRs: prefixes("240.0.0.0/4", "fd77::/16"), UIDs: []uint32{64001, 64002}, ExceptUIDs: []uint32{64002}})
	expect(t, "both", r.dialAs(t, 64001, "240.0.0.7", "443"), "captured 240.0.0.7:443")
	expect(t, "both by IPv6", r.dialAs(t, 64001, "fd77::7", "443"), "captured [fd77::7]:443")
	expect(t, "the program alone", r.dialAs(t, 64001, "10.9.0.2", "80"), "direct")
	expect(t, "the destination alone", r.dialAs(t, 64003, "240.0.0.7", "443"), "refused")
	expect(t, "a program that is left out", r.dialAs(t, 64002, "240.0.0.7", "443"), "refused")
	rules := r.rules
	rules.UIDs, rules.TransparentPort = []uint32{64003}, 0
	if err := c.Update(rules); err != nil {
		t.Fatal(err)
	}
	expect(t, "updated", r.dialAs(t, 64003, "10.9.0.2", "80"), "captured 10.9.0.2:80")
	expect(t, "updated, another program", r.dialAs(t, 64001, "10.9.0.2", "80"), "direct")
	nothing := Rules{Port: r.rules.Port, Mark: r.rules.Mark}
	if err := c.Update(nothing); err != nil {
		t.Fatal(err)
	}
	expect(t, "rules of nothing", r.dialAs(t, 64003, "10.9.0.2", "80"), "direct")
	if err := r.Do(func() error {
		all, err := Show()
		if err == nil && (len(all) != 1 || all[0].All || len(all[0].CIDRs) > 0) {
			t.Errorf("rules of nothing are shown as %+v", all)
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}
	rules.Name = "other"
	if err := c.Update(rules); err == nil || !strings.Contains(err.Error(), "culvert-other") {
		t.Errorf("another name: %v", err)
	}
	for _, name := range []string{"a b", "a/b", "\n", strings.Repeat("x", 65)} {
		if _, err := Install(Rules{Name: name, All: true, Port: 1}); err == nil || !strings.Contains(err.Error(), "name of a capture") {
			t.Errorf("name %q: %v", name, err)
		}
	}
}

// After Close and Remove nothing is left, and after an Install that fails neither.
func TestNothingIsLeft(t *testing.T) {
	r := newRig(t)
	before := r.state(t)
	left := func(when string) {
		t.Helper()
		if after := r.state(t); after != before {
			t.Errorf("after %s:\n%s\nwant\n%s", when, after, before)
		}
	}
	for _, name := range []string{"", "work"} {
		rules := Rules{Name: name, VIPs: true, TransparentPort: r.rules.TransparentPort, DNSPort: 53}
		c := r.install(t, rules)
		during := r.state(t)
		for _, want := range []string{"table inet " + TableName(name) + " {", "local default dev lo table", "fwmark"} {
			if !strings.Contains(during, want) {
				t.Errorf("installed: %q is not in\n%s", want, during)
			}
		}
		// A second process does not get the name, and takes nothing away.
		if err := r.Do(func() error { _, err := Install(rules); return err }); !errors.Is(err, nft.ErrOwned) {
			t.Errorf("the name of another process: %v, want %v", err, nft.ErrOwned)
		}
		if err := r.Do(func() error { return Remove(rules) }); !errors.Is(err, nft.ErrOwned) {
			t.Errorf("remove what another process has: %v, want %v", err, nft.ErrOwned)
		}
		if got := r.state(t); got != during {
			t.Errorf("after a second process:\n%s\nwant\n%s", got, during)
		}
		for range 2 {
			if err := c.Close(); err != nil {
				t.Error(err)
			}
			left("Close")
		}
		rules.Stay = true
		c = r.install(t, rules)
		if err := c.Close(); err != nil {
			t.Error(err)
		}
		if got := r.state(t); !strings.Contains(got, "table inet "+TableName(name)+" {") || strings.Contains(got, "owner") {
			t.Errorf("staying:\n%s", got)
		}
		// One that goes with its process takes the place of one that stays.
		rules.Stay = false
		if err := r.install(t, rules).Close(); err != nil {
			t.Error(err)
		}
		left("another capture")
		rules.Stay = true
		_ = r.install(t, rules).Close()
		for range 2 {
			if err := r.Do(func() error { return Remove(Rules{Name: name}) }); err != nil {
				t.Error(err)
			}
			left("Remove")
		}
	}
	lo := func(state string) {
		t.Helper()
		if out, err := r.Command(t.Context(), "ip", "link", "set", "lo", state).CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
	}
	lo("down") // routes to it can't be added
	before = r.state(t)
	for _, stay := range []bool{false, true} {
		rules := r.rules
		rules.All, rules.Stay = true, stay
		if err := r.Do(func() error { _, err := Install(rules); return err }); !errors.Is(err, syscall.ENETDOWN) {
			t.Errorf("Install without lo: %v, want %v", err, syscall.ENETDOWN)
		}
		left("an Install that failed")
	}
	if err := r.Do(func() error { _, err := Install(Rules{Cgroups: []string{"no/such"}}); return err }); err == nil {
		t.Error("a cgroup that is not there was captured")
	}
	left("a cgroup that is not there")
}

// The table goes with a process that is killed. What the kernel keeps has no effect, and the next
// Install or Remove takes it away.
func TestKilled(t *testing.T) {
	if os.Getenv("CULVERT_CAPTURE_TEST") != "" {
		c, err := Install(Rules{All: true, Port: 1, TransparentPort: 2})
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		fmt.Println("installed")
		_, _ = io.Copy(io.Discard, os.Stdin)
		return
	}
	r := newRig(t)
	before := r.state(t)
	for _, next := range []struct {
		name string
		f    func() error
	}{
		{"Remove", func() error { return Remove(Rules{}) }},
		{"Install", func() error {
			c, err := Install(Rules{All: true, Port: 1})
			if err != nil {
				return err
			}
			if got := r.state(t); strings.Contains(got, "fwmark") {
				t.Errorf("installed again, the rules of routing are there:\n%s", got)
			}
			return c.Close()
		}},
	} {
		r.installAndKill(t)
		testnet.Eventually(t, patience, func() bool { return dial(t, r.NS, "10.9.0.2:80") == "direct" }, "the rules have gone")
		expect(t, "by IPv6", dial(t, r.NS, "[fd09::2]:80"), "direct")
		got := r.state(t)
		if strings.Contains(got, "table inet") || !strings.Contains(got, "fwmark 0x63760002") {
			t.Errorf("after the process:\n%s\nwant no table, and the rules of routing", got)
		}
		if err := r.Do(next.f); err != nil {
			t.Fatal(err)
		}
		if after := r.state(t); after != before {
			t.Errorf("after %s:\n%s\nwant\n%s", next.name, after, before)
		}
	}
}

// installAndKill captures everything, to where nothing listens, by a process that is killed.
func (r *rig) installAndKill(t *testing.T) {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := r.Command(t.Context(), "env", "CULVERT_CAPTURE_TEST=1", self, "-test.run", "^TestKilled$")
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if line, err := bufio.NewReader(out).ReadString('\n'); line != "installed\n" {
		t.Fatalf("the process says %q, %v", line, err)
	}
	expect(t, "captured", dial(t, r.NS, "10.9.0.2:80"), "refused")
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	var exit *exec.ExitError
	if err := cmd.Wait(); !errors.As(err, &exit) || exit.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL {
		t.Errorf("the process ended with %v", err)
	}
}

// DNS is redirected, but not that of the agent to its upstream: by the mark, the user or the
// address.
func TestDNSUpstream(t *testing.T) {
	r := newRig(t)
	const query = "\x12\x34\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00\x01a\x00\x00\x01\x00\x01"
	serve := func(listen func(network, addr string) (net.PacketConn, error), addr, name string) (port uint16) {
		t.Helper()
		c, err := listen("udp", addr)
		if err != nil {
			t.Fatal(err)
		}
		var wg sync.WaitGroup
		wg.Go(func() {
			b := make([]byte, 512)
			for {
				_, from, err := c.ReadFrom(b)
				if err != nil {
					return
				}
				_, _ = c.WriteTo([]byte(name), from)
			}
		})
		t.Cleanup(func() { _ = c.Close(); wg.Wait() })
		return c.LocalAddr().(*net.UDPAddr).AddrPort().Port()
	}
	inside := func(network, addr string) (c net.PacketConn, err error) {
		err = r.Do(func() error { c, err = net.ListenPacket(network, addr); return err })
		return c, err
	}
	beside := func(network, addr string) (c net.PacketConn, err error) {
		err = r.beside.Do(func() error { c, err = net.ListenPacket(network, addr); return err })
		return c, err
	}
	port := serve(inside, "127.0.0.1:0", "ours")
	serve(inside, fmt.Sprintf("[::1]:%d", port), "ours")
	for _, addr := range []string{"10.9.0.2:53", "10.9.0.2:123", "10.9.0.3:53", "[fd09::2]:53"} {
		serve(beside, addr, "theirs at "+addr)
	}
	ask := func(addr string, mark int) string {
		t.Helper()
		var c net.Conn
		err := r.Do(func() (err error) {
			d := net.Dialer{Control: func(_, _ string, raw syscall.RawConn) (err error) {
				_ = raw.Control(func(fd uintptr) { err = syscall.SetsockoptInt(int(fd), syscall.SOL_SOCKET, syscall.SO_MARK, mark) })
				return err
			}}
			c, err = d.DialContext(context.WithoutCancel(t.Context()), "udp", addr)
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		if _, err := io.WriteString(c, query); err != nil {
			return err.Error()
		}
		return begin(c)
	}
	c := r.install(t, Rules{All: true, DNSPort: port, Except: prefixes("10.9.0.2/32")})
	expect(t, "DNS", ask("10.9.0.3:53", 0), "ours")
	expect(t, "DNS by IPv6", ask("[fd09::2]:53", 0), "ours")
	expect(t, "the upstream by its address", ask("10.9.0.2:53", 0), "theirs at 10.9.0.2:53")
	expect(t, "the upstream by the mark", ask("10.9.0.3:53", Mark), "theirs at 10.9.0.3:53")
	expect(t, "the upstream by the mark and IPv6", ask("[fd09::2]:53", Mark), "theirs at [fd09::2]:53")
	expect(t, "other datagrams to what is excepted", ask("10.9.0.2:123", 0), "theirs at 10.9.0.2:123")
	if got := ask("10.9.0.3:123", 0); !strings.Contains(got, "refused") && !strings.Contains(got, "not permitted") {
		t.Errorf("other datagrams: got %q, want an error", got)
	}
	rules := r.rules
	rules.TransparentPort, rules.DNSPort, rules.UIDs = 0, port, []uint32{64001}
	if err := c.Update(rules); err != nil {
		t.Fatal(err)
	}
	expect(t, "DNS of another user", ask("10.9.0.3:53", 0), "theirs at 10.9.0.3:53")
	rules.UIDs, rules.ExceptUIDs, rules.All = nil, []uint32{0}, true
	if err := c.Update(rules); err != nil {
		t.Fatal(err)
	}
	expect(t, "DNS of a user that is left out", ask("10.9.0.3:53", 0), "theirs at 10.9.0.3:53")
}

// Where the agent serves IPv4 alone, IPv6 is captured and refused, and does not go past it.
func TestIPv4Only(t *testing.T) {
	r := newRig(t)
	rules := r.serve(t, "by IPv4 ", "127.0.0.1")
	rules.TransparentPort, rules.CIDRs = 0, prefixes("10.9.0.0/24", "fd09::/64")
	c := r.install(t, rules)
	expect(t, "IPv4", dial(t, r.NS, "10.9.0.2:80"), "by IPv4 10.9.0.2:80")
	expect(t, "IPv6", dial(t, r.NS, "[fd09::2]:80"), "refused")
	rules.CIDRs, rules.All = nil, true
	if err := c.Update(rules); err != nil {
		t.Fatal(err)
	}
	expect(t, "IPv6 with everything captured", dial(t, r.NS, "[fd09::2]:80"), "refused")
}

// A host without IPv6 is captured by IPv4.
func TestWithoutIPv6(t *testing.T) {
	r := newRig(t)
	if out, err := r.Command(t.Context(), "sysctl", "-w", "net.ipv6.conf.all.disable_ipv6=1", "net.ipv6.conf.lo.disable_ipv6=1").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	before := r.state(t)
	c := r.install(t, Rules{All: true, TransparentPort: r.rules.TransparentPort})
	expect(t, "IPv4", dial(t, r.NS, "10.9.0.2:80"), "captured 10.9.0.2:80")
	if err := c.Close(); err != nil {
		t.Error(err)
	}
	if after := r.state(t); after != before {
		t.Errorf("after:\n%s\nwant\n%s", after, before)
	}
}
