package inbound

import (
	"crypto/x509"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"culvert.dev/connect"
	"culvert.dev/delegation"
	"culvert.dev/identity"
	"culvert.dev/tunnel"
)

// delegates believes other gateways that state who has made a request.
type delegates struct {
	store    *identity.Store
	verifier delegation.Verifier // it has no gateways: a session is that of its peer
}

// delegate returns what finds the caller of a request that another gateway passes on.
func (b *Builder) delegate() connect.DelegateFunc {
	if d := b.believed(); d != nil {
		return d.peer
	}
	return nil
}

// believed returns the delegates of b, nil where it has no identity.
func (b *Builder) believed() *delegates {
	if b.Identity == nil {
		return nil
	}
	b.delegatesOnce.Do(func() { b.delegates = &delegates{store: b.Identity} })
	return b.delegates
}

// caller returns who has made req, which a gateway has passed on with a PROXY header inside
// TLS: whom the assertion in it states, and the gateway itself without one. As the header
// says where the client is, too, nobody may send one but a gateway that some trust domain
// lists. It is the Caller of a proxyproto.Inner; d may be nil.
func (d *delegates) caller(req *tunnel.Request, assertion string) (tunnel.Peer, error) {
	gateway := &req.TLS.Peer
	switch {
	case gateway.Method != "mtls":
		return tunnel.Peer{}, errors.New("the client has shown no certificate, and only a gateway may send a PROXY header here")
	case d == nil || len(d.store.Delegations(gateway.ID)) == 0:
		return tunnel.Peer{}, fmt.Errorf("%q may not send a PROXY header here: it is in no list of delegates", gateway.ID)
	case assertion == "":
		return req.Peer, nil
	}
	return d.peer(req, connect.Stated{Callers: []string{assertion}})
}

// peer returns who has made req: whom the gateway states, whose certificate was verified,
// if the trust domain of that caller lists the gateway, and who it was without that if no
// trust domain does. Each gateway on the way is the Actor of the one before. Such a gateway may
// state where the client is, too. It is connect.DelegateFunc.
func (d *delegates) peer(req *tunnel.Request, stated connect.Stated) (tunnel.Peer, error) {
	gateway := req.TLS.Peer
	domains := d.store.Delegations(gateway.ID)
	if len(domains) == 0 {
		return req.Peer, nil
	}
	for name, values := range map[string][]string{delegation.HeaderField: stated.Callers, connect.SourceField: stated.Sources} {
		if len(values) > 1 {
			return tunnel.Peer{}, fmt.Errorf("the request has %d fields %s, want one", len(values), name)
		}
	}
	if len(stated.Sources) > 0 {
		source, err := netip.ParseAddrPort(stated.Sources[0])
		if err != nil || source.Addr().Zone() != "" {
			return tunnel.Peer{}, fmt.Errorf("the field %s is %q, want an address and a port", connect.SourceField, tunnel.Clip(stated.Sources[0]))
		}
		req.StatedSource = netip.AddrPortFrom(source.Addr().Unmap(), source.Port())
	}
	if len(stated.Callers) == 0 {
		return req.Peer, nil
	}
	if own := gateway.Auth; own != nil && slices.Contains(domains, own.TrustDomain) {
		domains = append(slices.Clone(domains), "") // callers without a trust domain are of the gateway's
	}
	if req.TLS.Exporter == nil || len(req.TLS.Chain) == 0 {
		return tunnel.Peer{}, errors.New("the caller cannot be verified: the request came by no TLS session of a gateway")
	}
	binding, err := req.TLS.Exporter("EXPORTER-Channel-Binding", []byte{}, 32)
	if err != nil {
		return tunnel.Peer{}, fmt.Errorf("the TLS session has nothing to bind to: %w", err)
	}
	a, err := d.verifier.VerifySession(stated.Callers[0], &delegation.Session{
		Gateway: delegation.Gateway{ID: gateway.ID, TrustDomains: domains}, Leaf: req.TLS.Chain[0], Binding: binding, Audience: namesOf(req.TLS.Certificate),
	})
	if err != nil {
		return tunnel.Peer{}, err
	}
	caller, err := callerOf(a, gateway)
	if err != nil {
		return tunnel.Peer{}, err
	}
	caller.Auth.Evidence = &statement{store: d.store, by: gateway, caller: caller.Auth.TrustDomain}
	return caller, nil
}

// A statement is that of a gateway about a caller. It implements tunnel.Evidence: it counts
// for as long as the gateway is a delegate of the caller's trust domain.
type statement struct {
	store  *identity.Store
	by     tunnel.Peer
	caller string // the trust domain; "" for none
}

// Revoked implements tunnel.Evidence.
func (s *statement) Revoked() error {
	domain := s.caller
	if domain == "" && s.by.Auth != nil { // callers without one are of the gateway's
		domain = s.by.Auth.TrustDomain
	}
	if slices.Contains(s.store.Delegations(s.by.ID), domain) {
		return nil
	}
	return fmt.Errorf("%s is no delegate of the trust domain %q any more", s.by.ID, domain)
}

// namesOf returns what assertions call a gateway with that certificate: as a gateway by its
// URI, or a name with "dns:", and as a service also by what its clients verify.
func namesOf(own *x509.Certificate) (all []string) {
	if own == nil {
		return nil
	}
	if len(own.URIs) == 1 {
		all = append(all, own.URIs[0].String())
	}
	for _, name := range own.DNSNames {
		all = append(all, "dns:"+name, name)
	}
	for _, ip := range own.IPAddresses {
		all = append(all, ip.String())
	}
	return all
}

// callerOf returns the caller that a names, with the gateways on the way.
func callerOf(a *delegation.Assertion, gateway tunnel.Peer) (tunnel.Peer, error) {
	caller := tunnel.Peer{ID: a.Subject, Method: a.Method, Auth: new(tunnel.AuthInfo)}
	if strings.HasPrefix(a.Subject, tunnel.UserID) {
		caller.Method = delegated // of a Unix socket there: it is no user of this machine
	}
	if strings.HasPrefix(a.Subject, "spiffe://") {
		auth, err := identity.Principal(a.Subject)
		if err != nil {
			return tunnel.Peer{}, err
		}
		caller.Auth = auth
	}
	if gateway.Auth != nil {
		caller.Auth.Expires = gateway.Auth.Expires
	}
	var nearer tunnel.Peer // the gateway before, nobody at first
	for _, id := range slices.Backward(a.Actors[1:]) {
		nearer = tunnel.Peer{ID: id, Method: delegated}.WithActor(nearer)
	}
	return caller.WithActor(gateway.WithActor(nearer)), nil
}

// delegated is the Method of gateways of which the nearest one has said that they are on
// the way, and of users of other machines.
const delegated = "delegated"
