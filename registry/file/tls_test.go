package file

import (
	"bytes"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"culvert.dev/internal/testca"
	"culvert.dev/registry"
)

func TestTLS(t *testing.T) {
	dir := private(t, "testdata/good")
	path := filepath.Join(dir, "tls.yaml")
	cfg, err := Load(path)
	if err != nil {
		t.Fatal(err)
	}
	for i, want := range []struct{ outer, inner string }{
		{"[sni connect]", "[connect connect-h2 websocket]"},
		{"[]", "[hbone]"},
		{"[]", "[connect connect-h2]"},
	} {
		l := &cfg.Listeners[i]
		if outer, inner := fmt.Sprint(l.Outer()), fmt.Sprint(l.Inner()); outer != want.outer || inner != want.inner {
			t.Errorf("listener %d speaks %s and inside %s, want %s and %s", i, outer, inner, want.outer, want.inner)
		}
	}
	if l := (&Listener{}); fmt.Sprint(l.Outer(), l.Inner()) != "[sni connect connect-h2] []" {
		t.Errorf("a listener that says nothing speaks %s and inside %s", l.Outer(), l.Inner())
	}
	hbone := cfg.Listeners[1].TLS[0]
	if len(hbone.Certificates) != 2 || hbone.Optional || fmt.Sprint(hbone.Names) != "[gw.example.com *.in.example.net]" || hbone.ClientCA != "" {
		t.Errorf("got %+v", hbone)
	}
	for _, p := range hbone.Certificates {
		if _, err := p.X509(); err != nil {
			t.Error(err)
		}
	}
	one := cfg.Listeners[3].TLS[0]
	ca, err := os.ReadFile(filepath.Join(dir, "client-ca.pem"))
	if err != nil {
		t.Fatal(err)
	}
	second, err := os.ReadFile(filepath.Join(dir, "second.crt"))
	if err != nil {
		t.Fatal(err)
	}
	if want := map[string]string{"example.test": string(ca), "cluster.local": string(second)}; !reflect.DeepEqual(hbone.Trust, want) {
		t.Errorf("the CAs by trust domain are %q", hbone.Trust)
	}
	if want := map[string]string{"example.test": string(ca)}; !reflect.DeepEqual(one.Trust, want) || one.ClientCA != "" {
		t.Errorf("the CAs by trust domain are %q, and %q beside them", one.Trust, one.ClientCA)
	}
	last := cfg.Listeners[2].TLS[0]
	if !last.Optional || last.MinVersion != 0x0303 || last.ClientCA == "" || last.Trust != nil {
		t.Errorf("got %+v, want optional client certificates and TLS 1.2", last)
	}

	// A certificate must have the names that end here, at the start at least.
	config, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	lacking := filepath.Join(dir, "lacking.yaml")
	if err := os.WriteFile(lacking, bytes.ReplaceAll(config, []byte("gw.example.com"), []byte("other.example.com")), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Load(lacking); err == nil || !strings.Contains(err.Error(), `: tls.names: no certificate covers "other.example.com"; gw.crt covers gw.example.com`) {
		t.Errorf("a name that no certificate has: %v", err)
	}

	// A new key is a change.
	for _, name := range []string{"gw.crt", "gw.key"} {
		b, err := os.ReadFile(filepath.Join(dir, strings.Replace(name, "gw", "second", 1)))
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, name), b, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	next, err := Reload(path, cfg)
	if err != nil {
		t.Fatal(err)
	}
	if next.sum == cfg.sum {
		t.Error("a new certificate is not seen as a change")
	}
	if parts := cfg.RestartNeeded(next); len(parts) > 0 {
		t.Errorf("a new certificate needs a restart: %q", parts)
	}
	if reflect.DeepEqual(cfg.Snapshot().Listeners, next.Snapshot().Listeners) {
		t.Error("a new certificate is not in the snapshot")
	}
}

// TLS may end for each name in a way of its own.
func TestTLSByNames(t *testing.T) {
	dir := private(t, "testdata/good")
	cfg, err := Load(filepath.Join(dir, "tls-names.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	ca, err := os.ReadFile(filepath.Join(dir, "client-ca.pem"))
	if err != nil {
		t.Fatal(err)
	}
	type item struct {
		names, protocols, alpn, clients string
		any                             bool
	}
	for i, want := range [][]item{
		{{"[gw.example.com]", "[connect connect-h2]", "[]", "ignored", false}, {"[shop.in.example.net]", "[tcp]", "[]", "required", false}, {"[*.in.example.net]", "[tcp]", "[h2 http/1.1]", "ignored", false}},
		{{"[gw.example.com]", "[connect connect-h2]", "[]", "ignored", true}, {"[shop.in.example.net]", "[tcp]", "[]", "ignored", false}},
		{{"[gw.example.com]", "[connect-h3]", "[]", "ignored", false}, {"[shop.in.example.net]", "[connect-h3]", "[]", "required", false}},
	} {
		s := cfg.Snapshot().Listeners[i].Settings
		var got []item
		for j := range s.TLS {
			l := &s.TLS[j]
			got = append(got, item{fmt.Sprint(l.Names), fmt.Sprint(l.Protocols), fmt.Sprint(l.ALPN), l.ClientCertificates(), l.Any})
		}
		if !slices.Equal(got, want) || s.RequireTLS != (i == 0) {
			t.Errorf("listener %d: got %+v, TLS required: %v; want %+v", i, got, s.RequireTLS, want)
		}
	}
	want := `clients of "shop.in.example.net" must show a certificate at :443, and :8443 leads to the service without one; do not expose the service there, or ask for the same`
	if got := cfg.Warnings.Error(); strings.Count(got, "must show a certificate") != 2 || !strings.Contains(got, want) || !strings.Contains(got, "udp://:443 leads") {
		t.Errorf("the warnings are %s\nwant %s", got, want)
	}
	if got := cfg.Snapshot().Listeners[0].Settings.TLS[1]; len(got.TrustNames) != 1 || cfg.Credentials.Trust[got.TrustNames[0]].PEM != string(ca) || got.ClientCAs != "" || len(got.Certificates) > 0 {
		t.Errorf("tls in the table: got %+v, want names alone, and the CAs of clients by theirs", got)
	}
	if got := fmt.Sprint(cfg.Listeners[0].Inner()); got != "[connect connect-h2 tcp]" {
		t.Errorf("inside TLS is spoken %s", got)
	}
}

// A certificate or key that vanishes or turns bad is told of, and the configuration
// before stays in force.
func TestKeysThatTurnBad(t *testing.T) {
	dir := private(t, "testdata/good")
	path := filepath.Join(dir, "tls-names.yaml")
	cfg, err := Load(path)
	if err != nil {
		t.Fatal(err)
	}
	for _, row := range []struct {
		file, content, want string
	}{
		{"second.key", "", "keyFile: " + filepath.Join(dir, "second.key") + ": no such file"},
		{"second.crt", "nonsense", "failed to find any PEM data in certificate input"},
		{"client-ca.pem", "nonsense", "clientCAFile has no certificate in it"},
	} {
		name := filepath.Join(dir, row.file)
		good, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		if row.content == "" {
			err = os.Remove(name)
		} else {
			err = os.WriteFile(name, []byte(row.content), 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
		if _, err := Reload(path, cfg); err == nil || !strings.Contains(err.Error(), row.want) {
			t.Errorf("%s: got %v, want %q", row.file, err, row.want)
		}
		if err := os.WriteFile(name, good, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if next, err := Reload(path, cfg); err != nil || next != cfg {
		t.Errorf("as it was: %v", err)
	}
}

func TestViaHBONE(t *testing.T) {
	cfg, err := Load(filepath.Join(private(t, "testdata/good"), "via-hbone.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	via := cfg.Services[0].Via
	for i := range via {
		pair := cfg.Credentials.Keys[via[i].KeyName]
		if !strings.HasPrefix(pair.Certificate, "-----BEGIN CERT") || !strings.HasPrefix(string(pair.Key), "-----BEGIN PRIVATE") {
			t.Errorf("hop %d has no certificate or no key", i)
		}
	}
	if got := cfg.Credentials.Trust["file:client-ca.pem#cluster.local"]; got.TrustDomain != "cluster.local" || !strings.HasPrefix(got.PEM, "-----BEGIN CERT") {
		t.Errorf("the CAs of the second hop: got %+v, want those of its trust domain", got)
	}
	want := []registry.Hop{
		{Proto: "connect-h2", Addresses: []string{"gw.example.com:443", "https://gw2.example.com:443"}, KeyName: "file:gw.crt"},
		{
			Proto: "hbone", Addresses: []string{"eastwest.example.com:15008"}, KeyName: "file:gw.crt", TrustNames: []string{"file:client-ca.pem#cluster.local"},
			Peers: []string{"spiffe://cluster.local/ns/istio-system/sa/eastwest"}, InnerPeers: []string{"spiffe://cluster.local"},
		},
	}
	if !reflect.DeepEqual(via, want) {
		t.Errorf("via %+v, want %+v", via, want)
	}
}

// What is no mistake and hardly meant is told of.
func TestWarnings(t *testing.T) {
	dir := private(t, "testdata/good")
	write := func(name, text string, mode os.FileMode) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Chmod(filepath.Join(dir, name), mode); err != nil {
			t.Fatal(err)
		}
	}
	const cheap, dear = "$2a$04$CwTycUXWue0Thq9StjUM0uJ8kd8a8e9Zb8xnJmPxFUHn0nNdJ9EPy", "$2a$10$XajjQvNhvvRt5GSeFk1xFeyqRrsxkhBkUiQeg0dt.wU1qD4aFDcga"
	write("warn.yaml", `listeners:
  - address: :1
    protocols: [sni, connect]
    auth: {usersFile: warn-users.txt}
  - address: udp://:1
    protocols: [quic]
    tls: {certificateFile: gw.crt, keyFile: warn.key}
    auth: {tokensFile: warn-tokens.txt}
services:
  - name: a.test
    ports: [1]
    via: [{connect: "https://gw.example.com:1", tokenFile: warn-token.txt}, {socks5: "gw.example.com:1", userFile: warn-user.txt, insecure: true}]
`, 0o600)
	ca, err := testca.New("example.test", nil)
	if err != nil {
		t.Fatal(err)
	}
	pair, err := ca.Issue(testca.Options{SPIFFEID: "spiffe://example.test/gw", DNSNames: []string{"gw.example.test"}})
	if err != nil {
		t.Fatal(err)
	}
	write("gw.crt", string(pair.CertPEM), 0o600)
	key := pair.KeyPEM
	openUp(t, dir)
	for _, mode := range []os.FileMode{0o644, 0o640} {
		write("warn.key", string(key), mode)
		write("warn-users.txt", "alice:"+cheap+"\nbob:"+dear+"\n", mode)
		write("warn-tokens.txt", "ci:"+strings.Repeat("ab", 32)+"\n", mode)
		write("warn-token.txt", "t0ken-of-this\n", mode)
		write("warn-user.txt", "alice:hunter2\n", mode)
		cfg, err := Load(filepath.Join(dir, "warn.yaml"))
		if err != nil {
			t.Fatal(err)
		}
		got := strings.ReplaceAll(cfg.Warnings.Error(), dir+"/", "")
		want := []string{
			"warn.yaml:3:16: sni asks for no credentials",
			"warn.yaml:6:16: quic asks for no credentials",
			"warn.yaml:4:11: 1 of 2 users have a password hash of a cost below 10",
		}
		n := len(want)
		if mode == 0o644 && runtime.GOOS != "windows" {
			for _, name := range []string{"warn.key", "warn-users.txt", "warn-tokens.txt", "warn-token.txt", "warn-user.txt"} {
				want = append(want, `"`+name+`" may be read by everybody on this host (mode -rw-r--r--); chmod o-r it`)
			}
			n += 5
		}
		for _, w := range want {
			if !strings.Contains(got, w) {
				t.Errorf("mode %v: the warnings are\n%s\nwant %s", mode, got, w)
			}
		}
		if len(cfg.Warnings) != n || strings.Contains(got, "hunter2") || strings.Contains(got, "$2a$") {
			t.Errorf("mode %v: the warnings are\n%s\nwant %d of them, without secrets", mode, got, n)
		}
	}
	write("insecure.yaml", `cluster: c
network: home
networks:
  - {name: home, cidrs: [10.0.0.0/8], gateways: [{address: "10.0.0.1:1", transports: [connect]}]}
  - {name: open, gateways: [{address: "gw.open.example:1", transports: [connect]}], insecure: true}
  - {name: plain, gateways: [{address: "gw.plain.example:1", transports: [sni, connect]}]}
  - {name: plainvia, cidrs: [10.3.0.0/16], via: [{connect: "https://gw.example:1"}, {connect: "gw.plainvia.example:1"}]}
  - {name: names, gateways: ["gw.names.example:1"]}
  - {name: safe, gateways: [{address: "gw.safe.example:1", transports: [connect]}], via: [{connect: "gw.example:1"}, {connect-h2: "https://gw.safe.example:1", tokenFile: warn-token.txt}]}
  - {name: local, gateways: [{address: "127.0.0.1:1", transports: [connect]}]}
  - {name: discovered, insecure: true}
listeners: [{address: ":1", service: a.test}]
kubernetes: {discovery: {network: discovered}}
services: [{name: a.test, ports: [1], endpoints: ["10.0.0.2:1"]}]
`, 0o600)
	cfg, err := Load(filepath.Join(dir, "insecure.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	got := cfg.Warnings.Error()
	for _, want := range []string{
		`network "open" is insecure: plaintext may go there without mutual TLS`,
		`network "discovered" is insecure: plaintext may go there without mutual TLS`,
		`gateway "gw.plain.example:1" of network "plain" is reached without TLS`,
		`gateway "gw.plainvia.example:1" of network "plainvia" is reached without TLS`,
	} {
		if !strings.Contains(got, want) {
			t.Errorf("the warnings are\n%s\nwant %s", got, want)
		}
	}
	if len(cfg.Warnings) != 4 {
		t.Errorf("the warnings are\n%s\nwant 4", got)
	}
	if l := (&Listener{Auth: &Auth{}}); fmt.Sprint(l.Outer()) != "[connect connect-h2]" {
		t.Errorf("a listener with auth that says nothing more speaks %s", l.Outer())
	}
}

// The loader tells when the certificates expire that the gateway shows, and again
// when their files have changed.
func TestExpiries(t *testing.T) {
	ca, err := testca.New("example.test", time.Now)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	save := func(name string, ttl time.Duration) time.Time {
		t.Helper()
		pair, err := ca.Issue(testca.Options{SPIFFEID: "spiffe://example.test/gw", DNSNames: []string{"gw.test"}, TTL: ttl})
		if err != nil {
			t.Fatal(err)
		}
		if err := pair.Save(dir, name); err != nil {
			t.Fatal(err)
		}
		block, _ := pem.Decode(pair.CertPEM)
		leaf, err := x509.ParseCertificate(block.Bytes)
		if err != nil {
			t.Fatal(err)
		}
		return leaf.NotAfter
	}
	one, two, three, four := save("one", time.Hour), save("two", 2*time.Hour), save("three", 3*time.Hour), save("four", 4*time.Hour)
	path := filepath.Join(dir, "culvert.yaml")
	const text = `
listeners:
  - address: 127.0.0.1:8443
    tls: {certificateFile: one.crt, keyFile: one.key, certificates: [{certificateFile: two.crt, keyFile: two.key}]}
dns:
  listen: ["tls://127.0.0.1:853"]
  tls: {certificateFile: three.crt, keyFile: three.key}
services:
  - names: [web.test]
    endpoints: [10.0.0.1:443]
    via: [{connect: "https://gw.west.example.com:443", certificateFile: four.crt, keyFile: four.key}]
`
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	cfg, err := Load(path)
	if err != nil {
		t.Fatal(err)
	}
	check := func(cfg *Config, want ...Certificate) {
		t.Helper()
		for i, c := range cfg.Certificates {
			if life := c.NotAfter.Sub(c.NotBefore); life <= 0 || life > 1000*time.Hour {
				t.Errorf("%v is valid for %v", c, life)
			}
			cfg.Certificates[i].NotBefore = time.Time{}
		}
		for _, c := range want {
			if !slices.Contains(cfg.Certificates, c) {
				t.Errorf("there is no %v among %v", c, cfg.Certificates)
			}
		}
		if len(cfg.Certificates) != len(want) {
			t.Errorf("%d certificates, want %d", len(cfg.Certificates), len(want))
		}
	}
	check(cfg, Certificate{UsedBy: "listener", File: "one.crt", NotAfter: one}, Certificate{UsedBy: "listener", File: "two.crt", NotAfter: two}, Certificate{UsedBy: "dns", File: "three.crt", NotAfter: three}, Certificate{UsedBy: "via", File: "four.crt", NotAfter: four})
	two, four = save("two", 20*time.Hour), save("four", 21*time.Hour)
	if cfg, err = Reload(path, cfg); err != nil {
		t.Fatal(err)
	}
	check(cfg, Certificate{UsedBy: "listener", File: "one.crt", NotAfter: one}, Certificate{UsedBy: "listener", File: "two.crt", NotAfter: two}, Certificate{UsedBy: "dns", File: "three.crt", NotAfter: three}, Certificate{UsedBy: "via", File: "four.crt", NotAfter: four})
}
