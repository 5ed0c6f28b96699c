package delegation

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"hash/crc32"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"culvert.dev/internal/testnet"
)

// value returns a TLV.
func value(kind byte, v string) []byte {
	return append(binary.BigEndian.AppendUint16([]byte{kind}, uint16(len(v))), v...)
}

// proxyV2 returns a header with addresses of IPv4 and these values.
func proxyV2(command, family byte, values ...[]byte) []byte {
	body := []byte{192, 0, 2, 7, 127, 0, 0, 1, 0x1f, 0x90, 1, 187}
	if family != familyTCP4 {
		body = make([]byte, addressBytes[family])
	}
	body = append(body, bytes.Join(values, nil)...)
	h := append([]byte(proxySignature), command, family)
	return append(binary.BigEndian.AppendUint16(h, uint16(len(body))), body...)
}

// withChecksum adds a checksum to a header.
func withChecksum(h []byte) []byte {
	h = append(slices.Clone(h), typeChecksum, 0, 4, 0, 0, 0, 0)
	binary.BigEndian.PutUint16(h[14:], uint16(len(h)-headBytes))
	binary.BigEndian.PutUint32(h[len(h)-4:], crc32.Checksum(h, crc32.MakeTable(crc32.Castagnoli)))
	return h
}

// listen returns a listener of v, whose TLS asks for certificates.
func (w *world) listen(t *testing.T, v *Verifier) net.Listener {
	t.Helper()
	ln := v.Listener(tls.NewListener(testnet.Listen(t), &tls.Config{Certificates: []tls.Certificate{w.service.TLS}, ClientAuth: tls.RequireAnyClientCert}))
	t.Cleanup(func() { _ = ln.Close() })
	return ln
}

// dial returns a session of the gateway with the service at addr, and a token for it.
func (w *world) dial(t *testing.T, addr string) (*tls.Conn, string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	d := tls.Dialer{Config: &tls.Config{Certificates: []tls.Certificate{w.gateway.TLS}, RootCAs: w.ca.Pool(), ServerName: "shop.test"}}
	c, err := d.DialContext(ctx, "tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	_ = c.SetDeadline(time.Now().Add(patience))
	cs := c.(*tls.Conn).ConnectionState()
	token, err := signer(t, gatewayID, w.gateway).Sign(assertion(t, &cs))
	if err != nil {
		t.Fatal(err)
	}
	return c.(*tls.Conn), token
}

// A connection through a gateway has the caller's name, address and bytes. What else begins
// a connection is refused before a byte is exchanged.
func TestListener(t *testing.T) {
	w := newWorld(t)
	for _, row := range []struct {
		name     string
		header   func(token string) []byte
		optional bool
		why      Reason // "" for none
		text     string
		nobody   bool // there is no assertion
	}{
		{name: "an assertion", header: func(s string) []byte { return proxyV2(commandProxy, familyTCP4, value(TLV, s)) }},
		{name: "all values", header: func(s string) []byte {
			return withChecksum(proxyV2(commandProxy, familyTCP4, value(0x01, "h2"), value(typeAuthority, "shop.test"), value(0x20, "\x01\x00\x00\x00\x00"), value(TLV, s), value(0x05, "id"), value(0xee, ""), value(0xee, "")))
		}},
		{name: "no addresses", header: func(s string) []byte { return proxyV2(commandProxy, familyUnspec, value(TLV, s)) }},
		{name: "IPv6", header: func(s string) []byte { return proxyV2(commandProxy, familyTCP6, value(TLV, s)) }},
		{name: "no assertion", header: func(string) []byte { return proxyV2(commandProxy, familyTCP4) }, why: Missing, text: "there is no assertion"},
		{name: "no assertion, optional", header: func(string) []byte {
			return proxyV2(commandProxy, familyTCP4, value(typeAuthority, "shop.test"))
		}, optional: true, nobody: true},
		{name: "LOCAL", header: func(s string) []byte { return proxyV2(commandLocal, familyTCP4, value(TLV, s)) }, why: Missing, text: "there is no assertion"},
		{name: "a wrong assertion, optional", header: func(string) []byte { return proxyV2(commandProxy, familyTCP4, value(TLV, "a.b.c")) }, optional: true, why: Malformed, text: "not a JWS"},
		{name: "two assertions", header: func(s string) []byte {
			return proxyV2(commandProxy, familyTCP4, value(TLV, s), value(TLV, s))
		}, why: Malformed, text: "value 0xe1 of the PROXY header is repeated"},
		{name: "two authorities", header: func(s string) []byte {
			return proxyV2(commandProxy, familyTCP4, value(TLV, s), value(typeAuthority, "a"), value(typeAuthority, "b"))
		}, why: Malformed, text: "value 0x02 of the PROXY header is repeated"},
		{name: "an authority that is no text", header: func(s string) []byte {
			return proxyV2(commandProxy, familyTCP4, value(TLV, s), value(typeAuthority, "\xff"))
		}, why: Malformed, text: "not UTF-8"},
		{name: "a wrong checksum", header: func(s string) []byte {
			return proxyV2(commandProxy, familyTCP4, value(TLV, s), value(typeChecksum, "abcd"))
		}, why: Malformed, text: "checksum of the PROXY header is wrong"},
		{name: "a short checksum", header: func(s string) []byte { return proxyV2(commandProxy, familyTCP4, value(typeChecksum, "a")) }, why: Malformed, text: "has 1 bytes, want 4"},
		{name: "a value that overruns", header: func(s string) []byte { return proxyV2(commandProxy, familyTCP4, []byte{TLV, 0xff, 0xff}) }, why: Malformed, text: "a value overruns"},
		{name: "half a value", header: func(s string) []byte { return proxyV2(commandProxy, familyTCP4, []byte{TLV}) }, why: Malformed, text: "a value overruns"},
		{name: "addresses that overrun", header: func(s string) []byte {
			return append([]byte(proxySignature), commandProxy, familyTCP4, 0, 1, 0)
		}, why: Malformed, text: "the addresses overrun"},
		{name: "a large assertion", header: func(s string) []byte {
			return proxyV2(commandProxy, familyTCP4, value(TLV, strings.Repeat("a", MaxTLV+1)))
		}, why: TooLarge, text: "has 1537 bytes in a PROXY header, limit 1536"},
		{name: "a large header", header: func(s string) []byte {
			return proxyV2(commandProxy, familyTCP4, value(TLV, s), value(0xee, strings.Repeat("a", maxHeader)))
		}, why: TooLarge, text: "limit 4096"},
		{name: "datagrams", header: func(s string) []byte { return proxyV2(commandProxy, 0x12, value(TLV, s)) }, why: Malformed, text: "family 0x12"},
		{name: "another command", header: func(s string) []byte { return proxyV2(0x22, familyTCP4, value(TLV, s)) }, why: Malformed, text: "command 0x22"},
		{name: "version 1", header: func(string) []byte { return []byte("PROXY TCP4 192.0.2.7 127.0.0.1 8080 443\r\n") }, why: Missing, text: "does not begin with a PROXY header of version 2"},
		{name: "HTTP", header: func(string) []byte { return []byte("GET / HTTP/1.1\r\nHost: shop.test\r\n\r\n") }, why: Missing, text: "does not begin with"},
		{name: "the end", header: func(string) []byte { return []byte(proxySignature) }, why: Missing, text: "ended before the PROXY header"},
		{name: "the end in a value", header: func(s string) []byte { return proxyV2(commandProxy, familyTCP4, value(TLV, s))[:100] }, why: Missing, text: "ended before the PROXY header"},
	} {
		t.Run(row.name, func(t *testing.T) {
			v := w.verifier()
			v.Optional = row.optional
			ln := w.listen(t, v)
			done := make(chan struct{})
			go func() {
				defer close(done)
				raw, err := ln.Accept()
				if err != nil {
					t.Error(err)
					return
				}
				defer raw.Close()
				c := raw.(*Conn)
				_, err = io.WriteString(c, "220 hello\r\n") // the server speaks first, and waits for the header
				if row.why != "" {
					if reason(err) != row.why || !strings.Contains(err.Error(), row.text) {
						t.Errorf("got %v, want %s and %q", err, row.why, row.text)
					}
					if _, again := c.Read(make([]byte, 1)); again != err {
						t.Errorf("then got %v, want the same", again)
					}
					return
				}
				if err != nil {
					t.Error(err)
					return
				}
				a, err := c.Assertion()
				if err != nil || row.nobody != (a == nil) || a != nil && (a.Subject != callerID || !slices.Equal(a.Actors, []string{gatewayID})) {
					t.Errorf("got %+v, %v, want the caller", a, err)
				}
				if addr, name := c.Client(); row.nobody && (addr.IsValid() || name != "") || row.name == "all values" && (addr != netip.MustParseAddrPort("192.0.2.7:8080") || name != "shop.test") {
					t.Errorf("got the client %v and the name %q", addr, name)
				}
				if got, err := io.ReadAll(c); string(got) != "the client's bytes" || err != nil {
					t.Errorf("got %q, %v", got, err)
				}
			}()
			c, token := w.dial(t, ln.Addr().String())
			_, _ = c.Write(row.header(token))
			if row.why == "" {
				_, _ = io.WriteString(c, "the client's bytes")
			}
			_ = c.CloseWrite()
			got, _ := io.ReadAll(c)
			if want := "220 hello\r\n"; row.why == "" && string(got) != want || row.why != "" && len(got) > 0 {
				t.Errorf("the client got %q", got)
			}
			<-done
		})
	}
}

// A client that sends no header is not waited for without end; then the deadlines are the
// service's.
func TestListenerHasADeadline(t *testing.T) {
	w := newWorld(t)
	v := w.verifier()
	v.HeaderTimeout = 50 * time.Millisecond
	ln := w.listen(t, v)
	silent, err := net.Dial("tcp", ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	c, err := ln.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(time.Hour)) // it does not replace that of the header
	if _, err := c.Read(make([]byte, 1)); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("got %v, want a timeout", err)
	}
}

// A canceled context ends the wait.
func TestHandshakeIsCanceled(t *testing.T) {
	w := newWorld(t)
	ln := w.listen(t, w.verifier())
	silent, err := net.Dial("tcp", ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	c, err := ln.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := c.(*Conn).Handshake(ctx); err == nil {
		t.Error("got no error")
	}
}

// Over a Listener, net/http's handlers know the caller of a connection.
func TestConnContext(t *testing.T) {
	w := newWorld(t)
	ln := w.listen(t, w.verifier())
	callers := make(chan *Assertion, 1)
	srv := &http.Server{ConnContext: ConnContext, Handler: http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		callers <- FromContext(r.Context())
	})}
	served := make(chan error, 1)
	go func() { served <- srv.Serve(ln) }()
	c, token := w.dial(t, ln.Addr().String())
	_, _ = c.Write(proxyV2(commandProxy, familyTCP4, value(TLV, token)))
	_, _ = io.WriteString(c, "GET / HTTP/1.1\r\nHost: shop.test\r\nConnection: close\r\n\r\n")
	answer, err := io.ReadAll(c)
	if !strings.HasPrefix(string(answer), "HTTP/1.1 200") {
		t.Fatalf("got %q, %v", answer, err)
	}
	if a := <-callers; a == nil || a.Subject != callerID {
		t.Errorf("got %+v, want the caller", a)
	}
	_ = srv.Close()
	<-served
}

func FuzzParseHeader(f *testing.F) {
	f.Add(proxyV2(commandProxy, familyTCP4, value(TLV, "a.b.c"), value(typeAuthority, "shop.test")))
	f.Add(withChecksum(proxyV2(commandProxy, familyTCP6, value(TLV, "a.b.c"))))
	f.Add(proxyV2(commandLocal, familyUnspec))
	f.Fuzz(func(t *testing.T, b []byte) {
		r := bytes.NewReader(b)
		h, err := readHeader(r)
		if err != nil {
			if h != (proxyHeader{}) {
				t.Errorf("got %+v with the error %v", h, err)
			}
			return
		}
		if used := len(b) - r.Len(); used != headBytes+int(binary.BigEndian.Uint16(b[14:])) || len(h.assertion) > MaxTLV {
			t.Errorf("read %d bytes for %+v", used, h)
		}
	})
}
