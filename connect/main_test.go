package connect

import (
	"context"
	"io"
	"net"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"culvert.dev/internal/testnet"
	"culvert.dev/tunnel"
)

func TestMain(m *testing.M) { testnet.GoroutinesEnd(m) }

// patience is how long anything in these tests may take.
const patience = 30 * time.Second

// A gateway serves a Protocol on loopback, and nothing before or behind it.
type gateway struct {
	addr string
	errs chan error // what ServeConn returned, one for each connection
}

func serve(t *testing.T, p *Protocol, h tunnel.Handler) *gateway {
	t.Helper()
	ln := testnet.Listen(t)
	g := &gateway{addr: ln.Addr().String(), errs: make(chan error, 100)}
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			wg.Go(func() {
				conn := tunnel.NewConn(c)
				_ = conn.SetReadDeadline(time.Now().Add(patience))
				err := p.ServeConn(t.Context(), conn, h)
				if err != nil {
					_ = conn.Close()
				}
				g.errs <- err
			})
		}
	})
	t.Cleanup(func() {
		_ = ln.Close()
		wg.Wait()
	})
	return g
}

// exchange sends in and returns all that comes back until the end.
func exchange(t *testing.T, addr, in string) string {
	t.Helper()
	c := testnet.Connect(t, addr)
	if _, err := io.WriteString(c, in); err != nil {
		t.Fatal(err)
	}
	out, err := io.ReadAll(c)
	if err != nil {
		t.Fatalf("after %q: %v", out, err)
	}
	_ = c.Close() // the gateway waits a second for it
	return string(out)
}

// A router is the Handler of these tests: it has a table, dials, and carries.
type router struct {
	refer func(*tunnel.Request) error // nil refuses nobody

	mu       sync.Mutex        // guards what follows
	table    map[string]string // "name:port" as asked, to the address dialed
	requests []tunnel.Request
	dials    int
}

func (r *router) asked() ([]tunnel.Request, int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return append([]tunnel.Request(nil), r.requests...), r.dials
}

func (r *router) ServeTunnel(ctx context.Context, req *tunnel.Request) {
	r.mu.Lock()
	r.requests = append(r.requests, *req)
	r.mu.Unlock()
	if r.refer != nil {
		if err := r.refer(req); err != nil {
			req.Refuse(err)
			return
		}
	}
	r.mu.Lock()
	addr, ok := r.table[req.Target()]
	r.mu.Unlock()
	if !ok {
		req.Refuse(tunnel.Refusef(tunnel.NoRoute, "no route for %q", req.Target()))
		return
	}
	r.mu.Lock()
	r.dials++
	r.mu.Unlock()
	out, err := new(net.Dialer).DialContext(ctx, "tcp", addr)
	if err != nil {
		req.Refuse(&tunnel.Error{Reason: tunnel.DialFailed, Err: err})
		return
	}
	defer out.Close()
	in, err := req.Accept()
	if err != nil {
		return
	}
	carry(in, out.(tunnel.Stream))
}

// carry copies both ways until both ends are done, and closes both.
func carry(a, b tunnel.Stream) {
	stop := time.AfterFunc(patience, func() { _, _ = a.Close(), b.Close() })
	defer stop.Stop()
	var wg sync.WaitGroup
	for _, d := range [][2]tunnel.Stream{{a, b}, {b, a}} {
		wg.Go(func() {
			_, _ = io.Copy(d[0], d[1])
			_ = d[0].CloseWrite()
		})
	}
	wg.Wait()
	_, _ = a.Close(), b.Close()
}

// refusal is the answer that a refused client has to get, to the byte.
func refusal(status, token string, reason tunnel.Reason, text string, extra ...string) string {
	body := "culvert: " + string(reason) + ": " + text + "\n"
	lines := []string{
		"HTTP/1.1 " + status,
		"Proxy-Status: culvert; error=" + token + `; details="` + string(reason) + `"`,
		"Content-Type: text/plain; charset=utf-8",
		"Content-Length: " + strconv.Itoa(len(body)),
	}
	lines = append(append(lines, extra...), "Connection: close", "", body)
	return strings.Join(lines, "\r\n")
}

// result returns what ServeConn said of the next connection.
func (g *gateway) result(t *testing.T) error {
	t.Helper()
	select {
	case err := <-g.errs:
		return err
	case <-time.After(patience):
		t.Fatal("ServeConn does not return")
		return nil
	}
}
