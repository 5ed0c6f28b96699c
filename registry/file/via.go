package file

import (
	"net/url"
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
	Path    string   // in front of the destination, with a slash at both ends; "" means the default
	Hosts   []string // what Host may be, in lower case; empty means anything
	Origins []string // what Origin may be, in lower case; empty means that pages are refused
}

var websocketFields = []field[WebSocket]{
	{"path", func(d *decoder, n *yaml.Node, to *WebSocket) {
		s, ok := d.text(n, "path")
		if ok && (!strings.HasPrefix(s, "/") || !strings.HasSuffix(s, "/") || strings.ContainsAny(s, "?#% ")) {
			d.errorf(n, "write /some/path/", "path %q does not begin and end with a slash, or has a query, an escape or a space", clip(s))
			return
		}
		to.Path = s
	}},
	{"hosts", func(d *decoder, n *yaml.Node, to *WebSocket) {
		d.list(n, "hosts", func(n *yaml.Node) {
			s, ok := d.text(n, "a host")
			if !ok {
				return
			}
			if _, c := parseEndpoint(s); c != nil || strings.ContainsAny(s, ":") {
				d.errorf(n, "write a name, without a port", "%q is not a host", clip(s))
				return
			}
			to.Hosts = append(to.Hosts, strings.ToLower(s))
		})
	}},
	{"origins", func(d *decoder, n *yaml.Node, to *WebSocket) {
		d.list(n, "origins", func(n *yaml.Node) {
			s, ok := d.text(n, "an origin")
			if !ok {
				return
			}
			u, err := url.Parse(s)
			if err != nil || u.Host == "" || u.Scheme+"://"+u.Host != s {
				d.errorf(n, "write https://app.example.com", "%q is not an origin", clip(s))
				return
			}
			to.Origins = append(to.Origins, strings.ToLower(s))
		})
	}},
}

// A hopAt is where the file names the files of a hop.
type hopAt struct {
	mapping
	hop *registry.Hop
}

// via reads the gateways on the way to a service.
func (d *decoder) via(n *yaml.Node, to *registry.Service) {
	d.hops(n, &to.Via)
}

func (d *decoder) hops(n *yaml.Node, to *[]registry.Hop) {
	first := len(d.at.hops)
	d.list(n, "via", func(n *yaml.Node) {
		d.at.hops = append(d.at.hops, hopAt{mapping: mapping{n}})
		*to = append(*to, registry.Hop{})
		object(d, n, "a hop", hopFields, &(*to)[len(*to)-1])
		d.checkHop(n)
		d.checkPeers(n, &(*to)[len(*to)-1])
		d.checkSecrets(n, &(*to)[len(*to)-1], len(*to) == 1)
		if len(*to) > 1 && has(n, "connect-h3") {
			d.errorf(keyOf(n, "connect-h3"), "make it the first, or write connect-h2", "connect-h3 is carried by UDP, and the gateway before it carries streams")
		}
	})
	for i := range d.at.hops[first:] {
		d.at.hops[first+i].hop = &(*to)[i] // which stay where they are from now on
	}
	switch {
	case n.Kind == yaml.SequenceNode && len(n.Content) == 0:
		d.errorf(n, "leave the key out to go there directly", "via is empty")
	case len(*to) > maxVia:
		d.errorf(n, "", "via has %d gateways, limit %d", len(*to), maxVia)
	}
}

// checkHop finds keys of a hop that do not go together.
func (d *decoder) checkHop(n *yaml.Node) {
	if n.Kind != yaml.MappingNode {
		return
	}
	ways := 0
	for _, way := range []string{"connect", "connect-h2", "connect-h3", "websocket", "hbone", "socks5"} {
		if has(n, way) {
			ways++
		}
	}
	if ways != 1 {
		d.errorf(n, "write {connect: gw.example.com:443}, or the same with connect-h2, connect-h3, hbone or socks5, or {websocket: wss://gw.example.com/}", "a hop has one of connect, connect-h2, connect-h3, websocket, hbone and socks5")
		return
	}
	for _, key := range []string{"peers", "behind"} {
		if has(n, key) && !has(n, "hbone") {
			d.errorf(keyOf(n, key), "leave it out", "%s has no effect: it is for hbone only", key)
		}
	}
	if has(n, "hbone") {
		for _, key := range []string{"tokenFile", "userFile"} {
			if has(n, key) {
				d.errorf(keyOf(n, key), "leave it out", "%s has no effect: hbone knows its callers by their certificates", key)
			}
		}
		d.need(n, "a hop by hbone", "certificateFile")
	}
	if has(n, "socks5") {
		if has(n, "tokenFile") {
			d.errorf(keyOf(n, "tokenFile"), "use userFile", "tokenFile has no effect: socks5 knows its callers by a name and a password")
		}
		for _, key := range []string{"certificateFile", "keyFile", "caFile"} {
			if has(n, key) {
				d.errorf(keyOf(n, key), "leave it out", "%s has no effect: socks5 has no TLS of its own", key)
			}
		}
	} else if has(n, "tokenFile") && has(n, "userFile") {
		d.errorf(keyOf(n, "userFile"), "keep one of them", "a hop sends either a token or a user")
	}
	if has(n, "http2") && !has(n, "websocket") {
		d.errorf(keyOf(n, "http2"), "leave it out", "http2 has no effect: it is for websocket only")
	}
	if has(n, "certificateFile") != has(n, "keyFile") {
		d.errorf(n, "give both", "certificateFile and keyFile belong together")
	}
}

// checkSecrets finds credentials that would be sent in the clear. The first hop
// is dialed from here.
func (d *decoder) checkSecrets(n *yaml.Node, hop *registry.Hop, first bool) {
	if n.Kind != yaml.MappingNode || hop.Insecure || !has(n, "tokenFile") && !has(n, "userFile") {
		return
	}
	if to, clear := hop.CleartextAddress(first); clear {
		d.errorf(valueOf(n, hop.Proto), "use TLS there, or add insecure: true to send them all the same", "the credentials for gateway %q would go there unencrypted", clip(to))
	}
}

// checkPeers finds peers of a trust domain for which it is not known which CA
// speaks.
func (d *decoder) checkPeers(n *yaml.Node, hop *registry.Hop) {
	cas := valueOf(n, "caFile")
	var domains []string
	for _, id := range slices.Concat(hop.Peers, hop.InnerPeers) {
		domain, _, _ := strings.Cut(strings.TrimPrefix(id, "spiffe://"), "/")
		if !slices.Contains(domains, domain) {
			domains = append(domains, domain)
		}
	}
	switch {
	case cas == nil || cas.Kind != yaml.MappingNode:
		if len(domains) > 1 {
			what := "one caFile"
			if cas == nil {
				what = "no caFile"
			}
			d.errorf(keyOf(n, "peers"), byDomain("caFile", domains), "%s for peers of several trust domains: each CA could speak for all of them", what)
		}
	case hop.Proto != "hbone":
		d.errorf(cas, "name one file", "a caFile for each trust domain has no effect: other gateways than hbone's have no peers")
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

// address checks a host and port; with prefix, one that may come first.
func address(prefix string) func(string) *complaint {
	return func(s string) *complaint {
		if prefix != "" {
			s, _ = strings.CutPrefix(s, prefix)
		}
		ep, c := parseEndpoint(s)
		switch {
		case c == nil && ep.Port == 0 && prefix == "":
			c = complain("write host:port", "it has no port")
		case c == nil && ep.Port == 0:
			c = complain("write host:port, or https://host:port for TLS", "it has no port")
		}
		return c
	}
}

// ids reads SPIFFE ids, or trust domains with their scheme.
func (d *decoder) ids(n *yaml.Node, what string, to *[]string) {
	d.list(n, what, func(n *yaml.Node) {
		s, ok := d.text(n, "a SPIFFE id")
		if ok && (!strings.HasPrefix(s, "spiffe://") || strings.HasSuffix(s, "/")) {
			d.errorf(n, "write spiffe://domain/path, or spiffe://domain for any of it", "%q is not a SPIFFE id", clip(s))
			return
		}
		*to = append(*to, s)
	})
	if n.Kind == yaml.SequenceNode && len(n.Content) == 0 {
		d.errorf(n, "", "%s is empty", what)
	}
}

var hopFields = []field[registry.Hop]{
	{"connect", func(d *decoder, n *yaml.Node, to *registry.Hop) { d.hop(n, "connect", to, address("https://")) }},
	{"connect-h2", func(d *decoder, n *yaml.Node, to *registry.Hop) { d.hop(n, "connect-h2", to, address("https://")) }},
	{"connect-h3", func(d *decoder, n *yaml.Node, to *registry.Hop) { d.hop(n, "connect-h3", to, address("")) }},
	{"hbone", func(d *decoder, n *yaml.Node, to *registry.Hop) { d.hop(n, "hbone", to, address("")) }},
	{"socks5", func(d *decoder, n *yaml.Node, to *registry.Hop) { d.hop(n, "socks5", to, address("")) }},
	{"websocket", func(d *decoder, n *yaml.Node, to *registry.Hop) {
		d.hop(n, "websocket", to, func(s string) *complaint {
			const hint = "write ws://host:port/ or wss://host/, with a path that ends with a slash if there is one"
			u, err := url.Parse(s)
			switch {
			case err != nil:
				return complain(hint, "it is not a URL")
			case u.Scheme != "ws" && u.Scheme != "wss", u.Hostname() == "":
				return complain(hint, "it does not begin with ws:// or wss:// and a host")
			case u.User != nil:
				return complain("use userFile", "it has credentials in it")
			case u.RawQuery != "" || u.Fragment != "" || u.ForceQuery:
				return complain(hint, "it has a query")
			case u.Path != "" && !strings.HasSuffix(u.Path, "/"):
				return complain(hint, "its path does not end with a slash")
			}
			_, c := parseEndpoint(u.Host)
			return c
		})
	}},
	{"insecure", func(d *decoder, n *yaml.Node, to *registry.Hop) { d.boolean(n, "insecure", &to.Insecure) }},
	{"http2", func(d *decoder, n *yaml.Node, to *registry.Hop) { d.boolean(n, "http2", &to.HTTP2) }},
	{"certificateFile", readLater[registry.Hop]},
	{"keyFile", readLater[registry.Hop]},
	{"peers", func(d *decoder, n *yaml.Node, to *registry.Hop) { d.ids(n, "peers", &to.Peers) }},
	{"behind", func(d *decoder, n *yaml.Node, to *registry.Hop) { d.ids(n, "behind", &to.InnerPeers) }},
	{"tokenFile", readLater[registry.Hop]},
	{"userFile", readLater[registry.Hop]},
	{"caFile", func(d *decoder, n *yaml.Node, _ *registry.Hop) {
		d.checkByDomain(n, "caFile")
	}},
}

// hop reads one gateway, or several of which one is enough.
func (d *decoder) hop(n *yaml.Node, proto string, to *registry.Hop, check func(string) *complaint) {
	one := func(n *yaml.Node) {
		s, ok := d.text(n, "a gateway")
		if !ok {
			return
		}
		switch c := check(s); {
		case c != nil && strings.Contains(s, "@"): // perhaps a password
			d.errorf(n, c.hint, "a gateway: %s", c.msg)
		case c != nil:
			d.errorf(n, c.hint, "gateway %q: %s", clip(s), c.msg)
		case slices.Contains(to.Addresses, s):
			d.errorf(n, "keep one of them", "gateway %q is listed twice", clip(s))
		default:
			to.Addresses = append(to.Addresses, s)
		}
	}
	to.Proto = proto
	if n.Kind != yaml.SequenceNode {
		one(n)
		return
	}
	d.list(n, proto, one)
	if len(n.Content) == 0 {
		d.errorf(n, "name a gateway", "%s is empty", proto)
	}
}

// readHopFiles reads the tokens and roots that hops name, and returns what
// they contain.
func (d *decoder) readHopFiles(path string) (all [][]byte) {
	for _, at := range d.at.hops {
		hop := at.hop
		if cas := at.value("caFile"); cas != nil && cas.Kind == yaml.MappingNode {
			hop.Trust = d.rootsByDomain(path, cas, "caFile", &all)
		} else {
			hop.Roots = d.roots(path, cas, "caFile", &all)
		}
		if at.value("certificateFile") != nil && at.value("keyFile") != nil {
			pair, _ := d.pair(path, "via", at.mapping, &all)
			hop.Certificate, hop.Key = pair.Certificate, pair.Key
		}
		if n := at.value("userFile"); n != nil {
			d.warnReadable(path, n)
			hop.User, hop.Password = d.userOf(n, d.content(path, n, "userFile", &all))
		}
		n := at.value("tokenFile")
		if n == nil {
			continue
		}
		d.warnReadable(path, n)
		token := strings.TrimSpace(string(d.content(path, n, "tokenFile", &all)))
		if strings.ContainsFunc(token, func(r rune) bool { return r <= ' ' || r > '~' }) {
			d.errorf(n, "put the one token into it and nothing else", "tokenFile has more than one word, or characters that no token has")
			continue
		}
		hop.Token = registry.Secret(token)
	}
	return all
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
