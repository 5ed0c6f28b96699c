package file

import (
	"net/url"
	"path/filepath"
	"slices"
	"strings"
)

// An Issuer is one whose JSON Web Tokens listeners may accept.
type Issuer struct {
	Issuer     string   `yaml:"issuer,required" as:"issuer"`
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

// JWKSURL returns where the keys are, "" where the issuer says it or a file has them.
func (i *Issuer) JWKSURL() string {
	if strings.Contains(i.JWKS, "://") {
		return i.JWKS
	}
	return ""
}

func (i *Issuer) check(d *decoder, at mapping) {
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
	u, err := url.Parse(s)
	if err != nil || u.Scheme != "https" || u.Host == "" || u.User != nil || u.RawQuery != "" || u.Fragment != "" {
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
		for n, i := range d.cfg.Identity.Tokens {
			if i.Issuer == "" {
				continue // which was reported
			}
			where := mapping{at.item("tokens", n)}
			if first, twice := known[i.Issuer]; twice {
				d.errorf(where.value("issuer"), "put its audiences and claims together", "issuer %q is already in line %d", clip(i.Issuer), first)
				continue
			}
			known[i.Issuer] = where.where("issuer").Line
		}
	}
	used := map[string]bool{}
	for n := range d.cfg.Listeners {
		auth := d.cfg.Listeners[n].Auth
		if auth == nil {
			continue
		}
		for j, name := range auth.Issuers {
			used[name] = true
			if _, ok := known[name]; !ok && name != "" {
				d.errorf(d.listener(n).object("auth").item("issuers", j), "list it in identity: {tokens: [{issuer: ..., audience: ...}]}, spelled alike", "there is no issuer %q in identity.tokens", clip(name))
			}
		}
	}
	if d.cfg.Identity == nil {
		return
	}
	for n, i := range d.cfg.Identity.Tokens {
		if i.Issuer != "" && !used[i.Issuer] && len(d.cfg.Listeners) > 0 {
			d.warnf(mapping{d.root.object("identity").item("tokens", n)}.where("issuer"), "add it to a listener: auth: {issuers: [...]}", "no listener accepts tokens of %q", clip(i.Issuer))
		}
	}
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
