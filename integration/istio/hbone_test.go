package istio

import (
	"bytes"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"testing"

	"culvert.dev/connect/hbone"
	"culvert.dev/tunnel"
	istio "istio.io/istio/pkg/hbone"
)

// TestTheirDialer reaches a service through our server, by its name and by its
// address.
func TestTheirDialer(t *testing.T) {
	m := newMesh(t)
	sent := make(chan []byte, 1)
	gw := m.gateway(backend(t, echo))
	d := m.theirs(gw)
	for _, addr := range []string{"svc.test:80", "10.96.0.10:80"} {
		if err := exchange(dial(t, d, addr), strings.Repeat("to "+addr, 10000)); err != nil {
			t.Errorf("%s: %v", addr, err)
		}
	}
	for addr, want := range map[string]string{
		"down.test:80": "503", "nobody.test:80": "503", "192.0.2.1:80": "503", "private.test:80": "401",
		"svc.test": "400", "127.0.0.1:80": "400", "169.254.169.254:80": "400",
	} {
		refused(t, d, addr, want)
	}
	// TLS 1.3: they hear of it when they are done, or not at all.
	other := newMesh(t)
	wrong := m.client("mallory")
	wrong.Certificates = []tls.Certificate{other.issue("mallory")}
	refused(t, istio.NewDialer(istio.Config{ProxyAddress: gw, TLS: wrong}), "svc.test:80", "round trip")
	refused(t, istio.NewDialer(istio.Config{ProxyAddress: gw, TLS: &tls.Config{RootCAs: m.ca.Pool()}}), "svc.test:80", "round trip")

	// Their end reaches the service, after all that was sent.
	gw = m.gateway(backend(t, func(c *net.TCPConn) {
		b, err := io.ReadAll(c)
		if err != nil {
			b = []byte(err.Error())
		}
		sent <- b
	}))
	c := dial(t, m.theirs(gw), "svc.test:80")
	_, _ = io.WriteString(c, "all of it")
	_ = c.Close()
	if b := <-sent; string(b) != "all of it" {
		t.Errorf("the service got %q, want all of it and the end", b)
	}

	// The service's end reaches them, after all that it sent.
	gw = m.gateway(backend(t, func(c *net.TCPConn) {
		_, _ = io.WriteString(c, "from the service")
		_ = c.CloseWrite()
		_, _ = io.Copy(io.Discard, c)
	}))
	c = dial(t, m.theirs(gw), "svc.test:80")
	if b, err := io.ReadAll(c); string(b) != "from the service" || err != nil {
		t.Errorf("got %q and %v, want what the service sent, and its end", b, err)
	}
}

// TestTheirServer: our dialer reaches a service through it.
func TestTheirServer(t *testing.T) {
	m := newMesh(t)
	to := backend(t, echo)
	addr := m.istioServer(istio.NewServer())
	d := m.ours(addr, "istio")
	if err := exchange(dial(t, d, to), strings.Repeat("through theirs", 10000)); err != nil {
		t.Error(err)
	}

	// Our end reaches the service, and what that sends afterwards reaches us.
	answer := backend(t, func(c *net.TCPConn) {
		b, _ := io.ReadAll(c)
		_, _ = fmt.Fprintf(c, "got %d bytes", len(b))
	})
	c := dial(t, d, answer).(tunnel.Stream)
	_, _ = c.Write(make([]byte, 100_000))
	_ = c.CloseWrite()
	if b, err := io.ReadAll(c); string(b) != "got 100000 bytes" || err != nil {
		t.Errorf("got %q and %v, want the answer, and its end", b, err)
	}

	// It says yes before it dials: what can't be reached ends at once.
	c = dial(t, d, "127.0.0.1:1").(tunnel.Stream)
	if b, err := io.ReadAll(c); len(b) > 0 || err != nil {
		t.Errorf("got %q and %v of a service that is down, want the end", b, err)
	}

	other := newMesh(t)
	wrong := &hbone.Dialer{Gateway: addr, TLS: other.client("mallory"), Verifier: m.verifier("istio")}
	defer wrong.Close()
	refused(t, wrong, to, "unknown certificate authority")
	refused(t, m.ours(addr, "somebody"), to, "the server's id is")
}

// TestDouble has Istio's double dialer go through our server to another of
// ours, ours to Istio's server behind ours, and ours to Istio's double server.
func TestDouble(t *testing.T) {
	m := newMesh(t)
	plain := backend(t, echo)
	t.Run("theirs through ours", func(t *testing.T) {
		m := &mesh{t, m.ca}
		outer := cable(t, m.gateway(m.gateway(plain)))
		inner := m.client("alice")
		inner.ServerName = "svc.test"
		d := istio.NewDoubleDialer(istio.Config{ProxyAddress: outer, TLS: m.client("alice")}, istio.Config{ProxyAddress: outer, TLS: inner}, inner)
		for range 3 {
			if err := exchange(dial(t, d, "svc.test:80"), strings.Repeat("double", 10000)); err != nil {
				t.Error(err)
			}
		}
	})
	t.Run("ours to theirs behind ours", func(t *testing.T) {
		m := &mesh{t, m.ca}
		outer := m.gateway(m.istioServer(istio.NewServer()))
		d := &hbone.Double{Outer: m.ours(outer, "gw"), TLS: m.client("alice"), Verifier: m.verifier("istio")}
		defer d.Close()
		// Both are asked for the same name, and theirs looks it up by itself.
		_, port, _ := net.SplitHostPort(plain)
		if err := exchange(dial(t, d, "localhost:"+port), strings.Repeat("double", 10000)); err != nil {
			t.Error(err)
		}
	})
	t.Run("ours to their double server", func(t *testing.T) {
		m := &mesh{t, m.ca}
		// Its inner http.Server is not asked for HTTP/2 inside of TLS, and takes
		// h2 out of the protocols it is given: so it gets them for each hello.
		keys, each := m.server("istio"), m.server("istio")
		keys.GetConfigForClient = func(*tls.ClientHelloInfo) (*tls.Config, error) { return each, nil }
		addr := m.istioServer(istio.NewDoubleHBONEServer(keys))
		_, port, _ := net.SplitHostPort(plain)
		d := &hbone.Double{Outer: m.ours(addr, "istio"), TLS: m.client("alice"), Verifier: m.verifier("istio")}
		defer d.Close()
		if err := exchange(dial(t, d, "localhost:"+port), strings.Repeat("double", 10000)); err != nil {
			t.Error(err)
		}
	})
}

// TestManyStreams has hundreds at once, in either direction.
func TestManyStreams(t *testing.T) {
	m := newMesh(t)
	plain := backend(t, echo)
	for name, d := range map[string]struct {
		tunnel.Dialer
		addr string
	}{
		"their dialer": {m.theirs(m.gateway(plain)), "svc.test:80"},
		"their server": {m.ours(m.istioServer(istio.NewServer()), "istio"), plain},
	} {
		t.Run(name, func(t *testing.T) {
			const n = 300
			conns := make([]net.Conn, n)
			var wg sync.WaitGroup
			for i := range conns {
				wg.Go(func() {
					c, err := d.DialContext(t.Context(), "tcp", d.addr)
					if err != nil {
						t.Errorf("stream %d: %v", i, err)
						return
					}
					conns[i] = c
				})
			}
			wg.Wait()
			for i, c := range conns {
				if c == nil {
					continue
				}
				wg.Go(func() {
					if err := exchange(c, string(bytes.Repeat([]byte{byte(i)}, 20_000+i))); err != nil {
						t.Errorf("stream %d: %v", i, err)
					}
					_ = c.Close()
				})
			}
			wg.Wait()
		})
	}
}
