//go:build !nospiffe

package command

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"net"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/spiffe/go-spiffe/v2/bundle/spiffebundle"
	"github.com/spiffe/go-spiffe/v2/federation"
	"github.com/spiffe/go-spiffe/v2/spiffeid"

	"culvert.dev/identity/spiffe/spiffetest"
	"culvert.dev/internal/testca"
	"culvert.dev/internal/testnet"
	"culvert.dev/tunnel"
)

// svidKey makes a key of JWT-SVIDs.
func svidKey(t *testing.T) *ecdsa.PrivateKey {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	return key
}

// The recipe of the guide: JWT-SVIDs of the agent's trust domain and of one with a bundle
// endpoint are accepted by every carrier, for the ids of their own domain alone, and follow
// the rotation of the keys.
func TestWorkloadTokenRecipe(t *testing.T) {
	const corpID, partnerID = "spiffe://corp.example/ns/shop/sa/api", "spiffe://partner.example/ns/web/sa/front"
	corpKey, nextKey, partnerKey := svidKey(t), svidKey(t), svidKey(t)
	corp, partner := newTestCA(t, "corp.example"), newTestCA(t, "partner.example")
	answer := spiffetest.Answer{
		Bundles:    map[string][]byte{"spiffe://corp.example": spiffetest.Bundle(corp)},
		JWTBundles: map[string][]byte{"spiffe://corp.example": spiffetest.JWKS(t, "corp.example", map[string]crypto.PublicKey{"one": corpKey.Public()})},
	}
	agent := spiffetest.New(t, answer)
	domain := spiffeid.RequireTrustDomainFromString("partner.example")
	theirs := spiffebundle.FromX509Authorities(domain, nil)
	theirs.AddX509Authority(partner.Root())
	if err := theirs.AddJWTAuthority("one", partnerKey.Public()); err != nil {
		t.Fatal(err)
	}
	handler, err := federation.NewHandler(domain, theirs)
	if err != nil {
		t.Fatal(err)
	}
	shown, err := partner.Issue(testca.Options{SPIFFEID: partnerGateway, IPs: []net.IP{{127, 0, 0, 1}}})
	if err != nil {
		t.Fatal(err)
	}
	endpoint := httptest.NewUnstartedServer(handler)
	endpoint.TLS = &tls.Config{Certificates: []tls.Certificate{shown.TLS}}
	endpoint.StartTLS()
	t.Cleanup(endpoint.Close)

	files, roots := keysOfGateway(t)
	files["partner.pem"] = string(partner.CertPEM)
	yaml := tokenRecipe(t, "Workloads with JWT-SVIDs")
	for _, swap := range [][2]string{
		{"unix:///run/spire/agent.sock", agent.Socket()},
		{`{bundle: "https://bundle.partner.example/"}`, `{bundle: "` + endpoint.URL + `", endpointCAFile: partner.pem}`},
		{"  - address: :8080\n    protocols: [connect, connect-h2, websocket]\n", "  - address: 127.0.0.1:1\n    tls: {certificateFile: gw.crt, keyFile: gw.key, protocols: [connect, connect-h2, websocket]}\n"},
		{"services:\n", "  - {address: \"udp://127.0.0.1:1\", tls: {certificateFile: gw.crt, keyFile: gw.key}, auth: {issuers: [corp.example, partner.example]}}\nservices:\n"},
		{"name: orders.example.com", "name: svc.test"}, {"10.0.1.7:8443", testnet.Echo(t).Addr()},
	} {
		if !strings.Contains(yaml, swap[0]) {
			t.Fatalf("the recipe has no %q", swap[0])
		}
		yaml = strings.Replace(yaml, swap[0], swap[1], 1)
	}
	files["culvert.yaml"] = yaml
	r := startFile(t, files)
	token := func(key *ecdsa.PrivateKey, kid, id string) string {
		return spiffetest.Token(t, key, kid, id, []string{"culvert"}, time.Now().Add(time.Hour))
	}
	with := func(token string) *client {
		return &client{tls: &tls.Config{RootCAs: roots, ServerName: "gw.test"}, token: token}
	}
	good := []string{token(corpKey, "one", corpID), token(partnerKey, "one", partnerID)}
	for _, one := range good { // the sources answer when they do
		testnet.Eventually(t, patience, func() bool { return try(t, wayInBy("connect"), r.addrs[0], with(one)) == nil }, "the bundles are there")
	}
	bad := map[string]string{
		"an id of the other domain":      token(partnerKey, "one", corpID),
		"an id of a domain of nobody":    token(corpKey, "one", "spiffe://other.example/ns/a/sa/b"),
		"a token for another audience":   spiffetest.Token(t, corpKey, "one", corpID, []string{"billing"}, time.Now().Add(time.Hour)),
		"a token that has expired":       spiffetest.Token(t, corpKey, "one", corpID, []string{"culvert"}, time.Now().Add(-time.Hour)),
		"a token that nobody has signed": good[0][:strings.LastIndexByte(good[0], '.')+1] + good[1][strings.LastIndexByte(good[1], '.')+1:],
		"a key that nobody knows":        token(nextKey, "two", corpID),
	}
	for _, carrier := range []string{"connect", "connect-h2", "websocket", "websocket-h2", "connect-h3"} {
		addr := r.addrs[0]
		if carrier == "connect-h3" {
			addr = r.addrs[1]
		}
		for _, one := range good {
			if err := try(t, wayInBy(carrier), addr, with(one)); err != nil {
				t.Errorf("%s: %v", carrier, err)
			}
		}
		for name, one := range bad {
			if err := try(t, wayInBy(carrier), addr, with(one)); tunnel.ReasonOf(err) != tunnel.NoAuth {
				t.Errorf("%s, %s: got %v, want %s", carrier, name, err, tunnel.NoAuth)
			}
		}
	}
	for _, id := range []string{corpID, partnerID} {
		testnet.Eventually(t, patience, func() bool { return strings.Count(r.log.String(), "peer="+id+" peer_method=jwt") >= 5 }, "the log names %s", id)
	}
	for _, one := range good {
		for _, part := range strings.Split(one, ".") {
			if strings.Contains(r.log.String(), part) {
				t.Error("the log has a part of a token in it")
			}
		}
	}

	// The keys rotate without a new table.
	before := r.Status().Generation
	answer.JWTBundles = map[string][]byte{"spiffe://corp.example": spiffetest.JWKS(t, "corp.example", map[string]crypto.PublicKey{"two": nextKey.Public()})}
	agent.Set(answer)
	testnet.Eventually(t, patience, func() bool {
		return try(t, wayInBy("connect"), r.addrs[0], with(token(nextKey, "two", corpID))) == nil
	}, "a token of the next key is accepted")
	if err := try(t, wayInBy("connect"), r.addrs[0], with(good[0])); tunnel.ReasonOf(err) != tunnel.NoAuth {
		t.Errorf("a token of the former key: got %v, want %s", err, tunnel.NoAuth)
	}
	agent.Stop()
	if err := try(t, wayInBy("connect"), r.addrs[0], with(token(nextKey, "two", corpID))); err != nil {
		t.Errorf("while the agent is away: %v", err)
	}
	if after := r.Status().Generation; after != before {
		t.Errorf("the table was made anew, %v after %v, want none", after, before)
	}
}
