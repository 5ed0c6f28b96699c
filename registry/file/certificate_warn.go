package file

import (
	"bytes"
	"crypto/x509"
	"maps"
	"slices"
	"time"

	"culvert.dev/identity"
	"go.yaml.in/yaml/v3"
)

// This file warns of certificates that can be read, and that nobody will accept.

// uses are what a certificate must be for where a gateway shows it.
var uses = map[string]x509.ExtKeyUsage{
	"listener": x509.ExtKeyUsageServerAuth, "dns": x509.ExtKeyUsageServerAuth,
	"via": x509.ExtKeyUsageClientAuth, "service": x509.ExtKeyUsageClientAuth,
}

// warnCertificate warns of a certificate to show that clients or servers refuse. N names it,
// and usedBy is as in a Certificate.
func (d *decoder) warnCertificate(n *yaml.Node, c *x509.Certificate, usedBy string) {
	d.warnDates(n, "certificate", c)
	if usage, known := uses[usedBy]; known {
		d.warnUsage(n, c, usage)
	}
}

// warnDates warns of a certificate that is not valid now.
func (d *decoder) warnDates(n *yaml.Node, what string, c *x509.Certificate) {
	switch now := time.Now(); {
	case now.After(c.NotAfter):
		d.warnf(n, "renew it", "the %s of %q has expired: it was valid until %s", what, clip(c.Subject.String()), c.NotAfter.Format(time.RFC3339))
	case now.Before(c.NotBefore):
		d.warnf(n, "look at the clock of this host", "the %s of %q is not valid yet, but from %s on", what, clip(c.Subject.String()), c.NotBefore.Format(time.RFC3339))
	}
}

// warnUsage warns of a certificate that may not be used for what it is used for.
func (d *decoder) warnUsage(n *yaml.Node, c *x509.Certificate, usage x509.ExtKeyUsage) {
	if len(c.ExtKeyUsage)+len(c.UnknownExtKeyUsage) == 0 || slices.Contains(c.ExtKeyUsage, usage) || slices.Contains(c.ExtKeyUsage, x509.ExtKeyUsageAny) {
		return
	}
	side, name := "clients", "serverAuth"
	if usage == x509.ExtKeyUsageClientAuth {
		side, name = "servers", "clientAuth"
	}
	d.warnf(n, "have its CA issue one for both uses", "%s refuse the certificate of %q: it is not for %s", side, clip(c.Subject.String()), name)
}

// warnIdentity warns of keys that are not for what they are used for, of CAs and revocation
// lists that nobody is accepted by, and of CAs that speak for several trust domains.
func (d *decoder) warnIdentity() {
	c := d.cfg.Identity
	if c == nil {
		return
	}
	at := d.root.object("identity")
	d.eachCredentials(func(at mapping, caKey string) {
		usage := x509.ExtKeyUsageClientAuth
		if caKey == listenerCAs {
			usage = x509.ExtKeyUsageServerAuth
		}
		for i, name := range at.words("key") {
			d.warnKeyUsage(at.item("key", i), name, usage)
		}
	})
	if s := c.ServeBundle; s != nil {
		d.warnKeyUsage(at.object("serveBundle").where("key"), s.Key, x509.ExtKeyUsageServerAuth)
	}
	type owner struct{ name, domain string }
	owners := map[string]owner{}
	for _, name := range slices.Sorted(maps.Keys(c.Trust)) {
		t, n := c.Trust[name], at.object("trust").object(name).where("caFile")
		if t.CAs == "" {
			continue
		}
		cas, _ := identity.ParseCertificates(t.CAs) // readTrust has seen that there are some
		for _, ca := range cas {
			d.warnDates(n, "CA", ca)
			if ca.BasicConstraintsValid && !ca.IsCA {
				d.warnf(n, "write the certificate of the CA that has signed it", "the certificate of %q is not that of a CA: it verifies itself and nothing else", clip(ca.Subject.String()))
			}
			id := string(ca.RawSubject) + string(ca.RawSubjectPublicKeyInfo)
			was, again := owners[id]
			switch {
			case !again:
				owners[id] = owner{name, t.TrustDomain(name)}
			case was.domain != "" && t.TrustDomain(name) != "" && was.name != name:
				d.warnf(n, "give each trust domain a CA of its own", "the CA %q speaks for the trust domains %q and %q: whoever has it can be anybody of both", clip(ca.Subject.String()), was.name, name)
			}
		}
		for _, list := range t.lists {
			newer := slices.ContainsFunc(t.lists, func(o *x509.RevocationList) bool {
				return bytes.Equal(o.RawIssuer, list.RawIssuer) && o.ThisUpdate.After(list.ThisUpdate)
			})
			if !newer && !list.NextUpdate.IsZero() && time.Now().After(list.NextUpdate) {
				d.warnf(at.object("trust").object(name).where("crlFile"), "fetch the next list", "the revocation list of %q is out of date since %s: all certificates of that CA are refused", clip(list.Issuer.String()), list.NextUpdate.Format(time.RFC3339))
			}
		}
		t.lists = nil // they may be large
	}
}

// warnKeyUsage warns where a key of files is not for a use. N names it.
func (d *decoder) warnKeyUsage(n *yaml.Node, name string, usage x509.ExtKeyUsage) {
	k := d.cfg.Identity.Keys[name]
	if k == nil || k.Pair.Certificate == "" {
		return
	}
	if pair, err := k.Pair.X509(); err == nil && pair.Leaf != nil {
		d.warnUsage(n, pair.Leaf, usage)
	}
}
