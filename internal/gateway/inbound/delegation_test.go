package inbound

import (
	"crypto"
	"crypto/x509"
	"errors"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"culvert.dev/connect"
	"culvert.dev/delegation"
	"culvert.dev/identity"
	"culvert.dev/internal/testca"
	"culvert.dev/tunnel"
)

// A gateway that is listed names callers of the trust domains that list it, in one field that it
// has signed for this session. What any other client says has no meaning.
func TestDelegates(t *testing.T) {
	const gatewayID, ownID = "spiffe://corp.example/gw", "spiffe://corp.example/inner"
	ca, err := testca.New("corp.example", nil)
	if err != nil {
		t.Fatal(err)
	}
	issue := func(id string) *testca.Pair {
		pair, err := ca.Issue(testca.Options{SPIFFEID: id})
		if err != nil {
			t.Fatal(err)
		}
		return pair
	}
	gw, other, own := issue(gatewayID), issue("spiffe://corp.example/other"), issue(ownID)
	binding := []byte(strings.Repeat("b", 32))
	sign := func(p *testca.Pair, id string, a delegation.Assertion) string {
		s, err := delegation.NewSigner(id, p.TLS.PrivateKey.(crypto.Signer), nil)
		if err != nil {
			t.Fatal(err)
		}
		if a.Audience == "" {
			a.Audience = ownID
		}
		if a.Binding == nil {
			a.Binding = binding
		}
		if a.Method == "" {
			a.Method = "mtls"
		}
		token, err := s.Sign(&a)
		if err != nil {
			t.Fatal(err)
		}
		return token
	}
	partner := delegation.Assertion{Subject: "spiffe://partner.example/ns/web/sa/front"}
	good := sign(gw, gatewayID, partner)
	for _, row := range []struct {
		name   string
		by     *testca.Pair // nil means the gateway
		domain map[string][]string
		stated []string
		noKey  bool // the session exports nothing
		caller string
		actors []string
		err    string
	}{
		{name: "a caller of a domain that lists it", domain: map[string][]string{"partner.example": {gatewayID}}, stated: []string{good}, caller: partner.Subject, actors: []string{gatewayID}},
		{name: "through a third gateway", domain: map[string][]string{"partner.example": {gatewayID}}, stated: []string{sign(gw, gatewayID, delegation.Assertion{Subject: partner.Subject, Actors: []string{"g3", "g4"}})}, caller: partner.Subject, actors: []string{gatewayID, "g3", "g4"}},
		{name: "nobody lists it", stated: []string{good}, caller: gatewayID},
		{name: "nobody lists it, and it says so twice, and no truth", stated: []string{"x", "y"}, caller: gatewayID},
		{name: "another client", by: other, domain: map[string][]string{"partner.example": {gatewayID}}, stated: []string{good}, caller: "spiffe://corp.example/other"},
		{name: "a caller of another domain", domain: map[string][]string{"corp.example": {gatewayID}}, stated: []string{good}, err: "may name callers of the trust domains"},
		{name: "a user, of the gateway's domain", domain: map[string][]string{"corp.example": {gatewayID}}, stated: []string{sign(gw, gatewayID, delegation.Assertion{Subject: "alice"})}, caller: "alice", actors: []string{gatewayID}},
		{name: "a user, of another domain", domain: map[string][]string{"partner.example": {gatewayID}}, stated: []string{sign(gw, gatewayID, delegation.Assertion{Subject: "alice"})}, err: "may name callers of the trust domains"},
		{name: "a user of its machine", domain: map[string][]string{"corp.example": {gatewayID}}, stated: []string{sign(gw, gatewayID, delegation.Assertion{Subject: "uid:0", Method: "unix"})}, caller: "uid:0", actors: []string{gatewayID}},
		{name: "twice", domain: map[string][]string{"partner.example": {gatewayID}}, stated: []string{good, good}, err: "2 fields Culvert-Peer, want one"},
		{name: "empty", domain: map[string][]string{"partner.example": {gatewayID}}, stated: []string{""}, err: "there is no assertion"},
		{name: "signed by another", domain: map[string][]string{"partner.example": {gatewayID}}, stated: []string{sign(other, gatewayID, partner)}, err: "not signed by the gateway's key"},
		{name: "of another", domain: map[string][]string{"partner.example": {gatewayID}}, stated: []string{sign(other, "spiffe://corp.example/other", partner)}, err: "and the TLS session is of"},
		{name: "for another gateway", domain: map[string][]string{"partner.example": {gatewayID}}, stated: []string{sign(gw, gatewayID, delegation.Assertion{Subject: partner.Subject, Audience: "spiffe://corp.example/third"})}, err: `is for "spiffe://corp.example/third"`},
		{name: "of another session", domain: map[string][]string{"partner.example": {gatewayID}}, stated: []string{sign(gw, gatewayID, delegation.Assertion{Subject: partner.Subject, Binding: []byte(strings.Repeat("c", 32))})}, err: "bound to another TLS session"},
		{name: "a malformed id", domain: map[string][]string{"partner.example": {gatewayID}}, stated: []string{sign(gw, gatewayID, delegation.Assertion{Subject: "spiffe://partner.example/a//b"})}, err: "malformed path"},
		{name: "no exporter", noKey: true, domain: map[string][]string{"partner.example": {gatewayID}}, stated: []string{good}, err: "nothing to bind to"},
	} {
		store := new(identity.Store)
		store.SetDelegates(row.domain)
		d := (&Builder{Identity: store}).delegate()
		by := gw
		if row.by != nil {
			by = row.by
		}
		id := by.TLS.Leaf.URIs[0].String()
		auth, err := identity.Principal(id)
		if err != nil {
			t.Fatal(err)
		}
		peer := tunnel.Peer{ID: id, Method: "mtls", Auth: auth}
		req := &tunnel.Request{Peer: peer, TLS: &tunnel.EndedTLS{
			Peer: peer, Chain: []*x509.Certificate{by.TLS.Leaf}, Certificate: own.TLS.Leaf,
			Exporter: func(label string, context []byte, n int) ([]byte, error) {
				if row.noKey {
					return nil, errors.New("no keying material")
				}
				if label != "EXPORTER-Channel-Binding" || context == nil || n != 32 {
					t.Errorf("%s: %q, %v and %d bytes are exported", row.name, label, context, n)
				}
				return binding, nil
			},
		}}
		got, err := d(req, connect.Stated{Callers: row.stated})
		if row.err != "" {
			if err == nil || !strings.Contains(err.Error(), row.err) {
				t.Errorf("%s: got %v, %v, want %q", row.name, got, err, row.err)
			}
			continue
		}
		var actors []string
		for at := got.Auth; at != nil && at.Actor != nil; at = at.Actor.Auth {
			actors = append(actors, at.Actor.ID)
		}
		if err != nil || got.ID != row.caller || !slices.Equal(actors, row.actors) {
			t.Errorf("%s: got %s through %q, %v, want %s through %q", row.name, got.ID, actors, err, row.caller, row.actors)
		}
		if row.caller == "uid:0" && got.Method != delegated {
			t.Errorf("%s: got the method %q, of a user of this machine", row.name, got.Method)
		}
		if row.caller == partner.Subject && (got.Auth.TrustDomain != "partner.example" || got.Auth.Namespace != "web") {
			t.Errorf("%s: got %+v", row.name, got.Auth)
		}
		if peer.Auth.Actor != nil {
			t.Errorf("%s: what is shared by the streams of a connection was changed", row.name)
		}
	}
}

// Where a client is, gateways may state that some trust domain lists, and nobody else; and it is not
// yet believed.
func TestSourcesAreStatedByDelegatesAlone(t *testing.T) {
	const id = "spiffe://corp.example/gw"
	var none netip.AddrPort
	here, there := netip.MustParseAddrPort("192.0.2.1:5000"), netip.MustParseAddrPort("198.51.100.7:443")
	for _, row := range []struct {
		name    string
		listed  string // the delegate
		stated  []string
		want    netip.AddrPort
		refused bool
	}{
		{"a delegate", id, []string{there.String()}, there, false},
		{"mapped into IPv6", id, []string{"[::ffff:198.51.100.7]:443"}, there, false},
		{"another gateway", "spiffe://corp.example/other", []string{there.String()}, none, false},
		{"another gateway, and no address", "spiffe://corp.example/other", []string{"x"}, none, false},
		{"two", id, []string{there.String(), there.String()}, none, true},
		{"no address", id, []string{"localhost:443"}, none, true},
		{"no port", id, []string{"198.51.100.7"}, none, true},
		{"a zone", id, []string{"[fe80::1%eth0]:443"}, none, true},
	} {
		store := new(identity.Store)
		store.SetDelegates(map[string][]string{"corp.example": {row.listed}})
		peer := tunnel.Peer{ID: id, Method: "mtls"}
		req := &tunnel.Request{Source: here, Peer: peer, TLS: &tunnel.EndedTLS{Peer: peer}}
		got, err := (&Builder{Identity: store}).delegate()(req, connect.Stated{Sources: row.stated})
		if refused := err != nil; refused != row.refused || req.StatedSource != row.want || req.Source != here || !refused && got.ID != id {
			t.Errorf("%s: the client is %q at %v, with %v; want %v, refused %v", row.name, got.ID, req.StatedSource, err, row.want, row.refused)
		}
	}
}
