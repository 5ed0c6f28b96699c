package sni

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"strings"
	"testing"
	"time"

	"culvert.dev/internal/testnet"
	"culvert.dev/tunnel"
)

// A script is a connection whose client has said all it will say.
type script struct {
	said  *bytes.Reader
	heard bytes.Buffer
}

func newScript(raw []byte) *script { return &script{said: bytes.NewReader(raw)} }

func (s *script) Read(p []byte) (int, error)       { return s.said.Read(p) }
func (s *script) Write(p []byte) (int, error)      { return s.heard.Write(p) }
func (s *script) Close() error                     { return nil }
func (s *script) LocalAddr() net.Addr              { return &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: 443} }
func (s *script) RemoteAddr() net.Addr             { return &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: 50000} }
func (s *script) SetDeadline(time.Time) error      { return nil }
func (s *script) SetReadDeadline(time.Time) error  { return nil }
func (s *script) SetWriteDeadline(time.Time) error { return nil }

// small is the seeds without those that are only long: they slow the fuzzer
// down and show it nothing.
func small(f *testing.F) map[string][]byte {
	all := seeds(f)
	maps.DeleteFunc(all, func(_ string, raw []byte) bool { return len(raw) > 4<<10 })
	return all
}

// oracle asks crypto/tls for the server name of a hello. It is false where
// crypto/tls refuses the hello.
func oracle(raw []byte) (name string, ok bool) {
	cfg := &tls.Config{GetConfigForClient: func(chi *tls.ClientHelloInfo) (*tls.Config, error) {
		name, ok = chi.ServerName, true
		return nil, errors.New("that is all")
	}}
	_ = tls.Server(newScript(raw), cfg).Handshake()
	return name, ok
}

// plain makes a hello of which crypto/tls reads what this package reads and
// nothing else: every other extension gets a type that is unknown. It leaves
// the framing alone.
func plain(msg []byte) []byte {
	msg = bytes.Clone(msg)
	at := 4 + 2 + 32
	at += 1 + int(msg[at])
	at += 2 + int(binary.BigEndian.Uint16(msg[at:]))
	at += 1 + int(msg[at])
	if at == len(msg) {
		return msg
	}
	unknown := uint16(0x2000) // to 0x6000: crypto/tls knows none of these
	for at += 2; at < len(msg); {
		switch binary.BigEndian.Uint16(msg[at:]) {
		case extServerName, extALPN, extSupportedVersions:
		default:
			binary.BigEndian.PutUint16(msg[at:], unknown)
			unknown++
		}
		at += 4 + int(binary.BigEndian.Uint16(msg[at+2:]))
	}
	return msg
}

// stricter are the refusals of hellos that crypto/tls reads: the parts of the
// errors' texts.
var stricter = []string{
	"name has",             // bytes and labels that no name has
	"name is too long",     // over 253 bytes
	"server name is",       // over 254 bytes, refused before it arrives
	"server name of type",  // RFC 6066's other types, which nobody uses
	"more than one server", // of which only one is a host_name
	"session id is",        // RFC 8446: at most 32 bytes
	"cipher suites are 0",  // RFC 8446: at least one
	"no compression",       // RFC 8446: at least one
	"hello of version",     // before SSLv3
	"spread over more",     // records
	"record of type",       // crypto/tls steps over warnings before a hello
	"record of major",      // crypto/tls takes the 2 of SSLv2 too
	"not TLS",              // the same, in the first record
}

// What this package reads, crypto/tls reads the same; what crypto/tls reads
// and this package refuses, it refuses for a reason that is listed.
func FuzzParse(f *testing.F) {
	for _, raw := range small(f) {
		f.Add(raw)
	}
	f.Fuzz(func(t *testing.T, raw []byte) {
		h, err := Parse(raw)
		name, ok := oracle(raw)
		switch {
		case err == ErrMore:
			if ok {
				t.Errorf("more is wanted of a hello for %q", name)
			}
			return
		case err != nil:
			for _, why := range stricter {
				if strings.Contains(err.Error(), why) {
					return
				}
			}
			if ok {
				t.Errorf("refused a hello for %q: %v", name, err)
			}
			return
		}
		if ok && name != h.RawName {
			t.Errorf("name %q, crypto/tls reads %q", h.RawName, name)
		}
		if strings.HasSuffix(h.RawName, ".") {
			return // crypto/tls refuses these
		}
		// It may also refuse an extension that is none of our business.
		if name, ok := oracle(records(plain(payload(raw[:h.Len])), MaxRecord)); !ok || name != h.RawName {
			t.Errorf("name %q, crypto/tls reads %q (%t) without other extensions", h.RawName, name, ok)
		}
		if want, err := tunnel.ParseName(h.RawName); want != h.Name {
			t.Errorf("name %q of %q, want %q (%v)", h.Name, h.RawName, want, err)
		}
	})
}

// Pieces do not matter, an answer stands whatever follows it, and memory is
// bounded by what was sent.
func FuzzFeed(f *testing.F) {
	for _, raw := range small(f) {
		f.Add(raw, uint16(1))
		f.Add(raw, uint16(1000))
	}
	f.Fuzz(func(t *testing.T, raw []byte, step uint16) {
		if len(raw) > MaxRaw {
			raw = raw[:MaxRaw]
		}
		var want Hello
		var wantErr error
		testnet.Bounded(t, 2*len(raw)+4<<10, func() { want, wantErr = Parse(raw) })
		_ = want.ALPN()

		var p Parser
		for n, final := 0, false; ; n = min(n+max(int(step), 1), len(raw)) {
			h, err := p.Feed(raw[:n])
			if whole := complete(raw[:n]); whole && err == ErrMore || !whole && err == nil {
				t.Fatalf("complete says %v after %d bytes, of which Feed says %v", whole, n, err)
			}
			switch {
			case err != ErrMore:
				if !same(h, want) || !alike(err, wantErr) {
					t.Fatalf("after %d bytes %+v (%v), at once %+v (%v)", n, h, err, want, wantErr)
				}
				if err == nil && n < want.Len {
					t.Fatalf("a hello of %d bytes after %d", want.Len, n)
				}
				final = true
			case final:
				t.Fatalf("ErrMore after a final answer, after %d bytes", n)
			}
			if n == len(raw) {
				if alike(err, ErrMore) != alike(wantErr, ErrMore) {
					t.Fatalf("in the end %v, at once %v", err, wantErr)
				}
				break
			}
		}

		verdict := (&Protocol{}).Sniff(raw)
		switch foreign := tunnel.ReasonOf(reasoned(wantErr)) == tunnel.BadPreamble; {
		case foreign != (verdict == tunnel.No):
			t.Errorf("Sniff = %d, Parse = %v", verdict, wantErr)
		case verdict == tunnel.More && wantErr != ErrMore:
			t.Errorf("Sniff wants more, Parse = %v", wantErr)
		}
	})
}

// alike compares errors but for their text, which may quote what had arrived.
func alike(a, b error) bool {
	var x, y *ParseError
	if errors.As(a, &x) && errors.As(b, &y) {
		return x.Reason == y.Reason && x.Alert == y.Alert && x.Offset == y.Offset && x.Limit == y.Limit
	}
	return a == b
}

// reasoned is err as ServeConn returns it.
func reasoned(err error) error {
	var bad *ParseError
	if errors.As(err, &bad) {
		return &tunnel.Error{Reason: bad.Reason, Err: err}
	}
	return err
}

// The handler is called for a hello with a name and for nothing else; the
// stream is what was sent; the client hears nothing but a well-formed refusal.
func FuzzServeConn(f *testing.F) {
	for _, raw := range small(f) {
		f.Add(raw, false)
	}
	f.Fuzz(func(t *testing.T, raw []byte, silent bool) {
		var p Protocol
		if silent {
			p.Refusal = RefuseClose
		}
		conn := newScript(raw)
		calls := 0
		err := p.ServeConn(t.Context(), tunnel.NewConn(conn), tunnel.HandlerFunc(func(_ context.Context, req *tunnel.Request) {
			calls++
			if req.Name.IsZero() {
				t.Error("a request without a name")
			}
			s, err := req.Accept()
			if err != nil {
				t.Fatal(err)
			}
			if got, err := io.ReadAll(s); err != nil || !bytes.Equal(got, raw) {
				t.Errorf("the stream has %d bytes (%v), want the %d that were sent", len(got), err, len(raw))
			}
		}))
		h, perr := Parse(raw)
		if routed := perr == nil && h.NameErr == nil; routed != (calls == 1) || routed != (err == nil) {
			t.Errorf("handler called %d times, ServeConn = %v, Parse = %+v, %v", calls, err, h, perr)
		}
		if err != nil && tunnel.ReasonOf(err) == tunnel.Internal {
			t.Errorf("no reason in %v", err)
		}
		switch heard := conn.heard.Bytes(); {
		case len(heard) == 0:
		case silent || err == nil:
			t.Errorf("the client heard %q, want nothing", heard)
		case bytes.HasPrefix(heard, []byte{21, 3, 3, 0, 2, 2}) && len(heard) == 7:
		case bytes.HasPrefix(heard, []byte("HTTP/1.1 400 ")):
		default:
			t.Errorf("the client heard %q", heard)
		}
	})
}

// A name that parses is written the same way again.
func FuzzParseIstio(f *testing.F) {
	for _, s := range []string{"outbound_.443_._.svc.example.test", "outbound_.80_.v1_.a", "outbound_.0_._.a", svc, "outbound_.1_._._.a"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		name, err := tunnel.ParseName(s)
		if err != nil {
			return
		}
		service, port, subset, ok := ParseIstio(name)
		if again := fmt.Sprintf("outbound_.%d_.%s_.%s", port, subset, service); ok && again != name.String() {
			t.Errorf("ParseIstio(%q) makes %q", name, again)
		}
	})
}
