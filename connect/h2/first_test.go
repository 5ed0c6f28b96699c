package h2

import (
	"context"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"golang.org/x/net/http2"

	"culvert.dev/internal/testnet"
)

// A latePeer answers a request once it has read so many bytes of its stream, and hands over
// all that it reads.
func latePeer(t *testing.T, far net.Conn, before int, status string) (got <-chan string) {
	all := make(chan string, 1)
	go func() {
		r := newRaw(t, far)
		_, _ = io.ReadFull(far, make([]byte, len(preface)))
		_ = r.fr.WriteSettings()
		var text strings.Builder
		answered := false
		for {
			f, err := r.next()
			if err != nil {
				break
			}
			if d, ok := f.(*http2.DataFrame); ok {
				text.Write(d.Data())
				if d.StreamEnded() {
					break
				}
			}
			if !answered && text.Len() >= before {
				answered = true
				_ = r.fr.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: fieldList(":status", status), EndHeaders: true, EndStream: status != "200"})
			}
		}
		all <- text.String()
		_, _ = io.Copy(io.Discard, far)
	}()
	return all
}

// connected returns both ends of a TCP connection.
func connected(t *testing.T) (near, far net.Conn) {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	if near, err = net.Dial("tcp", ln.Addr().String()); err != nil {
		t.Fatal(err)
	}
	if far, err = ln.Accept(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = near.Close()
		_ = far.Close()
	})
	return near, far
}

// TestFirstBytesGoWithTheRequest: the peer has them before it answers, and once.
func TestFirstBytesGoWithTheRequest(t *testing.T) {
	long := strings.Repeat("0123456789abcdef", 2<<10) // 32 KiB
	for _, c := range []struct {
		name   string
		first  string
		before int // bytes that the peer has before it answers
		writes []string
	}{
		{"in one Write", "hello", 5, []string{"hello, world"}},
		{"alone", "hello", 5, []string{"hello", ", world"}},
		{"byte by byte", "hel", 3, []string{"h", "e", "l", "l", "o"}},
		{"across the end", "hello", 5, []string{"hel", "lo, w", "orld"}},
		{"more than fits", long, maxFirst, []string{long, "more"}},
		{"none", "", 0, []string{"hello"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			near, far := connected(t)
			got := latePeer(t, far, c.before, "200")
			d := &Dialer{Proxy: "proxy:1", Dialer: testnet.DialOnce(near)}
			defer d.Close()
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			s, _, err := d.OpenWith(ctx, &Head{Authority: "svc:1"}, []byte(c.first))
			if err != nil {
				t.Fatal(err)
			}
			_ = s.SetDeadline(time.Now().Add(patience))
			for _, w := range c.writes {
				if n, err := io.WriteString(s, w); n != len(w) || err != nil {
					t.Fatalf("Write of %d bytes: %d, %v", len(w), n, err)
				}
			}
			if err := s.(*Stream).CloseWrite(); err != nil {
				t.Fatal(err)
			}
			if want := strings.Join(c.writes, ""); <-got != want {
				t.Errorf("the peer did not get the %d bytes that were written, once and in order", len(want))
			}
		})
	}
}

// TestFirstBytesAndOthers: a stream that begins with something else is not sent.
func TestFirstBytesAndOthers(t *testing.T) {
	near, far := connected(t)
	got := latePeer(t, far, 5, "200")
	d := &Dialer{Proxy: "proxy:1", Dialer: testnet.DialOnce(near)}
	s, _, err := d.OpenWith(t.Context(), &Head{Authority: "svc:1"}, []byte("hello"))
	if err != nil {
		t.Fatal(err)
	}
	if n, err := io.WriteString(s, "help"); n != 0 || err == nil {
		t.Errorf("Write of something else: %d, %v", n, err)
	}
	_ = d.Close()
	if text := <-got; text != "hello" {
		t.Errorf("the peer got %q, want what went with the request alone", text)
	}
}

// TestFirstBytesAreRefused: a refusal is one whether they went along or not.
func TestFirstBytesAreRefused(t *testing.T) {
	near, far := connected(t)
	latePeer(t, far, 0, "403")
	d := &Dialer{Proxy: "proxy:1", Dialer: testnet.DialOnce(near)}
	if _, _, err := d.OpenWith(t.Context(), &Head{Authority: "svc:1"}, []byte(strings.Repeat("x", 1<<20))); err == nil || !strings.Contains(err.Error(), "403") {
		t.Errorf("OpenWith: %v, want the refusal", err)
	}
	_ = d.Close()
}
