//go:build !nospiffe

package command

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/spiffe/go-spiffe/v2/bundle/spiffebundle"
	"github.com/spiffe/go-spiffe/v2/bundle/x509bundle"
	"github.com/spiffe/go-spiffe/v2/federation"
	"github.com/spiffe/go-spiffe/v2/proto/spiffe/workload"
	"github.com/spiffe/go-spiffe/v2/spiffeid"

	"culvert.dev/identity"
	"culvert.dev/identity/bundle"
	"culvert.dev/identity/enroll"
	"culvert.dev/identity/spiffe/spiffetest"
	"culvert.dev/internal/testca"
	"culvert.dev/internal/testnet"
	"culvert.dev/registry/file"
	"culvert.dev/tunnel"
)

const (
	corpGateway    = "spiffe://corp.example/ns/edge/sa/gw"
	partnerGateway = "spiffe://partner.example/ns/edge/sa/gw"
)

// federationRecipe returns the configuration in the guide, for a socket, a bundle endpoint
// and a listener of this test.
func federationRecipe(t *testing.T, socket, endpoint, listener string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("..", "..", "..", "docs", "guides", "spiffe.md"))
	if err != nil {
		t.Fatal(err)
	}
	_, block, ok := strings.Cut(string(text), "```yaml\n")
	block, _, closed := strings.Cut(block, "```\n")
	if !ok || !closed {
		t.Fatal("the guide has no recipe")
	}
	for old, now := range map[string]string{
		"unix:///run/spire/agent.sock":               socket,
		"https://bundle.partner.example:8443/bundle": endpoint,
		`":8443"`: fmt.Sprintf("%q", listener),
	} {
		if strings.Count(block, old) != 1 {
			t.Fatalf("the recipe has %q %d times, want once", old, strings.Count(block, old))
		}
		block = strings.Replace(block, old, now, 1)
	}
	return block
}

// agentAnswer is that of an agent of corp.example with the gateway's SVID.
func agentAnswer(t *testing.T, ca *testca.CA) spiffetest.Answer {
	t.Helper()
	return spiffetest.Answer{
		SVIDs:   []*workload.X509SVID{spiffetest.SVID(t, ca, testca.Options{SPIFFEID: corpGateway, IPs: []net.IP{{127, 0, 0, 1}}})},
		Bundles: map[string][]byte{"spiffe://corp.example": spiffetest.Bundle(ca)},
	}
}

// The recipe of the guide: the own key and bundle come from the agent, the partner's from
// go-spiffe's endpoint, and go-spiffe gets ours, while the own CA rotates. What is taken out
// of the configuration is gone.
func TestFederationRecipe(t *testing.T) {
	corp, partner, partnerNext := newTestCA(t, "corp.example"), newTestCA(t, "partner.example"), newTestCA(t, "partner.example")
	agent := spiffetest.New(t, agentAnswer(t, corp))
	domain := spiffeid.RequireTrustDomainFromString("partner.example")
	theirs := spiffebundle.FromX509Authorities(domain, []*x509.Certificate{partner.Root(), partnerNext.Root()})
	handler, err := federation.NewHandler(domain, theirs)
	if err != nil {
		t.Fatal(err)
	}
	shown, err := partner.Issue(testca.Options{SPIFFEID: partnerGateway})
	if err != nil {
		t.Fatal(err)
	}
	endpoint := httptest.NewUnstartedServer(handler)
	endpoint.TLS = &tls.Config{Certificates: []tls.Certificate{shown.TLS}}
	endpoint.StartTLS()
	t.Cleanup(endpoint.Close)

	dir := t.TempDir()
	first, err := bundle.Marshal(&identity.Bundle{TrustDomain: "partner.example", Roots: []*x509.Certificate{partner.Root()}})
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, "culvert.yaml")
	for name, data := range map[string]string{path: federationRecipe(t, agent.Socket(), endpoint.URL, testnet.FreePort(t)), filepath.Join(dir, "partner.json"): string(first)} {
		if err := os.WriteFile(name, []byte(data), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	c, err := file.Load(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := checkIdentity(c.Identity); err != nil {
		t.Fatal(err)
	}
	ids, err := newIdentities(t.Context(), c.Identity, tunnel.Sockets{}, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(ids.close)
	eventually := func(what string, f func() bool) {
		t.Helper()
		testnet.Eventually(t, time.Minute, f, "%s; %v", what, statusText{ids})
	}
	eventually("the partner's next CA", func() bool {
		b, err := ids.store.Trust("partner.example").Bundle()
		return err == nil && len(b.Roots) == 2
	})
	eventually("it is kept", func() bool { _, err := os.Stat(filepath.Join(dir, "partner.state.json")); return err == nil })
	url := "https://" + ids.status().ServeBundle.Address + "/bundle"
	for range 2 {
		eventually("go-spiffe gets our bundle", func() bool {
			own := spiffeid.RequireTrustDomainFromString("corp.example")
			trusted := x509bundle.FromX509Authorities(own, []*x509.Certificate{corp.Root()})
			got, err := federation.FetchBundle(t.Context(), own, url, federation.WithSPIFFEAuth(trusted, spiffeid.RequireFromString(corpGateway)))
			return err == nil && got.HasX509Authority(corp.Root())
		})
		corp = newTestCA(t, "corp.example")
		agent.Set(agentAnswer(t, corp))
	}

	var text strings.Builder
	line := func(what, format string, args ...any) { fmt.Fprintf(&text, what+": "+format+"\n", args...) }
	eventually("no problem", func() bool {
		text.Reset()
		printIdentity(line, ids.status())
		s := text.String()
		return strings.Contains(s, "SVIDs "+corpGateway+"; bundles corp.example") && strings.Contains(s, "of partner.example from "+endpoint.URL) && strings.Contains(s, " ago\n") && strings.Contains(s, "served at 127.0.0.1:")
	})
	values := map[string]float64{}
	ids.metrics(func(name, _ string, _ []string, read func(yield func([]string, float64))) {
		read(func(labels []string, v float64) { values[name+" "+strings.Join(labels, " ")] = v })
	})
	if v, ok := values["culvert_identity_problem bundle-endpoint partner.example"]; !ok || v != 0 || len(values) != 4 {
		t.Errorf("metrics: got %v, want 4 of which that of partner.example is 0", values)
	}
	var back runningStatus
	sent, err := json.Marshal(map[string]any{"identity": ids.status()})
	if err == nil {
		err = json.Unmarshal(sent, &back)
	}
	if err != nil || back.Identity == nil || len(back.Identity.Bundles) != 1 || len(back.Identity.WorkloadAPI.SVIDs) != 1 {
		t.Errorf("status over JSON: got %+v, %v, want one bundle and one SVID", back.Identity, err)
	}

	agent.Stop()
	eventually("the agent is away", func() bool {
		text.Reset()
		printIdentity(line, ids.status())
		return strings.Contains(text.String(), "cannot reach the agent")
	})
	if _, err := ids.store.Key("gateway").Certificate(); err != nil {
		t.Errorf("key while the agent is away: got error %v, want the last", err)
	}
	if err := ids.use(nil); err != nil {
		t.Fatal(err)
	}
	if _, err := ids.store.Key("gateway").Certificate(); err == nil {
		t.Error("a key that is no longer configured is still there")
	}
	if conn, err := net.Dial("tcp", strings.TrimSuffix(strings.TrimPrefix(url, "https://"), "/bundle")); err == nil {
		_ = conn.Close()
		t.Error("the bundle endpoint is open though it is no longer configured")
	}
}

type statusText struct{ *identities }

func (s statusText) String() string {
	b, _ := json.Marshal(s.status())
	return string(b)
}

// Keys and CAs of files change with the files, without another configuration, and those
// that have not changed keep their generation. Files that are in force and damaged are no
// mistake of a configuration that changes elsewhere.
func TestIdentityFiles(t *testing.T) {
	ca, legacy, dir := newTestCA(t, "corp.example"), newTestCA(t, "old.example"), t.TempDir()
	write := func(name string, content []byte) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(dir, name), content, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	rotate := func() []byte {
		p, err := ca.Issue(testca.Options{SPIFFEID: corpGateway})
		if err != nil {
			t.Fatal(err)
		}
		write("edge.key", p.KeyPEM)
		write("edge.pem", p.CertPEM)
		return p.TLS.Certificate[0]
	}
	const config = `
admin: 127.0.0.1:1
services: []
identity:
  keys: {edge: {certificateFile: edge.pem, keyFile: edge.key}}
  trust:
    corp.example: {caFile: ca.pem}
    legacy: {caFile: old.pem, type: ca}
`
	rotate()
	write("ca.pem", ca.CertPEM)
	write("old.pem", legacy.CertPEM)
	write("culvert.yaml", []byte(config))
	path := filepath.Join(dir, "culvert.yaml")
	c, err := file.Load(path)
	if err != nil {
		t.Fatal(err)
	}
	ids, err := newIdentities(t.Context(), c.Identity, tunnel.Sockets{}, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(ids.close)
	key, trust := ids.store.Key("edge"), ids.store.Trust("corp.example")
	if b, err := trust.Bundle(); err != nil || b.TrustDomain != "corp.example" || len(b.Roots) != 1 {
		t.Errorf("bundle: got %v, %v, want the CA of the file", b, err)
	}
	if b, err := ids.store.Trust("legacy").Bundle(); err != nil || b.TrustDomain != "" || len(b.Roots) != 1 {
		t.Errorf("bundle of type ca: got %v, %v, want the CA of the file and no trust domain", b, err)
	}
	next := rotate()
	testnet.Eventually(t, time.Minute, func() bool {
		now, err := key.Certificate()
		return err == nil && bytes.Equal(now.Certificate[0], next)
	}, "the next key; %v", statusText{ids})
	if trust.Generation() != 1 {
		t.Errorf("generation of the trust: got %d, want 1", trust.Generation())
	}
	if again, err := file.Reload(path, c); err != nil || again != c {
		t.Errorf("the configuration with another key: got %v, %v, want the same as before", again, err)
	}
	var text strings.Builder
	printIdentity(func(what, format string, args ...any) { fmt.Fprintf(&text, what+": "+format+"\n", args...) }, ids.status())
	for _, want := range []string{
		"key: edge: " + corpGateway + ", of " + filepath.Join(dir, "edge.pem") + ", expires in ", ", generation 2\n",
		"trust: corp.example: 1 CA, of " + filepath.Join(dir, "ca.pem") + ", expires in ", "trust: legacy: 1 CA, of ",
	} {
		if !strings.Contains(text.String(), want) {
			t.Errorf("status: got\n%s\nwant %q in it", text.String(), want)
		}
	}
	write("edge.pem", []byte("damaged"))
	testnet.Eventually(t, time.Minute, func() bool { return strings.Contains(statusText{ids}.String(), "failed to find any PEM data") }, "the problem; %v", statusText{ids})
	write("culvert.yaml", []byte(config+"zone: a.example\n"))
	other, err := file.Reload(path, c)
	if err != nil {
		t.Fatalf("a change elsewhere while the certificate is damaged: %v", err)
	}
	if err := ids.use(other.Identity); err != nil {
		t.Fatal(err)
	}
	if now, err := key.Certificate(); err != nil || !bytes.Equal(now.Certificate[0], next) {
		t.Errorf("the last key is not kept: %v", err)
	}
	values := map[string]float64{}
	ids.metrics(func(name, _ string, _ []string, read func(yield func([]string, float64))) {
		read(func(labels []string, v float64) { values[name+" "+strings.Join(labels, " ")] = v })
	})
	if values["culvert_identity_problem key-file edge"] != 1 || values["culvert_identity_problem trust-file legacy"] != 0 {
		t.Errorf("metrics: got %v, want a problem of the key alone", values)
	}
	if _, err := file.Load(path); err == nil || !strings.Contains(err.Error(), "certificate and key") {
		t.Errorf("a start with a damaged certificate: got error %v, want one of it", err)
	}
	write("edge.pem", nil)
	if err := os.Remove(filepath.Join(dir, "edge.pem")); err != nil {
		t.Fatal(err)
	}
	if _, err := file.Load(path); err == nil || !strings.Contains(err.Error(), "edge.pem: no such file") {
		t.Errorf("a start without the certificate: got error %v, want one of it", err)
	}
}

// The status has the certificate of a device that has joined, and why it is not renewed.
func TestStatusOfADevice(t *testing.T) {
	folder := t.TempDir()
	ids, err := newIdentities(t.Context(), &file.Identity{Joined: folder}, tunnel.Sockets{}, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(ids.close)
	text := func() string {
		var b strings.Builder
		printIdentity(func(what, format string, args ...any) { fmt.Fprintf(&b, what+": "+format+"\n", args...) }, ids.status())
		return b.String()
	}
	testnet.Eventually(t, time.Minute, func() bool { return strings.Contains(text(), "device: "+folder+": not renewed for ") }, "the problem; %v", statusText{ids})
	values := map[string]float64{}
	ids.metrics(func(name, _ string, _ []string, read func(yield func([]string, float64))) {
		read(func(labels []string, v float64) { values[name+" "+strings.Join(labels, " ")] = v })
	})
	if values["culvert_identity_problem device "+folder] != 1 {
		t.Errorf("metrics: got %v, want a problem of the device", values)
	}
	var b strings.Builder
	line := func(what, format string, args ...any) { fmt.Fprintf(&b, what+": "+format+"\n", args...) }
	printDevice(line, &enroll.RenewalStatus{Dir: folder, Device: "cam-7", ID: "spiffe://corp.example/device/cam-7", Gateway: "gw.example:443",
		Expires: time.Now().Add(20*time.Hour + 40*time.Second), Renew: time.Now().Add(8*time.Hour + 40*time.Second)})
	if want := "device: cam-7: spiffe://corp.example/device/cam-7, of gw.example:443, expires in 20h00m, renewed in 8h00m\n"; b.String() != want {
		t.Errorf("got %q, want %q", b.String(), want)
	}
}

// Of many keys, the status has those with a problem and those that end first.
func TestManyKeys(t *testing.T) {
	ids, err := newIdentities(t.Context(), nil, tunnel.Sockets{}, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(ids.close)
	ca := newTestCA(t, "corp.example")
	for i := range 150 {
		pair, err := ca.Issue(testca.Options{SPIFFEID: corpGateway, TTL: time.Duration(200-i) * time.Hour})
		if err != nil {
			t.Fatal(err)
		}
		ids.store.Key(fmt.Sprintf("key%03d", i)).Set(&pair.TLS)
	}
	ids.store.Key("bad").Remove(errors.New("no such file"))
	ids.store.Key("removed").Remove(identity.ErrNotConfigured)
	ids.store.Key("secret/shop/gone").Remove(identity.ErrUnused)
	st := ids.status()
	if len(st.Keys) != 100 || st.MoreKeys != 51 || st.Keys[0].Name != "bad" || st.Keys[0].Problem != "no such file" || st.Keys[1].Name != "key149" {
		t.Errorf("got %d keys and %d more, of which the first are %+v, want 100 and 51, bad and key149", len(st.Keys), st.MoreKeys, st.Keys[:2])
	}
	var text strings.Builder
	printIdentity(func(what, format string, args ...any) { fmt.Fprintf(&text, what+": "+format+"\n", args...) }, st)
	if !strings.Contains(text.String(), "key: bad: generation 1, no such file\n") || !strings.HasSuffix(text.String(), "key: and 51 more, which last longer\n") {
		t.Errorf("status: got\n%s", text.String())
	}
}

// A listener that can't be opened is an error at the start, and later a problem in the
// status.
func TestServeBundleListener(t *testing.T) {
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	c := &file.Identity{ServeBundle: &file.ServeBundle{Listener: taken.Addr().String(), Path: "/b", Trust: "corp.example", Key: "edge"}}
	if _, err := newIdentities(t.Context(), c, tunnel.Sockets{}, slog.New(slog.DiscardHandler)); err == nil {
		t.Fatal("with a port that is taken: no error")
	}
	ids, err := newIdentities(t.Context(), nil, tunnel.Sockets{}, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(ids.close)
	if err := ids.use(c); err == nil || ids.status().ServeBundle.Problem == "" {
		t.Errorf("with a port that is taken: got %v, status %v, want an error and a problem", err, statusText{ids})
	}
}

// What the loader cannot know is found by "config check".
func TestCheckIdentity(t *testing.T) {
	for want, c := range map[string]*file.Identity{
		"":                            nil,
		"bundleFile of trust \"x.y\"": {Trust: file.Trusts{"x.y": {Bundle: "https://x.y/", First: []byte("{}")}}},
		"SPIFFE id":                   {Trust: file.Trusts{"x.y": {Bundle: "https://x.y/", EndpointID: "x"}}},
		"identity.spiffe":             {SPIFFE: &file.SPIFFE{Socket: "x"}},
	} {
		err := checkIdentity(c)
		if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("got error %v, want %q", err, want)
		}
	}
}
