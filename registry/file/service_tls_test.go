package file

import (
	"crypto/tls"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"culvert.dev/internal/testca"
	"culvert.dev/registry"
)

// TLS to services, with what is read of its files.
func TestServiceTLS(t *testing.T) {
	cfg, err := Load(filepath.Join(private(t, "testdata/good"), "service-tls.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	first := *cfg.Services[0].TLS
	key, cas := cfg.Credentials.Keys["file:gw.crt"], cfg.Credentials.Trust["file:hop-ca.pem"]
	if !strings.HasPrefix(cas.PEM, "-----BEGIN CERTIFICATE-----") || cas.TrustDomain != "" || !strings.HasPrefix(key.Certificate, "-----BEGIN CERTIFICATE-----") || !strings.Contains(string(key.Key), "PRIVATE KEY") {
		t.Errorf("got %+v and %+v, want CAs of no trust domain, a certificate and a key", cas, key)
	}
	if s := fmt.Sprintf("%v %+v %#v", cfg.Credentials, cfg.Credentials, cfg.Credentials); strings.Contains(s, "PRIVATE KEY") {
		t.Errorf("printed credentials show their key: %s", s)
	}
	want := registry.BackendTLS{
		ServerName: "shop.internal", SANs: []string{"spiffe://corp.example/ns/shop/sa/web", "shop.internal", "*.internal", "2001:db8::1"},
		MinVersion: tls.VersionTLS12, MaxVersion: tls.VersionTLS12, CipherSuites: []string{"TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256"},
		KeyName: "file:gw.crt", TrustNames: []string{"file:hop-ca.pem"}, PassClientTLS: true,
	}
	if !reflect.DeepEqual(first, want) {
		t.Errorf("got %+v, want %+v", first, want)
	}
	if got, want := *cfg.Services[1].TLS, (registry.BackendTLS{ServerName: "mail.example.com"}); !reflect.DeepEqual(got, want) {
		t.Errorf("without keys: got %+v, want %+v", got, want)
	}
	if got := cfg.Services[2].TLS; got.ServerName != "10.0.1.9" || !slices.Equal(got.TrustNames, first.TrustNames) || got.MinVersion != tls.VersionTLS13 {
		t.Errorf("got %+v", got)
	}
	if n := len(cfg.files); n != 4 {
		t.Errorf("%d files are followed, want the configuration, the CAs, the certificate and the key: %q", n, cfg.files)
	}
	if len(cfg.Certificates) != 1 || cfg.Certificates[0].UsedBy != "service" {
		t.Errorf("certificates %+v, want one of a service", cfg.Certificates)
	}
}

// A reload takes up changed files, and refuses what can't be used: then the
// configuration stays what it was.
func TestServiceTLSIsReadAgain(t *testing.T) {
	dir := t.TempDir()
	save := func(name string, content []byte) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(dir, name), content, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	issue := func() *testca.Pair {
		t.Helper()
		ca, err := testca.New("edge.test", nil)
		if err != nil {
			t.Fatal(err)
		}
		pair, err := ca.Issue(testca.Options{SPIFFEID: "spiffe://edge.test/gw", Usage: testca.Both})
		if err != nil {
			t.Fatal(err)
		}
		save("ca.pem", ca.CertPEM)
		save("gw.crt", pair.CertPEM)
		save("gw.key", pair.KeyPEM)
		return pair
	}
	first := issue()
	const services = `services:
  - {name: other.test, ports: [1], endpoints: ["192.0.2.1:1"]}
  - name: db.test
    endpoints: ["192.0.2.1:1"]
    tls: {caFile: ca.pem, certificateFile: gw.crt, keyFile: gw.key}
  - {name: last.test, ports: [1], endpoints: ["192.0.2.1:1"]}
`
	save("culvert.yaml", []byte(services))
	path := filepath.Join(dir, "culvert.yaml")
	current, err := Load(path)
	if err != nil {
		t.Fatal(err)
	}
	if again, err := Reload(path, current); again != current || err != nil {
		t.Errorf("nothing has changed: got another configuration, %v", err)
	}
	second := issue()
	next, err := Reload(path, current)
	if err != nil {
		t.Fatal(err)
	}
	const key, cas = "file:gw.crt", "file:ca.pem"
	if got := next.Credentials; got.Keys[key].Certificate != string(second.CertPEM) || got.Trust[cas] == current.Credentials.Trust[cas] {
		t.Errorf("the new certificate and CAs were not taken up")
	}
	if current.Credentials.Keys[key].Certificate != string(first.CertPEM) {
		t.Errorf("the configuration before has changed")
	}
	if got := next.Services[1].TLS; got.KeyName != key || !reflect.DeepEqual(got, current.Services[1].TLS) {
		t.Errorf("got %+v in the table, want the names of before: %+v", got, current.Services[1].TLS)
	}
	if next.Services[0] != current.Services[0] || next.Services[2] != current.Services[2] {
		t.Errorf("services without files were parsed again")
	}
	for _, gone := range []struct{ name, want string }{
		{"ca.pem", "caFile: " + filepath.Join(dir, "ca.pem") + ": no such file"},
		{"gw.crt", "certificateFile: " + filepath.Join(dir, "gw.crt") + ": no such file"},
		{"gw.key", "keyFile: " + filepath.Join(dir, "gw.key") + ": no such file"},
	} {
		content, err := os.ReadFile(filepath.Join(dir, gone.name))
		if err != nil {
			t.Fatal(err)
		}
		if err := os.Remove(filepath.Join(dir, gone.name)); err != nil {
			t.Fatal(err)
		}
		if got, err := Reload(path, next); err == nil || !strings.Contains(err.Error(), gone.want) {
			t.Errorf("without %s: got %v, %v, want %q", gone.name, got, err, gone.want)
		}
		save(gone.name, content)
	}
	if got, err := Reload(path, next); err != nil || !reflect.DeepEqual(got.Services[1].TLS, next.Services[1].TLS) {
		t.Errorf("with all files: got %v", err)
	}
}

// A file that many services name is read and parsed once.
func TestServiceTLSFilesAreReadOnce(t *testing.T) {
	dir := private(t, "testdata/bad")
	conf := "services:\n"
	for i := range 100 {
		conf += fmt.Sprintf("  - {name: s%d.test, ports: [1], endpoints: [\"192.0.2.1:1\"], tls: {caFile: gw.crt, certificateFile: gw.crt, keyFile: gw.key}}\n", i)
	}
	path := filepath.Join(dir, "culvert.yaml")
	if err := os.WriteFile(path, []byte(conf), 0o600); err != nil {
		t.Fatal(err)
	}
	cfg, err := Load(path)
	if err != nil {
		t.Fatal(err)
	}
	if len(cfg.files) != 4 || len(cfg.Certificates) != 1 {
		t.Errorf("%d files and %d certificates, want 4 and 1", len(cfg.files), len(cfg.Certificates))
	}
	for _, s := range cfg.Services {
		if !slices.Equal(s.TLS.TrustNames, []string{"file:gw.crt"}) || s.TLS.KeyName != "file:gw.crt" || s.TLS.ServerName != s.Name {
			t.Fatalf("%s: got %+v", s.Name, s.TLS)
		}
	}
}

// TLS that no request would make use of is warned of.
func TestServiceTLSWithoutEffectIsWarnedOf(t *testing.T) {
	const want = `service "db.test": tls has no effect: all listeners pass the TLS of clients on as it is`
	for listeners, warned := range map[string]bool{
		"":                                    false, // one may be given on the command line
		`[{address: ":1", protocols: [sni]}]`: true,
		`[{address: ":1", protocols: [sni, postgres]}, {address: "udp://:1"}]`:   true,
		`[{address: ":1", protocols: [sni, connect]}]`:                           false,
		`[{address: ":1", protocols: [sni]}, {address: ":2", service: db.test}]`: false,
	} {
		conf := "services:\n  - {name: db.test, ports: [1], endpoints: [\"192.0.2.1:1\"], tls: {}}\n"
		if listeners != "" {
			conf += "listeners: " + listeners + "\n"
		}
		cfg, err := Parse("culvert.yaml", []byte(conf))
		if err != nil {
			t.Fatal(err)
		}
		if got := strings.Contains(cfg.Warnings.Error(), want); got != warned {
			t.Errorf("listeners %s: warned %t, want %t: %v", listeners, got, warned, cfg.Warnings)
		}
	}
}
