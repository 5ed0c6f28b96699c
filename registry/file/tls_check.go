package file

import (
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"slices"
	"strings"

	"culvert.dev/registry"
	"culvert.dev/tunnel"
	"go.yaml.in/yaml/v3"
)

// checkTLS finds settings of a listener's TLS that do not go together.
func (d *decoder) checkTLS(l *Listener, at mapping) {
	items := tlsItems(at)
	if len(items) != len(l.TLS) {
		return
	}
	var catchAll *yaml.Node // that ends TLS for any name
	names := map[tunnel.Pattern]*yaml.Node{}
	for i := range l.TLS {
		t := &l.TLS[i]
		if items[i].node.Kind != yaml.MappingNode {
			continue
		}
		d.checkTLSItem(l, t, items[i])
		for j, name := range t.Names {
			n := items[i].item("names", j)
			if first := names[name]; first != nil && name != (tunnel.Pattern{}) {
				d.errorf(n, "keep one of them", "TLS for %q ends already by line %d", name, first.Line)
				continue
			}
			names[name] = n
		}
		if l.UDP() && !slices.Equal(l.inside(t), l.inside(&l.TLS[0])) {
			d.errorf(items[i].where("protocols"), "write the same, or use a listener of its own", "every tls of a listener of UDP has the same protocols, and these are not those of line %d", items[0].node.Line)
		}
		switch {
		case !l.any(t):
		case catchAll != nil:
			d.errorf(items[i].node, "list the names of one of them", "tls without names ends TLS for every other name, and so does that in line %d", catchAll.Line)
		default:
			catchAll = items[i].node
		}
	}
}

// checkTLSItem finds settings of one tls that do not go together.
func (d *decoder) checkTLSItem(l *Listener, t *TLS, settings mapping) {
	protocols, cas, domains := settings.value("protocols"), settings.value("clientCAFile"), settings.value("trustDomains")
	ignored := settings.word("clientCertificates") == "ignored"
	d.checkCredentials(settings.node, "clientCAFile")
	d.needCertificate(settings.node, "tls")
	casKey := "clientCAFile"
	if n := settings.value("trust"); n != nil {
		casKey = "trust"
		if cas == nil {
			cas = n
		}
	}
	switch has := func(s string) bool { return slices.Contains(t.Protocols, s) }; {
	case slices.Contains(l.Protocols, "proxy"):
		d.errorf(settings.node, "give it a listener of its own", "tls has no effect: with proxy, nothing is read from the client but its PROXY header")
	case has("hbone") && has("connect-h2"):
		d.errorf(protocols, "give one of them a listener of its own", "hbone and connect-h2 begin with the same bytes and can't be told apart")
	case has("hbone") && (cas == nil || t.Optional || ignored):
		d.errorf(protocols, "add clientCAFile or trust, and leave clientCertificates out", "hbone identifies its clients by certificates, which this listener does not require")
	case has("proxy") && len(t.Protocols) > 1:
		d.errorf(protocols, "give it names of its own: tls: [{names: [...], protocols: [proxy], ...}, ...]", "proxy inside TLS stands alone: whoever may speak it states who its clients are")
	case has("proxy") && (cas == nil || t.Optional || ignored):
		d.errorf(protocols, "add trust, and leave clientCertificates out", "proxy inside TLS is for gateways, which have certificates, and this listener does not require one")
	case has("proxy") && !d.cfg.Identity.delegates():
		d.errorf(protocols, "list the gateways: identity: {trust: {DOMAIN: {delegates: [...], ...}}}", "proxy inside TLS is for gateways that may state callers, and no trust of identity has delegates")
	case t.plain() && len(t.Protocols) > 1:
		d.errorf(protocols, "give it names of its own: tls: [{names: [...], protocols: [tcp], ...}, ...]", "tcp can't be told apart from other protocols: it is whatever the service speaks")
	}
	carrier := "connect-h2"
	if l.UDP() {
		carrier = "connect-h3"
	}
	if has := func(s string) bool { return slices.Contains(t.Protocols, s) }; has("connect-udp") && !has(carrier) {
		d.errorf(protocols, "add "+carrier, "connect-udp is carried by %s, which this listener does not speak", carrier)
	}
	if n := settings.value("key"); n != nil && len(t.Names) == 0 && !l.any(t) {
		d.errorf(n, "list them: names: [...]", "tls ends for no name: the certificate of a named key may change, so its names do not count")
	}
	if n := settings.value("alpn"); n != nil && !t.plain() {
		d.errorf(n, "leave it out", "alpn has no effect: it is for the protocol tcp, and the others have their own")
	}
	for _, p := range t.Protocols {
		if p != "connect-udp" && (p == "connect-h3") != l.UDP() {
			network, other := "TCP", "UDP"
			if l.UDP() {
				network, other = other, network
			}
			d.errorf(protocols, "leave it out", "%s is carried by %s, and this listener is of %s", p, other, network)
		}
	}
	if l.UDP() && t.MinVersion == tls.VersionTLS12 {
		d.errorf(settings.node, "leave minVersion out", "QUIC has no TLS before 1.3")
	}
	switch {
	case cas == nil || domains == nil:
	case casKey == "trust":
		d.errorf(domains, "leave it out", "trustDomains has no effect: trust names what clients are verified by")
	case cas.Kind == yaml.MappingNode:
		d.errorf(domains, "leave it out", "trustDomains has no effect: clientCAFile names the trust domains")
	case len(trustDomains(settings)) > 1:
		d.errorf(domains, byDomain("clientCAFile", trustDomains(settings)), "one clientCAFile for several trust domains: each of its CAs could speak for all of them")
	}
	if ignored && cas != nil {
		d.errorf(cas, "leave one of them out", "%s has no effect: client certificates are ignored", casKey)
	}
	for key, n := range map[string]*yaml.Node{"clientCertificates": settings.value("clientCertificates"), "trustDomains": domains} {
		if n != nil && cas == nil && (key == "trustDomains" || !ignored) {
			d.errorf(n, "add clientCAFile or trust", "%s has no effect: there is nothing to verify a client's certificate by", key)
		}
	}
}

// checkServiceListenerTLS finds what of tls has no effect at a listener with a service: TLS ends
// for whatever name a client asks for, and its stream is for that service.
func (d *decoder) checkServiceListenerTLS(l *Listener, at mapping) {
	if n := at.value("tls"); n != nil && l.UDP() {
		d.errorf(n, "leave it out", "tls has no effect: a listener of UDP with a service reads nothing from its clients")
		return
	}
	items := tlsItems(at)
	for i := range l.TLS {
		if t := &l.TLS[i]; i < len(items) && !t.plain() {
			d.errorf(items[i].where("protocols"), "write protocols: [tcp]", "with a service, what is inside of TLS is for that service")
		} else if i < len(items) && len(t.Names) > 0 {
			d.errorf(items[i].value("names"), "leave it out", "names has no effect: with a service, TLS ends whatever name a client asks for")
		}
	}
}

// checkPlain finds names that TLS ends for and that no service has. Table has the services
// of the file.
func (d *decoder) checkPlain(l *Listener, at mapping, table func() *registry.Table) {
	items := tlsItems(at)
	for i := range l.TLS {
		t := &l.TLS[i]
		if !t.plain() || d.cfg.Kubernetes != nil { // which may have them
			continue
		}
		for j, name := range t.Names {
			if name.Wildcard || name.Suffix.IsZero() {
				continue
			}
			s, err := table().Find(&tunnel.Request{Proto: "tls", Name: name.Suffix, ALPN: t.ALPN, LocalPort: listenPort(l.Address)})
			switch {
			case err != nil:
				d.errorf(items[i].item("names", j), "add a service with that name", "tls ends for %q, and its stream goes nowhere: %v", name, strings.TrimPrefix(err.Error(), "registry: "))
			case s.StartTLS != "" && s.TLS == nil:
				d.errorf(items[i].item("names", j), "add tls to the service, or leave its startTLS out", "tls ends for %q, and startTLS has its endpoints expect TLS, which nobody would begin", name)
			}
		}
	}
}

// warnCertified warns of services whose clients must show a certificate at one listener,
// and that another one leads to without. Each pair of listeners is told of once.
func (d *decoder) warnCertified() {
	certified := make([][]tunnel.Pattern, len(d.cfg.Listeners))
	for i := range d.cfg.Listeners {
		certified[i] = d.cfg.Listeners[i].certified()
	}
	for i := range d.cfg.Listeners {
		for j := range d.cfg.Listeners {
			other := &d.cfg.Listeners[j]
			if i == j || len(other.LocalUsers) > 0 || isSocket(other.Address) || other.certifiesAll() { // its clients are known
				continue
			}
			for _, name := range certified[i] {
				if !other.Service.IsZero() && !name.Matches(other.Service) || slices.Contains(certified[j], name) {
					continue
				}
				d.warnf(d.listener(j).where("address"), "do not expose the service there, or ask for the same", "clients of %q must show a certificate at %s, and %s leads to the service without one", name, d.cfg.Listeners[i].Address, other.Address)
				break
			}
		}
	}
}

// certified returns the names whose streams go to services, of clients that must show a
// certificate.
func (l *Listener) certified() (names []tunnel.Pattern) {
	for i := range l.TLS {
		if t := &l.TLS[i]; t.plain() && !t.Optional && (t.ClientCA != "" || len(t.Trust)+len(t.TrustNames) > 0) {
			if !l.Service.IsZero() {
				names = append(names, tunnel.Pattern{Suffix: l.Service})
				continue
			}
			names = append(names, t.names()...)
		}
	}
	return names
}

// certifiesAll reports whether TLS ends for all that comes, of clients that must show a certificate.
func (l *Listener) certifiesAll() bool {
	all := len(l.Protocols) == 0
	ends := false
	for i := range l.TLS {
		t := &l.TLS[i]
		all = all && !t.Optional && (t.ClientCA != "" || len(t.Trust)+len(t.TrustNames) > 0)
		ends = ends || l.any(t)
	}
	return all && ends
}

// checkNames finds names that no certificate of their listener has, and those that
// several have.
func (d *decoder) checkNames() {
	for i := range d.cfg.Listeners {
		l, items := &d.cfg.Listeners[i], tlsItems(d.listener(i))
		first := map[tunnel.Pattern]int{}
		for j := range l.TLS {
			t := &l.TLS[j]
			if len(t.Certificates) != len(keyFiles(items[j])) {
				continue
			}
			d.checkNamesOf(t, items[j])
			names := t.names()
			if len(names) == 0 && !l.any(t) && items[j].value("key") == nil { // else it was reported
				d.errorf(items[j].node, "list them: names: [...]", "tls ends for no name: it lists none, and its certificates have none but wildcards")
			}
			for _, name := range names {
				if k, taken := first[name]; taken && k != j && len(l.TLS[j].Names)*len(l.TLS[k].Names) == 0 { // else it was reported
					d.errorf(items[j].node, "list the names of each", "TLS for %q, of a certificate, ends already by line %d", name, items[k].node.Line)
					continue
				}
				first[name] = j
			}
		}
	}
}

func (d *decoder) checkNamesOf(l *TLS, at mapping) {
	certificates, called := d.certificatesOf(l, at)
	if len(certificates) == 0 {
		return
	}
	const most = 5 // names that are told of a certificate
	for i, name := range l.Names {
		if name == (tunnel.Pattern{}) {
			continue
		}
		var covered []string
		has := false
		for j, pair := range certificates {
			c, err := pair.X509()
			if err != nil || c.Leaf == nil {
				return
			}
			if has = has || covers(c.Leaf, name); len(c.Leaf.DNSNames) > 0 {
				some := c.Leaf.DNSNames[:min(len(c.Leaf.DNSNames), most)]
				covered = append(covered, fmt.Sprintf("%s covers %s", clip(called[j]), strings.Join(some, ", ")))
			}
		}
		if !has {
			d.errorf(at.item("names", i), strings.Join(covered, "; "), "tls.names: no certificate covers %q", name)
		}
	}
}

// certificatesOf returns what a listener's TLS presents, and what each is called; none
// where that is not known before the gateway runs.
func (d *decoder) certificatesOf(t *TLS, at mapping) (all []KeyPair, called []string) {
	if at.value("key") == nil {
		for _, f := range keyFiles(at) {
			called = append(called, f.value("certificateFile").Value)
		}
		return t.Certificates, called
	}
	for _, name := range t.Keys {
		k := d.cfg.Identity.key(name)
		if k == nil || k.Pair.Certificate == "" {
			return nil, nil
		}
		all, called = append(all, k.Pair), append(called, "key "+name)
	}
	return all, called
}

// key returns the key with that name, nil if there is none.
func (c *Identity) key(name string) *IdentityKey {
	if c == nil {
		return nil
	}
	return c.Keys[name]
}

// delegates reports whether there is a gateway that may name callers.
func (c *Identity) delegates() bool {
	if c != nil {
		for _, t := range c.Trust {
			if t != nil && len(t.Delegates) > 0 {
				return true
			}
		}
	}
	return false
}

// covers reports whether c has the name, as a listener's TLS looks for it.
func covers(c *x509.Certificate, name tunnel.Pattern) bool {
	if !name.Wildcard {
		return c.VerifyHostname(name.Suffix.String()) == nil
	}
	return slices.ContainsFunc(c.DNSNames, func(s string) bool { return strings.EqualFold(s, name.String()) })
}
