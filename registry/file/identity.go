package file

import (
	"crypto/x509"
	"maps"
	"net"
	"net/netip"
	"net/url"
	"slices"
	"strings"

	"culvert.dev/identity"
	"go.yaml.in/yaml/v3"
)

// An Identity is how the gateway knows callers, beside their passwords, and what it shows
// to others: keys and trust by name, and where they come from.
type Identity struct {
	Tokens      []Issuer     `yaml:"tokens" what:"an issuer"`
	SPIFFE      *SPIFFE      `yaml:"spiffe"` // nil means that there is no agent
	Keys        IdentityKeys `yaml:"keys"`
	Trust       Trusts       `yaml:"trust"`
	ServeBundle *ServeBundle `yaml:"serveBundle"` // nil means that no bundle is served

	// Joined is the folder of a device that has joined by a token, whose certificate is
	// renewed; an absolute path once it is read, "" for none.
	Joined string `yaml:"joined"`
}

// A SPIFFE is an agent that serves the Workload API.
type SPIFFE struct {
	Socket string `yaml:"socket,required" as:"workloadAPI"`
}

// IdentityKeys are keys by name.
type IdentityKeys map[string]*IdentityKey

// An IdentityKey is a key of the Workload API, or of files. Paths are absolute, or relative
// to where the process was started, once the files are read.
type IdentityKey struct {
	SPIFFE          string `yaml:"spiffe" as:"workload"` // its id, or "default"; "" where it is of files
	CertificateFile string `yaml:"certificateFile"`
	KeyFile         string `yaml:"keyFile"`

	Pair KeyPair // what the files contained; they may change at any time
}

// DefaultSVID in place of an id is the one that the agent names first.
const DefaultSVID = "default"

// Trusts are what certificates and tokens of trust domains are verified by, by the domain.
type Trusts map[string]*Trust

// A Trust is where the bundle of a trust domain comes from: one of SPIFFE, Bundle and
// CAFile. Paths are as in an IdentityKey.
type Trust struct {
	SPIFFE  bool   `yaml:"spiffe"` // the Workload API
	Bundle  string `yaml:"bundle" as:"bundleURL"`
	CAFile  string `yaml:"caFile"`
	CRLFile string `yaml:"crlFile"` // revocation lists of the CAs of CAFile

	// Type is "ca" where the CAs of CAFile speak for no trust domain: a certificate that
	// they sign has no SPIFFE id, and is known by another name.
	Type string `yaml:"type" oneof:"trustDomain ca" default:"trustDomain"`

	Delegates []string `yaml:"delegates" what:"a gateway" as:"workload" unique:"gateway" empty:"leave the key out, and no gateway may name callers of the trust domain"`

	EndpointID     string `yaml:"endpointID" as:"workload"` // of Bundle, for the profile https_spiffe
	EndpointCAFile string `yaml:"endpointCAFile"`           // CAs for the profile https_web; "" means those of the system
	BundleFile     string `yaml:"bundleFile"`               // the bundle to begin with
	State          string `yaml:"state"`                    // where the last one is kept; an absolute path once it is read

	CAs         string // what CAFile contained; it may change at any time
	lists       []*x509.RevocationList
	EndpointCAs string // what EndpointCAFile contains
	First       []byte // what BundleFile contains
}

// TypeCA is Trust.Type of CAs that speak for no trust domain.
const TypeCA = "ca"

// TrustDomain returns the trust domain that t, which has a name, is for; "" for none.
func (t *Trust) TrustDomain(name string) string {
	if t.Type == TypeCA {
		return ""
	}
	return name
}

// A ServeBundle is a bundle endpoint of this gateway.
type ServeBundle struct {
	Listener string `yaml:"listener,required" as:"ownListener"`
	Path     string `yaml:"path" as:"urlPath" default:"/bundle"`
	Trust    string `yaml:"trust,required"`
	Key      string `yaml:"key,required"`
}

// decode reads a mapping of names to keys.
func (k *IdentityKeys) decode(d *decoder, n *yaml.Node, what string) {
	*k = IdentityKeys(named[IdentityKey](d, n, what, "a key", parseKeyName))
}

// decode reads a mapping of trust domains to trust.
func (t *Trusts) decode(d *decoder, n *yaml.Node, what string) {
	*t = Trusts(named[Trust](d, n, what, "trust", parseTrustDomain))
}

// named reads a mapping of names, which parse checks, to objects.
func named[T any](d *decoder, n *yaml.Node, key, what string, parse func(what, s string) (string, *complaint)) map[string]*T {
	if !d.is(n, yaml.MappingNode, key) {
		return nil
	}
	all := make(map[string]*T, len(n.Content)/2)
	for i := 0; i+1 < len(n.Content); i += 2 {
		k := n.Content[i]
		name, ok := d.text(k, "a name in "+key)
		if !ok {
			continue
		}
		if _, c := parse("the name", name); c != nil {
			d.errorf(k, c.hint, "%s", c.msg)
			continue
		}
		if all[name] != nil {
			d.errorf(k, "keep one of them", "%q is in %s twice", clip(name), key)
			continue
		}
		all[name] = new(T)
		into(d, n.Content[i+1], what, all[name])
	}
	return all
}

// parseKeyName parses the name of a key.
func parseKeyName(what, s string) (string, *complaint) {
	if len(s) > 63 || strings.ContainsFunc(s, notInName) {
		return "", complain("use letters, digits, dots, hyphens and underscores", "%s %q is not usable", what, clip(s))
	}
	return s, nil
}

// notInName reports whether a key's name, and a part of a SPIFFE id, may not have r.
func notInName(r rune) bool {
	return !('a' <= r && r <= 'z' || 'A' <= r && r <= 'Z' || '0' <= r && r <= '9' || strings.ContainsRune("-._", r))
}

// parseWorkloadAPI parses the socket of a Workload API.
func parseWorkloadAPI(_, s string) (string, *complaint) {
	const hint = "write unix:///run/spire/agent.sock, or tcp://127.0.0.1:8081"
	u, err := url.Parse(s)
	if err != nil || u.User != nil || u.RawQuery != "" || u.Fragment != "" {
		return "", complain(hint, "socket %q is not that of a Workload API", clip(s))
	}
	switch u.Scheme {
	case "unix":
		if u.Host == "" && (strings.HasPrefix(u.Path, "/") || strings.HasPrefix(u.Opaque, "/")) {
			return s, nil
		}
		return "", complain(hint, "socket %q needs an absolute path", clip(s))
	case "tcp":
		if a, err := netip.ParseAddrPort(u.Host); err == nil && a.Port() > 0 && u.Path == "" {
			return s, nil
		}
		return "", complain(hint, "socket %q needs an IP address and a port", clip(s))
	}
	return "", complain(hint, "socket %q does not begin with unix:// or tcp://", clip(s))
}

// parseWorkload parses the SPIFFE id of one workload, SPIFFE-ID section 2.
func parseWorkload(what, s string) (string, *complaint) {
	if s == DefaultSVID && what == "spiffe" {
		return s, nil
	}
	rest, ok := strings.CutPrefix(s, "spiffe://")
	domain, path, more := strings.Cut(rest, "/")
	_, c := parseTrustDomain("", domain)
	bad := len(s) > 2048 || !ok || !more || domain == "" || c != nil
	for segment := range strings.SplitSeq(path, "/") {
		bad = bad || segment == "" || segment == "." || segment == ".." || strings.ContainsFunc(segment, notInName)
	}
	if bad {
		return "", complain("write spiffe://corp.example/ns/shop/sa/gateway", "%q is not the SPIFFE id of a workload", clip(s))
	}
	return s, nil
}

// parseBundleURL parses the URL of a bundle endpoint.
func parseBundleURL(_, s string) (string, *complaint) {
	u, err := url.Parse(s)
	if err != nil || u.Scheme != "https" || u.Hostname() == "" || u.User != nil || u.Fragment != "" {
		return "", complain("write https://bundle.partner.example/", "a bundle endpoint must be an https URL without a user or a fragment")
	}
	return s, nil
}

// parseOwnListener parses host:port of a listener for TCP.
func parseOwnListener(what, s string) (string, *complaint) { return parseListenAddress(what, s) }

func (k *IdentityKey) check(d *decoder, at mapping) {
	switch files := k.CertificateFile != "" || k.KeyFile != ""; {
	case at.node.Kind != yaml.MappingNode:
	case files && at.value("spiffe") != nil:
		d.errorf(at.value("spiffe"), "keep one of them", "a key is that of the Workload API or that of files, not both")
	case files && (k.CertificateFile == "" || k.KeyFile == ""):
		d.errorf(at.node, "", "a key needs both certificateFile and keyFile")
	case !files && at.value("spiffe") == nil:
		d.errorf(at.node, "write spiffe: ID, or certificateFile and keyFile", "a key does not say where it comes from")
	}
}

func (t *Trust) check(d *decoder, at mapping) {
	var from []string
	for _, key := range []string{"spiffe", "bundle", "caFile"} {
		if at.value(key) != nil && (key != "spiffe" || t.SPIFFE) {
			from = append(from, key)
		}
	}
	switch {
	case at.node.Kind != yaml.MappingNode:
		return
	case len(from) == 0:
		d.errorf(at.node, "write spiffe: true, bundle: URL or caFile: FILE", "trust does not say where its bundle comes from")
	case len(from) > 1:
		d.errorf(at.value(from[1]), "keep one of them: two bundles are not joined, as neither could take a CA away", "the bundle of a trust domain comes from %s and from %s", from[0], from[1])
	}
	if n := at.value("type"); n != nil && t.Type == TypeCA && at.value("caFile") == nil && len(from) > 0 {
		d.errorf(n, "leave it out, or write caFile: FILE", "a bundle from %s is that of a trust domain, and no CAs without one", from[0])
	}
	if n := at.value("delegates"); n != nil && t.Type == TypeCA {
		d.errorf(n, "leave it out", "delegates name callers of a trust domain, and these CAs speak for none")
	}
	if n := at.value("crlFile"); n != nil && at.value("caFile") == nil {
		d.errorf(n, "leave it out, or write caFile: FILE", "crlFile has the revocation lists of the CAs of caFile, and there is none")
	}
	for _, key := range []string{"endpointID", "endpointCAFile", "bundleFile", "state"} {
		if n := at.value(key); n != nil && at.value("bundle") == nil {
			d.errorf(n, "add bundle: URL, or leave it out", "%s is of a bundle endpoint, and there is none", key)
		}
	}
	if n := at.value("endpointCAFile"); n != nil && t.EndpointID != "" {
		d.errorf(n, "leave it out: the endpoint's CA is in the bundle of its trust domain", "endpointCAFile has no meaning with endpointID")
	}
}

// checkIdentity checks how the parts of identity fit together.
func (d *decoder) checkIdentity() {
	c := d.cfg.Identity
	if c == nil {
		return
	}
	at := d.root.object("identity")
	agent := false
	for _, name := range slices.Sorted(maps.Keys(c.Keys)) {
		if k := c.Keys[name]; k.SPIFFE != "" {
			agent = true
			if c.SPIFFE == nil {
				d.errorf(at.object("keys").object(name).where("spiffe"), "add identity: {spiffe: {socket: unix:///run/spire/agent.sock}}", "key %q comes from the Workload API, and spiffe has no socket", name)
			}
		}
	}
	for _, name := range slices.Sorted(maps.Keys(c.Trust)) {
		t, where := c.Trust[name], at.object("trust").object(name)
		if t.SPIFFE {
			agent = true
			if c.SPIFFE == nil {
				d.errorf(where.where("spiffe"), "add identity: {spiffe: {socket: unix:///run/spire/agent.sock}}", "trust %q comes from the Workload API, and spiffe has no socket", name)
			}
		}
		d.checkEndpointID(name, t, where)
	}
	if c.SPIFFE != nil && !agent && !d.showsJWTSVID() {
		d.warnf(at.where("spiffe"), "add keys: {NAME: {spiffe: ID}} or trust: {DOMAIN: {spiffe: true}}", "no key, no trust and no hop's jwtSVID comes from the Workload API")
	}
	if s := c.ServeBundle; s != nil {
		where := at.object("serveBundle")
		if t := c.Trust[s.Trust]; t == nil && s.Trust != "" {
			d.errorf(where.where("trust"), "add it to identity.trust", "there is no trust %q", clip(s.Trust))
		} else if t != nil && t.Bundle != "" {
			d.errorf(where.where("trust"), "each trust domain serves its own bundle", "trust %q comes from a bundle endpoint itself", clip(s.Trust))
		} else if t != nil && t.Type == TypeCA {
			d.errorf(where.where("trust"), "name one without type: ca", "trust %q has CAs of no trust domain, and a bundle endpoint serves the bundle of one", clip(s.Trust))
		}
		if c.Keys[s.Key] == nil && s.Key != "" {
			d.errorf(where.where("key"), "add it to identity.keys", "there is no key %q", clip(s.Key))
		}
		for i := range d.cfg.Listeners {
			if l := &d.cfg.Listeners[i]; !l.UDP() && samePlace(l.Address, s.Listener) {
				d.errorf(where.where("listener"), "give it a port of its own", "a listener is at %q already", clip(s.Listener))
			}
		}
	}
}

// checkEndpointID checks that there is something to verify a bundle endpoint by.
func (d *decoder) checkEndpointID(name string, t *Trust, at mapping) {
	if t.EndpointID == "" {
		return
	}
	domain, _, _ := strings.Cut(strings.TrimPrefix(t.EndpointID, "spiffe://"), "/")
	switch {
	case domain == name && t.BundleFile == "" && t.State == "":
		d.errorf(at.where("endpointID"), "add bundleFile: FILE, which the other domain has given to you", "nothing verifies the endpoint of %q the first time: its CA is in the bundle that it serves", name)
	case domain != name && d.cfg.Identity.Trust[domain] == nil:
		d.errorf(at.where("endpointID"), "add it to identity.trust", "nothing verifies the endpoint of %q: there is no trust %q", name, domain)
	case domain != name && d.cfg.Identity.Trust[domain].Type == TypeCA:
		d.errorf(at.where("endpointID"), "leave type: ca out there", "nothing verifies the endpoint of %q: trust %q has CAs of no trust domain", name, domain)
	}
}

// samePlace reports whether two addresses of listeners are the same one.
func samePlace(a, b string) bool {
	hostA, portA, errA := net.SplitHostPort(a)
	hostB, portB, errB := net.SplitHostPort(b)
	return errA == nil && errB == nil && portA == portB && portA != "0" && (hostA == hostB || hostA == "" || hostB == "")
}

// readIdentityFiles reads the files of keys and trust, and returns what those contain that
// are read with the configuration alone. The others are followed by the gateway: a change of
// them is none of the configuration. Before is what is in force, and may be nil: files that
// it had are no mistake, whatever they contain by now, as the last good ones are kept.
func (d *decoder) readIdentityFiles(path string, before *Identity) (all [][]byte) {
	c := d.cfg.Identity
	if c == nil {
		return nil
	}
	if before == nil {
		before = &Identity{}
	}
	c.Joined = d.besideIf(c.Joined)
	at := d.root.object("identity")
	for _, name := range slices.Sorted(maps.Keys(c.Keys)) {
		k, where := c.Keys[name], at.object("keys").object(name)
		if k.SPIFFE != "" || where.node == nil {
			continue
		}
		k.CertificateFile, k.KeyFile = d.besideIf(k.CertificateFile), d.besideIf(k.KeyFile)
		was := before.Keys[name]
		ok := d.followed(was != nil && was.CertificateFile == k.CertificateFile && was.KeyFile == k.KeyFile, func() {
			k.Pair, _ = d.pair(path, "identity", where, new([][]byte))
		})
		if !ok {
			k.Pair = was.Pair
		}
	}
	for _, name := range slices.Sorted(maps.Keys(c.Trust)) {
		t, where := c.Trust[name], at.object("trust").object(name)
		t.EndpointCAs = d.roots(path, where.value("endpointCAFile"), "endpointCAFile", &all)
		t.First = d.content(path, where.value("bundleFile"), "bundleFile", &all)
		t.State = d.besideIf(t.State)
		t.CAFile, t.CRLFile = d.besideIf(t.CAFile), d.besideIf(t.CRLFile)
		was := before.Trust[name]
		ok := d.followed(was != nil && was.CAFile == t.CAFile && was.CRLFile == t.CRLFile, func() { d.readTrust(path, name, t, where) })
		if !ok {
			t.CAs = was.CAs
		}
	}
	return all
}

// readTrust reads the CAs and revocation lists of trust.
func (d *decoder) readTrust(path, name string, t *Trust, at mapping) {
	errs := len(d.errs)
	t.CAs = d.roots(path, at.value("caFile"), "caFile", new([][]byte))
	lists := d.contentOf(path, at.value("crlFile"), "crlFile", maxCRLSize, new([][]byte))
	if t.CAs == "" || len(d.errs) > errs {
		return
	}
	b, err := identity.ParseBundle(t.TrustDomain(name), []byte(t.CAs), lists)
	if err == nil {
		t.lists = b.Revoked
	} else {
		n := at.value("crlFile")
		if n == nil || !strings.HasPrefix(err.Error(), "revocation list") {
			n = at.value("caFile")
		}
		d.errorf(n, "a revocation list is in PEM or DER, of a CA of caFile or of one below it", "%v", err)
	}
}

// maxCRLSize is the largest file of revocation lists, in bytes.
const maxCRLSize = 32 << 20

// besideIf is beside for a path that may be "".
func (d *decoder) besideIf(path string) string {
	if path == "" {
		return ""
	}
	return d.beside(path)
}

// followed has f read files that the gateway follows by itself: the configuration does not
// change with them. Where known says that they are those in force, mistakes in them are
// none of the configuration, and followed reports false.
func (d *decoder) followed(known bool, f func()) (ok bool) {
	errs, files, certs := len(d.errs), len(d.cfg.files), len(d.cfg.Certificates)
	f()
	d.cfg.files, d.cfg.Certificates = d.cfg.files[:files], d.cfg.Certificates[:certs]
	if known && len(d.errs) > errs {
		d.errs = d.errs[:errs]
		return false
	}
	return true
}
