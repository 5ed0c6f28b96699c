package command

import (
	"strings"
	"testing"
	"time"

	"culvert.dev/internal/testca"
	"culvert.dev/internal/testnet"
)

// A clockWindow is when a certificate is valid: a clock that is hours behind or ahead sees one
// that is good as one of these.
type clockWindow struct {
	name  string
	from  time.Duration // from now
	for_  time.Duration
	wrong string // what is said of it
}

var wrongClocks = []clockWindow{
	{"behind", 3 * time.Hour, time.Hour, "certificate is not valid yet"},
	{"ahead", -3 * time.Hour, time.Hour, "certificate has expired"},
}

// windowed issues a certificate for a window.
func (w *reverseWorld) windowed(t *testing.T, c clockWindow, id string, names ...string) *testca.Pair {
	t.Helper()
	pair, err := w.ca.Issue(testca.Options{SPIFFEID: id, DNSNames: names, NotBefore: time.Now().Add(c.from), TTL: c.for_})
	if err != nil {
		t.Fatal(err)
	}
	return pair
}

// A connector by whose clock the gateway's certificate is not valid says so, and that it may be
// its clock. It goes on trying, and has its session as soon as both agree.
func TestExposeWithAWrongClock(t *testing.T) {
	for _, c := range wrongClocks {
		t.Run(c.name, func(t *testing.T) {
			w := newReverseWorld(t)
			bad := w.windowed(t, c, "spiffe://corp.example/ns/gw/sa/gw1", "gw1.example")
			w.gateway.write(t, "gw.crt", string(bad.CertPEM))
			w.gateway.write(t, "gw.key", string(bad.KeyPEM))
			w.gateway.source.Reload()
			shown := func(leaf string) func() bool {
				return func() bool {
					for _, e := range w.gateway.ids.store.Entries() {
						for _, end := range e.Ends {
							if end.Of == "spiffe://corp.example/ns/gw/sa/gw1" {
								return end.NotBefore.UTC().Format(time.RFC3339) == leaf
							}
						}
					}
					return false
				}
			}
			testnet.Eventually(t, patience, shown(bad.TLS.Leaf.NotBefore.UTC().Format(time.RFC3339)), "the gateway has the certificate")

			one := w.expose(t, "spiffe://corp.example/ns/edge/sa/one", []string{w.gateway.addrs[0]}, "-o", "json")
			one.says(t, c.wrong)
			one.says(t, "the clock of this machine says 20")
			connector := w.connector(t, "spiffe://corp.example/ns/edge/sa/one", w.recipe)
			testnet.Eventually(t, patience, func() bool {
				s := connector.Status().Reverse
				return s != nil && len(s.To) == 1 && strings.Contains(s.To[0].Error, c.wrong)
			}, "the status of a connector says why")

			good := w.issue(t, "spiffe://corp.example/ns/gw/sa/gw1", "gw1.example")
			w.gateway.write(t, "gw.crt", string(good.CertPEM))
			w.gateway.write(t, "gw.key", string(good.KeyPEM))
			w.gateway.source.Reload()
			one.says(t, `"event":"session"`)
			testnet.Eventually(t, patience, func() bool { connected, _ := session(connector); return connected }, "the connector has its session")
			if got, err := w.ask(t, "cam.edge.example"); err != nil || got != helloClient {
				t.Errorf("got %q and %v, want %q", got, err, helloClient)
			}
		})
	}
}

// A gateway by whose clock the connector's certificate is not valid refuses it, and its log says
// why. The connector says when its certificate is valid, and what its clock is.
func TestExposeToAGatewayWithAWrongClock(t *testing.T) {
	w := newReverseWorld(t)
	for _, c := range wrongClocks {
		t.Run(c.name, func(t *testing.T) {
			bad := w.windowed(t, c, "spiffe://corp.example/ns/edge/sa/"+c.name)
			w.exposeAs(t, bad, []string{w.gateway.addrs[0]}).ends(t, `the certificate of "spiffe://corp.example/ns/edge/sa/`+c.name+`" is valid from `+bad.TLS.Leaf.NotBefore.UTC().Format(time.RFC3339))
			w.wantRefusal(t, "reason=no-auth", c.wrong, "CN="+c.name)
		})
	}
}
