package registry

import (
	"slices"
	"strings"

	"culvert.dev/tunnel"
)

// This file keeps what a listener requires of the clients of one name from being evaded
// by another name at the same port. Where TLS for a service ends with client certificates
// required, the service has a second way in by every other protocol of the listener: a
// CONNECT inside TLS that ended for another name, in the clear, or to the endpoint's
// address; and TLS that is passed on by another name of the service, behind whose hello
// anything may come, and which the service takes for plaintext.

// clientCerts has what clients of services must show, by the name of the listener.
type clientCerts map[string]*listenerClientCerts

// A listenerClientCerts has, of one listener, the services for which it ends TLS with
// client certificates required.
type listenerClientCerts struct {
	byName   hostMap[*ListenerTLS]
	services map[int32][]*ListenerTLS // by index
}

// addClientCerts finds the services for which listeners end TLS with client certificates
// required. All names have been added.
func (b *builder) addClientCerts() {
	if b.listeners == nil {
		return
	}
	for _, l := range b.listeners.list {
		if l.Settings == nil || !slices.ContainsFunc(l.Settings.TLS, func(i ListenerTLS) bool { return i.certifies() }) {
			continue
		}
		c := &listenerClientCerts{services: map[int32][]*ListenerTLS{}}
		for i := range l.Settings.TLS {
			item := &l.Settings.TLS[i]
			for _, p := range item.Names {
				c.byName.add(p, item)
				if item.certifies() {
					b.certify(c, p, item)
				}
			}
			if item.Any {
				c.byName.add(tunnel.Pattern{}, item)
			}
		}
		if b.clientCerts == nil {
			b.clientCerts = clientCerts{}
		}
		b.clientCerts[l.Name] = c
	}
}

// certifies reports whether the streams inside go to services, of clients that have shown
// a certificate.
func (t *ListenerTLS) certifies() bool {
	return slices.Contains(t.Protocols, PlainTCP) && t.requiresClientCert()
}

// certify adds the services that the names of p lead to, without the catch-all.
func (b *builder) certify(c *listenerClientCerts, p tunnel.Pattern, item *ListenerTLS) {
	add := func(all claims) {
		for _, one := range all {
			if !slices.Contains(c.services[one.service], item) {
				c.services[one.service] = append(c.services[one.service], item)
			}
		}
	}
	hello := func(at tunnel.Pattern) {
		if b.hello != nil {
			for _, all := range b.hello.byPattern[at] {
				add(all)
			}
		}
	}
	if m, ok := b.matchName(p.Suffix); ok && !p.Wildcard {
		add(m.claims)
	}
	hello(p)
	for at, more := p.Suffix, true; more; at, more = at.Parent() { // names of p may lead to them
		if at != p.Suffix || p.Wildcard {
			hello(tunnel.Pattern{Suffix: at, Wildcard: true})
		}
	}
	if !p.Wildcard {
		return
	}
	if all, ok := b.wild[p.Suffix]; ok {
		add(all)
	} else if m, ok := b.matchWild(p.Suffix); ok {
		add(m.claims)
	}
	below := "." + p.Suffix.String()
	for _, by := range []map[tunnel.Name]claims{b.exact, b.wild} {
		for name, all := range by {
			if strings.HasSuffix(name.String(), below) {
				add(all)
			}
		}
	}
	if b.hello != nil {
		for at := range b.hello.byPattern {
			if strings.HasSuffix(at.Suffix.String(), below) {
				hello(at)
			}
		}
	}
}

// admits returns nil if the client of req may reach e by the way that it came, and the
// refusal otherwise. It does not allocate, refusals apart.
func (c clientCerts) admits(e *serviceEntry, req *tunnel.Request) *tunnel.Error {
	if c == nil || e.index < 0 || req.Proto == "tls" { // which was ended for the very name that is asked for
		return nil
	}
	l := c[req.Listener]
	if l == nil || len(l.services[e.index]) == 0 {
		return nil
	}
	var came *ListenerTLS                                // by which the client came
	if req.TLS != nil && req.TLS.Peer.Method == "mtls" { // the Peer may be a user, whose certificate is the Actor
		if m, ok := l.byName.find(req.TLS.ServerName); ok && m.value.requiresClientCert() {
			came = m.value
		}
	}
	for _, item := range l.services[e.index] {
		if came == nil || !came.sameClients(&item.TLSTermination) {
			return tunnel.Refusef(tunnel.Denied, "registry: service %q of %s requires the client certificates of %q at listener %s, and the request came without one",
				e.Name, orUnknown(e.Origin), item.Names, req.Listener)
		}
	}
	return nil
}
