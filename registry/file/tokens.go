package file

import (
	"cmp"
	"net/url"
	"path/filepath"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"
)

// An Issuer is one whose JSON Web Tokens listeners may accept: a login service, or a trust
// domain with its JWT-SVIDs.
type Issuer struct {
	Issuer      string `yaml:"issuer" as:"issuer"`           // one of these two
	TrustDomain string `yaml:"trustDomain" as:"trustDomain"` // a name of Identity.Trust; with Kubernetes, that of the workloads

	Audience   []string `yaml:"audience,single" what:"an audience" unique:"audience" empty:"name what its tokens for this gateway have in aud"`
	ID         string   `yaml:"id"` // of the caller, with claims in braces; "" means {sub}
	Claims     []string `yaml:"claims" what:"a claim" unique:"claim"`
	Kubernetes bool     `yaml:"kubernetes"`
	Header     string   `yaml:"header" as:"fieldName"`
	Signer     string   `yaml:"signer"`
	JWKS       string   `yaml:"jwks"`      // a file, or an https URL; "" means where the issuer says
	CAFile     string   `yaml:"caFile"`    // of the issuer's server
	TokenFile  string   `yaml:"tokenFile"` // to show to it; an absolute path once it is read

	Keys  []byte // what the file of JWKS contains; nil for a URL
	Roots string // what CAFile contains
}

// Name returns what listeners call the issuer.
func (i *Issuer) Name() string { return cmp.Or(i.Issuer, i.TrustDomain) }

// JWKSURL returns where the keys are, "" where the issuer says it or a file has them.
func (i *Issuer) JWKSURL() string {
	if strings.Contains(i.JWKS, "://") {
		return i.JWKS
	}
	return ""
}

func (i *Issuer) check(d *decoder, at mapping) {
	url, domain := at.value("issuer"), at.value("trustDomain")
	switch {
	case at.node.Kind != yaml.MappingNode:
		return
	case url == nil && domain == nil:
		d.errorf(at.node, "write issuer: https://login.example.com/, or trustDomain: corp.example", "tokens are those of an issuer or of a trust domain, and neither is named")
	case url != nil && domain != nil && !i.Kubernetes:
		d.errorf(domain, "list it as an entry of its own", "an entry is that of an issuer or that of a trust domain, not both")
	case domain != nil && url == nil:
		for _, key := range []string{"id", "kubernetes", "header", "signer", "jwks", "caFile", "tokenFile"} {
			if n := at.value(key); n != nil {
				d.errorf(n, "leave it out", "%s has no effect: JWT-SVIDs have the ids and keys of their trust domain", key)
			}
		}
	}
	if at.value("audience") == nil && i.Signer == "" {
		d.errorf(at.node, "name what its tokens for this gateway have in aud: audience: [culvert]", "an issuer without an audience would let in tokens that are meant for others")
	}
	if i.Signer != "" && (i.Header == "" || i.JWKS == "") {
		d.errorf(at.value("signer"), "add header: x-amzn-oidc-data and jwks", "a signer needs the header that the load balancer sends, and its keys")
	}
	if u := i.JWKSURL(); u != "" {
		if _, c := parseIssuer("jwks", u); c != nil {
			d.errorf(at.value("jwks"), "write a file, or a URL that begins with https://", "%s", c.msg)
		}
	}
	if i.JWKS != "" && i.JWKSURL() == "" && i.CAFile+i.TokenFile != "" {
		d.errorf(at.value("jwks"), "leave caFile and tokenFile out", "the keys are in a file, so that no server is asked for them")
	}
}

// parseIssuer parses the https URL of an issuer, OpenID Connect Core 1.0 section 2.
func parseIssuer(what, s string) (string, *complaint) {
	if strings.Contains(s, "@") { // it may have a password, and is not quoted
		return "", complain("leave the user out; tokenFile has a bearer token for jwks", "%s has a user, and this file must not have a password", what)
	}
	u, err := url.Parse(s)
	if err != nil || u.Scheme != "https" || u.Host == "" || u.RawQuery != "" || u.Fragment != "" {
		return "", complain("write it as its tokens have it in iss: https://login.example.com/", "%s %q is not an https URL", what, clip(s))
	}
	return s, nil
}

// parseFieldName parses the name of a header field.
func parseFieldName(what, s string) (string, *complaint) {
	bad := func(r rune) bool {
		return !('a' <= r && r <= 'z' || 'A' <= r && r <= 'Z' || '0' <= r && r <= '9' || r == '-' || r == '_')
	}
	lower := strings.ToLower(s)
	switch {
	case s == "" || len(s) > 64 || strings.ContainsFunc(s, bad):
		return "", complain("write it as x-amzn-oidc-data", "%s %q is not the name of a field", what, clip(s))
	case slices.Contains([]string{"authorization", "proxy-authorization", "cookie", "host", "forwarded", "via"}, lower):
		return "", complain("leave header out: clients send their own tokens as credentials", "%s %q is not a field that a load balancer signs", what, clip(s))
	}
	return lower, nil
}

// checkIssuers checks which issuers listeners accept.
func (d *decoder) checkIssuers() {
	known := map[string]int{}
	if d.cfg.Identity != nil {
		at := d.root.object("identity")
		for n := range d.cfg.Identity.Tokens {
			i := &d.cfg.Identity.Tokens[n]
			if i.Name() == "" {
				continue // which was reported
			}
			where := i.named(mapping{at.item("tokens", n)})
			if first, twice := known[i.Name()]; twice {
				d.errorf(where, "put its audiences and claims together", "issuer %q is already in line %d", clip(i.Name()), first)
				continue
			}
			known[i.Name()] = where.Line
			switch t := d.cfg.Identity.Trust[i.TrustDomain]; {
			case i.Issuer != "":
			case t == nil:
				d.errorf(where, "add it to identity.trust, with spiffe: true or a bundle", "there is no trust %q to verify JWT-SVIDs by", clip(i.TrustDomain))
			case t.CAFile != "":
				d.errorf(where, "have its bundle come from the Workload API or from a bundle endpoint", "trust %q has CAs alone, and JWT-SVIDs are verified by JWT keys", clip(i.TrustDomain))
			}
		}
	}
	d.checkAccounts()
	used := map[string]bool{}
	for n := range d.cfg.Listeners {
		auth := d.cfg.Listeners[n].Auth
		if auth == nil {
			continue
		}
		for j, name := range auth.Issuers {
			used[name] = true
			if _, ok := known[name]; !ok && name != "" {
				d.errorf(d.listener(n).object("auth").item("issuers", j), "list it in identity: {tokens: [{issuer: ..., audience: ...}]}, or with trustDomain, with the same spelling", "there is no issuer %q in identity.tokens", clip(name))
			}
		}
	}
	if d.cfg.Identity == nil {
		return
	}
	for n := range d.cfg.Identity.Tokens {
		i := &d.cfg.Identity.Tokens[n]
		if name := i.Name(); name != "" && !used[name] && len(d.cfg.Listeners) > 0 {
			d.warnf(i.named(mapping{d.root.object("identity").item("tokens", n)}), "add it to a listener: auth: {issuers: [...]}", "no listener accepts tokens of %q", clip(name))
		}
	}
}

// checkAccounts says which trust domain the service accounts of Kubernetes are of.
func (d *decoder) checkAccounts() {
	if d.cfg.Identity == nil {
		return
	}
	clusters := 0
	for _, i := range d.cfg.Identity.Tokens {
		if i.Kubernetes && i.Issuer != "" {
			clusters++
		}
	}
	for n := range d.cfg.Identity.Tokens {
		i, at := &d.cfg.Identity.Tokens[n], mapping{d.root.object("identity").item("tokens", n)}
		if !i.Kubernetes || i.Issuer == "" || i.TrustDomain != "" {
			continue
		}
		i.TrustDomain = DefaultTrustDomain
		if clusters > 1 {
			d.errorf(at.where("kubernetes"), "add trustDomain, another one for each cluster", "the service accounts of %q need a trust domain, as there are %d issuers of Kubernetes", clip(i.Issuer), clusters)
		}
		if k := d.cfg.Kubernetes; k != nil && k.AuthorizationPolicies != nil && len(k.AuthorizationPolicies.TrustDomains) > 0 && !slices.Contains(k.AuthorizationPolicies.TrustDomains, DefaultTrustDomain) {
			d.warnf(at.where("kubernetes"), "add trustDomain: "+k.AuthorizationPolicies.TrustDomains[0]+" if they are of this cluster", "no AuthorizationPolicy that names a ServiceAccount matches the tokens of %q: without trustDomain they are of %s", clip(i.Issuer), DefaultTrustDomain)
		}
	}
}

// named returns where the issuer at that place has its name.
func (i *Issuer) named(at mapping) *yaml.Node {
	if i.Issuer != "" {
		return at.where("issuer")
	}
	return at.where("trustDomain")
}

// readIssuerFiles reads the key sets and CAs of issuers, and returns what they contain.
func (d *decoder) readIssuerFiles(path string) (all [][]byte) {
	if d.cfg.Identity == nil {
		return nil
	}
	for n := range d.cfg.Identity.Tokens {
		i, at := &d.cfg.Identity.Tokens[n], mapping{d.root.object("identity").item("tokens", n)}
		if i.JWKSURL() == "" {
			i.Keys = d.content(path, at.value("jwks"), "jwks", &all)
		}
		i.Roots = d.roots(path, at.value("caFile"), "caFile", &all)
		if i.TokenFile != "" {
			if !filepath.IsAbs(i.TokenFile) {
				i.TokenFile = filepath.Join(filepath.Dir(path), i.TokenFile)
			}
			d.warnFile(at.value("tokenFile"), i.TokenFile) // it is read each time that keys are fetched
		}
	}
	return all
}
