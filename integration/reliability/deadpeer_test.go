//go:build linux && netns

// This test needs root, ip and nft, and most of a minute in which it does
// nothing; "make test" runs it beside the others.

package reliability

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"strconv"
	"testing"
	"time"

	"culvert.dev/internal/testnet"
	"culvert.dev/internal/testnet/netns"
)

// What the gateway says of a peer that is gone without a word: a quarter of a
// minute and two more for each of three probes, and half a minute for bytes.
const (
	deadIdle   = 75 * time.Second
	deadUnack  = 30 * time.Second
	deadSlack  = 10 * time.Second // timers of the kernel, which back off, and a busy machine
	notReading = deadUnack + 15*time.Second
	standing   = 7 * time.Second // a tunnel's sockets are watched from its fifth second on
)

// A peer that vanishes, with its machine or the way to it, is found though
// nobody closes anything: by probes while the tunnel is idle, by what is not
// acknowledged otherwise; and the peer at the other end gets a reset. One that
// is there and only does not read is left alone.
func TestDeadPeers(t *testing.T) {
	t.Parallel()
	west, middle, east := netns.New(t, "west"), netns.New(t, "middle"), netns.New(t, "east")
	netns.Link(t, west, "10.9.1.2/24", middle, "10.9.1.1/24")
	netns.Link(t, middle, "10.9.2.1/24", east, "10.9.2.2/24")

	cases := []struct {
		name   string
		client bool          // it is the client that vanishes
		bytes  bool          // with bytes on their way to it
		young  bool          // before its sockets are watched
		limit  time.Duration // 0 where nobody vanishes
	}{
		{name: "the client is idle", client: true, limit: deadIdle},
		{name: "the service is idle", limit: deadIdle},
		{name: "the client is sent to", client: true, bytes: true, limit: deadUnack},
		{name: "the service is sent to", bytes: true, limit: deadUnack},
		{name: "the client is young and sent to", client: true, bytes: true, young: true, limit: deadUnack},
		{name: "the service is young and idle", young: true, limit: deadIdle + standing},
		{name: "the client does not read", client: true, bytes: true},
		{name: "the service does not read", bytes: true},
	}

	// Each case has a service of its own, and so a port to drop.
	const firstPort = 4430
	services := ""
	accepted := make([]chan net.Conn, len(cases))
	for i := range cases {
		addr := net.JoinHostPort("10.9.2.2", strconv.Itoa(firstPort+i))
		services += service("s"+strconv.Itoa(i)+".test", addr)
		ln, err := east.Listen("tcp", addr)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = ln.Close() })
		accepted[i] = make(chan net.Conn, 1)
		go func() {
			c, err := ln.Accept()
			if err == nil {
				accepted[i] <- c
			}
		}()
	}
	g := prepare(t, options{Services: services, Wrap: []string{"ip", "netns", "exec", middle.Name}})
	g.addr = "10.9.1.1:8443"
	g.http.Transport = &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, network, addr string) (net.Conn, error) {
		return middle.Dial(ctx, network, addr)
	}}
	g.write(g.yaml(services))
	g.run()
	testnet.Eventually(t, patience, func() bool {
		g.alive()
		status, _, err := g.get("/readyz")
		return err == nil && status == http.StatusOK
	}, "the gateway is ready")

	// The cases wait together, and the namespaces for all of them.
	t.Run("cases", func(t *testing.T) {
		for i, tt := range cases {
			t.Run(tt.name, func(t *testing.T) {
				t.Parallel()
				client, err := west.Dial(t.Context(), "tcp", g.addr)
				if err != nil {
					t.Fatal(err)
				}
				defer client.Close()
				name := "s" + strconv.Itoa(i) + ".test"
				if err := bySNI.ask(client, name); err != nil {
					t.Fatal(err)
				}
				var server net.Conn
				select {
				case server = <-accepted[i]:
					defer server.Close()
				case <-time.After(patience):
					t.Fatal("the service was not dialed")
				}
				if err := expect(server, bySNI.carried(name)); err != nil {
					t.Fatal(err)
				}
				for _, c := range []net.Conn{client, server} { // their probes are no concern of the gateway's
					_ = c.(*net.TCPConn).SetKeepAlive(false)
				}
				gone, stays := server, client
				if tt.client {
					gone, stays = client, server
				}
				if tt.limit == 0 {
					leftAlone(t, gone, stays)
					return
				}
				if !tt.young {
					pause(t.Context(), standing)
				}
				_, port, _ := net.SplitHostPort(gone.LocalAddr().String())
				end := east
				if tt.client {
					end = west
				}
				end.Drop(t, "tcp dport "+port)
				middle.Drop(t, "tcp sport "+port)
				began := time.Now()
				if tt.bytes {
					if _, err := stays.Write([]byte("is anybody there?")); err != nil {
						t.Fatal(err)
					}
				}
				_ = stays.SetReadDeadline(began.Add(tt.limit + deadSlack))
				n, err := stays.Read(make([]byte, 1))
				took := time.Since(began)
				t.Logf("found after %v: %v", took.Round(100*time.Millisecond), err)
				if n > 0 || !wasReset(err) || took > tt.limit+deadSlack {
					t.Errorf("after %v the peer got %d bytes, %v; want a reset within %v", took, n, err, tt.limit)
				}
			})
		}
	})
	dead := 0
	for _, tt := range cases {
		if tt.limit > 0 {
			dead++
		}
	}
	// The peer hears the reset before the line is written.
	resets := func() int { return len(g.entries(func(e entry) bool { return e.str("reason") == "reset" })) }
	testnet.Eventually(t, patience, func() bool { return resets() >= dead }, "%d lines of the log with a reset", dead)
	if n := resets(); n != dead {
		t.Errorf("%d lines of the log with a reset, want %d", n, dead)
	}
}

// leftAlone sends to a peer that does not read for longer than a dead one is
// given, and then has it read all of it.
func leftAlone(t *testing.T, idler, sender net.Conn) {
	t.Helper()
	_ = idler.(*net.TCPConn).SetReadBuffer(16 << 10)
	const size = 64 << 20
	sent := make(chan error, 1)
	go func() {
		p := make([]byte, 1<<20)
		for range size / len(p) {
			if _, err := sender.Write(p); err != nil {
				sent <- err
				return
			}
		}
		sent <- sender.(*net.TCPConn).CloseWrite()
	}()
	select {
	case err := <-sent:
		t.Fatalf("%d bytes went to a peer that does not read: %v", size, err)
	case <-time.After(notReading):
	}
	_ = idler.(*net.TCPConn).SetReadBuffer(4 << 20) // or it takes thousands of round trips
	began := time.Now()                             // whoever was told of no room asks seldom by now whether there is some
	_ = idler.SetReadDeadline(began.Add(2 * deadUnack))
	_ = sender.SetWriteDeadline(began.Add(2 * deadUnack))
	n, err := io.Copy(io.Discard, idler)
	t.Logf("%d bytes in %v", n, time.Since(began).Round(100*time.Millisecond))
	if n != size || err != nil {
		t.Errorf("a peer that did not read for %v got %d of %d bytes, %v", notReading, n, size, err)
	}
	if err := <-sent; err != nil && !errors.Is(err, net.ErrClosed) {
		t.Errorf("the sender: %v", err)
	}
}
