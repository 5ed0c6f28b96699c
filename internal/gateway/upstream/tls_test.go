package upstream

import (
	"context"
	"crypto/sha256"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"runtime"
	"strings"
	"testing"
	"time"

	"culvert.dev/internal/testca"
	"culvert.dev/internal/testnet"
	"culvert.dev/registry"
	"culvert.dev/tunnel"
	"culvert.dev/tunnel/tunneltest"
)

const patience = 30 * time.Second

// Services with the same TLS settings share the parsed ones.
func TestEqualTLSIsShared(t *testing.T) {
	up := &Transports{Direct: &tunnel.NetDialer{}}
	defer up.Close()
	layer := func(serverName string) Layer {
		t.Helper()
		made, err := up.New(&registry.Service{TLS: &registry.BackendTLS{ServerName: serverName}}, nil, nil)
		if err != nil {
			t.Fatal(err)
		}
		return made.(*layered).layers[0]
	}
	first := layer("db.test")
	if layer("db.test") != first {
		t.Error("equal settings are parsed twice")
	}
	if layer("mail.test") == first {
		t.Error("another server name has the settings of the first")
	}
}

// An endpoint that is not as the settings have it is refused with words that say why, and
// not a byte of the client goes there. So is a service whose settings can't be used.
func TestTLSIsAsConfiguredOrThereIsNone(t *testing.T) {
	ca, err := testca.New("edge.test", nil)
	if err != nil {
		t.Fatal(err)
	}
	issue := func(o testca.Options) *testca.Pair {
		t.Helper()
		o.SPIFFEID = "spiffe://edge.test/ns/test/sa/a"
		pair, err := ca.Issue(o)
		if err != nil {
			t.Fatal(err)
		}
		return pair
	}
	names := make([]string, 2000)
	for i := range names {
		names[i] = fmt.Sprintf("name-%d-of-a-large-certificate.db.test", i)
	}
	at := func(change func(*tls.Config), o testca.Options) string {
		config := &tls.Config{Certificates: []tls.Certificate{issue(o).TLS}}
		change(config)
		return testnet.ServeTLS(t, config, func(c *tls.Conn) { _, _ = io.WriteString(c, "h") }).Addr()
	}
	raw := func(answer func(io.Writer)) string {
		return testnet.Serve(t, func(c net.Conn) {
			_, _ = c.Read(make([]byte, 1<<12))
			answer(c)
		}).Addr()
	}
	good := testca.Options{DNSNames: []string{"db.test"}, IPs: []net.IP{net.IPv4(192, 0, 2, 7)}}
	var (
		server = at(func(*tls.Config) {}, good)
		tls12  = at(func(c *tls.Config) { c.MaxVersion = tls.VersionTLS12 }, good)
		tls13  = at(func(c *tls.Config) { c.MinVersion = tls.VersionTLS13 }, good)
		tls11  = at(func(c *tls.Config) { c.MinVersion, c.MaxVersion = tls.VersionTLS10, tls.VersionTLS11 }, good)
		strong = at(func(c *tls.Config) {
			c.MaxVersion, c.CipherSuites = tls.VersionTLS12, []uint16{tls.TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384}
		}, good)
		large   = at(func(*tls.Config) {}, testca.Options{DNSNames: append(names, "db.test")})
		client  = at(func(*tls.Config) {}, testca.Options{DNSNames: []string{"db.test"}, Usage: testca.ClientOnly})
		expired = at(func(*tls.Config) {}, testca.Options{DNSNames: []string{"db.test"}, NotBefore: time.Now().Add(-2 * time.Hour), TTL: time.Hour})
		plain   = raw(func(w io.Writer) { _, _ = io.WriteString(w, "HTTP/1.1 400 Bad Request\r\n\r\n") })
		gone    = raw(func(io.Writer) {})
		flood   = raw(floodOfRecords)
		chain   = raw(floodOfCertificates)
		huge    = raw(func(w io.Writer) { record(w, []byte{2, 0xff, 0xff, 0xff}) })
	)
	roots, gw, other := string(ca.CertPEM), issue(testca.Options{}), issue(testca.Options{})
	with := func(change func(*registry.BackendTLS)) registry.BackendTLS {
		b := registry.BackendTLS{ServerName: "db.test", Roots: roots}
		change(&b)
		return b
	}
	same := with(func(*registry.BackendTLS) {})
	sans := func(sans ...string) registry.BackendTLS { return with(func(b *registry.BackendTLS) { b.SANs = sans }) }
	const aes128, aes256 = "TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256", "TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384"
	for _, row := range []struct {
		name string
		at   string
		tls  registry.BackendTLS
		want string // in the error; "" for none
	}{
		{"as configured", server, same, ""},
		{"a certificate of 80 KiB", large, same, ""},
		{"an address as the name", server, with(func(b *registry.BackendTLS) { b.ServerName = "192.0.2.7" }), ""},
		{"another address as the name", server, with(func(b *registry.BackendTLS) { b.ServerName = "192.0.2.8" }), "its certificate is for other names"},
		{"an address among the SANs", server, sans("no.test", "192.0.2.7"), ""},
		{"another address among the SANs", server, sans("192.0.2.8"), `none of the names ["192.0.2.8"], it has ["db.test" "spiffe://edge.test/ns/test/sa/a" "192.0.2.7"]`},
		{"wrong SANs", server, sans("web.test", "spiffe://edge.test/ns/test/sa/b"), "none of the names"},
		{"TLS 1.3 at least", tls13, with(func(b *registry.BackendTLS) { b.MinVersion = tls.VersionTLS13 }), ""},
		{"TLS 1.3 at least, of 1.2", tls12, with(func(b *registry.BackendTLS) { b.MinVersion = tls.VersionTLS13 }), "the service refuses it: remote error: tls: protocol version not supported"},
		{"TLS 1.2 at most, of 1.3", tls13, with(func(b *registry.BackendTLS) { b.MaxVersion = tls.VersionTLS12 }), "protocol version not supported"},
		{"TLS 1.1", tls11, same, "protocol version not supported"},
		{"TLS 1.1, whatever is configured", tls11, with(func(b *registry.BackendTLS) { b.MinVersion = tls.VersionTLS10 }), "protocol version not supported"},
		{"a cipher suite", strong, with(func(b *registry.BackendTLS) { b.CipherSuites = []string{aes128, aes256} }), ""},
		{"other cipher suites", strong, with(func(b *registry.BackendTLS) { b.CipherSuites = []string{aes128} }), "handshake failure"},
		{"an unknown cipher suite", server, with(func(b *registry.BackendTLS) { b.CipherSuites = []string{"AES128"} }), `cipher suite "AES128" is not known`},
		{"no version", server, with(func(b *registry.BackendTLS) { b.MinVersion, b.MaxVersion = tls.VersionTLS13, tls.VersionTLS12 }), "the highest version, TLS 1.2, is below the lowest, TLS 1.3"},
		{"only old versions", server, with(func(b *registry.BackendTLS) { b.MaxVersion = tls.VersionTLS11 }), "the highest version, TLS 1.1, is below the lowest, TLS 1.2"},
		{"a certificate for clients", client, same, "its certificate is not for servers"},
		{"a certificate for clients, by SAN", client, sans("db.test"), "its certificate is not for servers"},
		{"expired", expired, same, "its certificate is not valid now"},
		{"expired, by SAN", expired, sans("db.test"), "its certificate is not valid now"},
		{"an unknown CA", server, with(func(b *registry.BackendTLS) { b.Roots = "" }), "not signed by any of the CAs of the system"},
		{"another's key", server, with(func(b *registry.BackendTLS) { b.Certificate, b.Key = string(gw.CertPEM), registry.Secret(other.KeyPEM) }), "private key does not match public key"},
		{"no key", server, with(func(b *registry.BackendTLS) { b.Certificate = string(gw.CertPEM) }), "the certificate to show to a service"},
		{"no TLS", plain, same, "the service does not speak TLS there"},
		{"the end", gone, same, "the connection ended in the handshake"},
		{"records without end", flood, same, "too many ignored records"},
		{"a chain without end", chain, same, "more than a handshake may have"},
		{"a message of 16 MiB", huge, same, "exceeds maximum"},
	} {
		up := &Transports{Direct: &tunnel.NetDialer{}}
		got, err := greetingBy(t, up, &registry.Service{TLS: &row.tls}, row.at)
		if row.want == "" && (err != nil || got != "h") || row.want != "" && (err == nil || !strings.Contains(err.Error(), row.want)) {
			t.Errorf("%s: got %q, %v, want %q", row.name, got, err, row.want)
		}
		if err != nil && strings.Contains(err.Error(), "PRIVATE KEY") {
			t.Errorf("%s: the error shows the key: %v", row.name, err)
		}
		up.Close()
	}
}

// A handshake goes on by the settings that it has begun with, whatever the table has in
// the meantime.
func TestTLSHandshakeOutlivesItsSettings(t *testing.T) {
	ca, err := testca.New("edge.test", nil)
	if err != nil {
		t.Fatal(err)
	}
	pair, err := ca.Issue(testca.Options{SPIFFEID: "spiffe://edge.test/db", DNSNames: []string{"db.test"}})
	if err != nil {
		t.Fatal(err)
	}
	begun, goOn := make(chan struct{}), make(chan struct{})
	config := &tls.Config{GetConfigForClient: func(*tls.ClientHelloInfo) (*tls.Config, error) {
		close(begun)
		<-goOn
		return nil, nil
	}, Certificates: []tls.Certificate{pair.TLS}}
	server := testnet.ServeTLS(t, config, func(c *tls.Conn) { _, _ = io.WriteString(c, "h") })
	up := &Transports{Direct: &tunnel.NetDialer{}}
	defer up.Close()
	type answer struct {
		greeting string
		err      error
	}
	answered := make(chan answer, 1)
	go func() {
		greeting, err := greetingBy(t, up, &registry.Service{TLS: &registry.BackendTLS{ServerName: "db.test", Roots: string(ca.CertPEM)}}, server.Addr())
		answered <- answer{greeting, err}
	}()
	<-begun
	runtime.GC() // the table has no such service any more
	if _, err := up.New(&registry.Service{TLS: &registry.BackendTLS{ServerName: "db.test", Roots: "gone"}}, nil, nil); err == nil || !strings.Contains(err.Error(), "hold no certificate") {
		t.Errorf("roots that are none: got %v", err)
	}
	close(goOn)
	if got := <-answered; got.greeting != "h" || got.err != nil {
		t.Errorf("got %q, %v, want the handshake to go on by its own roots", got.greeting, got.err)
	}
}

// greetingBy returns the first byte that the endpoint at addr says to a client of s.
func greetingBy(t *testing.T, up *Transports, s *registry.Service, addr string) (string, error) {
	t.Helper()
	transport, err := up.New(s, nil, nil)
	if err != nil {
		return "", err
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	c, err := transport.Dial(ctx, &tunneltest.RouteTo(addr).Endpoints[0], &tunnel.Request{})
	if err != nil {
		return "", err
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(patience))
	b := make([]byte, 1)
	_, err = io.ReadFull(c, b)
	return string(b), err
}

// record writes a record of the handshake.
func record(w io.Writer, content []byte) bool {
	_, err := w.Write(append([]byte{22, 3, 3, byte(len(content) >> 8), byte(len(content))}, content...))
	return err == nil
}

// floodOfRecords are warnings, which a client ignores.
func floodOfRecords(w io.Writer) {
	for {
		if _, err := w.Write([]byte{21, 3, 3, 0, 2, 1, 100}); err != nil {
			return
		}
	}
}

// floodOfCertificates is a message of certificates with nearly as many bytes as it may
// have.
func floodOfCertificates(w io.Writer) {
	hello := append([]byte{2, 0, 0, 38, 3, 3}, make([]byte, 32)...)
	if !record(w, append(hello, 0, 0xc0, 0x2b, 0)) { // no session; ECDHE-ECDSA with AES-128-GCM
		return
	}
	const size = 256<<10 - 1
	if !record(w, []byte{11, size >> 16, size >> 8 & 0xff, size & 0xff}) {
		return
	}
	for sent := 0; sent < size; sent += 1 << 14 {
		if !record(w, make([]byte, 1<<14)) {
			return
		}
	}
}

// Settings that differ in anything have keys that differ, also where a text moves from one
// to the next.
func TestTLSKeysDiffer(t *testing.T) {
	seen := map[[sha256.Size]byte]string{}
	for _, b := range []registry.BackendTLS{
		{}, {ServerName: "a"}, {Roots: "a"}, {Certificate: "a"}, {Key: "a"}, {SANs: []string{"a"}}, {CipherSuites: []string{"a"}},
		{SANs: []string{""}}, {SANs: []string{"a", "a"}}, {SANs: []string{"aa"}}, {SANs: []string{"a"}, CipherSuites: []string{"a"}}, {MinVersion: 1}, {MaxVersion: 1},
		{ServerName: "aa"}, {ServerName: "a", Roots: "a"}, {Roots: "a", Certificate: "a"},
	} {
		what := fmt.Sprintf("%#v", b)
		if other, taken := seen[tlsKey(&b)]; taken {
			t.Errorf("%s has the key of %s", what, other)
		}
		seen[tlsKey(&b)] = what
	}
}

func BenchmarkTLSLayerOfAService(b *testing.B) {
	up := &Transports{Direct: &tunnel.NetDialer{}}
	defer up.Close()
	ca, err := testca.New("edge.test", nil)
	if err != nil {
		b.Fatal(err)
	}
	pair, err := ca.Issue(testca.Options{SPIFFEID: "spiffe://edge.test/gw"})
	if err != nil {
		b.Fatal(err)
	}
	s := &registry.Service{TLS: &registry.BackendTLS{ServerName: "db.test", Roots: string(ca.CertPEM), Certificate: string(pair.CertPEM), Key: registry.Secret(pair.KeyPEM)}}
	keep, err := up.New(s, nil, nil)
	if err != nil {
		b.Fatal(err)
	}
	b.ReportAllocs()
	for b.Loop() {
		if _, err := up.New(s, nil, nil); err != nil {
			b.Fatal(err)
		}
	}
	runtime.KeepAlive(keep)
}
