package file

import (
	"net/netip"
	"slices"
	"strings"

	"culvert.dev/registry"
)

// A LoadBalancer is one in front of a listener that ends HTTPS and sends requests on.
type LoadBalancer struct {
	From              []netip.Prefix `yaml:"from" what:"a range" as:"cidr" unique:"range" empty:"list the ranges of the load balancers in front"` // no other client may connect
	ClientHeader      string         `yaml:"clientHeader" as:"requestField" default:"X-Forwarded-For"`
	Hops              int            `yaml:"hops,min=1,max=16" default:"1"` // that add to ClientHeader
	CredentialsHeader string         `yaml:"credentialsHeader" as:"requestField"`
}

func (b *LoadBalancer) check(d *decoder, at mapping) {
	checkEverybody(d, at, b.From)
	switch n := at.value("clientHeader"); {
	case n == nil:
	case strings.HasSuffix(strings.ToLower(b.ClientHeader), "authorization"):
		d.errorf(n, "write the one in which it names the client: X-Forwarded-For", "clientHeader %q has credentials, and no address", b.ClientHeader)
	case b.ClientHeader != "" && strings.EqualFold(b.ClientHeader, b.CredentialsHeader):
		d.errorf(n, "use another one for one of them", "clientHeader and credentialsHeader are the same")
	}
}

// forTable returns b as the table has it.
func (b *LoadBalancer) forTable() *registry.LoadBalancer {
	if b == nil {
		return nil
	}
	return &registry.LoadBalancer{From: b.From, ClientField: b.ClientHeader, Hops: b.Hops, CredentialsField: b.CredentialsHeader}
}

// checkEverybody finds ranges of proxies in front that cover all addresses: a proxy may claim to be
// anybody.
func checkEverybody(d *decoder, at mapping, from []netip.Prefix) {
	for i, r := range from {
		if r.IsValid() && r.Bits() == 0 {
			d.errorf(at.item("from", i), "list the ranges of the proxies in front", "range %s covers everybody", r)
		}
	}
}

// parseRequestField parses the name of a field of requests.
func parseRequestField(what, s string) (string, *complaint) {
	bad := func(r rune) bool {
		return !('a' <= r && r <= 'z' || 'A' <= r && r <= 'Z' || '0' <= r && r <= '9' || r == '-')
	}
	switch {
	case s == "" || len(s) > 64 || strings.ContainsFunc(s, bad):
		return "", complain("write it with letters, digits and dashes, as X-Forwarded-For", "%s %q is not the name of a field", what, clip(s))
	case slices.Contains([]string{"connection", "cookie", "forwarded", "host", "origin", "upgrade", "via"}, strings.ToLower(s)):
		return "", complain("use another field", "%s %q has another meaning or form", what, clip(s))
	}
	return s, nil
}

// checkLoadBalancer finds what does not go with a load balancer in front of the listener.
func (d *decoder) checkLoadBalancer(l *Listener, at mapping) {
	b := l.LoadBalancer
	if b == nil {
		return
	}
	n, inside := at.value("loadBalancer"), at.object("loadBalancer")
	switch {
	case at.value("service") != nil || l.UDP():
		d.errorf(n, "leave it out", "loadBalancer has no effect: the listener reads no requests of HTTP")
		return
	case l.Proxy != nil:
		d.errorf(n, "keep one of them", "proxyProtocol and loadBalancer both say who the client is")
	case l.UnixSocket() && len(b.From) > 0:
		d.errorf(inside.value("from"), "leave it out: whoever may write to the socket is the load balancer", "from has no effect: a client of a Unix socket has no address")
	case !l.UnixSocket() && inside.value("from") == nil:
		d.errorf(n, "add from: [RANGE], the addresses of the load balancer", "anybody who can connect could claim any address, as loadBalancer has no from")
	}
	for _, p := range l.spoken() {
		if !slices.Contains([]string{"connect", "connect-h2", "connect-udp", "websocket"}, p) {
			d.errorf(n, "give it a listener of its own, and write protocols: [websocket] here", "behind a load balancer the clients of %s cannot be told apart: it names them in requests of CONNECT and WebSocket alone", p)
		}
	}
	h := inside.value("credentialsHeader")
	switch {
	case h == nil:
	case l.Auth == nil:
		d.errorf(h, "add auth, or leave it out", "credentialsHeader has no effect: the listener asks for no credentials")
	case d.cfg.Identity != nil:
		for _, i := range d.cfg.Identity.Tokens {
			if slices.Contains(l.Auth.Issuers, i.Name()) && strings.EqualFold(i.Header, b.CredentialsHeader) {
				d.errorf(h, "leave it out: the issuer's header has its token", "the tokens of %q come in this field, too", clip(i.Name()))
			}
		}
	}
}
