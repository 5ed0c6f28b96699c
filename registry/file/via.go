package file

import (
	"slices"
	"strings"
	"unicode"

	"culvert.dev/registry"
	"go.yaml.in/yaml/v3"
)

// maxVia is how many gateways may stand between this one and a service. More
// than a few is a mistake, and a request ends after 16 in any case.
const maxVia = 8

// A WebSocket is what a listener's websocket protocol serves.
type WebSocket struct {
	Path    string   `yaml:"path" as:"tunnelPath"`                 // in front of the destination, with a slash at both ends; "" means the default
	Hosts   []string `yaml:"hosts" what:"a host" as:"host"`        // what Host may be, in lower case; empty means anything
	Origins []string `yaml:"origins" what:"an origin" as:"origin"` // what Origin may be, in lower case; empty means that pages are refused
}

// A hop is a gateway on the way to a service or a network, or several of which one is
// enough. One of the first six keys says where it is, and by which protocol it is asked.
type hop struct {
	Connect   []string `yaml:"connect,single" what:"a gateway" as:"proxy" unique:"gateway" empty:"name a gateway"`
	ConnectH2 []string `yaml:"connect-h2,single" what:"a gateway" as:"proxy" unique:"gateway" empty:"name a gateway"`
	ConnectH3 []string `yaml:"connect-h3,single" what:"a gateway" as:"hostPort" unique:"gateway" empty:"name a gateway"`
	HBONE     []string `yaml:"hbone,single" what:"a gateway" as:"hostPort" unique:"gateway" empty:"name a gateway"`
	SOCKS5    []string `yaml:"socks5,single" what:"a gateway" as:"hostPort" unique:"gateway" empty:"name a gateway"`
	WebSocket []string `yaml:"websocket,single" what:"a gateway" as:"webSocketURL" unique:"gateway" empty:"name a gateway"`

	hopAccess
}

// A hopAccess says how a gateway is verified, and what is shown to it.
type hopAccess struct {
	Insecure        bool         `yaml:"insecure"` // plaintext may go there without mutual TLS, and credentials without TLS
	HTTP2           bool         `yaml:"http2"`
	CertificateFile string       `yaml:"certificateFile"`
	KeyFile         string       `yaml:"keyFile"`
	Key             string       `yaml:"key"`
	ForwardIdentity *hopIdentity `yaml:"forwardIdentity"`
	ServerName      string       `yaml:"serverName" as:"host"` // "" means the host of its address
	Peers           []string     `yaml:"peers" what:"a SPIFFE id" as:"spiffe" empty:""`
	Behind          []string     `yaml:"behind" what:"a SPIFFE id" as:"spiffe" empty:""`
	TokenFile       string       `yaml:"tokenFile"`
	JWTSVID         *jwtSVID     `yaml:"jwtSVID"` // nil for none
	UserFile        string       `yaml:"userFile"`

	CredentialsHeader string `yaml:"credentialsHeader" as:"requestField"` // "" means that of the protocol

	CAFile caFiles  `yaml:"caFile"`
	Trust  []string `yaml:"trust,single" what:"trust" unique:"trust" empty:"name trust of identity.trust"`
}

// A jwtSVID says which JWT-SVID of the Workload API is shown.
type jwtSVID struct {
	Audience []string `yaml:"audience,required,single" what:"an audience" unique:"audience" empty:"name what the gateway there wants in aud"`
	SPIFFE   string   `yaml:"spiffe" as:"workload"` // its id, or "default"; "" means the same
}

// registered returns j as the registry has it.
func (j *jwtSVID) registered() *registry.JWTSVID {
	if j == nil {
		return nil
	}
	out := &registry.JWTSVID{Audience: readable(j.Audience), ID: j.SPIFFE}
	if out.ID == DefaultSVID {
		out.ID = ""
	}
	return out
}

// registered returns a as the registry has it, without the content of its files.
func (a *hopAccess) registered() registry.Hop {
	return registry.Hop{
		Insecure: a.Insecure, HTTP2: a.HTTP2, ServerName: a.ServerName, Peers: readable(a.Peers), InnerPeers: readable(a.Behind),
		ForwardIdentity: a.ForwardIdentity.registered(), KeyName: a.Key, TrustNames: readable(a.Trust), JWTSVID: a.JWTSVID.registered(), CredentialsField: a.CredentialsHeader,
	}
}

// registered returns h as the registry has it, without the content of its files.
func (h *hop) registered() registry.Hop {
	out := h.hopAccess.registered()
	for _, way := range []struct {
		proto     string
		addresses []string
	}{
		{"connect", h.Connect}, {"connect-h2", h.ConnectH2}, {"connect-h3", h.ConnectH3},
		{"websocket", h.WebSocket}, {"hbone", h.HBONE}, {"socks5", h.SOCKS5},
	} {
		if len(way.addresses) > 0 {
			out.Proto, out.Addresses = way.proto, readable(way.addresses)
		}
	}
	return out
}

// readable removes the elements of a list that could not be read.
func readable(list []string) []string {
	return slices.DeleteFunc(list, func(s string) bool { return s == "" })
}

func registeredHops(list []hop) []registry.Hop {
	var out []registry.Hop
	for i := range list {
		out = append(out, list[i].registered())
	}
	return out
}

// checkVia finds what is wrong with the hops of a service or a network.
func (d *decoder) checkVia(at mapping, list []hop) {
	var before registry.Hop
	for i := range list {
		n, h := at.item("via", i), list[i].registered()
		if d.checkHop(n) {
			_, clear := h.CleartextAddress(false)
			d.checkAccess(n, h.Proto, !clear)
		}
		d.checkPeers(n, &h)
		d.checkSecrets(n, valueOf(n, h.Proto), &h, i == 0)
		if i < len(list)-1 && h.ForwardIdentity != (registry.HopIdentity{}) {
			d.errorf(keyOf(n, "forwardIdentity"), "move it to the last gateway", "forwardIdentity has no effect: of several gateways the last one alone is told who a client is")
		}
		if i > 0 && has(n, "connect-h3") && !before.CarriesDatagrams() {
			d.errorf(keyOf(n, "connect-h3"), "write connect-h2, or ask the gateway before it by connect-h2 or connect-h3", "connect-h3 is carried by UDP, and the gateway before it carries streams alone")
		}
		before = h
	}
	if len(list) > maxVia {
		d.errorf(at.value("via"), "", "via has %d gateways, limit %d", len(list), maxVia)
	}
}

// checkHop reports whether a hop is of one protocol, as it must be.
func (d *decoder) checkHop(n *yaml.Node) bool {
	if n.Kind != yaml.MappingNode {
		return false
	}
	ways := 0
	for _, way := range []string{"connect", "connect-h2", "connect-h3", "websocket", "hbone", "socks5"} {
		if has(n, way) {
			ways++
		}
	}
	if ways != 1 {
		d.errorf(n, "write {connect: gw.example.com:443}, or the same with connect-h2, connect-h3, hbone or socks5, or {websocket: wss://gw.example.com/}", "a hop has one of connect, connect-h2, connect-h3, websocket, hbone and socks5")
	}
	return ways == 1
}

// checkAccess finds keys of a hop by a protocol that do not go together.
func (d *decoder) checkAccess(n *yaml.Node, protocol string, hasTLS bool) {
	if has(n, "behind") && protocol != "hbone" {
		d.errorf(keyOf(n, "behind"), "leave it out", "behind has no effect: it is for hbone only")
	}
	for _, key := range []string{"peers", "serverName", "key", "trust"} {
		if has(n, key) && !hasTLS && protocol != "socks5" {
			d.errorf(keyOf(n, key), "use TLS there, or leave it out", "%s has no effect: there is no TLS to the gateway", key)
		}
	}
	if has(n, "serverName") && protocol == "hbone" {
		d.errorf(keyOf(n, "serverName"), "use peers, or leave it out", "serverName has no effect: clients of hbone send no name")
	}
	if has(n, "forwardIdentity") {
		switch {
		case protocol == "socks5" || protocol == "websocket":
			d.errorf(keyOf(n, "forwardIdentity"), "ask the gateway by connect, connect-h2, connect-h3 or hbone, or leave it out", "forwardIdentity has no effect: requests by %s do not state who a client is", protocol)
		case !hasTLS:
			d.errorf(keyOf(n, "forwardIdentity"), "use TLS there, or leave it out", "forwardIdentity needs TLS: what it states is for one TLS session")
		case has(n, "behind"):
			d.errorf(keyOf(n, "forwardIdentity"), "leave it out", "forwardIdentity has no effect: the server behind the gateway is not told")
		default:
			d.needCertificate(n, "forwardIdentity")
			if xfcc := (mapping{n}).object("forwardIdentity").value("xfcc"); xfcc != nil && xfcc.Value == "appendForward" && !d.hasDelegates() {
				d.warnf(xfcc, "list the gateways: identity: {trust: {DOMAIN: {delegates: [...], ...}}}, or write sanitizeSet", "appendForward does what sanitizeSet does: no trust of identity has delegates, so no gateway states callers to append")
			}
		}
	}
	if protocol == "hbone" {
		for _, key := range []string{"tokenFile", "jwtSVID", "userFile"} {
			if has(n, key) {
				d.errorf(keyOf(n, key), "leave it out", "%s has no effect: hbone knows its callers by their certificates", key)
			}
		}
		d.needCertificate(n, "a hop by hbone")
	}
	if protocol == "socks5" {
		for _, key := range []string{"tokenFile", "jwtSVID"} {
			if has(n, key) {
				d.errorf(keyOf(n, key), "use userFile", "%s has no effect: socks5 knows its callers by a name and a password", key)
			}
		}
		for _, key := range []string{"certificateFile", "keyFile", "key", "caFile", "trust", "peers", "serverName"} {
			if has(n, key) {
				d.errorf(keyOf(n, key), "leave it out", "%s has no effect: socks5 has no TLS of its own", key)
			}
		}
	} else {
		d.checkOneCredential(n)
	}
	if has(n, "credentialsHeader") {
		switch {
		case protocol == "socks5" || protocol == "hbone":
			d.errorf(keyOf(n, "credentialsHeader"), "leave it out", "credentialsHeader has no effect: %s sends no credentials in a header", protocol)
		case !has(n, "tokenFile") && !has(n, "jwtSVID") && !has(n, "userFile"):
			d.errorf(keyOf(n, "credentialsHeader"), "add tokenFile, jwtSVID or userFile, or leave it out", "credentialsHeader has no effect: no credentials are sent")
		}
	}
	if has(n, "http2") && protocol != "websocket" {
		d.errorf(keyOf(n, "http2"), "leave it out", "http2 has no effect: it is for websocket only")
	}
	d.checkCredentials(n, "caFile")
}

// checkOneCredential finds several credentials where one is sent, and a JWT-SVID of no agent.
func (d *decoder) checkOneCredential(n *yaml.Node) {
	first := ""
	for _, key := range []string{"tokenFile", "jwtSVID", "userFile"} {
		switch {
		case !has(n, key):
		case first == "":
			first = key
		default:
			d.errorf(keyOf(n, key), "keep one of them", "a hop sends one credential, and there are %s and %s", first, key)
		}
	}
	if has(n, "jwtSVID") && d.root.object("identity").value("spiffe") == nil {
		d.errorf(keyOf(n, "jwtSVID"), "add identity: {spiffe: {socket: unix:///run/spire/agent.sock}}", "a JWT-SVID comes from the Workload API, and spiffe has no socket")
	}
}

// showsJWTSVID reports whether any hop shows a JWT-SVID.
func (d *decoder) showsJWTSVID() bool {
	shows := func(h registry.Hop) bool { return h.JWTSVID != nil }
	for i := range d.cfg.Networks {
		n := &d.cfg.Networks[i]
		if slices.ContainsFunc(n.Via, shows) || slices.ContainsFunc(n.Gateways, func(g registry.Gateway) bool { return slices.ContainsFunc(g.Transports, shows) }) {
			return true
		}
	}
	for i := range d.cfg.Peers {
		if slices.ContainsFunc(d.cfg.Peers[i].Gateways, func(g registry.Gateway) bool { return slices.ContainsFunc(g.Transports, shows) }) {
			return true
		}
	}
	if h := d.cfg.GatewayTransport; h != nil && shows(*h) {
		return true
	}
	if r := d.cfg.Reverse; r != nil && slices.ContainsFunc(r.Gateways, shows) {
		return true
	}
	return slices.ContainsFunc(d.cfg.Services, func(s *registry.Service) bool {
		return slices.ContainsFunc(s.Via, shows) || slices.ContainsFunc(s.Endpoints, func(ep registry.Endpoint) bool { return slices.ContainsFunc(ep.Hops(), shows) })
	})
}

// checkSecrets finds credentials that would be sent in the clear. The first hop
// is dialed from here. The mistake is at the node at.
func (d *decoder) checkSecrets(n, at *yaml.Node, hop *registry.Hop, first bool) {
	if n.Kind != yaml.MappingNode || hop.Insecure || !has(n, "tokenFile") && !has(n, "jwtSVID") && !has(n, "userFile") {
		return
	}
	if to, clear := hop.CleartextAddress(first); clear {
		d.errorf(at, "use TLS there, or add insecure: true to send them all the same", "the credentials for gateway %q would go there unencrypted", clip(to))
	}
}

// checkPeers finds peers of a trust domain for which it is not known which CA
// speaks.
func (d *decoder) checkPeers(n *yaml.Node, hop *registry.Hop) {
	cas := valueOf(n, "caFile")
	domains := domainsOf(slices.Concat(hop.Peers, hop.InnerPeers))
	switch {
	case len(hop.TrustNames) > 0:
		d.checkTrustOf(n, "peers or behind", domains)
	case cas == nil || cas.Kind != yaml.MappingNode:
		if len(domains) > 1 {
			what := "one caFile"
			if cas == nil {
				what = "no caFile"
			}
			d.errorf(keyOf(n, "peers"), byDomain("caFile", domains), "%s for peers of several trust domains: each CA could speak for all of them", what)
		}
	case len(hop.Peers) == 0:
		d.errorf(cas, "add peers: [spiffe://DOMAIN], or name one file", "caFile names trust domains, and there are no peers to say which of them the gateway is in")
	default:
		for _, domain := range domains {
			if !has(cas, domain) {
				d.errorf(cas, "add the file of its CAs", "caFile has no file for %q, which peers or behind name", clip(domain))
			}
		}
	}
}

// readHopFiles reads the tokens and roots that hops name, and returns what
// they contain.
func (d *decoder) readHopFiles(path string) (all [][]byte) {
	for i := range d.cfg.Networks {
		d.readFilesOfHops(path, d.cfg.Networks[i].Via, d.network(i), "via", &all)
		for j := range d.cfg.Networks[i].Gateways {
			d.readFilesOfHops(path, d.cfg.Networks[i].Gateways[j].Transports, mapping{d.network(i).item("gateways", j)}, "transports", &all)
		}
	}
	d.eachPeerGateway(func(_ *Peer, g *registry.Gateway, at mapping) {
		d.readFilesOfHops(path, g.Transports, at, "transports", &all)
	})
	if hop := d.cfg.GatewayTransport; hop != nil {
		d.readFilesOfHop(path, hop, d.gatewayTransport(), "gatewayTransport", &all)
	}
	if r := d.cfg.Reverse; r != nil {
		for i := range r.Gateways {
			d.readFilesOfHop(path, &r.Gateways[i], d.root.object("reverse"), "reverse", &all)
		}
	}
	for i, s := range d.cfg.Services {
		d.readFilesOfHops(path, s.Via, d.services[i], "via", &all)
		for j := range s.Endpoints {
			if hops := s.Endpoints[j].Hops(); len(hops) > 0 {
				d.readFilesOfHops(path, hops, mapping{d.services[i].item("endpoints", j)}, "via", &all)
			}
		}
	}
	return all
}

// readFilesOfHops reads the files of hops, which are the list of a key.
func (d *decoder) readFilesOfHops(path string, hops []registry.Hop, parent mapping, key string, all *[][]byte) {
	for i := range hops {
		d.readFilesOfHop(path, &hops[i], mapping{parent.item(key, i)}, key, all)
	}
}

func (d *decoder) readFilesOfHop(path string, hop *registry.Hop, at mapping, usedBy string, all *[][]byte) {
	if cas := at.value("caFile"); cas != nil && cas.Kind == yaml.MappingNode {
		hop.TrustNames, _ = d.ownTrustByDomain(path, cas, "caFile", all)
	} else if cas != nil {
		domain := "" // one at most: see checkPeers
		if domains := domainsOf(slices.Concat(hop.Peers, hop.InnerPeers)); len(domains) > 0 {
			domain = domains[0]
		}
		if name, _ := d.ownTrust(path, cas, "caFile", domain, all); name != "" {
			hop.TrustNames = []string{name}
		}
	}
	if at.value("certificateFile") != nil && at.value("keyFile") != nil {
		hop.KeyName, _ = d.ownKey(path, usedBy, at, all)
	}
	if n := at.value("userFile"); n != nil {
		d.warnReadable(path, n)
		hop.User, hop.Password = d.userOf(n, d.content(path, n, "userFile", all))
	}
	n := at.value("tokenFile")
	if n == nil {
		return
	}
	d.warnReadable(path, n)
	// What it contains is not part of the configuration: it is read again by those who
	// show it.
	if token := d.uncounted(path, n, "tokenFile", maxAuthSize); token != nil && registry.ParseToken(token) == "" {
		d.errorf(n, "put the one token into it and nothing else", "tokenFile has more than one word, or characters that no token has")
		return
	}
	hop.TokenFile = d.beside(n.Value)
}

// maxShown is how long a name and a password for a gateway may be, RFC 1929.
const maxShown = 255 // bytes

// userOf reads "NAME:PASSWORD". Its errors quote nothing of it.
func (d *decoder) userOf(n *yaml.Node, content []byte) (user string, password registry.Secret) {
	if content == nil {
		return "", "" // which was said
	}
	user, secret, _ := strings.Cut(strings.TrimRight(string(content), "\r\n"), ":")
	if user == "" || secret == "" || len(user) > maxShown || len(secret) > maxShown || strings.ContainsFunc(user+secret, unicode.IsControl) {
		d.errorf(n, "put the one line NAME:PASSWORD into it, of at most 255 bytes each", "userFile has no name and password in it")
		return "", ""
	}
	return user, registry.Secret(secret)
}
