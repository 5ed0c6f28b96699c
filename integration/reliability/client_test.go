//go:build linux

package reliability

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
	"unicode"

	"culvert.dev/internal/testnet"
)

// patience bounds what is not a promise itself: a machine may be busy.
const patience = 30 * time.Second

// sourceIP is the address of the n-th client.
func sourceIP(n int) string { return fmt.Sprintf("127.1.%d.%d", n>>8&255, n&255) }

// dialFrom connects from the address of the n-th client.
func dialFrom(n int, addr string) (*net.TCPConn, error) {
	d := net.Dialer{
		Timeout:   patience,
		LocalAddr: &net.TCPAddr{IP: net.ParseIP(sourceIP(n))},
		// The port is chosen when the socket connects: one that is chosen by
		// bind can't be shared by connections to different places.
		Control: func(_, _ string, c syscall.RawConn) error {
			const bindAddressNoPort = 24 // IP_BIND_ADDRESS_NO_PORT
			return c.Control(func(fd uintptr) { _ = syscall.SetsockoptInt(int(fd), syscall.IPPROTO_IP, bindAddressNoPort, 1) })
		},
	}
	c, err := d.Dial("tcp", addr)
	if err != nil {
		return nil, err
	}
	return c.(*net.TCPConn), nil
}

// A way is one of the two ways to say where to.
type way struct {
	name     string
	preamble func(target string) []byte // what a client says to reach target
	yes      string                     // what it hears before the service's bytes
	// The refusals by reason: the TLS alert or the HTTP status.
	code map[string]int
}

var (
	bySNI = way{
		name:     "sni",
		preamble: func(target string) []byte { return hello(target) },
		code:     map[string]int{"no-route": 112, "not-exposed": 112, "dial-failed": 80, "dial-timeout": 80, "overload": 80},
	}
	byConnect = way{
		name: "connect",
		preamble: func(target string) []byte {
			return fmt.Appendf(nil, "CONNECT %s:443 HTTP/1.1\r\nHost: %s:443\r\n\r\n", target, target)
		},
		yes:  "HTTP/1.1 200 Connection Established\r\n\r\n",
		code: map[string]int{"no-route": 403, "not-exposed": 403, "dial-failed": 502, "dial-timeout": 504, "overload": 503},
	}
)

// eachWay runs a test for both ways in.
func eachWay(t *testing.T, f func(t *testing.T, w way)) {
	for _, w := range []way{bySNI, byConnect} {
		t.Run(w.name, func(t *testing.T) { f(t, w) })
	}
}

// carried is what of the preamble the service gets.
func (w way) carried(target string) []byte {
	if w.yes != "" {
		return nil
	}
	return w.preamble(target)
}

// ask says on c where to and hears the yes, where there is one.
func (w way) ask(c net.Conn, target string) error {
	if _, err := c.Write(w.preamble(target)); err != nil {
		return err
	}
	return expect(c, []byte(w.yes))
}

// enter is ask for a service that is an echo: when it returns, both ends of
// the tunnel stand, and the service got the very bytes.
func (w way) enter(c net.Conn, target string) error {
	if err := w.ask(c, target); err != nil {
		return err
	}
	if err := expect(c, w.carried(target)); err != nil {
		return err
	}
	return echo(c, "x")
}

// echo sends text and expects it back.
func echo(c net.Conn, text string) error {
	if _, err := io.WriteString(c, text); err != nil {
		return err
	}
	return expect(c, []byte(text))
}

// expect reads exactly want.
func expect(c net.Conn, want []byte) error {
	_ = c.SetReadDeadline(time.Now().Add(patience))
	defer c.SetReadDeadline(time.Time{})
	got := make([]byte, len(want))
	n, err := io.ReadFull(c, got)
	if !bytes.Equal(got[:n], want[:n]) {
		rest := make([]byte, 512)
		_ = c.SetReadDeadline(time.Now().Add(50 * time.Millisecond))
		m, _ := c.Read(rest)
		return fmt.Errorf("got %q%q, want %q", got[:n], rest[:m], want)
	}
	if err != nil {
		return fmt.Errorf("after %d of %d bytes: %w", n, len(want), err)
	}
	return nil
}

// tunnel opens a tunnel to an echo service and closes it with the test.
func (g *gateway) tunnel(w way, source int, target string) *net.TCPConn {
	g.t.Helper()
	c := g.mustDial(source)
	if err := w.enter(c, target); err != nil {
		g.t.Fatalf("%s: a tunnel to %s: %v", w.name, target, err)
	}
	return c
}

// through is a testnet.Dial by this way to a service whose endpoint is b.
func (g *gateway) through(w way, b *testnet.Backend, target string) testnet.Dial {
	return b.Through(func(context.Context) (net.Conn, error) {
		c, err := g.dial(1)
		if err != nil || w.yes == "" { // the hello is Through's preamble
			return c, err
		}
		if err := w.ask(c, target); err != nil {
			_ = c.Close()
			return nil, err
		}
		return c, nil
	}, w.carried(target))
}

// A refusal is what a client that was told no has seen.
type refusal struct {
	code  int // TLS alert or HTTP status; 0 where there was neither
	text  string
	end   testnet.Ending
	after time.Duration // from the last byte of the request
}

// refused asks for target and returns the refusal.
func (g *gateway) refused(w way, source int, target string) refusal {
	g.t.Helper()
	return g.refusedRaw(source, w.preamble(target))
}

// refusedRaw sends raw and returns the refusal.
func (g *gateway) refusedRaw(source int, raw []byte) refusal {
	g.t.Helper()
	c, err := g.dial(source)
	if err != nil {
		g.t.Fatal(err)
	}
	defer c.Close()
	return request(c, raw)
}

// request sends raw on c and returns what comes back.
func request(c net.Conn, raw []byte) refusal {
	// Written beside the reading, as the answer may come before the last byte.
	var wg sync.WaitGroup
	defer wg.Wait()
	start := time.Now()
	wg.Go(func() { _, _ = c.Write(raw) })
	r := readRefusal(c)
	r.after = time.Since(start)
	_ = c.Close() // for the writing
	return r
}

func readRefusal(c net.Conn) (r refusal) {
	_ = c.SetReadDeadline(time.Now().Add(patience))
	var b bytes.Buffer
	_, err := io.Copy(&b, io.LimitReader(c, 64<<10))
	if err == nil {
		err = io.EOF
	}
	r.end, r.text = testnet.EndingOf(err), b.String()
	p := b.Bytes()
	switch {
	case len(p) == 7 && p[0] == 21 && p[3] == 0 && p[4] == 2 && p[5] == 2:
		r.code = int(p[6])
	case bytes.HasPrefix(p, []byte("HTTP/1.1 ")):
		_, _ = fmt.Sscan(r.text[len("HTTP/1.1 "):], &r.code)
	}
	return r
}

func (r refusal) String() string {
	return fmt.Sprintf("%d, %s after %v, %q", r.code, r.end, r.after.Round(time.Millisecond), r.text)
}

// hopeless is how many failures end a crowd: the rest would wait in vain as long as
// these have.
const hopeless = 50

// crowd calls f for 0 to n-1, some at a time, and reports the errors.
func crowd(t *testing.T, n, workers int, f func(i int) error) {
	t.Helper()
	next := make(chan int)
	var (
		wg     sync.WaitGroup
		mu     sync.Mutex // guards failed and first
		failed int
		first  error
	)
	for range workers {
		wg.Go(func() {
			for i := range next {
				if err := f(i); err != nil {
					mu.Lock()
					if failed++; first == nil {
						first = fmt.Errorf("number %d: %w", i, err)
					}
					mu.Unlock()
				}
			}
		})
	}
	for i := range n {
		next <- i
		mu.Lock()
		enough := failed >= hopeless
		mu.Unlock()
		if enough {
			break
		}
	}
	close(next)
	wg.Wait()
	if failed > 0 {
		t.Errorf("%d of %d failed; the first: %v", failed, n, first)
	}
}

// percentile sorts ds and returns the p-th of a hundred.
func percentile(ds []time.Duration, p int) time.Duration {
	slices.Sort(ds)
	return ds[min(len(ds)*p/100, len(ds)-1)]
}

// wasReset reports whether err says that the peer, or the way to it, aborted.
func wasReset(err error) bool {
	return err != nil && !errors.Is(err, io.EOF) && testnet.EndingOf(err) == testnet.RST
}

// The parts of a ClientHello (RFC 8446 section 4.1.2).

func vec16(parts ...[]byte) []byte {
	b := bytes.Join(parts, nil)
	return append(binary.BigEndian.AppendUint16(nil, uint16(len(b))), b...)
}

func extension(kind uint16, data []byte) []byte {
	return append(binary.BigEndian.AppendUint16(nil, kind), vec16(data)...)
}

// serverName is the extension that names name, more than once if asked to.
func serverName(names ...string) []byte {
	var list []byte
	for _, n := range names {
		list = append(append(list, 0), vec16([]byte(n))...)
	}
	return extension(0, vec16(list))
}

// helloWith is a ClientHello with the given extensions and without its
// handshake header.
func helloWith(extensions ...[]byte) []byte {
	return bytes.Join([][]byte{
		{3, 3}, bytes.Repeat([]byte{0x5a}, 32), {0}, vec16([]byte{0x13, 1, 0x13, 2}), {1, 0}, vec16(extensions...),
	}, nil)
}

// helloBody is a ClientHello that names name, with an extension of padding
// bytes of zeros, if that is not negative.
func helloBody(name string, padding int) []byte {
	if padding < 0 {
		return helloWith(serverName(name))
	}
	return helloWith(serverName(name), extension(21, make([]byte, padding)))
}

// records puts the handshake header in front of body and cuts it into records
// of at most size bytes.
func records(body []byte, size int) []byte {
	msg := append([]byte{1, byte(len(body) >> 16), byte(len(body) >> 8), byte(len(body))}, body...)
	var raw []byte
	for p := range slices.Chunk(msg, size) {
		raw = append(raw, append([]byte{22, 3, 1}, vec16(p)...)...)
	}
	return raw
}

// hello is a ClientHello of 512 bytes, the size many clients pad theirs to.
func hello(name string) []byte {
	const size = 512
	natural := len(records(helloBody(name, 0), 16<<10))
	return records(helloBody(name, max(size-natural, 0)), 16<<10)
}

// unprintable reports the first rune of s that must not stand in a log line.
func unprintable(s string) (rune, bool) {
	i := strings.IndexFunc(s, func(r rune) bool { return !unicode.IsPrint(r) })
	if i < 0 {
		return 0, false
	}
	return []rune(s[i:])[0], true
}
