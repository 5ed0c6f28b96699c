package upstream

import (
	"bytes"
	"context"
	"io"
	"net"
	"os"
	"testing"
	"time"

	"culvert.dev/internal/postgres"
	"culvert.dev/tunnel"
)

// A fed is a client whose bytes come in pieces, each by a read of its own. After them it is silent
// until the deadline, or has ended.
type fed struct {
	net.Conn
	pieces  [][]byte
	ends    bool
	answers []byte // to what the client has sent
	limited bool   // a deadline is set
}

func (c *fed) Read(p []byte) (int, error) {
	for len(c.pieces) > 0 && len(c.pieces[0]) == 0 {
		c.pieces = c.pieces[1:]
	}
	switch {
	case len(c.pieces) > 0:
		n := copy(p, c.pieces[0])
		c.pieces[0] = c.pieces[0][n:]
		return n, nil
	case c.ends:
		return 0, io.EOF
	case !c.limited:
		panic("a client that sends nothing is waited for without a limit")
	}
	return 0, os.ErrDeadlineExceeded
}

func (c *fed) Write(p []byte) (int, error) {
	c.answers = append(c.answers, p...)
	return len(p), nil
}

func (c *fed) SetReadDeadline(t time.Time) error {
	c.limited = !t.IsZero()
	return nil
}

func (c *fed) CloseWrite() error { return nil }

// Whatever a client begins with, and in whatever pieces: each byte goes on once, but for requests
// for TLS that were answered, and what passes begins a TLS handshake.
func FuzzFirstBytes(f *testing.F) {
	const sslRequest, gssRequest, hello = "\x00\x00\x00\x08\x04\xd2\x16\x2f", "\x00\x00\x00\x08\x04\xd2\x16\x30", "\x16\x03\x01\x00\x05\x01\x00\x00\x01\x00"
	for _, first := range []string{"", "x", hello, hello[:3], hello[:5], "GET / HTTP/1.1\r\n\r\n", sslRequest, sslRequest + hello, gssRequest + sslRequest + hello, gssRequest + gssRequest, sslRequest + "x", "\x00\x00\x00\x08\x04\xd2", "EHLO me\r\n"} {
		for _, size := range []byte{0, 1, 3, 8} {
			f.Add([]byte(first), size, true, false)
			f.Add([]byte(first), size, false, true)
		}
	}
	f.Fuzz(func(t *testing.T, sent []byte, size byte, answers, ends bool) {
		client := &fed{ends: ends}
		for rest := sent; len(rest) > 0; {
			n := min(len(rest), max(1, int(size)))
			if size == 0 {
				n = len(rest)
			}
			client.pieces = append(client.pieces, bytes.Clone(rest[:n]))
			rest = rest[n:]
		}
		u := &undecided{layer: &passingLayer{answersPostgres: answers}}
		got, passes, err := u.look(context.Background(), client)
		if len(client.answers) > 0 && !answers {
			t.Fatalf("a client that asks for nothing is answered %q", client.answers)
		}
		if len(client.answers) > 64 {
			t.Fatalf("%d answers", len(client.answers))
		}
		if err != nil {
			if _, ok := err.(*tunnel.Error); !ok {
				t.Fatalf("an error without a reason: %v", err)
			}
			return
		}
		client.ends, client.pieces = true, append(client.pieces, nil)
		all, err := io.ReadAll(got)
		if err != nil {
			t.Fatal(err)
		}
		if want := sent[len(client.answers)*postgres.RequestSize:]; !bytes.Equal(all, want) {
			t.Fatalf("got %q of %q, want %q", all, sent, want)
		}
		if begins := len(all) >= helloStart && tunnel.MayBeTLS(all[:helloStart]); passes != begins {
			t.Fatalf("passes is %v, and the client begins TLS is %v, with %q", passes, begins, all)
		}
		if !passes && bytes.IndexByte(client.answers, 'S') >= 0 {
			t.Fatalf("the client was promised TLS, and goes on with %q", all)
		}
	})
}
