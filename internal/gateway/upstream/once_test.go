package upstream

import (
	"bufio"
	"context"
	"io"
	"net"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"culvert.dev/internal/testnet"
	"culvert.dev/registry"
	"culvert.dev/tunnel"
)

// A proxy answers CONNECT over HTTP/1.1, and records what comes.
type proxy struct {
	addr string

	mu   sync.Mutex // guards got
	got  []string   // of each connection: the request line, and the bytes behind the head
	done sync.WaitGroup
}

// newProxy starts a proxy that answers each request and then, where it stays, reads until
// the client has ended.
func newProxy(t *testing.T, answer string, stays bool) *proxy {
	t.Helper()
	p := &proxy{}
	p.done.Add(1)
	first := sync.OnceFunc(p.done.Done)
	p.addr = testnet.Service(t, func(c net.Conn) {
		r := bufio.NewReader(c)
		line, err := r.ReadString('\n')
		if err != nil {
			return
		}
		for head := line; strings.TrimSpace(head) != ""; {
			if head, err = r.ReadString('\n'); err != nil {
				return
			}
		}
		_, _ = io.WriteString(c, answer)
		rest := []byte(nil)
		if stays {
			rest, _ = io.ReadAll(r)
		} else {
			if b := r.Buffered(); b > 0 { // what came with the head
				rest, _ = r.Peek(b)
			}
			if tcp, ok := c.(*net.TCPConn); ok {
				_ = tcp.SetLinger(0)
			}
		}
		_ = c.Close()
		p.mu.Lock()
		p.got = append(p.got, strings.TrimSpace(line)+" "+string(rest))
		p.mu.Unlock()
		first()
	})
	return p
}

func (p *proxy) requests() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.got
}

// The client of a request that goes by several carriers has its bytes sent once. CONNECT
// itself, which has none of them, is sent by the next carrier only where the one before has
// ended without an answer. Once a gateway has said anything, the request goes nowhere else.
func TestFallbackSendsBytesOnce(t *testing.T) {
	const connect, ok = "CONNECT shop.test:443 HTTP/1.1", "HTTP/1.1 200 OK\r\n\r\n"
	for name, row := range map[string]struct {
		answer string // of the first gateway, which then aborts the connection
		second string // what the second one gets; "" for nothing
		reason tunnel.Reason
	}{
		"no answer":      {"", connect + " hello", ""},
		"half an answer": {"HTTP/1.1 20", connect + " hello", ""},
		"200":            {ok, "", ""},
		"refused":        {"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n", "", tunnel.Denied},
		"its endpoint":   {"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\n\r\n", "", tunnel.DialFailed},
	} {
		t.Run(name, func(t *testing.T) {
			first, second := newProxy(t, row.answer, false), newProxy(t, ok, true)
			up := &Transports{Direct: &tunnel.NetDialer{}}
			defer up.Close()
			var carriers []fallbackCarrier
			for _, p := range []*proxy{first, second} {
				hop, err := up.NextHop([]registry.Hop{{Proto: "connect", Addresses: []string{p.addr}}})
				if err != nil {
					t.Fatal(err)
				}
				carriers = append(carriers, fallbackCarrier{Transport: hop, name: p.addr, probe: func(context.Context) error { return nil }})
			}
			f := newFallbackDialer("gw.test:443", carriers...)
			defer f.probes.Close()
			c, err := f.Dial(t.Context(), &tunnel.Endpoint{Host: "shop.test", Addr: netip.AddrPortFrom(netip.Addr{}, 443)}, &tunnel.Request{})
			if (err != nil) != (row.reason != "") || err != nil && row.reason != tunnel.ReasonOf(err) {
				t.Errorf("got %v, want reason %q", err, row.reason)
			}
			if c != nil {
				_ = c.SetDeadline(time.Now().Add(time.Minute))
				_, _ = io.WriteString(c, "hello")
				_ = c.Close()
			}
			first.done.Wait()
			if row.second != "" {
				second.done.Wait()
			}
			for _, got := range first.requests() {
				if !strings.HasPrefix(got, connect) || strings.HasSuffix(got, "hello") && row.answer != ok {
					t.Errorf("the first gateway got %q, want the request alone", got)
				}
			}
			if n := len(first.requests()); n != 1 {
				t.Errorf("the first gateway got %d requests, want 1", n)
			}
			if got := strings.Join(second.requests(), ", "); got != row.second {
				t.Errorf("the second gateway got %q, want %q", got, row.second)
			}
		})
	}
}
