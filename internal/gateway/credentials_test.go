package gateway

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"encoding/json"
	"net"
	"testing"
	"time"

	"github.com/go-jose/go-jose/v4"
	josejwt "github.com/go-jose/go-jose/v4/jwt"

	"culvert.dev/connect"
	"culvert.dev/identity/jwt"
	"culvert.dev/internal/testnet"
	"culvert.dev/registry"
)

// Tunnels outlive their credentials, but at a listener that wants them ended: those of a
// token that is taken away, and those of one that has expired. Others go on.
func TestTunnelsEndWithTheirCredentials(t *testing.T) {
	const issuer = "https://login.example/"
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	keys, err := json.Marshal(jose.JSONWebKeySet{Keys: []jose.JSONWebKey{{Key: key.Public(), KeyID: "k"}}})
	if err != nil {
		t.Fatal(err)
	}
	signer, err := jose.NewSigner(jose.SigningKey{Algorithm: jose.ES256, Key: key}, nil)
	if err != nil {
		t.Fatal(err)
	}
	expires := time.Now().Add(time.Hour)
	token, err := josejwt.Signed(signer).Claims(josejwt.Claims{Issuer: issuer, Subject: "alice", Audience: josejwt.Audience{"culvert"}, Expiry: josejwt.NewNumericDate(expires)}).Serialize()
	if err != nil {
		t.Fatal(err)
	}
	e := newEdgeOf(t, Config{Limits: noLimits, Issuers: []jwt.Issuer{{URL: issuer, Audiences: []string{"culvert"}, JWKS: keys}}})
	svc := service(testnet.Echo(t).Addr())
	auth := func(names ...string) func(*registry.ListenerSettings) {
		return func(s *registry.ListenerSettings) {
			s.Auth = &registry.Auth{Tokens: map[registry.TokenDigest]string{}, Issuers: []string{issuer}}
			for _, name := range names {
				s.Auth.Tokens[sha256.Sum256([]byte("token of "+name))] = name
			}
		}
	}
	lax := changed(e.configured("connect"), auth("ci", "cd"))
	strict := changed(changed(e.configured("connect"), auth("ci", "cd")), func(s *registry.ListenerSettings) { s.EndWithCredential = true })
	e.configure(svc, lax, strict)
	open := func(l *registry.Listener, token string) net.Conn {
		t.Helper()
		c, err := e.by(l, connect.BearerCredentials(token))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = c.Close() })
		testnet.Ping(t, c, "open")
		return c
	}
	ended := func(c net.Conn, what string) {
		t.Helper()
		_ = c.SetReadDeadline(time.Now().Add(patience))
		if n, err := c.Read(make([]byte, 1)); n > 0 || err == nil || isTimeout(err) {
			t.Errorf("%s: got %d bytes and %v, want the tunnel ended", what, n, err)
		}
	}
	stays := []net.Conn{open(lax, "token of ci"), open(lax, "token of cd"), open(strict, "token of ci"), open(lax, token)}
	gone, expired := open(strict, "token of cd"), open(strict, token)
	e.configure(svc, changed(lax, auth("ci")), changed(strict, auth("ci")))
	ended(gone, "a token that was taken away")
	e.logs("peer=cd", "reason=revoked")
	for _, c := range append(stays, expired) {
		testnet.Ping(t, c, "goes on")
	}
	if n := e.credentials.sweep(expires); n != 0 {
		t.Errorf("%d tunnels ended while their token is still accepted, want none", n)
	}
	if n := e.credentials.sweep(expires.Add(2 * time.Minute)); n != 1 {
		t.Errorf("%d tunnels ended with an expired token, want one", n)
	}
	ended(expired, "a token that has expired")
	for _, c := range stays {
		testnet.Ping(t, c, "goes on")
	}
	// An issuer that is taken away ends what it allowed as well.
	last := open(strict, token)
	e.configure(svc, changed(lax, auth("ci")), changed(strict, func(s *registry.ListenerSettings) { auth("ci")(s); s.Auth.Issuers = nil }))
	ended(last, "an issuer that was taken away")
	for _, c := range stays {
		testnet.Ping(t, c, "goes on")
	}
}

func isTimeout(err error) bool {
	timeout, ok := err.(net.Error)
	return ok && timeout.Timeout()
}
