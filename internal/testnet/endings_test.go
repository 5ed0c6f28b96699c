package testnet

import (
	"bytes"
	"context"
	"crypto/tls"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"culvert.dev/internal/testca"
)

func TestEndingsOfPlainTCP(t *testing.T) {
	TestEndings(t, NewBackend(t).Direct(), Transparent())
}

func TestEndingsThroughRecorder(t *testing.T) {
	b := NewBackend(t)
	TestEndings(t, b.Through(dialTo(NewRecorder(t, b.Addr()).Addr()), nil), Transparent())
}

// A relay like most is told from a good one.
func TestEndingsOfPlainPipe(t *testing.T) {
	want := Transparent()
	want.BackendRST, want.ClientRST, want.CutRST = FIN, FIN, FIN
	TestEndings(t, through(t, pipe(func(p []byte) []byte { return p })), want)
}

func TestEndingsOfRelayWithoutHalfClose(t *testing.T) {
	want := Endings{BackendRST: FIN, ClientRST: FIN, CutRST: FIN, Silent: FIN, SilentFor: 10 * time.Second}
	TestEndings(t, through(t, func(client, server *net.TCPConn) {
		done := make(chan struct{}, 2)
		for _, d := range [][2]*net.TCPConn{{client, server}, {server, client}} {
			go func() { _, _ = io.Copy(d[0], d[1]); done <- struct{}{} }()
		}
		<-done
		_ = client.CloseWrite()
		_ = server.CloseWrite()
		_, _ = client.Close(), server.Close()
		<-done
	}), want)
}

func TestBackendTellsClientsApart(t *testing.T) {
	b := NewBackend(t)
	dial := b.Through(dialTo(b.Addr()), []byte("hello"))
	type pair struct{ c, s net.Conn }
	var pairs []pair
	for range 20 {
		c, s, err := dial(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		pairs = append(pairs, pair{c, s})
	}
	for i, p := range pairs {
		if p.c.LocalAddr().String() != p.s.RemoteAddr().String() {
			t.Errorf("pair %d: the client is %v, the backend's end says %v", i, p.c.LocalAddr(), p.s.RemoteAddr())
		}
		_, _ = p.c.Close(), p.s.Close()
	}
}

func TestBackendRefusesChangedPreamble(t *testing.T) {
	b := NewBackend(t)
	front := Serve(t, func(c net.Conn) {
		server, err := net.Dial("tcp", b.Addr())
		if err != nil {
			t.Error(err)
			return
		}
		defer server.Close()
		p := make([]byte, 1024)
		n, _ := c.Read(p)
		p[0]++
		_, _ = server.Write(p[:n])
		_, _ = io.Copy(io.Discard, c)
	})
	if _, _, err := b.Through(dialTo(front.Addr()), []byte("hello"))(t.Context()); err == nil || !strings.Contains(err.Error(), "preamble") {
		t.Errorf("dial = %v, want an error about the preamble", err)
	}
}

func TestBackendGivesUpWithTheContext(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	dial := NewBackend(t).Through(dialTo(Discard(t).Addr()), nil)
	if _, _, err := dial(ctx); err == nil || !strings.Contains(err.Error(), "no connection for the client") {
		t.Errorf("dial to another server = %v, want an error that says so", err)
	}
}

func TestServers(t *testing.T) {
	send := func(t *testing.T, addr, msg string) string {
		t.Helper()
		c, err := net.Dial("tcp", addr)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		_ = c.SetDeadline(time.Now().Add(time.Minute))
		_, _ = io.WriteString(c, msg)
		_ = CloseWrite(c)
		got, err := io.ReadAll(c)
		if err != nil {
			t.Fatal(err)
		}
		return string(got)
	}
	if got := send(t, Echo(t).Addr(), "over"); got != "over" {
		t.Errorf("echo said %q", got)
	}
	if got := send(t, Greeting(t, "220 hi\r\n").Addr(), "x"); got != "220 hi\r\nx" {
		t.Errorf("greeting said %q", got)
	}
	d := Discard(t)
	if got := send(t, d.Addr(), "12345"); got != "" || d.Received() != 5 || d.Accepted() != 1 {
		t.Errorf("discard said %q, received %d on %d connections; want nothing, 5 and 1", got, d.Received(), d.Accepted())
	}
	tap := NewTap(t)
	send(t, tap.Addr(), "one")
	send(t, tap.Addr(), "two")
	if f := tap.Flows(); len(f) != 2 || string(f[0].Data) != "one" || string(f[1].Data) != "two" || f[1].End != FIN {
		t.Errorf("tap has %q", f)
	}
	rec := NewRecorder(t, Echo(t).Addr())
	if got := send(t, rec.Addr(), "through"); got != "through" {
		t.Errorf("echo through the recorder said %q", got)
	}
	if f := rec.Flows(); len(f) != 1 || string(f[0].Up) != "through" || !bytes.Equal(f[0].Up, f[0].Down) {
		t.Errorf("recorder has %q", f)
	}
	d.Close()
	if c, err := net.Dial("tcp", d.Addr()); err == nil {
		c.Close()
		t.Error("a closed server accepts")
	}
}

func TestTapSeesReset(t *testing.T) {
	tap := NewTap(t)
	c, err := net.Dial("tcp", tap.Addr())
	if err != nil {
		t.Fatal(err)
	}
	Eventually(t, time.Minute, func() bool { return len(tap.Flows()) == 1 }, "the tap accepts")
	if got := tap.Flows()[0].End; got != Open {
		t.Errorf("before the reset the flow is %s, want open", got)
	}
	_ = Abort(c)
	Eventually(t, time.Minute, func() bool { return tap.Flows()[0].End == RST }, "the tap sees the reset")
}

func TestServeTLSAsksForCertificate(t *testing.T) {
	ca, err := testca.New("example.test", nil)
	if err != nil {
		t.Fatal(err)
	}
	pair, err := ca.Issue(testca.Options{SPIFFEID: "spiffe://example.test/ns/demo/sa/echo", DNSNames: []string{"echo.test"}})
	if err != nil {
		t.Fatal(err)
	}
	s := ServeTLS(t, pair.ServerConfig(), nil)
	config := pair.ClientConfig("echo.test")
	c, err := tls.Dial("tcp", s.Addr(), config)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	var got [2]byte
	if _, err := io.WriteString(c, "hi"); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(c, got[:]); err != nil || string(got[:]) != "hi" {
		t.Errorf("echo over TLS said %q, %v", got, err)
	}
	config.Certificates = nil
	anonymous, err := tls.Dial("tcp", s.Addr(), config)
	if err == nil { // TLS 1.3 tells with the first read
		_, err = anonymous.Read(got[:])
		_ = anonymous.Close()
	}
	if err == nil {
		t.Error("a client without certificate was served")
	}
}
