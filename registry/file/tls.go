package file

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"culvert.dev/registry"
	"culvert.dev/tunnel"
	"go.yaml.in/yaml/v3"
)

// Inner are the protocols that a listener's TLS may have inside.
var Inner = []string{"connect", "connect-h2", "hbone", "socks5", "websocket", "connect-h3", "connect-udp", "proxy", "tcp"}

// A TLS is how a listener ends TLS for some names.
type TLS struct {
	// Protocols, of Inner, are spoken inside; empty means connect and connect-h2, and for
	// UDP connect-h3. With tcp the stream goes to the service with the name that TLS was
	// ended for.
	Protocols []string

	Keys         []string // of identity by name, or names of Certificates in Config.Credentials
	Certificates []KeyPair
	Names        []tunnel.Pattern // that end here; empty means the certificates', without wildcards
	ALPN         []string         // that clients are offered with tcp; empty means that ALPN is not spoken
	ClientCA     string           // PEM certificates to verify clients by, whatever identity these have; "" for none
	Optional     bool             // clients may come without a certificate
	MinVersion   uint16           // 0 means TLS 1.3

	// Trust has the PEM certificates to verify clients by, by the trust domain of
	// the SPIFFE id that they must have. TrustNames name trust of identity, or are names of
	// Trust or ClientCA in Config.Credentials. With none of the three, no client is asked for
	// a certificate.
	Trust      map[string]string
	TrustNames []string
}

// A KeyPair is a certificate with its chain, and its key: PEM.
type KeyPair struct {
	Certificate string
	Key         registry.Secret
}

// X509 returns the pair for crypto/tls. The loader has seen that it is one.
func (p KeyPair) X509() (tls.Certificate, error) {
	return tls.X509KeyPair([]byte(p.Certificate), []byte(p.Key))
}

// Outer returns the protocols that the listener speaks in the clear. With TLS,
// "sni" says that TLS for names that are not the listener's own goes on to
// services.
func (l *Listener) Outer() []string {
	switch {
	case len(l.Protocols) > 0:
		return l.Protocols
	case len(l.TLS) > 0:
		return nil
	case l.UDP():
		return []string{"quic"}
	case l.Auth != nil:
		return Protocols[1:3] // TLS by name asks for no credentials
	}
	return Protocols[:3]
}

// Inner returns the protocols that the listener speaks inside of TLS, for all names.
func (l *Listener) Inner() (all []string) {
	for i := range l.TLS {
		for _, p := range l.inside(&l.TLS[i]) {
			if !slices.Contains(all, p) {
				all = append(all, p)
			}
		}
	}
	return all
}

// inside returns the protocols that the listener speaks inside of t.
func (l *Listener) inside(t *TLS) []string {
	switch {
	case len(t.Protocols) > 0:
		return t.Protocols
	case l.UDP():
		return []string{"connect-h3"}
	}
	return Inner[:2]
}

// any reports whether TLS ends by t for names that no other has: where the listener
// passes none on, at the one that names none. TLS for a service ends for names alone, unless
// the listener has one service.
func (l *Listener) any(t *TLS) bool {
	if !l.Service.IsZero() {
		return t.plain() && len(t.Names) == 0
	}
	return !slices.Contains(l.Outer(), "sni") && !slices.Contains(l.Outer(), "quic") && !t.plain() && (len(l.TLS) == 1 || len(t.Names) == 0)
}

// plain reports whether the streams inside go to services as they are.
func (t *TLS) plain() bool { return slices.Contains(t.Protocols, registry.PlainTCP) }

// names returns the names that end by t: those of its certificates where it has none.
func (t *TLS) names() []tunnel.Pattern {
	if len(t.Names) > 0 {
		return t.Names
	}
	var all []tunnel.Pattern
	for _, pair := range t.Certificates {
		c, err := pair.X509()
		if err != nil || c.Leaf == nil {
			continue
		}
		for _, s := range c.Leaf.DNSNames {
			if p, err := tunnel.ParsePattern(s); err == nil && !p.Wildcard && !slices.Contains(all, p) {
				all = append(all, p)
			}
		}
	}
	return all
}

// spoken returns all that the listener speaks.
func (l *Listener) spoken() []string { return append(slices.Clone(l.Outer()), l.Inner()...) }

// tlsSettings are a listener's tls. They become a TLS.
type tlsSettings struct {
	CertificateFile    string           `yaml:"certificateFile"`
	KeyFile            string           `yaml:"keyFile"`
	Key                []string         `yaml:"key,single" what:"a key" unique:"key" empty:"name a key of identity.keys"`
	Certificates       []KeyFiles       `yaml:"certificates" what:"a certificate"` // beside the first
	Names              []tunnel.Pattern `yaml:"names" what:"a name" as:"pattern"`
	Protocols          []string         `yaml:"protocols" what:"a protocol" oneof:"connect connect-h2 hbone socks5 websocket connect-h3 connect-udp proxy tcp" unique:"protocol" empty:"leave the key out for connect and connect-h2"`
	ALPN               []string         `yaml:"alpn" what:"an ALPN protocol" as:"alpn" unique:"ALPN protocol" empty:"leave the key out to speak no ALPN"`
	ClientCAFile       caFiles          `yaml:"clientCAFile"`
	Trust              []string         `yaml:"trust,single" what:"trust" unique:"trust" empty:"name trust of identity.trust"`
	ClientCertificates string           `yaml:"clientCertificates" oneof:"required optional ignored"`
	TrustDomains       []string         `yaml:"trustDomains" what:"a trust domain" as:"trustDomain" empty:"leave the key out to take any identity"`
	MinVersion         string           `yaml:"minVersion" oneof:"1.2 1.3"`
}

// KeyFiles name the files of a KeyPair.
type KeyFiles struct {
	CertificateFile string `yaml:"certificateFile,required"`
	KeyFile         string `yaml:"keyFile,required"`
}

// decode reads all but the files.
func (t *TLS) decode(d *decoder, n *yaml.Node, key string) {
	var s tlsSettings
	into(d, n, key, &s)
	*t = TLS{Protocols: readable(s.Protocols), Names: s.Names, ALPN: readable(s.ALPN), Optional: s.ClientCertificates == "optional", Keys: readable(s.Key), TrustNames: readable(s.Trust)}
	if s.ClientCertificates == "ignored" {
		t.TrustNames = nil
	}
	switch s.MinVersion {
	case "1.2":
		t.MinVersion = tls.VersionTLS12
	case "1.3":
		t.MinVersion = tls.VersionTLS13
	}
}

// keyFiles returns the objects that name the files of a listener's TLS.
func keyFiles(at mapping) (all []mapping) {
	if at.value("key") == nil {
		all = append(all, at)
	}
	for _, n := range at.items("certificates") {
		all = append(all, mapping{n})
	}
	return all
}

// trustDomains returns the trust domains of a listener's TLS, each once.
func trustDomains(at mapping) (domains []string) {
	for _, n := range at.items("trustDomains") {
		if _, c := parseTrustDomain("", n.Value); c == nil && !slices.Contains(domains, n.Value) {
			domains = append(domains, n.Value)
		}
	}
	return domains
}

// caFiles names a file of CAs, or a file for each trust domain.
type caFiles struct{}

func (*caFiles) decode(d *decoder, n *yaml.Node, key string) {
	if n.Kind != yaml.MappingNode {
		d.text(n, key)
		return
	}
	if len(n.Content) == 0 {
		d.errorf(n, "write {cluster.local: FILE}", "%s names no file", key)
	}
	seen := map[string]int{}
	for i := 0; i+1 < len(n.Content); i += 2 {
		k := n.Content[i]
		domain, ok := d.text(k, "a trust domain")
		if !ok {
			continue
		}
		if _, c := parseTrustDomain("", domain); c != nil {
			d.errorf(k, c.hint, "%s", c.msg)
			continue
		}
		if line, twice := seen[domain]; twice {
			d.errorf(k, "put the CAs of a trust domain into one file", "%q is in %s twice, first in line %d", clip(domain), key, line)
		}
		seen[domain] = k.Line
		d.text(n.Content[i+1], key)
	}
}

// tlsItems returns the objects of a listener's tls: one, or those of a list.
func tlsItems(listener mapping) []mapping {
	n := listener.value("tls")
	if n == nil || n.Kind != yaml.SequenceNode {
		return []mapping{{n}}
	}
	all := make([]mapping, len(n.Content))
	for i := range n.Content {
		all[i].node = n.Content[i]
	}
	return all
}

// readTLSFiles reads the certificates, keys and CAs of listeners, and returns
// what they contain.
func (d *decoder) readTLSFiles(path string) (all [][]byte) {
	for i := range d.cfg.Listeners {
		items := tlsItems(d.listener(i))
		for j := range d.cfg.Listeners[i].TLS {
			d.readTLSItem(path, &d.cfg.Listeners[i].TLS[j], items[j], &all)
		}
	}
	return all
}

// readTLSItem reads the files of one tls.
func (d *decoder) readTLSItem(path string, to *TLS, at mapping, all *[][]byte) {
	for _, p := range keyFiles(at) {
		if name, pair := d.ownKey(path, "listener", p, all); name != "" {
			to.Keys, to.Certificates = append(to.Keys, name), append(to.Certificates, pair)
		}
	}
	cas := at.value("clientCAFile")
	if cas != nil && cas.Kind == yaml.MappingNode {
		to.TrustNames, to.Trust = d.ownTrustByDomain(path, cas, "clientCAFile", all)
		return
	}
	domain := ""
	if domains := trustDomains(at); len(domains) > 0 {
		domain = domains[0]
	}
	name, pem := d.ownTrust(path, cas, "clientCAFile", domain, all)
	switch {
	case name == "":
		return
	case domain == "":
		to.ClientCA = pem
	default:
		to.Trust = map[string]string{domain: pem}
	}
	to.TrustNames = []string{name}
}

// byDomain is the hint for a file of CAs that several trust domains have.
func byDomain(key string, domains []string) string {
	var b strings.Builder
	for _, domain := range domains {
		b.WriteString(", " + domain + ": FILE")
	}
	return "give each its own: " + key + ": {" + b.String()[len(", "):] + "}"
}

// A Certificate is one that the gateway shows.
type Certificate struct {
	UsedBy    string // "listener", "dns", "via" or "service"
	File      string // as the configuration names it
	NotAfter  time.Time
	NotBefore time.Time
}

// pair reads a certificate and its key.
func (d *decoder) pair(path, usedBy string, at mapping, all *[][]byte) (pair KeyPair, ok bool) {
	pair.Certificate = string(d.content(path, at.value("certificateFile"), "certificateFile", all))
	pair.Key = registry.Secret(d.content(path, at.value("keyFile"), "keyFile", all))
	d.warnReadable(path, at.value("keyFile"))
	if pair.Certificate == "" || pair.Key == "" {
		return pair, false
	}
	x, err := pair.X509()
	if err == nil && x.Leaf != nil {
		d.cfg.Certificates = append(d.cfg.Certificates, Certificate{usedBy, at.value("certificateFile").Value, x.Leaf.NotAfter, x.Leaf.NotBefore})
		d.warnCertificate(at.value("certificateFile"), x.Leaf, usedBy)
	}
	if err != nil { // which quotes nothing of either file
		d.errorf(at.value("certificateFile"), "write PEM: the certificate and what it was signed by, and in keyFile its key", "certificate and key: %v", strings.TrimPrefix(err.Error(), "tls: "))
	}
	return pair, err == nil
}

// roots reads certificates to verify others by; "" where n is nil.
func (d *decoder) roots(path string, n *yaml.Node, what string, all *[][]byte) string {
	pem := d.content(path, n, what, all)
	if n == nil || pem == nil {
		return ""
	}
	if !x509.NewCertPool().AppendCertsFromPEM(pem) {
		d.errorf(n, "write certificates in PEM", "%s has no certificate in it", what)
	}
	return string(pem)
}

// content reads a file that n names, relative to the one at path; nil where it
// can't be. What it contains is added to all.
func (d *decoder) content(path string, n *yaml.Node, what string, all *[][]byte) []byte {
	return d.contentOf(path, n, what, maxAuthSize, all)
}

// contentOf is content for a file of at most limit bytes.
func (d *decoder) contentOf(path string, n *yaml.Node, what string, limit int64, all *[][]byte) []byte {
	b := d.uncounted(path, n, what, limit)
	if b != nil {
		d.cfg.files = append(d.cfg.files, d.beside(n.Value))
		*all = append(*all, b)
	}
	return b
}

// uncounted is contentOf for a file that is not watched: another content is no change of
// the configuration.
func (d *decoder) uncounted(path string, n *yaml.Node, what string, limit int64) []byte {
	if n == nil || n.Kind != yaml.ScalarNode || n.Value == "" {
		return nil // which was reported
	}
	name := n.Value
	if !filepath.IsAbs(name) {
		name = filepath.Join(filepath.Dir(path), name)
	}
	b, err := read(name, limit)
	if err == nil && len(b) == 0 {
		err = errors.New("it is empty")
	}
	if err != nil {
		d.errorf(n, "paths are relative to the configuration file", "%s: %v", what, err)
		return nil
	}
	if why := writable(name); why != "" {
		d.errorf(n, "chmod go-w it", "%q %s", name, why)
	}
	return b
}
