package tunnel_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"culvert.dev/tunnel"
)

func TestServerDetects(t *testing.T) {
	protocols := []tunnel.Protocol{
		&lineProtocol{name: "alpha", magic: "ALPHA"},
		&lineProtocol{name: "alps", magic: "ALPS"},
		&lineProtocol{name: "alpine", magic: "ALP"}, // begins like the two above, which come first
		&lineProtocol{name: "never", sniff: func(p []byte) tunnel.Verdict {
			if p[0] == '?' {
				return tunnel.More
			}
			return tunnel.No
		}},
	}
	const bad = tunnel.BadPreamble
	for _, tt := range []struct {
		in    string
		proto string // of whole input
		slow  string // where it comes byte by byte, if that differs
		why   tunnel.Reason
	}{
		{in: "ALPHA hello\n", proto: "alpha", slow: "alpine"}, // three bytes are enough for a greedy protocol
		{in: "ALPS\n", proto: "alps", slow: "alpine"},
		{in: "ALPIN\n", proto: "alpine"},
		{in: "ALP\n", proto: "alpine"},
		{in: "B", why: bad},
		{in: "ALX", why: bad},
		{in: "\x00", why: bad},
		{in: strings.Repeat("?", 64), why: bad},
		{in: strings.Repeat("?", 5000), why: bad},
		{in: strings.Repeat("?", 63), why: tunnel.Gone}, // one byte short of the limit: asked for more, and the client left
		{in: "AL", why: tunnel.Gone},
		{in: "", why: tunnel.NoHello},
	} {
		for _, chunk := range []int{1 << 20, 1} {
			t.Run(fmt.Sprintf("%.8q of %d by %d", tt.in, len(tt.in), chunk), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					var proto, preamble string
					srv := &tunnel.Server{Handler: tunnel.HandlerFunc(func(ctx context.Context, req *tunnel.Request) {
						proto, preamble = req.Proto, req.ALPN[0]
						acceptAndClose(ctx, req)
					})}
					g := serve(t, srv, protocols...)
					client, accepted := g.dial("198.51.100.7:1000")
					for in := tt.in; in != ""; {
						n, err := client.Write([]byte(in[:min(chunk, len(in))]))
						if in = in[n:]; err != nil {
							break // it has heard enough
						}
					}
					if tt.why == bad {
						wantEnd(t, client)
						if accepted.ending() != "aborted" {
							t.Errorf("connection is %s, want aborted: a close would leave unread bytes to chance", accepted.ending())
						}
					}
					_ = client.Close()
					synctest.Wait()
					want := tt.proto
					if chunk == 1 && tt.slow != "" {
						want = tt.slow
					}
					if proto != want || tt.proto != "" && preamble != strings.TrimSuffix(tt.in, "\n") {
						t.Errorf("got protocol %q with preamble %q, want %q with all of the input", proto, preamble, want)
					}
					if tt.why != "" {
						g.wantReasons(t, tt.why)
					} else {
						g.wantReasons(t)
					}
					g.stop(t)
				})
			})
		}
	}
}

// TestServerAsksInOrder checks that a protocol that can't tell yet does not
// keep a later one that can from having the connection.
func TestServerAsksInOrder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := serve(t, &tunnel.Server{}, &lineProtocol{name: "slow", magic: "XXXX"}, &lineProtocol{name: "quick", magic: "X"})
		client, _ := g.dial("198.51.100.7:1000")
		_, _ = client.Write([]byte("X"))
		_ = client.Close()
		synctest.Wait()
		if all := g.told.all(); len(all) != 1 || all[0].Proto != "quick" || all[0].Reason != tunnel.Gone {
			t.Errorf("got %+v, want one outcome of quick", all)
		}
		g.stop(t)
	})
}

func TestServerPinnedListenerSpeaksFirst(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		to := tunnel.MustParseName("smtp.example")
		srv := &tunnel.Server{Handler: tunnel.HandlerFunc(func(_ context.Context, req *tunnel.Request) {
			if req.Name != to || req.Port != 25 || req.LocalPort != 443 || req.Source.String() != "198.51.100.7:1000" || req.Target() != "smtp.example:25" || req.Listener != "mail" {
				t.Errorf("request: %+v", req)
			}
			c, err := req.Accept()
			if err != nil {
				t.Error(err)
				return
			}
			defer c.Close()
			_, _ = io.WriteString(c, "220 hello\r\n") // before the client sent a byte
		})}
		srv.Observe = nil
		ln := newMemListener()
		served := make(chan error, 1)
		go func() {
			served <- srv.Serve(t.Context(), tunnel.Listener{Listener: ln, Name: "mail", Protocols: []tunnel.Protocol{&tunnel.Fixed{To: to, Port: 25}}})
		}()
		client, accepted := fakePair("[::ffff:198.51.100.7]:1000")
		ln.conns <- accepted
		if got, err := io.ReadAll(client); string(got) != "220 hello\r\n" || err != nil {
			t.Errorf("client got %q, %v", got, err)
		}
		_ = srv.Shutdown(t.Context())
		if err := <-served; err != tunnel.ErrServerClosed {
			t.Errorf("serve: %v", err)
		}
	})
}

func TestServerDeadlines(t *testing.T) {
	two := []tunnel.Protocol{&lineProtocol{name: "a", magic: "A"}, &lineProtocol{name: "b", magic: "BBBBBBBBBBBBBBBB"}}
	pinned := []tunnel.Protocol{line}
	every := func(d time.Duration, b string) func(net.Conn) {
		return func(c net.Conn) {
			for {
				if _, err := io.WriteString(c, b); err != nil {
					return
				}
				time.Sleep(d)
			}
		}
	}
	silent := func(net.Conn) {}
	for _, tt := range []struct {
		name      string
		limits    tunnel.Limits
		protocols []tunnel.Protocol
		client    func(net.Conn)
		want      time.Duration // from accept to the end
	}{
		{"silent", tunnel.Limits{}, two, silent, 10 * time.Second},
		{"silent, pinned", tunnel.Limits{}, pinned, silent, 10 * time.Second},
		{"half a preamble", tunnel.Limits{}, pinned, func(c net.Conn) { _, _ = io.WriteString(c, "hel") }, 5 * time.Second},
		{"half of what tells protocols apart", tunnel.Limits{}, two, func(c net.Conn) { _, _ = io.WriteString(c, "BB") }, 5 * time.Second},
		{"a byte a second", tunnel.Limits{}, pinned, every(time.Second, "x"), 5 * time.Second},
		{"a byte a second, undetected", tunnel.Limits{}, two, every(time.Second, "B"), 5 * time.Second},
		{"detected, then a byte a second", tunnel.Limits{}, two, every(time.Second, "A"), 5 * time.Second},
		{"a byte every 10 ms", tunnel.Limits{}, pinned, every(10*time.Millisecond, "x"), 5 * time.Second},
		{"first byte late", tunnel.Limits{}, pinned, func(c net.Conn) { time.Sleep(9 * time.Second); every(time.Second, "x")(c) }, 14 * time.Second},
		{"own limits, silent", tunnel.Limits{FirstByteTimeout: time.Second, HandshakeTimeout: time.Minute}, pinned, silent, time.Second},
		{"own limits, slow", tunnel.Limits{FirstByteTimeout: time.Second, HandshakeTimeout: 20 * time.Second}, pinned, every(time.Second, "x"), 20 * time.Second},
		{"no limit for the first byte", tunnel.Limits{FirstByteTimeout: -1}, pinned, func(c net.Conn) { time.Sleep(time.Hour); every(time.Second, "x")(c) }, time.Hour + 5*time.Second},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				g := serve(t, &tunnel.Server{Limits: tt.limits}, tt.protocols...)
				client, accepted := g.dial("198.51.100.7:1000")
				start := time.Now()
				go tt.client(client)
				wantEnd(t, client)
				if got := time.Since(start); got < tt.want || got > tt.want+200*time.Millisecond {
					t.Errorf("ended after %v, want %v", got, tt.want)
				}
				synctest.Wait()
				if accepted.ending() == "open" {
					t.Error("the connection was not closed")
				}
				g.wantReasons(t, tunnel.HelloTimeout)
				g.stop(t)
				time.Sleep(time.Minute) // for the clients that sleep
			})
		})
	}
}

func TestServerClientLeaves(t *testing.T) {
	for _, tt := range []struct {
		name, send string
		want       tunnel.Reason
	}{
		{"connect and leave", "", tunnel.NoHello},
		{"half a preamble", "hel", tunnel.Gone},
	} {
		synctest.Test(t, func(t *testing.T) {
			g := serve(t, &tunnel.Server{})
			client, _ := g.dial("198.51.100.7:1000")
			_, _ = io.WriteString(client, tt.send)
			_ = client.Close()
			synctest.Wait()
			all := g.told.all()
			if len(all) != 1 || all[0].Reason != tt.want || all[0].Lasted != 0 {
				t.Errorf("%s: got %+v, want %s at once", tt.name, all, tt.want)
			}
			if o := all[0]; o.Proto != "line" || o.Source.String() != "198.51.100.7:1000" || o.Listener != "192.0.2.1:443" || o.Err == nil || o.Carried() {
				t.Errorf("%s: outcome %+v", tt.name, o)
			}
			g.stop(t)
		})
	}
}

// TestServerLiftsDeadlines checks that no limit of the preamble outlives it.
func TestServerLiftsDeadlines(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		srv := &tunnel.Server{Handler: tunnel.HandlerFunc(func(_ context.Context, req *tunnel.Request) {
			time.Sleep(9900 * time.Millisecond) // a slow dial is not the client's fault
			c, err := req.Accept()
			if err != nil {
				t.Error(err)
				return
			}
			defer c.Close()
			_, _ = io.Copy(c, c)
		})}
		g := serve(t, srv)
		client, accepted := g.dial("198.51.100.7:1000")
		time.Sleep(9 * time.Second)
		_, _ = io.WriteString(client, "hel")
		time.Sleep(4900 * time.Millisecond)
		_, _ = io.WriteString(client, "lo\nearly")
		got := make([]byte, 5)
		if _, err := io.ReadFull(client, got); err != nil || string(got) != "early" {
			t.Errorf("echo of what came with the preamble: %q, %v", got, err)
		}
		time.Sleep(time.Hour)
		wantAlive(t, "after an hour", accepted)
		go func() { _, _ = io.WriteString(client, "later") }()
		if _, err := io.ReadFull(client, got); err != nil || string(got) != "later" {
			t.Errorf("echo after an hour: %q, %v", got, err)
		}
		_ = client.Close()
		synctest.Wait()
		g.wantReasons(t)
		g.stop(t)
	})
}

func TestServerAcceptErrorsBackOff(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := serve(t, &tunnel.Server{})
		emfile := &net.OpError{Op: "accept", Net: "tcp", Err: syscall.EMFILE}
		start := time.Now()
		for time.Since(start) < time.Minute {
			g.ln.conns <- emfile
		}
		if calls := g.ln.calls.Load(); calls < 30 || calls > 80 {
			t.Errorf("%d accepts in a minute of errors, want about one a second", calls)
		}
		// And it accepts again within a second of the errors' end.
		start = time.Now()
		client, _ := g.dial("198.51.100.7:1000")
		_, _ = io.WriteString(client, "hello\n")
		wantEnd(t, client)
		if d := time.Since(start); d > time.Second {
			t.Errorf("served %v after the last error, want a second at most", d)
		}
		// A success resets the wait.
		g.ln.conns <- emfile
		start = time.Now()
		client, _ = g.dial("198.51.100.7:1000")
		if d := time.Since(start); d > 10*time.Millisecond {
			t.Errorf("waited %v after a single error, want some milliseconds", d)
		}
		_ = client.Close()
		g.stop(t)
		if n := strings.Count(g.log.String(), "accept failed"); n > 90 || n < 30 {
			t.Errorf("%d lines logged, want one for each wait", n)
		}
	})
}

func TestServerListenerFails(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := serve(t, &tunnel.Server{})
		_ = g.ln.Close()
		if err := <-g.served; !errors.Is(err, net.ErrClosed) {
			t.Errorf("serve on a listener that someone else closed: %v, want net.ErrClosed", err)
		}
		ln := newMemListener()
		if err := g.srv.Serve(t.Context(), tunnel.Listener{Listener: ln}); err == nil || err == tunnel.ErrServerClosed {
			t.Errorf("serve without a protocol: %v, want an error that says so", err)
		}
		if _, err := ln.Accept(); err == nil {
			t.Error("the listener was not closed")
		}
	})
}

func TestServerSurvivesPanics(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		boom := func(where string) { panic("boom in " + where) }
		srv := &tunnel.Server{Handler: tunnel.HandlerFunc(func(ctx context.Context, req *tunnel.Request) {
			switch req.ALPN[0] {
			case "H handler":
				boom("handler")
			case "H accepted":
				_, _ = req.Accept()
				boom("accepted")
			}
			acceptAndClose(ctx, req)
		})}
		g := serve(t, srv,
			&lineProtocol{name: "sniffer", sniff: func(p []byte) tunnel.Verdict {
				if p[0] == '!' {
					boom("sniff")
				}
				return tunnel.No
			}},
			&lineProtocol{name: "server", magic: "S", serve: func(context.Context, *tunnel.Conn, tunnel.Handler) error { boom("serve"); return nil }},
			&lineProtocol{name: "honest", magic: "H"})
		bystander, _ := g.dial("198.51.100.1:1")
		_, _ = io.WriteString(bystander, "H")
		for _, tt := range []struct {
			in, proto, log string
			stack          bool
		}{
			{"!", "", "boom in sniff", true},
			{"S", "server", "boom in serve", false},
			{"H handler\n", "honest", "boom in handler", false},
			{"H accepted\n", "honest", "boom in accepted", false},
		} {
			before := len(g.log.String())
			client, accepted := g.dial("198.51.100.7:1000")
			_, _ = io.WriteString(client, tt.in)
			wantEnd(t, client)
			synctest.Wait()
			if accepted.ending() != "aborted" {
				t.Errorf("%q: connection is %s, want aborted", tt.in, accepted.ending())
			}
			all := g.told.all()
			o := all[len(all)-1]
			if o.Reason != tunnel.Internal || o.Proto != tt.proto || !strings.Contains(o.Err.Error(), tt.log) {
				t.Errorf("%q: outcome %+v, want internal of %q", tt.in, o, tt.proto)
			}
			log := g.log.String()[before:]
			if !strings.Contains(log, tt.log) || strings.Contains(log, "goroutine") != tt.stack {
				t.Errorf("%q: logged %q, want %q, with a stack: %v", tt.in, log, tt.log, tt.stack)
			}
		}
		if _, err := io.WriteString(bystander, "ello\n"); err != nil {
			t.Errorf("another connection: %v", err)
		}
		wantEnd(t, bystander)
		time.Sleep(time.Minute)
		before := len(g.log.String())
		client, _ := g.dial("198.51.100.7:1000")
		_, _ = io.WriteString(client, "!")
		wantEnd(t, client)
		synctest.Wait()
		if !strings.Contains(g.log.String()[before:], "goroutine") {
			t.Error("a minute later the stack is not logged again")
		}
		g.wantReasons(t, tunnel.Internal, tunnel.Internal, tunnel.Internal, tunnel.Internal, tunnel.Internal)
		g.stop(t)
	})
}
