//go:build linux

package reliability

import (
	"io"
	"net"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"culvert.dev/internal/testnet"
)

// slowReader asks for a service that sends without end, and takes next to
// nothing of it.
func (g *gateway) slowReader(source int, target string) (*net.TCPConn, error) {
	d := net.Dialer{
		Timeout:   patience,
		LocalAddr: &net.TCPAddr{IP: net.ParseIP(sourceIP(source))},
		Control: func(_, _ string, c syscall.RawConn) error {
			return c.Control(func(fd uintptr) {
				_ = syscall.SetsockoptInt(int(fd), syscall.SOL_SOCKET, syscall.SO_RCVBUF, 4<<10)
				// Loopback's own segments would let each of thousands of sockets
				// queue megabytes in the kernel, which has one limit for all and
				// ends the connections of other tests beyond it.
				_ = syscall.SetsockoptInt(int(fd), syscall.IPPROTO_TCP, syscall.TCP_MAXSEG, 1400)
			})
		},
	}
	c, err := d.Dial("tcp", g.addr)
	if err != nil {
		return nil, err
	}
	if _, err := c.Write(bySNI.preamble(target)); err != nil {
		_ = c.Close()
		return nil, err
	}
	return c.(*net.TCPConn), nil
}

// many are connections that are closed together.
type many struct {
	mu    sync.Mutex // guards conns
	conns []net.Conn
}

func (m *many) add(c net.Conn) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.conns = append(m.conns, c)
}

func (m *many) close() {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, c := range m.conns {
		_ = c.Close()
	}
	m.conns = nil
}

func (m *many) abort() {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, c := range m.conns {
		_ = testnet.Abort(c)
	}
	m.conns = nil
}

// With little memory, tunnels whose clients don't read are refused in time,
// one after the other, and those that stand go on. When they leave, there is
// room again.
func TestMemoryRunsOut(t *testing.T) {
	b := testnet.Echo(t)
	flood := startBackend(t, "flood")
	g := start(t, options{
		Services: service("echo.test", b.Addr()) + service("flood.test", flood.addr),
		More:     "limits: {memory: 20MiB}",
	})
	stands := g.tunnel(bySNI, 1, "echo.test")
	var slow many
	defer slow.close()
	const most = 6000
	opened := 0
	for ; opened < most && g.reaches(bySNI, "echo.test"); opened += 50 {
		crowd(t, 50, 8, func(i int) error {
			c, err := g.slowReader(opened/50+i, "flood.test")
			if err == nil {
				slow.add(c)
			}
			return err
		})
	}
	m := g.metrics()
	t.Logf("%d slow readers; in use %.1f MiB of %.0f, backlogs %.1f MiB, RSS %d MiB", opened,
		m["culvert_memory_used_bytes"]/(1<<20), m["culvert_memory_limit_bytes"]/(1<<20), m["culvert_backlog_bytes"]/(1<<20), g.rss()>>20)
	if opened >= most {
		t.Fatal("nothing was ever refused")
	}
	for _, w := range []way{bySNI, byConnect} {
		if r := g.refused(w, 1, "echo.test"); r.code != w.code["overload"] {
			t.Errorf("%s: while memory is short: %v, want %d", w.name, r, w.code["overload"])
		}
	}
	if err := echo(stands, "still here"); err != nil {
		t.Errorf("the tunnel that stood: %v", err)
	}
	slow.close()
	left := time.Now()
	testnet.Eventually(t, testnet.Deadline(2*time.Second), func() bool { return g.reaches(bySNI, "echo.test") }, "there is room again")
	t.Logf("new tunnels %v after the slow readers left", time.Since(left).Round(time.Millisecond))
	if err := echo(stands, "still here"); err != nil {
		t.Errorf("the tunnel that stood, in the end: %v", err)
	}
	testnet.Eventually(t, patience, func() bool { return g.metric("culvert_backlog_bytes") == 0 }, "no backlog is left")
}

// crowded returns a gateway in a cgroup with a limit, on which 2,000 readers of a
// flood do not read, and a tunnel that stands beside them; nil where no cgroup can
// be made.
func crowded(t *testing.T, limit int64) (*gateway, *cgroup, net.Conn, *many) {
	t.Helper()
	group := newCgroup(t, limit)
	if group == nil {
		testnet.LeaveOut(t, "no cgroup can be made: the memory limit of a container")
		return nil, nil, nil, nil
	}
	b := testnet.Echo(t)
	flood := startBackend(t, "flood")
	g := start(t, options{
		Services: service("echo.test", b.Addr()) + service("flood.test", flood.addr),
		Wrap:     group.wrap(),
	})
	if got := g.metric("culvert_memory_limit_bytes"); got != float64(limit) && got != float64(limit/10*9) {
		t.Errorf("the limit is %v, want the cgroup's %d or nine tenths of it", got, limit)
	}
	stands := g.tunnel(bySNI, 1, "echo.test")
	var slow many
	t.Cleanup(slow.close)
	crowd(t, 2000, 64, func(i int) error {
		c, err := g.slowReader(i%200, "flood.test")
		if err == nil {
			slow.add(c)
		}
		return err
	})
	most := 0.0
	for range 20 {
		g.alive()
		if err := echo(stands, "still here"); err != nil {
			t.Fatalf("the tunnel that stood: %v", err)
		}
		most = max(most, g.metric("culvert_backlog_bytes"))
		pause(t.Context(), 100*time.Millisecond)
	}
	t.Logf("2,000 slow readers: %v stand, backlogs up to %.1f MiB; the cgroup held %d MiB at most, RSS is %d MiB", g.metric("culvert_tunnels_open")-1,
		most/(1<<20), group.number("max_usage_in_bytes", "peak")>>20, g.rss()>>20)
	if most == 0 {
		t.Error("no slow reader made a backlog: the test tests nothing")
	}
	return g, group, stands, &slow
}

// 2,000 slow readers that come at once don't get the gateway killed, though its
// cgroup has 64 MiB.
func TestSlowReadersInASmallCgroup(t *testing.T) {
	crowded(t, 64<<20)
}

// When somebody else takes what is left of the cgroup, requests are refused, then
// tunnels that nobody reads from make room, and all is over within two seconds.
func TestMemoryOfACgroup(t *testing.T) {
	g, group, stands, slow := crowded(t, 128<<20)
	if g == nil {
		return
	}

	// Somebody else takes what is left of the cgroup, MiB by MiB. How much that
	// is depends on how the slow readers' memory was when it was looked at.
	eat, drop := group.ballast()
	for i, state := range []string{"short", "full"} {
		bite := []int{4, 1}[i] // small where the limit is near
		testnet.Eventually(t, patience, func() bool {
			if len(g.entries(func(e entry) bool { return e.str("msg") == "memory is "+state })) > 0 {
				return true
			}
			eat(bite)
			pause(t.Context(), 300*time.Millisecond) // longer than from one look to the next
			return false
		}, "memory is %s", state)
		if err := echo(stands, "still here"); err != nil {
			t.Errorf("memory is %s: the tunnel that stood: %v", state, err)
		}
	}
	// Room is made at the cost of the slow readers, and a connection that comes
	// meanwhile is let in then.
	c := g.mustDial(1)
	if _, err := c.Write(bySNI.preamble("echo.test")); err != nil {
		t.Fatal(err)
	}
	testnet.Eventually(t, patience, func() bool {
		return len(g.entries(func(e entry) bool { return strings.HasPrefix(e.str("msg"), "memory is full; aborted") })) > 0
	}, "the log says that tunnels were ended")
	slow.close()
	drop()
	left := time.Now()
	// It may be told no while memory is short.
	const echoed, alert = 22, 21
	heard := make([]byte, 1)
	_ = c.SetReadDeadline(time.Now().Add(patience))
	if _, err := io.ReadFull(c, heard); err != nil || heard[0] != echoed && heard[0] != alert {
		t.Errorf("the connection that waited: got %d, %v; want its hello back, or an alert", heard, err)
	}
	testnet.Eventually(t, testnet.Deadline(2*time.Second), func() bool { return g.reaches(bySNI, "echo.test") }, "there is room again")
	t.Logf("served again after %v", time.Since(left).Round(time.Millisecond))
	if n := group.kills(); n > 0 {
		t.Errorf("the kernel killed %d processes of the cgroup", n)
	}
}
