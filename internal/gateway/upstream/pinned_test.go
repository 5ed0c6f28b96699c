package upstream

import (
	"crypto/tls"
	"net"
	"testing"

	"culvert.dev/delegation"
	"culvert.dev/identity"
	"culvert.dev/internal/testca"
	"culvert.dev/registry"
)

// A carrier signs with the key that its session has shown, also once there is another one.
func TestAssertionsAreOfTheKeyThatTheSessionHasShown(t *testing.T) {
	w := newIdentityWorld(t)
	renewed, err := w.ca.Issue(testca.Options{SPIFFEID: gatewayID})
	if err != nil {
		t.Fatal(err)
	}
	store := new(identity.Store)
	key := store.Key("gw")
	get := func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return key.Certificate() }
	cfg := &tls.Config{InsecureSkipVerify: true, GetClientCertificate: get}
	fields, err := callerHeader(&registry.Hop{ForwardIdentity: registry.HopIdentity{Assertion: true}}, cfg)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := cfg.GetClientCertificate(nil); err == nil {
		t.Fatal("a key that nobody has set is shown")
	}
	key.Set(&w.gw.TLS)

	near, far := net.Pipe()
	defer near.Close()
	server := tls.Server(far, &tls.Config{Certificates: []tls.Certificate{w.service.TLS}, ClientAuth: tls.RequireAnyClientCert})
	done := make(chan error, 1)
	go func() { done <- server.Handshake() }()
	client := tls.Client(near, cfg)
	if err := client.HandshakeContext(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	key.Set(&renewed.TLS)
	cs, theirs := client.ConnectionState(), server.ConnectionState()
	got, err := fields(withCaller(t.Context(), w.request()), &cs)
	if err != nil || len(got) != 1 {
		t.Fatal(got, err)
	}
	binding, err := delegation.Binding(&theirs)
	if err != nil {
		t.Fatal(err)
	}
	var v delegation.Verifier
	session := &delegation.Session{Gateway: delegation.Gateway{ID: gatewayID}, Leaf: theirs.PeerCertificates[0], Binding: binding, Audience: []string{serviceID}}
	if _, err := v.VerifySession(got[0].Value, session); err != nil {
		t.Errorf("the session is refused: %v", err)
	}
	session.Leaf = renewed.TLS.Leaf
	if _, err := new(delegation.Verifier).VerifySession(got[0].Value, session); err == nil {
		t.Error("the assertion is signed with a key that the session has not shown")
	}
	// The next carrier shows the next key.
	next := &tls.Config{GetClientCertificate: get}
	if _, err := callerHeader(&registry.Hop{ForwardIdentity: registry.HopIdentity{Assertion: true}}, next); err != nil {
		t.Fatal(err)
	}
	if c, err := next.GetClientCertificate(nil); err != nil || !c.Leaf.Equal(renewed.TLS.Leaf) {
		t.Errorf("the next carrier shows %v, %v, want the key of now", c, err)
	}
}
