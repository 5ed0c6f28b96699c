package registry

import (
	"culvert.dev/tunnel"
)

// A HelloMatch says which ClientHellos of a service's names are for it. A service with
// one answers to its names for those hellos alone: neither DNS nor a request that came
// otherwise than by TLS finds it there. The zero HelloMatch is for services of all
// requests.
type HelloMatch struct {
	ALPN  []string // protocols; the first that the client offers, of those that services of the name have, decides
	NoSNI bool     // also hellos without a server name; with ALPN those that offer it
}

// IsZero reports whether m leaves nothing out.
func (m HelloMatch) IsZero() bool { return len(m.ALPN) == 0 && !m.NoSNI }

// helloClaims are the claims of services with a HelloMatch.
type helloClaims struct {
	byPattern map[tunnel.Pattern]map[string]claims // by ALPN protocol; AnyName is the catch-all's
	noSNI     claims
	noSNIALPN map[string]claims
}

// addHello adds the claims of service i, which has a HelloMatch, and reports whether it
// claims its names for all other requests too.
func (b *builder) addHello(s *Service, i int32) (names bool) {
	if b.hello == nil {
		b.hello = &helloClaims{byPattern: map[tunnel.Pattern]map[string]claims{}, noSNIALPN: map[string]claims{}}
	}
	h := b.hello
	for _, protocol := range s.Match.ALPN {
		for _, p := range s.Names {
			if p == (tunnel.Pattern{}) {
				continue
			}
			if h.byPattern[p] == nil {
				h.byPattern[p] = map[string]claims{}
			}
			h.byPattern[p][protocol] = b.claim(h.byPattern[p][protocol], "ALPN protocol "+protocol+" of name", p.String(), i)
		}
		if s.Match.NoSNI {
			h.noSNIALPN[protocol] = b.claim(h.noSNIALPN[protocol], "ALPN protocol "+protocol+" of clients", "without a server name", i)
		}
	}
	if s.Match.NoSNI && len(s.Match.ALPN) == 0 {
		h.noSNI = b.claim(h.noSNI, "clients", "without a server name", i)
	}
	return len(s.Match.ALPN) == 0
}

// byALPN returns the first of the protocols of a request that a service has.
func byALPN(services map[string]claims, req *tunnel.Request) (claims, bool) {
	for _, protocol := range req.ALPN {
		if c, ok := services[protocol]; ok {
			return c, true
		}
	}
	return nil, false
}

// findHello finds the service of a ClientHello by its ALPN protocols, at the most
// specific name that a service has. It is false where none has one of them there.
func (t *Table) findHello(req *tunnel.Request) (m nameMatch, ok bool, refusal *tunnel.Error) {
	if t.hello == nil || len(req.ALPN) == 0 {
		return nameMatch{}, false, nil
	}
	at := tunnel.Pattern{Suffix: req.Name}
	for {
		if services := t.hello.byPattern[at]; services != nil {
			if c, ok := byALPN(services, req); ok {
				return nameMatch{claims: c}, true, nil
			}
			if len(req.ALPN) >= tunnel.MaxALPN { // there may be more, which nobody has looked at
				return nameMatch{}, false, tunnel.Refusef(tunnel.TooLarge, "registry: %q: the client offers %d ALPN protocols or more, and services of this name differ by them", req.Target(), tunnel.MaxALPN)
			}
		}
		plain := t.exact
		if at.Wildcard {
			plain = t.wild
		}
		if _, ok := plain[at.Suffix]; ok || at == tunnel.AnyName {
			return nameMatch{}, false, nil
		}
		parent, more := at.Suffix.Parent()
		if !more {
			parent = tunnel.Name{}
		}
		at = tunnel.Pattern{Suffix: parent, Wildcard: true}
	}
}

// namesNothing reports whether req is of a ClientHello without a server name.
func namesNothing(req *tunnel.Request) bool { return req.Name.IsZero() && !req.Addr.IsValid() }

// findNoSNI finds the service of a ClientHello that has no server name.
func (t *Table) findNoSNI(req *tunnel.Request) (match, *tunnel.Error) {
	if t.hello != nil {
		if c, ok := byALPN(t.hello.noSNIALPN, req); ok {
			return t.pick(nameMatch{claims: c}, req)
		}
		if len(t.hello.noSNI) > 0 {
			return t.pick(nameMatch{claims: t.hello.noSNI}, req)
		}
	}
	return match{}, tunnel.Refusef(tunnel.NoSNI, "registry: the ClientHello has no server name, and no service is for such clients")
}
