//go:build linux && netns

package nft

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"culvert.dev/internal/testnet/netns"
)

func open(t testing.TB, ns *netns.NS) *Conn {
	t.Helper()
	var c *Conn
	if err := ns.Do(func() (err error) { c, err = Open(); return err }); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return c
}

// list returns what nft lists of the namespace: "" for nothing.
func list(t testing.TB, ns *netns.NS, args ...string) string {
	t.Helper()
	cmd := ns.Command(t.Context(), "nft", append(args, "list", "ruleset")...)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil || stderr.Len() > 0 {
		t.Fatalf("nft list ruleset: %v: %s", err, stderr.String())
	}
	return strings.Join(strings.Fields(string(out)), " ") // nft wraps long lines
}

func sets(n int) []*Set {
	vips4, vips6 := &Set{Name: "vips4", Key: IPv4Addr}, &Set{Name: "vips6", Key: IPv6Addr}
	for i := range n {
		var b [16]byte
		b[0] = 0xfd
		binary.BigEndian.PutUint32(b[12:], uint32(240<<24+2*i))
		vips4.Addrs = append(vips4.Addrs, netip.AddrFrom4([4]byte(b[12:])))
		vips6.Addrs = append(vips6.Addrs, netip.AddrFrom16(b))
	}
	return []*Set{vips4, vips6}
}

// The program nft lists every expression in the words that its documentation has, so that
// it has understood what the kernel has: with -j, too.
func TestExpressions(t *testing.T) {
	ns := netns.New(t, "nft")
	c := open(t, ns)
	cgroup, level := ownCgroup(t)
	ranges := &Set{Name: "cidrs4", Key: IPv4Addr, Ranges: []netip.Prefix{netip.MustParsePrefix("10.96.0.0/12"), netip.MustParsePrefix("10.100.0.0/16"), netip.MustParsePrefix("192.0.2.1/32")}}
	all := append(sets(2), ranges)
	table := &Table{Name: "culvert", Sets: all, Chains: []Chain{
		{Name: "output", Type: NAT, Hook: Output, Priority: -100, Rules: []Rule{
			All(Mark(0x63750001), Return()),
			All(ToLocal(), Return()),
			All(InSet(all[0]), L4(unix.IPPROTO_TCP), Opening(), Redirect(15001)),
			All(InSet(all[1]), L4(unix.IPPROTO_TCP), Redirect(15001)),
			All(InSet(ranges), L4(unix.IPPROTO_UDP), ToPort(53), Redirect(53)),
			All(UID(1000), L4(unix.IPPROTO_TCP), Redirect(15001)),
			All(Cgroup(cgroup, level), L4(unix.IPPROTO_TCP), Redirect(15001)),
			All(IPv6(), Accept()),
		}},
		{Name: "prerouting", Type: Filter, Hook: PreRouting, Priority: -150, Rules: []Rule{
			All(InSet(all[0]), L4(unix.IPPROTO_TCP), TProxy(netip.MustParseAddrPort("127.0.0.1:15002"), 7)),
			All(InSet(all[1]), L4(unix.IPPROTO_TCP), TProxy(netip.MustParseAddrPort("[::1]:15002"), 7)),
			All(L4(unix.IPPROTO_TCP), OfTransparentSocket(), SetMark(7), Accept()),
		}},
		{Name: "filter", Type: Filter, Hook: Output, Priority: 0, Rules: []Rule{
			All(L4(unix.IPPROTO_UDP), RejectUnreachable()),
		}},
	}}
	if err := c.Replace(table); err != nil {
		t.Fatal(err)
	}
	got := list(t, ns, "-n")
	for _, want := range []string{
		"table inet culvert {",
		"type ipv4_addr elements = { 240.0.0.0, 240.0.0.2 }",
		"type ipv6_addr elements = { fd00::f000:0, fd00::f000:2 }",
		"elements = { 10.96.0.0/12, 192.0.2.1 }",
		"type nat hook output priority -100; policy accept;",
		"type filter hook prerouting priority -150; policy accept;",
		"meta mark 0x63750001 return",
		"fib daddr type 2 return", // local, as a number
		"ip daddr @vips4 tcp flags 0x2 / 0x1,0x2,0x4,0x10 redirect to :15001",
		"ip6 daddr @vips6 meta l4proto 6 redirect to :15001",
		"ip daddr @cidrs4 udp dport 53 redirect to :53",
		"meta skuid 1000 meta l4proto 6 redirect to :15001",
		"socket cgroupv2 level ",
		"meta nfproto 10 accept",
		"ip daddr @vips4 meta l4proto 6 tproxy ip to 127.0.0.1:15002 meta mark set 0x00000007 accept",
		"ip6 daddr @vips6 meta l4proto 6 tproxy ip6 to [::1]:15002 meta mark set 0x00000007 accept",
		"meta l4proto 6 socket transparent 1 meta mark set 0x00000007 accept",
		"meta l4proto 17 reject",
	} {
		if !strings.Contains(got, want) {
			t.Errorf("nft does not list %q", want)
		}
	}
	if t.Failed() {
		t.Logf("nft lists\n%s", got)
	}
	var parsed struct{ Nftables []map[string]json.RawMessage }
	if err := json.Unmarshal([]byte(list(t, ns, "-j")), &parsed); err != nil {
		t.Fatal(err)
	}
	kinds := map[string]int{}
	for _, object := range parsed.Nftables {
		for kind := range object {
			kinds[kind]++
		}
	}
	if kinds["table"] != 1 || kinds["set"] != 3 || kinds["chain"] != 3 || kinds["rule"] != 12 {
		t.Errorf("nft -j lists %v, want 1 table, 3 sets, 3 chains and 12 rules", kinds)
	}
	if err := c.Replace(table); err != nil {
		t.Errorf("the same again: %v", err)
	}
	if again := list(t, ns, "-n"); again != got {
		t.Errorf("the same again: nft lists\n%s\nwant\n%s", again, got)
	}
	if err := c.Delete("culvert"); err != nil {
		t.Error(err)
	}
	if got := list(t, ns); got != "" {
		t.Errorf("deleted: nft lists %s", got)
	}
	if err := c.Delete("culvert"); !errors.Is(err, syscall.ENOENT) {
		t.Errorf("deleted twice: %v, want ENOENT", err)
	}
}

// ownCgroup makes a cgroup of version 2 until the end of the test.
func ownCgroup(t *testing.T) (id uint64, level int) {
	t.Helper()
	root := t.TempDir()
	if err := unix.Mount("none", root, "cgroup2", 0, ""); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Unmount(root, 0) })
	dir, err := os.MkdirTemp(root, "culvert-test")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.Remove(dir) })
	info, err := os.Stat(dir)
	if err != nil {
		t.Fatal(err)
	}
	rel, err := filepath.Rel(root, dir)
	if err != nil {
		t.Fatal(err)
	}
	return info.Sys().(*syscall.Stat_t).Ino, len(strings.Split(rel, "/"))
}

func TestChangeSets(t *testing.T) {
	ns := netns.New(t, "nft")
	c := open(t, ns)
	if err := c.Replace(&Table{Name: "culvert", Owned: true, Sets: sets(3)}); err != nil {
		t.Fatal(err)
	}
	a := func(s string) []netip.Addr { return []netip.Addr{netip.MustParseAddr(s)} }
	if err := c.ChangeSets("culvert", SetChange{"vips4", a("240.0.0.2"), a("240.0.0.9")}, SetChange{"vips6", a("fd00::f000:0"), nil}); err != nil {
		t.Fatal(err)
	}
	got := list(t, ns)
	if !strings.Contains(got, "{ 240.0.0.0, 240.0.0.4, 240.0.0.9 }") || !strings.Contains(got, "{ fd00::f000:2,") {
		t.Errorf("changed: nft lists %s", got)
	}
	// All of it or nothing.
	err := c.ChangeSets("culvert", SetChange{"vips4", nil, a("240.0.0.7")}, SetChange{"nothing", nil, a("240.0.0.7")})
	if !errors.Is(err, syscall.ENOENT) || !strings.Contains(err.Error(), "change set nothing") {
		t.Errorf("a set that is not there: %v", err)
	}
	if again := list(t, ns); again != got {
		t.Errorf("after an error nft lists %s", again)
	}
	if err := c.ChangeSets("culvert"); err != nil {
		t.Error(err)
	}
}

// An owned table goes with its Conn, others can't change it, and flushing leaves it.
func TestOwned(t *testing.T) {
	ns := netns.New(t, "nft")
	c := open(t, ns)
	table := &Table{Name: "culvert", Owned: true, Sets: sets(1)}
	if err := c.Replace(table); err != nil {
		t.Fatal(err)
	}
	got := list(t, ns)
	if !strings.Contains(got, "owner") {
		t.Errorf("nft lists %s, want flags owner", got)
	}
	if out, err := ns.Command(t.Context(), "nft", "flush", "ruleset").CombinedOutput(); err != nil {
		t.Errorf("nft flush ruleset: %v: %s", err, out)
	}
	if again := list(t, ns); again != got {
		t.Errorf("flushed: nft lists %s", again)
	}
	other := open(t, ns)
	if err := other.Replace(table); !errors.Is(err, ErrOwned) {
		t.Errorf("another Conn: %v, want %v", err, ErrOwned)
	}
	if err := c.Close(); err != nil {
		t.Error(err)
	}
	for end := time.Now().Add(30 * time.Second); list(t, ns) != ""; {
		if time.Now().After(end) {
			t.Fatal("the table is there after its Conn")
		}
	}
	if err := c.Replace(table); err == nil {
		t.Error("a closed Conn has made a table")
	}
	if err := other.Replace(table); err != nil {
		t.Errorf("after the owner: %v", err)
	}
}

// As a user without rights.
func TestNotPermitted(t *testing.T) {
	if os.Getenv("CULVERT_NFT_TEST") != "" {
		c, err := Open()
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		if err := c.Replace(&Table{Name: "culvert"}); !errors.Is(err, ErrNotPermitted) {
			t.Errorf("%v, want %v", err, ErrNotPermitted)
		}
		return
	}
	// The test itself may be in a folder that others can't enter.
	self, err := os.ReadFile("/proc/self/exe")
	if err != nil {
		t.Fatal(err)
	}
	dir, err := os.MkdirTemp("", "nft")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	exe := filepath.Join(dir, "test")
	if err := errors.Join(os.Chmod(dir, 0o755), os.WriteFile(exe, self, 0o755)); err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), exe, "-test.run", "^TestNotPermitted$")
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "CULVERT_NFT_TEST=1")
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("as another user: %v: %s", err, out)
	}
}

// 10,000 addresses of each family are installed and listed.
func TestMany(t *testing.T) {
	ns := netns.New(t, "nft")
	c := open(t, ns)
	if err := c.Replace(&Table{Name: "culvert", Owned: true, Sets: sets(10_000)}); err != nil {
		t.Fatal(err)
	}
	if got := list(t, ns); strings.Count(got, "240.0.") < 10_000 || strings.Count(got, "fd00::f000:") < 10_000 {
		t.Errorf("nft lists %d addresses", strings.Count(got, "240.0."))
	}
}

func BenchmarkReplace10000(b *testing.B) {
	c := open(b, netns.New(b, "nft"))
	table := &Table{Name: "culvert", Owned: true, Sets: sets(10_000)}
	for b.Loop() {
		if err := c.Replace(table); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkChangeOneOf10000(b *testing.B) {
	c := open(b, netns.New(b, "nft"))
	all := sets(10_000)
	if err := c.Replace(&Table{Name: "culvert", Owned: true, Sets: all}); err != nil {
		b.Fatal(err)
	}
	one, two := all[0].Addrs[:1], slices.Clone(all[0].Addrs[:1])
	two[0] = netip.MustParseAddr("192.0.2.1")
	for b.Loop() {
		if err := c.ChangeSets("culvert", SetChange{"vips4", one, two}); err != nil {
			b.Fatal(err)
		}
		one, two = two, one
	}
}
