//go:build unix

package interop

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"culvert.dev/internal/testnet"
)

// A gateway is a running "culvert gateway".
type gateway struct {
	*process
	addrs []string // of the listeners, in the order of the configuration
	addr  string   // of the first one
	admin string
}

// A line is a line of the gateway's log.
type line struct {
	Msg      string
	Address  string
	Source   string
	Proto    string
	Target   string
	Service  string
	Endpoint string
	Reason   string
	Err      string
	Peer     string
	ALPN     string
	In       int64 `json:"bytes_in"`
	Out      int64 `json:"bytes_out"`
	Attempts []string
}

// startGateway starts a gateway with an admin port, and waits until it is
// ready. Its limits are the defaults, if args say nothing else.
func startGateway(t *testing.T, args ...string) *gateway {
	t.Helper()
	args = append([]string{"gateway", "--log-format", "json", "--log-level", "debug"}, args...)
	if !slices.ContainsFunc(args, func(a string) bool { return a == "--admin" || a == "--config" }) {
		args = append(args, "--admin", "127.0.0.1:0")
	}
	g := &gateway{process: start(t, "culvert", args...)}
	t.Cleanup(g.checkRaces(t))
	g.await(t, "said where its admin port is", func() bool {
		for _, l := range g.lines() {
			if l.Msg == "serving the admin port" {
				g.admin = l.Address
			}
		}
		return g.admin != ""
	})
	g.await(t, "been ready", func() bool {
		var s struct {
			Ready     bool
			Listeners []struct{ Address string }
		}
		if err := g.ask("/status", &s); err != nil || !s.Ready {
			return false
		}
		g.addrs = g.addrs[:0]
		for _, l := range s.Listeners {
			g.addrs = append(g.addrs, l.Address)
		}
		return len(g.addrs) > 0
	})
	g.addr = g.addrs[0]
	return g
}

// checkRaces returns what fails the test if the gateway raced or panicked. It
// runs before the gateway is killed.
func (g *gateway) checkRaces(t *testing.T) func() {
	return func() {
		for _, bad := range []string{"DATA RACE", "panic", "goroutine 1 ["} {
			if strings.Contains(g.output(), bad) {
				t.Errorf("the gateway said %q", bad)
			}
		}
	}
}

// ask reads JSON from the admin port.
func (g *gateway) ask(path string, v any) error {
	body, err := g.get(path)
	if err != nil {
		return err
	}
	return json.Unmarshal(body, v)
}

func (g *gateway) get(path string) ([]byte, error) {
	// No pool: an idle connection would outlive the test.
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: patience}
	resp, err := client.Get("http://" + g.admin + path)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("%s: %s", path, resp.Status)
	}
	return io.ReadAll(resp.Body)
}

// dials returns how many dials the gateway has made, by its own account.
func (g *gateway) dials(t *testing.T) (n int) {
	t.Helper()
	body, err := g.get("/metrics")
	if err != nil {
		t.Fatal(err)
	}
	for l := range strings.Lines(string(body)) {
		var v int
		if strings.HasPrefix(l, "culvert_dial_duration_seconds_count") {
			if _, err := fmt.Sscan(l[strings.LastIndexByte(strings.TrimSpace(l), ' '):], &v); err != nil {
				t.Fatalf("metric %q: %v", l, err)
			}
			n += v
		}
	}
	return n
}

// lines returns the log so far.
func (g *gateway) lines() []line {
	var lines []line
	sc := bufio.NewScanner(strings.NewReader(g.output()))
	sc.Buffer(nil, 1<<20)
	for sc.Scan() {
		var l line
		if json.Unmarshal(sc.Bytes(), &l) == nil {
			lines = append(lines, l)
		}
	}
	return lines
}

// outcome waits for the line of the connection that came from source.
func (g *gateway) outcome(t *testing.T, source string) line {
	t.Helper()
	return g.line(t, "logged the connection from "+source, func(l line) bool { return l.Source == source })
}

// line waits for the first line that is meant.
func (g *gateway) line(t *testing.T, what string, meant func(line) bool) (found line) {
	t.Helper()
	g.await(t, what, func() bool {
		for _, l := range g.lines() {
			if meant(l) {
				found = l
				return true
			}
		}
		return false
	})
	return found
}

// sources counts the loopback addresses that raw clients come from: a gateway
// lets one source open 200 connections a second, and these tests are many
// sources.
var sources atomic.Uint32

// dial connects to addr from a source address of its own.
func dial(t *testing.T, addr string) *net.TCPConn {
	t.Helper()
	n := sources.Add(1)
	from := &net.TCPAddr{IP: net.IPv4(127, 1, byte(n>>8), byte(n))}
	to, err := net.ResolveTCPAddr("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	c, err := net.DialTCP("tcp", from, to)
	if err != nil {
		t.Fatal(err)
	}
	_ = c.SetDeadline(time.Now().Add(3 * patience)) // of a test that sets none: it fails then and does not hang
	return c
}

// An answer is all that a peer got, and how it ended.
type answer struct {
	data   []byte
	ending testnet.Ending
	source string // of the client's connection
}
