package postgres

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"culvert.dev/internal/testca"
	"culvert.dev/internal/testnet"
	"culvert.dev/sni"
	"culvert.dev/tunnel"
	"culvert.dev/tunnel/tunneltest"
)

func TestMain(m *testing.M) { testnet.GoroutinesEnd(m) }

const (
	wantSSL  = "\x00\x00\x00\x08\x04\xd2\x16\x2f"
	wantGSS  = "\x00\x00\x00\x08\x04\xd2\x16\x30"
	cancel   = "\x00\x00\x00\x10\x04\xd2\x16\x2e\x00\x00\x00\x01\x00\x00\x00\x02"
	startup  = "\x00\x00\x00\x15\x00\x03\x00\x00user\x00alice\x00\x00"
	startup2 = "\x00\x00\x00\x15\x00\x03\x00\x02user\x00alice\x00\x00" // protocol 3.2
)

// database is a server that expects an SSLRequest or a ClientHello, by what it is asked,
// and answers one line in TLS.
func database(t *testing.T, sslRequest bool) (addr string, config *tls.Config) {
	t.Helper()
	ca, err := testca.New("db.test", nil)
	if err != nil {
		t.Fatal(err)
	}
	pair, err := ca.Issue(testca.Options{SPIFFEID: "spiffe://db.test/db", DNSNames: []string{"db.test"}})
	if err != nil {
		t.Fatal(err)
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			_ = c.SetDeadline(time.Now().Add(20 * time.Second))
			if sslRequest {
				head := make([]byte, 8)
				if _, err := io.ReadFull(c, head); err != nil || string(head) != wantSSL {
					t.Errorf("the server read %q, %v; want an SSLRequest", head, err)
				}
				_, _ = c.Write([]byte("S"))
			}
			s := tls.Server(c, &tls.Config{Certificates: []tls.Certificate{pair.TLS}})
			_, _ = io.WriteString(s, "ready")
			_ = s.Close()
		}
	}()
	t.Cleanup(func() { _ = ln.Close(); <-done })
	return ln.Addr().String(), &tls.Config{RootCAs: ca.Pool(), ServerName: "db.test"}
}

func gateway(t *testing.T, backend string) *tunneltest.Gateway {
	t.Helper()
	tlsByName := &sni.Protocol{}
	return tunneltest.Serve(t, tunneltest.Setup{
		Protocols: []tunnel.Protocol{tlsByName, &Protocol{TLS: tlsByName}}, Resolver: tunneltest.Table{"db.test": backend},
	})
}

func dial(t *testing.T, addr string) net.Conn {
	t.Helper()
	c, err := net.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	_ = c.SetDeadline(time.Now().Add(20 * time.Second))
	return c
}

// all has send read to the end.
const all = -1

// send writes text and returns n bytes of what comes in answer.
func send(t *testing.T, c net.Conn, text string, n int) (string, error) {
	t.Helper()
	if _, err := io.WriteString(c, text); err != nil {
		t.Fatal(err)
	}
	if n == all {
		b, err := io.ReadAll(c)
		return string(b), err
	}
	b := make([]byte, n)
	m, err := io.ReadFull(c, b)
	return string(b[:m]), err
}

// TestClients: whatever a client asks for before TLS, its TLS reaches the server by name
// and untouched.
func TestClients(t *testing.T) {
	backend, config := database(t, false)
	g := gateway(t, backend)
	for _, row := range []struct {
		what  string
		steps [][2]string // sent, and answered
	}{
		{"direct TLS", nil},
		{"SSLRequest", [][2]string{{wantSSL, "S"}}},
		{"GSSENCRequest, then SSLRequest", [][2]string{{wantGSS, "N"}, {wantSSL, "S"}}},
		{"SSLRequest in pieces", [][2]string{{wantSSL[:1], ""}, {wantSSL[1:5], ""}, {wantSSL[5:], "S"}}},
	} {
		c := dial(t, g.Addr)
		for _, step := range row.steps {
			if got, err := send(t, c, step[0], len(step[1])); got != step[1] || err != nil {
				t.Fatalf("%s: sent %q, got %q, %v; want %q", row.what, step[0], got, err, step[1])
			}
		}
		s := tls.Client(c, config)
		if got, err := io.ReadAll(s); err != nil || string(got) != "ready" {
			t.Errorf("%s: got %q, %v; want the server's answer", row.what, got, err)
		}
	}
}

// TestRefusals: what is no request for TLS gets the answer that PostgreSQL's clients
// understand, or none.
func TestRefusals(t *testing.T) {
	backend, _ := database(t, false)
	for _, row := range []struct {
		what, sent string
		answer     string // a part of it
		reason     tunnel.Reason
	}{
		{"StartupMessage", startup, "C28000\x00MSSL required", tunnel.BadPreamble},
		{"StartupMessage of 3.2", startup2, "SFATAL\x00VFATAL\x00", tunnel.BadPreamble},
		{"CancelRequest", cancel, "", tunnel.Unsupported},
		{"bytes behind SSLRequest", wantSSL + "\x16\x03\x01", "", tunnel.BadPreamble},
		{"a StartupMessage behind SSLRequest", wantSSL + startup, "", tunnel.BadPreamble},
		{"bytes behind GSSENCRequest", wantGSS + wantSSL, "", tunnel.BadPreamble},
		{"SSLRequest of another length", "\x00\x00\x00\x09\x04\xd2\x16\x2f\x00", "", tunnel.BadPreamble},
		{"a StartupMessage that is too long", "\x00\x00\x27\x11\x00\x03\x00\x00", "", tunnel.BadPreamble},
		{"version 2", "\x00\x00\x01\x28\x00\x02\x00\x00", "", tunnel.BadPreamble},
	} {
		g := gateway(t, backend)
		got, _ := send(t, dial(t, g.Addr), row.sent, all)
		if row.answer == "" && got != "" || !strings.Contains(got, row.answer) {
			t.Errorf("%s: got %q, want %q in it", row.what, got, row.answer)
		}
		g.Reason(t, row.reason)
	}
	// A second GSSENCRequest.
	g := gateway(t, backend)
	c := dial(t, g.Addr)
	if got, _ := send(t, c, wantGSS, 1); got != "N" {
		t.Errorf("GSSENCRequest: got %q, want N", got)
	}
	if got, _ := send(t, c, wantGSS, all); got != "" {
		t.Errorf("second GSSENCRequest: got %q, want nothing", got)
	}
	g.Reason(t, tunnel.BadPreamble)
	// Plaintext after the answer gets no further than the reader of TLS.
	g = gateway(t, backend)
	c = dial(t, g.Addr)
	if got, _ := send(t, c, wantSSL, 1); got != "S" {
		t.Errorf("SSLRequest: got %q, want S", got)
	}
	_, _ = send(t, c, startup, all)
	g.Reason(t, tunnel.BadPreamble)
}

func TestSniff(t *testing.T) {
	p := &Protocol{}
	for _, row := range []struct {
		prefix string
		want   tunnel.Verdict
	}{
		{"\x00", tunnel.More}, {"\x00\x00\x00\x08\x04\xd2\x16", tunnel.More}, {wantSSL, tunnel.Yes}, {wantGSS, tunnel.Yes}, {cancel, tunnel.Yes},
		{startup, tunnel.Yes}, {startup2, tunnel.Yes}, {"\x16\x03\x01", tunnel.No}, {"\x00\x01", tunnel.No}, {"CONNECT", tunnel.No},
		{"\x00\x00\x00\x08\x04\xd2\x16\x31", tunnel.No}, {"\x00\x00\x00\x08\x00\x02\x00\x00", tunnel.No},
	} {
		if got := p.Sniff([]byte(row.prefix)); got != row.want {
			t.Errorf("Sniff(%q) = %v, want %v", row.prefix, got, row.want)
		}
		if got := p.HasPreamble([]byte(row.prefix)); got != (len(row.prefix) >= 8) {
			t.Errorf("HasPreamble(%q) = %t", row.prefix, got)
		}
	}
}

// TestLayer is the client's side, against a server that answers well, badly or never.
func TestLayer(t *testing.T) {
	addr, config := database(t, true)
	ep := &tunnel.Endpoint{Host: "db.test"}
	c, err := Layer{}.Handshake(t.Context(), dial(t, addr), ep, nil)
	if err != nil {
		t.Fatal(err)
	}
	if got, err := io.ReadAll(tls.Client(c, config)); err != nil || string(got) != "ready" {
		t.Errorf("got %q, %v; want the server's answer", got, err)
	}
	for _, row := range []struct{ answer, want string }{
		{"N", "does not offer TLS"}, {"E", "'E'"}, {"S\x16", "more than one byte"}, {"", "closed the connection"},
	} {
		here, there := net.Pipe()
		go func() {
			_, _ = io.ReadFull(there, make([]byte, 8))
			if row.answer != "" {
				_, _ = io.WriteString(there, row.answer)
			}
			_ = there.Close()
		}()
		_, err := Layer{}.Handshake(t.Context(), here, ep, nil)
		if err == nil || !strings.Contains(err.Error(), row.want) || tunnel.ReasonOf(err) != tunnel.DialFailed {
			t.Errorf("answer %q: got %v, want %q with %s", row.answer, err, row.want, tunnel.DialFailed)
		}
		if _, err := here.Write([]byte("x")); !errors.Is(err, io.ErrClosedPipe) {
			t.Errorf("answer %q: the connection is still open", row.answer)
		}
	}
	synctest.Test(t, func(t *testing.T) {
		here, there := net.Pipe()
		defer there.Close()
		go func() { _, _ = io.Copy(io.Discard, there) }()
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if _, err := (Layer{}).Handshake(ctx, here, ep, nil); tunnel.ReasonOf(err) != tunnel.DialTimeout {
			t.Errorf("no answer: got %v, want %s", err, tunnel.DialTimeout)
		}
	})
}

// A script is a connection that has sent all it will, and keeps what it is answered.
type script struct {
	net.Conn
	sent     *bytes.Reader
	answered bytes.Buffer
}

func (s *script) Read(p []byte) (int, error)       { return s.sent.Read(p) }
func (s *script) Write(p []byte) (int, error)      { return s.answered.Write(p) }
func (s *script) Close() error                     { return nil }
func (s *script) CloseWrite() error                { return nil }
func (s *script) RemoteAddr() net.Addr             { return &net.TCPAddr{} }
func (s *script) LocalAddr() net.Addr              { return &net.TCPAddr{} }
func (s *script) SetDeadline(time.Time) error      { return nil }
func (s *script) SetReadDeadline(time.Time) error  { return nil }
func (s *script) SetWriteDeadline(time.Time) error { return nil }

// FuzzServe: whatever comes first, the connection ends or is served without a panic, and
// the answer to what is no request for TLS is an error or nothing.
func FuzzServe(f *testing.F) {
	for _, s := range []string{wantSSL, wantGSS + wantSSL, cancel, startup, startup2, wantSSL + "\x16\x03\x01\x00\x05", "\x00\x00", ""} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, sent []byte) {
		c := &script{sent: bytes.NewReader(sent)}
		served := 0
		_ = (&Protocol{TLS: &sni.Protocol{}}).ServeConn(t.Context(), tunnel.NewConn(c), tunnel.HandlerFunc(func(_ context.Context, req *tunnel.Request) {
			served++
			req.Refuse(errors.New("no"))
		}))
		answer := bytes.TrimPrefix(c.answered.Bytes(), []byte("N"))
		asked := bytes.Contains(sent, []byte(wantSSL)) && bytes.HasPrefix(answer, []byte("S"))
		if len(answer) > 0 && !asked && answer[0] != 'E' || served > 1 || served == 1 && !asked {
			t.Errorf("sent %q: answered %q and served %d requests", sent, c.answered.Bytes(), served)
		}
	})
}
