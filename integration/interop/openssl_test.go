//go:build unix

package interop

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"io"
	"math/rand/v2"
	"strings"
	"testing"

	"culvert.dev/internal/testnet"
)

// sServer starts an "openssl s_server" that wants a client certificate. What
// it is given on standard input goes to the client, and what the client sends
// comes out.
func (w *world) sServer(t *testing.T, args ...string) (p *process, addr string) {
	t.Helper()
	addr = "127.0.0.1:" + freePort(t)
	p = start(t, "openssl", append([]string{"s_server", "-accept", addr, "-cert", w.svcCert, "-key", w.svcKey, "-CAfile", w.ca,
		"-Verify", "1", "-verify_return_error", "-quiet"}, args...)...)
	p.listens(t, addr)
	return p, addr
}

// sClient starts an "openssl s_client" for the service.
func (w *world) sClient(t *testing.T, args ...string) *process {
	t.Helper()
	return start(t, "openssl", append([]string{"s_client", "-servername", svc, "-verify_hostname", svc, "-verify_return_error",
		"-CAfile", w.ca, "-cert", w.cert, "-key", w.key, "-quiet"}, args...)...)
}

// Files go both ways between openssl's client and server, which know each
// other's certificates and not the gateway.
func TestOpenSSLCarriesFilesBothWays(t *testing.T) {
	w := newWorld(t)
	for _, c := range []struct {
		name    string
		args    []string
		connect bool
	}{
		{"TLS 1.2 by SNI", []string{"-tls1_2"}, false},
		{"TLS 1.3 by SNI", []string{"-tls1_3"}, false},
		{"TLS 1.2 by CONNECT", []string{"-tls1_2"}, true},
		{"TLS 1.3 by CONNECT", []string{"-tls1_3"}, true},
		{"hello in fragments by SNI", []string{"-max_send_frag", "512", "-split_send_frag", "64"}, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			server, backend := w.sServer(t)
			g := startGateway(t, "--listen", "127.0.0.1:0", "--route", route(backend))
			// Between the client and the gateway, to see how the hello was cut.
			front := testnet.NewRecorder(t, g.addr)
			args := append([]string{"-connect", front.Addr()}, c.args...)
			if c.connect {
				args = append([]string{"-proxy", front.Addr(), "-connect", svc + ":443"}, c.args...)
			}
			client := w.sClient(t, args...)
			up, down := noise(4<<20), noise(3<<20)
			send(t, client, server, up)
			send(t, server, client, down)
			if f := front.Flows()[0]; !c.connect {
				if cut := binary.BigEndian.Uint16(f.Up[3:]) <= 64; cut != strings.Contains(c.name, "fragments") {
					t.Errorf("the hello's first record is %d bytes", binary.BigEndian.Uint16(f.Up[3:]))
				}
			}
		})
	}
}

// The service's own no to a client without a certificate reaches that client.
func TestOpenSSLServerRefusesAClientWithoutACertificate(t *testing.T) {
	w := newWorld(t)
	_, backend := w.sServer(t)
	g := startGateway(t, "--listen", "127.0.0.1:0", "--route", route(backend))
	p := start(t, "openssl", "s_client", "-connect", g.addr, "-servername", svc, "-CAfile", w.ca, "-quiet")
	p.says(t, "certificate required")
}

// What a person sees who is refused: the alert's name, or the status line.
func TestOpenSSLShowsTheRefusal(t *testing.T) {
	g := startGateway(t, "--listen", "127.0.0.1:0", "--route", "a.example.test=127.0.0.1:1")
	p := start(t, "openssl", "s_client", "-connect", g.addr, "-servername", "nobody.example.test")
	p.says(t, "unrecognized name")
	p = start(t, "openssl", "s_client", "-connect", g.addr, "-servername", "a.example.test")
	p.says(t, "internal error")
	p = start(t, "openssl", "s_client", "-proxy", g.addr, "-connect", "nobody.example.test:443")
	p.says(t, "HTTP CONNECT failed, reason= 403 Forbidden")
	p = start(t, "openssl", "s_client", "-proxy", g.addr, "-connect", "a.example.test:443")
	p.says(t, "HTTP CONNECT failed, reason= 502 Bad Gateway")
}

// send writes data into one end and waits until it has come out of the other.
func send(t *testing.T, from, to *process, data []byte) {
	t.Helper()
	before := len(to.stdout())
	written := make(chan error, 1)
	go func() {
		_, err := io.Copy(from.stdin, bytes.NewReader(data))
		written <- err
	}()
	to.await(t, "got all the bytes", func() bool { return len(to.stdout()) >= before+len(data) })
	must(t, <-written)
	if got := to.stdout()[before:]; sha256.Sum256(got) != sha256.Sum256(data) {
		t.Errorf("%d bytes came out, with another checksum than the %d that went in", len(got), len(data))
	}
}

// noise is n bytes that no program takes for a command.
func noise(n int) []byte {
	b := make([]byte, n)
	src := rand.NewChaCha8([32]byte{byte(n), byte(n >> 16)})
	_, _ = src.Read(b)
	return b
}
