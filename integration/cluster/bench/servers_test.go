package bench

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"io"
	"net"
	"net/netip"
	"time"

	"culvert.dev/internal/testca"
)

// port is that of the servers.
const port = 8443

// A client knows the servers' CA.
type client struct{ roots *x509.CertPool }

// serve runs the two servers: each ends TLS, says in one byte which it is, and
// sends back what it gets.
func (r *rig) serve() {
	r.t.Helper()
	ca, err := testca.New("bench.test", nil)
	if err != nil {
		r.t.Fatal(err)
	}
	pair, err := ca.Issue(testca.Options{SPIFFEID: "spiffe://bench.test/ns/bench/sa/server", DNSNames: []string{"bench.test", "*.bench.test", "*." + home + ".svc.west.mesh.internal"}, Usage: testca.ServerOnly})
	if err != nil {
		r.t.Fatal(err)
	}
	cert, err := tls.X509KeyPair(pair.CertPEM, pair.KeyPEM)
	if err != nil {
		r.t.Fatal(err)
	}
	r.tls = &client{x509.NewCertPool()}
	r.tls.roots.AppendCertsFromPEM(ca.CertPEM)
	for i := range 2 {
		id := byte('A' + i)
		at := netip.AddrPortFrom(r.server(i), port)
		l, err := tls.Listen("tcp", at.String(), &tls.Config{Certificates: []tls.Certificate{cert}, MinVersion: tls.VersionTLS13})
		if err != nil {
			r.t.Fatal(err)
		}
		r.t.Cleanup(func() { l.Close() })
		r.ids[at.Addr()] = id
		go func() {
			for {
				conn, err := l.Accept()
				if err != nil {
					return
				}
				go echo(conn, id)
			}
		}()
	}
}

func echo(conn net.Conn, id byte) {
	defer conn.Close()
	if _, err := conn.Write([]byte{id}); err == nil {
		_, _ = io.Copy(conn, conn)
	}
}

// dial makes a connection through a gateway, and returns which server it reached.
func (c *client) dial(ctx context.Context, at netip.AddrPort, name string) (*tls.Conn, byte, error) {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	var d net.Dialer
	raw, err := d.DialContext(ctx, "tcp", at.String())
	if err != nil {
		return nil, 0, err
	}
	conn := tls.Client(raw, &tls.Config{ServerName: name, RootCAs: c.roots, MinVersion: tls.VersionTLS13, CurvePreferences: []tls.CurveID{tls.X25519}})
	var id [1]byte
	err = raw.SetDeadline(time.Now().Add(2 * time.Second))
	if err == nil {
		err = conn.HandshakeContext(ctx)
	}
	if err == nil {
		_, err = io.ReadFull(conn, id[:])
	}
	if err == nil {
		err = raw.SetDeadline(time.Time{})
	}
	if err != nil {
		raw.Close()
		return nil, 0, err
	}
	return conn, id[0], nil
}

// reaches is nil if a name leads to a server, at a gateway.
func (r *rig) reaches(at netip.AddrPort, name string, want netip.Addr) func(context.Context) error {
	return func(ctx context.Context) error {
		conn, id, err := r.tls.dial(ctx, at, name)
		if err != nil {
			return fmt.Errorf("%s at %s: %w", name, at, err)
		}
		conn.Close()
		if id != r.ids[want] {
			return fmt.Errorf("%s at %s is served by %c, want %c", name, at, id, r.ids[want])
		}
		return nil
	}
}
