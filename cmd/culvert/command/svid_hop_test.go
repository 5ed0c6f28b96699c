//go:build !nospiffe

package command

import (
	"crypto"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"culvert.dev/identity/spiffe/spiffetest"
	"culvert.dev/internal/testnet"
	"culvert.dev/tunnel"
)

// loadBalancer ends TLS in front of a gateway, as a foreign one does, and passes on what is
// inside. It returns its address.
func loadBalancer(t *testing.T, files map[string]string, to string) string {
	t.Helper()
	pair, err := tls.X509KeyPair([]byte(files["gw.crt"]), []byte(files["gw.key"]))
	if err != nil {
		t.Fatal(err)
	}
	cfg := &tls.Config{Certificates: []tls.Certificate{pair}, NextProtos: []string{"h2", "http/1.1"}}
	return testnet.Service(t, func(c net.Conn) {
		defer c.Close()
		inner := tls.Server(c, cfg)
		behind, err := net.Dial("tcp", to)
		if err != nil {
			return
		}
		defer behind.Close()
		done := make(chan struct{})
		go func() {
			defer close(done)
			_, _ = io.Copy(behind, inner)
			_ = behind.(*net.TCPConn).CloseWrite()
		}()
		_, _ = io.Copy(inner, behind)
		_ = inner.CloseWrite()
		<-done
	})
}

// hopCarriers are the ways from one gateway to another one that show a token, each as the
// configuration has it for an address.
var hopCarriers = map[string]string{
	"connect":      "connect: https://%s",
	"connect-h2":   "connect-h2: https://%s",
	"connect-h3":   "connect-h3: %s",
	"websocket":    "websocket: wss://%s/",
	"websocket-h2": "http2: true, websocket: wss://%s/",
}

// nearServices are services of a gateway that asks the one at addr, or at udp by HTTP/3, for
// svc.test by every carrier, with more in each hop.
func nearServices(addr, udp, more string) string {
	var b strings.Builder
	b.WriteString("services:\n")
	for carrier, hop := range hopCarriers {
		to := addr
		if carrier == "connect-h3" {
			to = udp
		}
		fmt.Fprintf(&b, "  - name: %s.test\n    endpoints: [\"svc.test:443\"]\n    ports: [443]\n    via: [{%s, serverName: gw.test, caFile: ca.pem, %s}]\n", carrier, fmt.Sprintf(hop, to), more)
	}
	return b.String()
}

// tryName is try for a service with that name, by a client without credentials.
func tryName(t *testing.T, addr, name string) error {
	t.Helper()
	return tryTo(t, wayInBy("connect"), addr, name+":443", &client{})
}

// The identity of a gateway crosses a load balancer that ends TLS, by every carrier that
// shows a token: the gateway behind it knows the caller by its JWT-SVID. The token is
// nowhere else. While the agent is away, the last one is shown until it expires.
func TestJWTSVIDOfHop(t *testing.T) {
	const nearID, recipeID = "spiffe://corp.example/ns/edge/sa/near", "spiffe://corp.example/ns/edge/sa/west"
	key := svidKey(t)
	corp := newTestCA(t, "corp.example")
	var life atomic.Int64 // of tokens for "brief", in seconds
	life.Store(3)
	shown := make(chan string, 1000)
	answer := spiffetest.Answer{
		Bundles:    map[string][]byte{"spiffe://corp.example": spiffetest.Bundle(corp)},
		JWTBundles: map[string][]byte{"spiffe://corp.example": spiffetest.JWKS(t, "corp.example", map[string]crypto.PublicKey{"one": key.Public()})},
		Token: func(id string, audience []string) (string, error) {
			expires := time.Hour
			if slices.Contains(audience, "brief") {
				expires = time.Duration(life.Load()) * time.Second
			}
			token := spiffetest.Token(t, key, "one", id, audience, time.Now().Add(expires))
			select {
			case shown <- token:
			default:
			}
			return token, nil
		},
	}
	agent := spiffetest.New(t, answer)
	files, _ := keysOfGateway(t)
	far := startFile(t, map[string]string{"gw.crt": files["gw.crt"], "gw.key": files["gw.key"], "culvert.yaml": `
identity:
  spiffe: {socket: "` + agent.Socket() + `"}
  trust: {corp.example: {spiffe: true}}
  tokens: [{trustDomain: corp.example, audience: [far.example, brief]}]
listeners:
  - {address: "127.0.0.1:1", protocols: [connect, connect-h2, websocket], auth: {issuers: [corp.example]}}
  - {address: "udp://127.0.0.1:1", tls: {certificateFile: gw.crt, keyFile: gw.key}, auth: {issuers: [corp.example]}}
services:
  - {name: svc.test, endpoints: ["` + testnet.Echo(t).Addr() + `"]}
`})
	balancer := loadBalancer(t, files, far.addrs[0])
	udp := strings.TrimPrefix(far.addrs[1], "udp://")
	near := startFile(t, map[string]string{"ca.pem": files["gw-ca.crt"], "culvert.yaml": `
cluster: near
identity: {spiffe: {socket: "` + agent.Socket() + `"}}
listeners: [{address: "127.0.0.1:1", protocols: [connect]}]
` + nearServices(balancer, udp, `jwtSVID: {audience: far.example, spiffe: "`+nearID+`"}`) + `
  - name: brief.test
    endpoints: ["svc.test:443"]
    ports: [443]
    via: [{connect: "https://` + balancer + `", serverName: gw.test, caFile: ca.pem, jwtSVID: {audience: brief, spiffe: "` + nearID + `"}}]
  - name: other.test
    endpoints: ["svc.test:443"]
    ports: [443]
    via: [{connect: "https://` + balancer + `", serverName: gw.test, caFile: ca.pem, jwtSVID: {audience: elsewhere, spiffe: "` + nearID + `"}}]
`})
	for carrier := range hopCarriers {
		testnet.Eventually(t, patience, func() bool { return tryName(t, near.addrs[0], carrier+".test") == nil }, "by %s", carrier)
	}
	recipe := tokenRecipe(t, "From one gateway to the next")
	for _, swap := range [][2]string{
		{"lb.east.example:443", balancer}, {"audience: gw.east.example}", "audience: far.example, spiffe: " + recipeID + "}, serverName: gw.test, caFile: ca.pem"},
		{"unix:///run/spire/agent.sock", agent.Socket()}, {":3128", "127.0.0.1:1"}, {"orders.example.com", "svc.test"}, {"ports: [8443]", "ports: [443]"},
	} {
		if !strings.Contains(recipe, swap[0]) {
			t.Fatalf("the recipe has no %q", swap[0])
		}
		recipe = strings.Replace(recipe, swap[0], swap[1], 1)
	}
	west := startFile(t, map[string]string{"ca.pem": files["gw-ca.crt"], "culvert.yaml": recipe})
	if err := tryName(t, west.addrs[0], "svc.test"); err != nil {
		t.Errorf("by the recipe of the guide: %v", err)
	}
	testnet.Eventually(t, patience, func() bool { return strings.Contains(far.log.String(), "peer="+recipeID+" peer_method=jwt") }, "the log of the gateway behind names that of the recipe")
	if err := tryName(t, near.addrs[0], "other.test"); tunnel.ReasonOf(err) != tunnel.DialFailed {
		t.Errorf("a token for another audience: got %v, want %s", err, tunnel.DialFailed)
	}
	testnet.Eventually(t, patience, func() bool { return strings.Contains(far.log.String(), `the token is for \"elsewhere\"`) }, "the log of the gateway behind says why")
	testnet.Eventually(t, patience, func() bool {
		return strings.Count(far.log.String(), "peer="+nearID+" peer_method=jwt") >= len(hopCarriers)
	}, "the log of the gateway behind names the one in front")

	// What is minted is in no log and no status.
	status := fmt.Sprintf("%+v", near.Status())
	for len(shown) > 0 {
		for _, part := range strings.Split(<-shown, ".") {
			if strings.Contains(near.log.String()+far.log.String()+status, part) {
				t.Error("a part of a token is in a log or in the status")
			}
		}
	}

	// A token that lives for a moment is renewed, and is good while the agent is away, but
	// no longer than it lives.
	testnet.Eventually(t, patience, func() bool { return tryName(t, near.addrs[0], "brief.test") == nil }, "by a token that lives for a moment")
	agent.Stop()
	if err := tryName(t, near.addrs[0], "connect.test"); err != nil {
		t.Errorf("while the agent is away, by a token that is still good: %v", err)
	}
	testnet.Eventually(t, patience, func() bool { return tunnel.ReasonOf(tryName(t, near.addrs[0], "brief.test")) == tunnel.DialFailed }, "no token that has expired is shown")
	testnet.Eventually(t, patience, func() bool {
		return strings.Contains(near.log.String(), "there is no token to show to gateway") && strings.Contains(near.log.String(), "cannot reach the agent")
	}, "the log says why")
	life.Store(3600)
	agent.Start()
	testnet.Eventually(t, patience, func() bool { return tryName(t, near.addrs[0], "brief.test") == nil }, "after the agent is back")
}

// The token file of a hop is read again when it changes, without a new table: a projected
// token of Kubernetes is another every hour.
func TestTokenFileOfHopRotates(t *testing.T) {
	files, _ := keysOfGateway(t)
	files["tokens.txt"] = "ci:" + digestOf("t-one") + "\n"
	files["culvert.yaml"] = `
listeners:
  - {address: "127.0.0.1:1", tls: {certificateFile: gw.crt, keyFile: gw.key, protocols: [connect, connect-h2, websocket]}, auth: {tokensFile: tokens.txt}}
  - {address: "udp://127.0.0.1:1", tls: {certificateFile: gw.crt, keyFile: gw.key}, auth: {tokensFile: tokens.txt}}
services:
  - {name: svc.test, endpoints: ["` + testnet.Echo(t).Addr() + `"]}
`
	far := startFile(t, files)
	near := startFile(t, map[string]string{"ca.pem": files["gw-ca.crt"], "token": "t-one\n", "culvert.yaml": `
cluster: near
listeners: [{address: "127.0.0.1:1", protocols: [connect]}]
` + nearServices(far.addrs[0], strings.TrimPrefix(far.addrs[1], "udp://"), "tokenFile: token")})
	for carrier := range hopCarriers {
		if err := tryName(t, near.addrs[0], carrier+".test"); err != nil {
			t.Errorf("by %s: %v", carrier, err)
		}
	}
	before := near.Status().Generation
	far.write(t, "tokens.txt", "ci:"+digestOf("t-two")+"\n")
	// Every listener has read the file before the next token is there: a listener that had not would take the first token.
	for carrier := range hopCarriers {
		testnet.Eventually(t, patience, func() bool { return tryName(t, near.addrs[0], carrier+".test") != nil }, "by %s the first token is refused", carrier)
	}
	// As kubelet does it: another file takes the place of the first.
	near.write(t, "token.next", "t-two\n")
	if err := os.Rename(filepath.Join(near.dir, "token.next"), filepath.Join(near.dir, "token")); err != nil {
		t.Fatal(err)
	}
	for carrier := range hopCarriers {
		testnet.Eventually(t, patience, func() bool { return tryName(t, near.addrs[0], carrier+".test") == nil }, "by %s with the next token", carrier)
	}
	if err := os.Remove(filepath.Join(near.dir, "token")); err != nil {
		t.Fatal(err)
	}
	for carrier := range hopCarriers {
		if err := tryName(t, near.addrs[0], carrier+".test"); err != nil {
			t.Errorf("by %s while the file is gone: %v", carrier, err)
		}
	}
	if after := near.Status().Generation; after != before {
		t.Errorf("table %d after table %d, want no new one", after, before)
	}
	if strings.Contains(near.log.String()+far.log.String(), "t-two") {
		t.Error("a log has the token in it")
	}
}
