//go:build linux

package reliability

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"culvert.dev/internal/testnet"
)

// A listed tunnel, as "culvert tunnels -o json" prints it.
type listed struct {
	ID       uint64  `json:"id"`
	Age      float64 `json:"ageSeconds"`
	Quiet    float64 `json:"quietSeconds"`
	Proto    string  `json:"proto"`
	Source   string  `json:"source"`
	Service  string  `json:"service"`
	BytesIn  int64   `json:"bytesIn"`
	BytesOut int64   `json:"bytesOut"`
}

// culvert runs a command of the program and returns what it prints.
func culvert(args ...string) (string, error) {
	bin, err := program()
	if err != nil {
		return "", err
	}
	cmd := exec.Command(bin, args...)
	out, err := cmd.Output()
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		err = fmt.Errorf("culvert %s: %w: %s", strings.Join(args, " "), err, exit.Stderr)
	}
	return string(out), err
}

// Thousands of tunnels are listed while some of them are busy, none is held up
// by it, and one that is closed is reset while the others go on.
func TestTunnelsAreListedAndClosed(t *testing.T) {
	const n, sources = 2000, 20
	echo := startBackend(t, "echo")
	g := start(t, options{
		Services: service("a.test", echo.addr) + service("b.test", echo.addr),
		More:     "adminControl: true", // this gateway's admin port is at TCP, as the others' of these tests
	})
	ways := []way{bySNI, byConnect}
	conns := make([]*net.TCPConn, n)
	defer func() {
		for _, c := range conns {
			if c != nil {
				_ = c.Close()
			}
		}
	}()
	crowd(t, n, 16, func(i int) (err error) {
		if conns[i], err = g.dial(i % sources); err != nil {
			return err
		}
		return ways[i%2].enter(conns[i], []string{"a.test", "b.test"}[i/2%2])
	})
	if t.Failed() {
		t.FailNow()
	}
	list := func(flags ...string) (tunnels []listed) {
		t.Helper()
		out, err := culvert(append([]string{"tunnels", "--admin", g.admin, "-o", "json"}, flags...)...)
		if err == nil {
			err = json.Unmarshal([]byte(out), &tunnels)
		}
		if err != nil {
			t.Fatal(err)
		}
		return tunnels
	}

	// Some are busy: an answer may take no longer for the lists that are made.
	stop, busy := make(chan struct{}), make(chan time.Duration, 1)
	quit := sync.OnceFunc(func() { close(stop) })
	defer quit()
	go func() {
		var worst time.Duration
		for i := 0; ; i = (i + 1) % 50 {
			select {
			case <-stop:
				busy <- worst
				return
			default:
			}
			begin := time.Now()
			if err := echo1(conns[i]); err != nil {
				t.Errorf("tunnel %d while it is listed: %v", i, err)
			}
			worst = max(worst, time.Since(begin))
		}
	}()
	began := time.Now()
	all := list()
	took := time.Since(began)
	if len(all) != n || g.metric("culvert_tunnels_open") != n {
		t.Errorf("%d tunnels are listed, culvert_tunnels_open is %v, want %d", len(all), g.metric("culvert_tunnels_open"), n)
	}
	bySource := map[string]listed{}
	for i, l := range all {
		if bySource[l.Source] = l; i > 0 && l.ID <= all[i-1].ID {
			t.Errorf("tunnel %d comes after %d", l.ID, all[i-1].ID)
		}
		// A hello goes in and comes back, and a byte; by CONNECT the byte alone.
		if least := map[string]int64{"sni": 513, "connect": 1}[l.Proto]; l.BytesIn < least || l.BytesOut < least || l.Quiet > l.Age {
			t.Errorf("listed: %+v", l)
		}
	}
	for i, c := range conns {
		l, ok := bySource[c.LocalAddr().String()]
		if want := []string{"a.test", "b.test"}[i/2%2]; !ok || l.Service != want || l.Proto != ways[i%2].name {
			t.Errorf("tunnel of %s: %+v, want one to %s by %s", c.LocalAddr(), l, want, ways[i%2].name)
		}
	}
	for flags, want := range map[string]int{
		"--service a.test": n / 2, "--proto sni": n / 2, "--service b.test --proto connect": n / 4,
		"--source " + sourceIP(7): n / sources, "--service c.test": 0, "--older-than 1h": 0, "--limit 17 --sort age": 17,
	} {
		if got := len(list(strings.Fields(flags)...)); got != want {
			t.Errorf("%s: %d tunnels, want %d", flags, got, want)
		}
	}
	quit()
	t.Logf("a list of %d tunnels took %v with the program's start; the longest echo meanwhile %v", n, took.Round(time.Millisecond), (<-busy).Round(time.Microsecond))

	// One is closed.
	victim := conns[1234]
	if out, err := culvert("tunnels", "close", fmt.Sprint(bySource[victim.LocalAddr().String()].ID), "--admin", g.admin); err != nil || out != "closed 1 tunnel\n" {
		t.Fatalf("%q, %v", out, err)
	}
	_ = victim.SetReadDeadline(time.Now().Add(patience))
	if _, err := victim.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("its client reads %v, want a reset", err)
	}
	testnet.Eventually(t, patience, func() bool {
		return len(g.entries(func(e entry) bool {
			return e.str("reason") == "killed" && e.str("source") == victim.LocalAddr().String()
		})) == 1
	}, "the log has its end")
	for i, c := range conns {
		if c == victim {
			continue
		}
		if err := echo1(c); err != nil {
			t.Fatalf("tunnel %d after another was closed: %v", i, err)
		}
	}
	if got := len(list()); got != n-1 || g.metric("culvert_tunnels_open") != n-1 {
		t.Errorf("%d tunnels are listed, culvert_tunnels_open is %v, want %d", got, g.metric("culvert_tunnels_open"), n-1)
	}

	// All of a service.
	if out, err := culvert("tunnels", "close", "--service", "a.test", "--admin", g.admin); err != nil || !strings.HasPrefix(out, "closed ") {
		t.Errorf("%q, %v", out, err)
	}
	testnet.Eventually(t, patience, func() bool { return len(list("--service", "a.test")) == 0 }, "the service's tunnels are gone")
	for i, c := range conns {
		if i/2%2 == 1 && c != victim {
			if err := echo1(c); err != nil {
				t.Fatalf("tunnel %d after those of another service were closed: %v", i, err)
			}
		}
	}

}

// echo1 passes a byte there and back.
func echo1(c *net.TCPConn) error {
	_ = c.SetDeadline(time.Now().Add(patience))
	if _, err := c.Write([]byte{7}); err != nil {
		return err
	}
	var b [1]byte
	_, err := io.ReadFull(c, b[:])
	return err
}
