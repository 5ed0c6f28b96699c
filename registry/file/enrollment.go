package file

import (
	"crypto/tls"
	"crypto/x509"
	"os"
	"runtime"
	"time"

	"culvert.dev/identity"
)

// An Enrollment is a registration authority in this gateway: it gives devices a certificate of
// the own trust domain, by token.
type Enrollment struct {
	Gateway         string        `yaml:"gateway,required" as:"hostPort"` // as devices reach it
	Transport       string        `yaml:"transport" oneof:"connect-h2 connect" default:"connect-h2"`
	Key             string        `yaml:"key,required"` // of identity.keys, with a SPIFFE id of TrustDomain
	TrustDomain     string        `yaml:"trustDomain,required" as:"trustDomain"`
	CertificateFile string        `yaml:"certificateFile,required"`
	KeyFile         string        `yaml:"keyFile,required"`
	MaxTTL          time.Duration `yaml:"maxTTL,min=1m" default:"24h"`
	State           string        `yaml:"state,required"` // a folder; an absolute path once it is read

	CA *tls.Certificate // of the two files
}

// maxDeviceTTL is what MaxTTL may be at most.
const maxDeviceTTL = 90 * 24 * time.Hour

// checkEnrollment finds what is wrong with enrollment, but for its files.
func (d *decoder) checkEnrollment() {
	e := d.cfg.Enrollment
	if e == nil {
		return
	}
	at := d.root.object("enrollment")
	c := d.cfg.Identity
	if c == nil {
		c = &Identity{}
	}
	if c.Keys[e.Key] == nil && e.Key != "" {
		d.errorf(at.where("key"), "add it to identity.keys", "there is no key %q", clip(e.Key))
	}
	const hint = "name the own trust domain, with caFile in identity.trust"
	switch t := c.Trust[e.TrustDomain]; {
	case e.TrustDomain == "":
	case t == nil:
		d.errorf(at.where("trustDomain"), "add it to identity.trust, with the certificate of the authority in caFile", "there is no trust %q", clip(e.TrustDomain))
	case t.Bundle != "":
		d.errorf(at.where("trustDomain"), hint, "trust %q comes from a bundle endpoint: it is the trust domain of others, and an authority signs for its own", clip(e.TrustDomain))
	case t.SPIFFE:
		d.errorf(at.where("trustDomain"), "have devices use the Workload API, too, or "+hint, "trust %q comes from the Workload API, which has an authority of its own", clip(e.TrustDomain))
	case t.Type == TypeCA:
		d.errorf(at.where("trustDomain"), "leave type: ca out there", "trust %q has CAs of no trust domain, and devices get an id of one", clip(e.TrustDomain))
	}
	if e.MaxTTL > maxDeviceTTL {
		d.errorf(at.where("maxTTL"), "write 24h: devices renew their certificates by themselves", "maxTTL is %v, limit %.0fh", e.MaxTTL, maxDeviceTTL.Hours())
	}
}

// readEnrollment reads the files of the authority, and finds whether it may sign for the
// trust domain.
func (d *decoder) readEnrollment(path string) (all [][]byte) {
	e := d.cfg.Enrollment
	if e == nil {
		return nil
	}
	at := d.root.object("enrollment")
	if at.node == nil {
		return nil
	}
	if e.State != "" {
		e.State = d.beside(e.State)
	}
	pair, ok := d.pair(path, "enrollment", at, &all)
	if !ok {
		return all
	}
	ca, err := pair.X509()
	if err != nil { // d.pair has parsed it
		return all
	}
	e.CA = &ca
	if why := readableByOthers(d.beside(e.KeyFile)); why != "" {
		d.errorf(at.where("keyFile"), "chmod 600 it: with the key one can be every device and every workload of the trust domain", "the key of the authority %s", why)
	}
	const hint = "make one with: culvert ca init --trust-domain DOMAIN"
	switch leaf := ca.Leaf; {
	case !leaf.IsCA || leaf.KeyUsage&x509.KeyUsageCertSign == 0:
		d.errorf(at.where("certificateFile"), hint, "it is not the certificate of a CA")
	case leaf.KeyUsage&x509.KeyUsageCRLSign == 0:
		d.errorf(at.where("certificateFile"), hint, "the CA may not sign revocation lists, by which devices are removed")
	case len(leaf.URIs) > 0 && leaf.URIs[0].Scheme == "spiffe" && leaf.URIs[0].Host != e.TrustDomain:
		d.errorf(at.where("certificateFile"), "an authority signs for its own trust domain", "the CA is that of trust domain %q, and not of %q", clip(leaf.URIs[0].Host), clip(e.TrustDomain))
	}
	c := d.cfg.Identity
	if c == nil || c.Trust[e.TrustDomain] == nil || c.Trust[e.TrustDomain].CAs == "" {
		return all
	}
	roots, err := identity.ParseCertificates(c.Trust[e.TrustDomain].CAs)
	if err != nil {
		return all
	}
	if !signedBelow(&ca, roots) {
		d.errorf(at.where("certificateFile"), "add it to caFile of that trust, if this is the own trust domain", "the CA is none of trust %q, so that no certificate of it would be accepted", clip(e.TrustDomain))
	}
	k := c.Keys[e.Key]
	if k == nil || k.SPIFFE != "" {
		return all
	}
	own, err := k.Pair.X509()
	if err != nil || own.Leaf == nil {
		return all
	}
	domain := ""
	if len(own.Leaf.URIs) == 1 {
		domain, _, _ = identity.ParseSPIFFEID(own.Leaf.URIs[0].String())
	}
	if domain != e.TrustDomain {
		d.errorf(at.where("key"), "name a key with a SPIFFE id of the own trust domain", "key %q has no id of trust domain %q: an authority signs for its own trust domain, and devices know the gateway by its id", clip(e.Key), clip(e.TrustDomain))
	}
	return all
}

// signedBelow reports whether a CA is one of the roots, or was signed by one.
func signedBelow(ca *tls.Certificate, roots []*x509.Certificate) bool {
	pool, between := x509.NewCertPool(), x509.NewCertPool()
	for _, r := range roots {
		if r.Equal(ca.Leaf) {
			return true
		}
		pool.AddCert(r)
	}
	for _, der := range ca.Certificate[1:] {
		if c, err := x509.ParseCertificate(der); err == nil {
			between.AddCert(c)
		}
	}
	_, err := ca.Leaf.Verify(x509.VerifyOptions{Roots: pool, Intermediates: between, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageAny}})
	return err == nil
}

// readableByOthers returns how others than its owner and the group may use the file at path;
// "" for not at all, and where that is not known.
func readableByOthers(path string) string {
	if runtime.GOOS == "windows" { // its mode bits say nothing of this
		return ""
	}
	info, err := os.Stat(path)
	if err != nil {
		return ""
	}
	if mode := info.Mode().Perm(); mode&0o007 != 0 && reachable(path) {
		return "may be used by all users of this machine (mode " + mode.String() + ")"
	}
	return ""
}
