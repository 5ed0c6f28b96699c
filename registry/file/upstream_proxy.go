package file

import (
	"net/url"
	"strings"
)

// An UpstreamProxy is an HTTP proxy through which gateways are dialed.
type UpstreamProxy struct {
	URL             string   `yaml:"url,required,short" as:"proxyURL"`
	CAFile          string   `yaml:"caFile"`       // of a proxy behind TLS; "" means the CAs of the system
	User            string   `yaml:"user"`         // "" means that no credentials are sent
	PasswordFile    string   `yaml:"passwordFile"` // one of these two with User; an absolute path once it is read
	PasswordCommand []string `yaml:"passwordCommand" what:"an argument" empty:"name the command and its arguments"`

	Roots string // what CAFile contains
}

// parseProxyURL parses the URL of an HTTP proxy. What it complains of is not quoted where it
// may have a password.
func parseProxyURL(what, s string) (string, *complaint) {
	const hint = "write http://proxy.example.com:3128, or https:// for TLS to the proxy"
	u, err := url.Parse(s)
	switch {
	case strings.Contains(s, "@"):
		return "", complain("use user, and passwordCommand or passwordFile", "%s has a user, and this file must not have a password", what)
	case err != nil || u.Scheme != "http" && u.Scheme != "https" || strings.TrimSuffix(u.Path, "/") != "" || u.RawQuery != "" || u.Fragment != "":
		return "", complain(hint, "%s %q is not the URL of an HTTP proxy", what, clip(s))
	}
	if c := checkHostPort(u.Host); c != nil {
		return "", complain(hint, "%s %q: %s", what, clip(s), c.msg)
	}
	return u.Scheme + "://" + u.Host, nil
}

// check finds credentials that are not complete.
func (p *UpstreamProxy) check(d *decoder, at mapping) {
	file, command, user := at.value("passwordFile"), at.value("passwordCommand"), at.value("user")
	switch {
	case file != nil && command != nil:
		d.errorf(command, "keep one of them", "the password comes from a file or from a command, and there are both")
	case user == nil && file != nil:
		d.errorf(file, "add user", "a password needs a user")
	case user == nil && command != nil:
		d.errorf(command, "add user", "a password needs a user")
	case user != nil && file == nil && command == nil:
		d.errorf(user, "add passwordCommand: [secret-tool, lookup, proxy, corp], or passwordFile", "a user needs a password")
	case user != nil && strings.Contains(p.User, ":"):
		d.errorf(user, "leave the password to passwordCommand or passwordFile", "user has a colon, which ends the name of a user")
	}
	if n := at.value("caFile"); n != nil && strings.HasPrefix(p.URL, "http:") {
		d.errorf(n, "write https:// in url, or leave it out", "caFile has no effect: there is no TLS to the proxy")
	}
}

// readProxyFiles reads the files that upstreamProxy names, and returns what they contain.
// The password is read when it is needed.
func (d *decoder) readProxyFiles(path string) (all [][]byte) {
	p, at := d.cfg.UpstreamProxy, d.root.object("upstreamProxy")
	if p == nil {
		return nil
	}
	if n := at.value("caFile"); n != nil {
		p.Roots = d.roots(path, n, "caFile", &all)
	}
	if n := at.value("passwordFile"); n != nil {
		d.warnReadable(path, n)
		d.uncounted(path, n, "passwordFile", maxAuthSize)
		p.PasswordFile = d.beside(p.PasswordFile)
	}
	return all
}
