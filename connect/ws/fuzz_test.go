package ws

import (
	"bytes"
	"errors"
	"io"
	"net/netip"
	"strings"
	"testing"

	"culvert.dev/connect"
	"culvert.dev/internal/testnet"
	"culvert.dev/tunnel"
)

// A reference reads a client's whole output by the rules of RFC 6455 and
// culvert.v1, in the plainest way there is.
func reference(in []byte) (data []byte, orderly bool) { return referenceOf(in, Server, true) }

// referenceOf is reference for what comes to a side, on which an empty message
// may be the end of the stream.
func referenceOf(in []byte, side Side, ends bool) (data []byte, orderly bool) {
	masked, keyLen := byte(0), 0
	if side == Server {
		masked, keyLen = 1, 4
	}
	inMessage, size, empty := false, 0, 0
	for {
		if len(in) < 2 {
			return data, false
		}
		fin, rsv, op, length := in[0]>>7 == 1, in[0]>>4&7, in[0]&15, int(in[1]&127)
		if rsv != 0 || in[1]>>7 != masked || op != 0 && op != 2 && op != 8 && op != 9 && op != 10 {
			return data, false
		}
		in = in[2:]
		for _, wide := range []struct{ mark, bytes, least int }{{126, 2, 126}, {127, 8, 1 << 16}} {
			if length != wide.mark {
				continue
			}
			if op >= 8 || len(in) < wide.bytes {
				return data, false
			}
			length = 0
			for _, c := range in[:wide.bytes] {
				length = length<<8 | int(c)
			}
			if length < wide.least { // also one of 2^63 or more
				return data, false
			}
			in = in[wide.bytes:]
			break
		}
		if op >= 8 && (!fin || length > 125) || op == 0 && !inMessage || op == 2 && inMessage || len(in) < keyLen {
			return data, false
		}
		key := [4]byte{}
		in = in[copy(key[:keyLen], in):]
		if op >= 8 || length == 0 {
			if empty++; empty > maxEmptyFrames {
				return data, false // the fuzzer is faster than a second
			}
		}
		whole := len(in) >= length
		payload := bytes.Clone(in[:min(length, len(in))])
		in = in[len(payload):]
		for i := range payload {
			payload[i] ^= key[i%4]
		}
		switch {
		case op == 8:
			code, _, err := parseClose(payload)
			return data, whole && err == nil && (code == 1000 || code == 1005)
		case op > 8:
			if !whole {
				return data, false
			}
			continue
		}
		if !inMessage {
			size = 0
		}
		inMessage = !fin
		size += length
		data = append(data, payload...)
		if !whole {
			return data, false
		}
		if fin && size == 0 && ends {
			return data, true
		}
	}
}

// nothing takes what is written and is no net.Conn.
type nothing struct{ io.Reader }

func (nothing) Write(p []byte) (int, error) { return len(p), nil }
func (nothing) Close() error                { return nil }

// FuzzFrames has a Stream read what a reference reads, however it is cut.
func FuzzFrames(f *testing.F) {
	for _, seed := range [][]byte{
		frame(0x82, true, []byte("good")), frame(0x82, true, nil), closeFrame(1000, true, "bye"), frame(0x88, true, nil),
		join(frame(0x02, true, []byte("a")), frame(0x89, true, []byte("b")), frame(0x80, true, []byte("c")), frame(0x82, true, nil)),
		join(frame(0x02, true, nil), frame(0x80, true, nil)), {0x82, 0xff, 0, 0, 0, 0, 0, 1, 0, 0, 1, 2, 3, 4, 5}, frame(0x82, true, bytes.Repeat([]byte("x"), 126)),
		frame(0x82, false, nil), frame(0xc2, true, nil), frame(0x81, true, nil), closeFrame(1006, true, ""), frame(0x89, true, make([]byte, 126)),
		{0x82, 0xff, 0x80, 0, 0, 0, 0, 0, 0, 0}, {0x82, 0xff, 0, 0, 0, 0, 0, 0x10, 0, 1, 0, 0, 0, 0},
	} {
		f.Add(seed, 1)
		f.Add(seed, 4096)
	}
	f.Fuzz(func(t *testing.T, in []byte, chunk int) {
		if chunk = chunk & 0xffff; chunk == 0 {
			chunk = 1
		}
		testnet.Bounded(t, 2*len(in)+16<<10, func() { // a Stream has a buffer
			s := NewStream(nothing{bytes.NewReader(in)}, Server, Subprotocol, Options{Ping: -1})
			_, _ = io.Copy(io.Discard, struct{ io.Reader }{s})
			_ = s.Abort()
		})
		s := NewStream(nothing{bytes.NewReader(in)}, Server, Subprotocol, Options{Ping: -1})
		defer s.Abort()
		var got []byte
		var err error
		for p := make([]byte, chunk); err == nil; {
			var n int
			n, err = s.Read(p)
			if got = append(got, p[:n]...); n == 0 && err == nil {
				t.Fatal("a read of nothing without an error")
			}
		}
		want, orderly := reference(in)
		if !bytes.Equal(got, want) || (err == io.EOF) != orderly {
			t.Errorf("%x: got %x, %v; want %x, orderly %v", in, got, err, want, orderly)
		}
		if _, again := s.Read(make([]byte, 1)); again == nil || again.Error() != err.Error() {
			t.Errorf("%x: got %v and then %v", in, err, again)
		}
	})
}

// FuzzHandshake: whatever is accepted has one meaning, and every refusal is an
// answer of one line that can be sent.
func FuzzHandshake(f *testing.F) {
	for _, seed := range []string{
		sample, handshake("/.culvert/tunnel", "Culvert-Target: [::1]:443"), handshake("/.culvert/tunnel/%5b::1%5d:1", "Origin: null"),
		handshake("/.culvert/tunnel/a:1", "Sec-WebSocket-Protocol: binary, culvert.v1"), "GET / HTTP/1.1\r\nHost: x\r\n\r\n",
		handshake("/.culvert/tunnel/a%00:1"), handshake("/.culvert/tunnel/a:1", "Via: 1.1 gw-1"), handshake("/x", "Sec-WebSocket-Version: 8"),
	} {
		f.Add(seed)
	}
	p := &Protocol{Via: "gw-1"}
	f.Fuzz(func(t *testing.T, in string) {
		head, err := connect.ParseHead([]byte(in))
		if err != nil {
			return
		}
		var u upgrade
		var req *tunnel.Request
		testnet.Bounded(t, 10*len(in)+4<<10, func() { // an error quotes what was asked for
			req = &tunnel.Request{}
			if u, err = checkUpgrade(&head); err == nil {
				host, _ := head.Fields.Get("Host")
				_, err = p.Admit(t.Context(), req, host, head.Target, head.Fields)
			}
		})
		if err != nil {
			var e *tunnel.Error
			if r := p.Refusal(nil, err); !errors.As(err, &e) || r.Status < 400 || strings.ContainsAny(r.Text, "\r\n\x00\x1b") {
				t.Errorf("%q: got %v, answered %+v", in, err, r)
			}
			return
		}
		if req.Port == 0 || req.Name.IsZero() == (req.Addr == netip.Addr{}) || len(u.key) != 24 {
			t.Errorf("%q: got request %+v, upgrade %+v", in, req, u)
		}
		if _, n := head.Fields.Get("Origin"); n > 0 || head.Method != "GET" || head.Minor < 1 {
			t.Errorf("%q was accepted", in)
		}
		to, err := connect.ParseAuthority(req.Target())
		if err != nil || to.Name != req.Name || to.Addr != req.Addr || to.Port != req.Port {
			t.Errorf("%q: target %q reads as %v, %v", in, req.Target(), to, err)
		}
	})
}
