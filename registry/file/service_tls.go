package file

import (
	"cmp"
	"crypto/tls"
	"net/netip"
	"strings"

	"culvert.dev/registry"
	"culvert.dev/tunnel"
	"go.yaml.in/yaml/v3"
)

// A serviceTLS says how the gateway speaks TLS to the endpoints of a service.
type serviceTLS struct {
	ServerName      string   `yaml:"serverName" as:"serverName"`
	CAFile          string   `yaml:"caFile"`
	SANs            []string `yaml:"sans" what:"a name" as:"san" unique:"name" empty:"leave the key out to have the certificate verified for serverName"`
	CertificateFile string   `yaml:"certificateFile"`
	KeyFile         string   `yaml:"keyFile"`
	Key             string   `yaml:"key"`
	Trust           []string `yaml:"trust,single" what:"trust" unique:"trust" empty:"name trust of identity.trust"`
	PassClientTLS   bool     `yaml:"passClientTLS"`
	MinVersion      string   `yaml:"minVersion" oneof:"1.2 1.3"`
	MaxVersion      string   `yaml:"maxVersion" oneof:"1.2 1.3"`
	CipherSuites    []string `yaml:"cipherSuites" what:"a cipher suite" as:"cipherSuite" unique:"cipher suite" empty:"leave the key out for all that are secure"`
}

// registered returns t as the registry has it, without the content of its files, for a
// service with those names.
func (t *serviceTLS) registered(names []tunnel.Pattern) *registry.BackendTLS {
	if t == nil {
		return nil
	}
	return &registry.BackendTLS{
		ServerName: cmp.Or(t.ServerName, ownName(names)), SANs: readable(t.SANs), CipherSuites: readable(t.CipherSuites),
		MinVersion: tlsVersion(t.MinVersion), MaxVersion: tlsVersion(t.MaxVersion), KeyName: t.Key, TrustNames: readable(t.Trust), PassClientTLS: t.PassClientTLS,
	}
}

// ownName returns the first of names that is one name and no pattern, or "".
func ownName(names []tunnel.Pattern) string {
	for _, p := range names {
		if !p.Wildcard && !p.Suffix.IsZero() {
			return p.Suffix.String()
		}
	}
	return ""
}

// tlsVersion returns the number of a version of TLS, 0 for "".
func tlsVersion(s string) uint16 {
	switch s {
	case "1.2":
		return tls.VersionTLS12
	case "1.3":
		return tls.VersionTLS13
	}
	return 0
}

// check finds keys that do not go together.
func (t *serviceTLS) check(d *decoder, at mapping) {
	d.checkCredentials(at.node, "caFile")
	if t.MinVersion == "1.3" && t.MaxVersion == "1.2" {
		d.errorf(at.value("minVersion"), "make maxVersion 1.3, or leave it out", "minVersion 1.3 is above maxVersion 1.2, which leaves none")
	}
	if t.MinVersion == "1.3" && has(at.node, "cipherSuites") {
		d.errorf(keyOf(at.node, "cipherSuites"), "leave it out, or make minVersion 1.2", "cipherSuites has no effect: TLS 1.3 has its own, which can't be chosen")
	}
	domains := domainsOf(t.SANs)
	if len(t.Trust) > 0 {
		d.checkTrustOf(at.node, "sans", domains)
	} else if len(domains) > 1 {
		d.errorf(keyOf(at.node, "sans"), "give the endpoints of each trust domain a service of their own", "sans of several trust domains (%s): each CA could speak for all of them", clip(strings.Join(domains, ", ")))
	}
}

// parseServerName parses a name that TLS asks a server for, or its address.
func parseServerName(what, s string) (string, *complaint) {
	if a, err := netip.ParseAddr(s); err == nil && a.Zone() == "" {
		return a.String(), nil
	}
	name, c := parseName(s)
	if c != nil {
		return "", complain(c.hint, "%s %q: %s", what, clip(s), c.msg)
	}
	return name.String(), nil
}

// parseSAN parses a name that a certificate may have: a DNS name, also with a wildcard, an
// address, or a URI.
func parseSAN(what, s string) (string, *complaint) {
	if scheme, rest, ok := strings.Cut(s, "://"); ok {
		if scheme == "" || rest == "" || strings.ContainsFunc(s, func(r rune) bool { return r <= ' ' || r > '~' }) || scheme == "spiffe" && strings.HasSuffix(s, "/") {
			return "", complain("write spiffe://domain/path", "%q is not a URI that a certificate has", clip(s))
		}
		return s, nil
	}
	if rest, ok := strings.CutPrefix(s, "*."); ok {
		name, c := parseName(rest)
		if c != nil {
			return "", complain(c.hint, "name %q: %s", clip(s), c.msg)
		}
		return "*." + name.String(), nil
	}
	return parseServerName("name", s)
}

func parseCipherSuite(_, s string) (string, *complaint) {
	if _, err := registry.ParseCipherSuite(s); err != nil {
		hint := "known are " + strings.Join(registry.CipherSuites(), ", ")
		if m := meant(s, registry.CipherSuites()); m != "" {
			hint = "did you mean " + m + "?"
		}
		return "", complain(hint, "%v", err)
	}
	return s, nil
}

// checkServiceTLS finds what does not go with the TLS of a service, or has no effect.
func (d *decoder) checkServiceTLS(s *registry.Service, at mapping) {
	n := at.value("tls")
	if n == nil || s.TLS == nil || n.Kind != yaml.MappingNode {
		return
	}
	if s.TLS.ServerName == "" && !has(n, "serverName") {
		d.errorf(n, "add serverName, the name that the certificates of the endpoints have", "tls needs a serverName: the service has no name but patterns")
	}
	if check := at.object("check"); s.Check.Kind == "tls" && s.Check.Port == 0 && check.value("host") != nil {
		d.errorf(check.value("host"), "leave it out", "host has no effect: the check is by the service's tls, which has a server name")
	}
	if len(d.cfg.Listeners) > 0 && d.plaintext() == "" {
		d.warnf(keyOf(at.node, "tls"), "end the clients' TLS at a listener, or take connect, socks5 or websocket", "service %q: tls has no effect: all listeners pass the TLS of clients on as it is", clip(s.Name))
	}
}

// readServiceTLSFiles reads the certificates, keys and CAs by which TLS is spoken to
// services, and returns what they contain. Many services may name the same file, which is
// read once.
func (d *decoder) readServiceTLSFiles(path string) (all [][]byte) {
	trust, keys := map[string]string{}, map[[2]string]string{} // names in Credentials
	for i, s := range d.cfg.Services {
		at := d.services[i].object("tls")
		if s.TLS == nil || at.node == nil {
			continue
		}
		if name := at.word("caFile"); name != "" {
			own, known := trust[name]
			if !known {
				own, _ = d.ownTrust(path, at.value("caFile"), "caFile", "", &all)
				trust[name] = own
			}
			if own != "" {
				s.TLS.TrustNames = []string{own}
			}
		}
		if names := [2]string{at.word("certificateFile"), at.word("keyFile")}; names[0] != "" && names[1] != "" {
			own, known := keys[names]
			if !known {
				own, _ = d.ownKey(path, "service", at, &all)
				keys[names] = own
			}
			s.TLS.KeyName = own
		}
	}
	return all
}
