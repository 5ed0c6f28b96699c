package file

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"culvert.dev/registry"
	"culvert.dev/tunnel"
	"go.yaml.in/yaml/v3"
)

// This file has the keys and trust that listeners, hops and services name: those of
// identity.keys and identity.trust, in place of files of their own.

// Credentials are what the files contain that listeners, hops and services name themselves.
// The table has names of them alone, which begin with "file:" as no name in identity does.
type Credentials struct {
	Keys  map[string]KeyPair
	Trust map[string]CAs
}

// A CAs is what a file of CAs contains.
type CAs struct {
	TrustDomain string // that they speak for; "" for none
	PEM         string
}

// ownKey reads a certificate and its key, and returns the name of the pair; "" where there
// is none.
func (d *decoder) ownKey(path, usedBy string, at mapping, all *[][]byte) (name string, pair KeyPair) {
	pair, ok := d.pair(path, usedBy, at, all)
	if !ok {
		return "", pair
	}
	files := [2]string{at.word("certificateFile"), at.word("keyFile")}
	name = "file:" + files[0]
	if other, taken := d.keyNames[name]; taken && other != files {
		name += "," + files[1]
	}
	if d.keyNames == nil {
		d.keyNames, d.cfg.Credentials.Keys = map[string][2]string{}, map[string]KeyPair{}
	}
	d.keyNames[name], d.cfg.Credentials.Keys[name] = files, pair
	return name, pair
}

// ownTrust reads a file of CAs, which speak for a trust domain or for none, and returns
// their name; "" where there is none.
func (d *decoder) ownTrust(path string, n *yaml.Node, key, domain string, all *[][]byte) (name, pem string) {
	if pem = d.roots(path, n, key, all); pem == "" {
		return "", ""
	}
	name = "file:" + n.Value
	if domain != "" {
		name += "#" + domain
	}
	if d.cfg.Credentials.Trust == nil {
		d.cfg.Credentials.Trust = map[string]CAs{}
	}
	d.cfg.Credentials.Trust[name] = CAs{domain, pem}
	return name, pem
}

// ownTrustByDomain reads the files of CAs of several trust domains.
func (d *decoder) ownTrustByDomain(path string, n *yaml.Node, key string, all *[][]byte) (names []string, byDomain map[string]string) {
	byDomain = make(map[string]string, len(n.Content)/2)
	for i := 0; i+1 < len(n.Content); i += 2 {
		domain := n.Content[i].Value
		name, pem := d.ownTrust(path, n.Content[i+1], key, domain, all)
		names, byDomain[domain] = append(names, name), pem
	}
	return readable(names), byDomain
}

// keepCertificates has listeners whose certificates are to have names, and lack one now,
// keep those of current.
func (d *decoder) keepCertificates(current *Config) {
	for i := range d.cfg.Listeners {
		items := tlsItems(d.listener(i))
		for j := range d.cfg.Listeners[i].TLS {
			t := &d.cfg.Listeners[i].TLS[j]
			if len(t.Certificates) == 0 || len(t.Certificates) != len(t.Keys) {
				continue
			}
			for k, name := range t.Names {
				if name == (tunnel.Pattern{}) || slices.ContainsFunc(t.Certificates, func(p KeyPair) bool { return p.covers(name) }) {
					continue
				}
				d.warnf(items[j].item("names", k), "renew it for all names", "tls.names: no certificate covers %q; those from before stay in force", name)
				for l, key := range t.Keys {
					if before, ok := current.Credentials.Keys[key]; ok {
						t.Certificates[l], d.cfg.Credentials.Keys[key] = before, before
					}
				}
				break
			}
		}
	}
}

// covers reports whether the certificate of p has a name.
func (p KeyPair) covers(name tunnel.Pattern) bool {
	c, err := p.X509()
	return err == nil && c.Leaf != nil && covers(c.Leaf, name)
}

// checkCredentials finds names next to the files that they take the place of, and half a
// certificate. caKey is the key that trust takes the place of.
func (d *decoder) checkCredentials(n *yaml.Node, caKey string) {
	if n.Kind != yaml.MappingNode {
		return
	}
	if has(n, "key") {
		for _, other := range []string{"certificateFile", "certificates", "keyFile"} {
			if has(n, other) {
				d.errorf(keyOf(n, "key"), "keep key, whose certificate is in identity.keys, or "+other+"; the file of a private key is keyFile", "key and %s both have a certificate to present", other)
				break
			}
		}
	} else if has(n, "certificateFile") != has(n, "keyFile") {
		d.errorf(n, "give both", "certificateFile and keyFile belong together")
	}
	if has(n, "trust") && has(n, caKey) {
		d.errorf(keyOf(n, "trust"), "keep trust, whose CAs are in identity.trust, or "+caKey, "trust and %s both have CAs to verify by", caKey)
	}
}

// needCertificate adds an error if an object names no certificate at all.
func (d *decoder) needCertificate(n *yaml.Node, what string) {
	if n.Kind == yaml.MappingNode && !has(n, "key") && !has(n, "certificateFile") && !has(n, "keyFile") {
		d.errorf(n, "add certificateFile and keyFile, or key: NAME with the name of one in identity.keys", "%s needs a certificate", what)
	}
}

// checkTrustOf finds trust domains, of the SPIFFE ids of a key, that none of the trust
// speaks for which an object names.
func (d *decoder) checkTrustOf(n *yaml.Node, idsKey string, domains []string) {
	trust := mapping{n}.words("trust")
	for _, domain := range domains {
		if !slices.Contains(trust, domain) {
			d.errorf(keyOf(n, "trust"), fmt.Sprintf("add %q to it", clip(domain)), "trust has no %q, the trust domain of an ID in %s", clip(domain), idsKey)
		}
	}
}

// domainsOf returns the trust domains of SPIFFE ids, each once. Other names have none.
func domainsOf(ids []string) (domains []string) {
	for _, id := range ids {
		rest, ok := strings.CutPrefix(id, "spiffe://")
		domain, _, _ := strings.Cut(rest, "/")
		if ok && !slices.Contains(domains, domain) {
			domains = append(domains, domain)
		}
	}
	return domains
}

// checkCredentialNames finds names of keys and trust that identity does not have.
func (d *decoder) checkCredentialNames() { d.eachCredentials(d.knownCredentials) }

// listenerCAs is the key of the CAs of clients, at a listener.
const listenerCAs = "clientCAFile"

// eachCredentials calls f with each object that may name a key and trust, and with the key
// by which it may name a file of CAs in place of trust.
func (d *decoder) eachCredentials(f func(at mapping, caKey string)) {
	for i := range d.cfg.Listeners {
		for _, at := range tlsItems(d.listener(i)) {
			f(at, listenerCAs)
		}
	}
	hops := func(at mapping, key string, n int) {
		for i := range n {
			f(mapping{at.item(key, i)}, "caFile")
		}
	}
	for i := range d.cfg.Networks {
		network, at := &d.cfg.Networks[i], d.network(i)
		hops(at, "via", len(network.Via))
		for j := range network.Gateways {
			hops(mapping{at.item("gateways", j)}, "transports", len(network.Gateways[j].Transports))
		}
	}
	d.eachPeerGateway(func(_ *Peer, g *registry.Gateway, at mapping) { hops(at, "transports", len(g.Transports)) })
	f(d.gatewayTransport(), "caFile")
	f(d.root.object("reverse"), "caFile")
	f(d.root.object("replicas"), "caFile")
	for i, s := range d.cfg.Services {
		at := d.services[i]
		if at.node == nil {
			continue // it was read before, and names nothing
		}
		hops(at, "via", len(s.Via))
		for j := range s.Endpoints {
			hops(mapping{at.item("endpoints", j)}, "via", len(s.Endpoints[j].Hops()))
		}
		f(at.object("tls"), "caFile")
	}
}

// knownCredentials finds names of keys and trust at an object that identity does not have.
func (d *decoder) knownCredentials(at mapping, caKey string) {
	if at.node == nil || at.node.Kind != yaml.MappingNode {
		return
	}
	var keys, trust []string
	if c := d.cfg.Identity; c != nil {
		keys, trust = slices.Sorted(maps.Keys(c.Keys)), slices.Sorted(maps.Keys(c.Trust))
	}
	if d.cfg.Site != nil && caKey == listenerCAs {
		trust = append(trust, TrustPeers)
	}
	d.known(at, "key", "keys", "key", keys, "certificateFile and keyFile")
	d.known(at, "trust", "trust", "trust", trust, caKey)
}

// known finds names in the value of a key that a section of identity does not have.
func (d *decoder) known(at mapping, key, section, what string, names []string, fileKey string) {
	in := d.root.object("identity").object(section)
	for i, name := range at.words(key) {
		if slices.Contains(names, name) || in.value(name) != nil || name == "" { // else it was reported
			continue
		}
		hint := fmt.Sprintf("add it to identity.%s, or name files: %s", section, fileKey)
		if m := meant(name, names); m != "" {
			hint = fmt.Sprintf("did you mean %q?", m)
		}
		d.errorf(at.item(key, i), hint, "there is no %s %q in identity.%s", what, clip(name), section)
	}
}
