package file

import (
	"net/url"
	"path/filepath"
	"slices"
	"strings"

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
	service, hop        int
	tokenFile, rootFile *yaml.Node
}

// via reads the gateways on the way to a service.
func (d *decoder) via(n *yaml.Node, to *registry.Service) {
	d.service().via = n
	d.list(n, "via", func(n *yaml.Node) {
		d.at.hops = append(d.at.hops, hopAt{service: len(d.at.services) - 1, hop: len(to.Via)})
		to.Via = append(to.Via, registry.Hop{})
		object(d, n, "a hop", hopFields, &to.Via[len(to.Via)-1])
		if n.Kind == yaml.MappingNode && has(n, "connect") == has(n, "websocket") {
			d.errorf(n, "write {connect: gw.example.com:443} or {websocket: wss://gw.example.com/}", "a hop has either connect or websocket")
		}
	})
	switch {
	case n.Kind == yaml.SequenceNode && len(n.Content) == 0:
		d.errorf(n, "leave the key out to go there directly", "via is empty")
	case len(to.Via) > maxVia:
		d.errorf(n, "", "via has %d gateways, limit %d", len(to.Via), maxVia)
	}
}

var hopFields = []field[registry.Hop]{
	{"connect", func(d *decoder, n *yaml.Node, to *registry.Hop) {
		d.hop(n, "connect", to, func(s string) *complaint {
			rest, _ := strings.CutPrefix(s, "https://")
			ep, c := parseEndpoint(rest)
			if c == nil && ep.Port == 0 {
				c = complain("write host:port, or https://host:port for TLS", "it has no port")
			}
			return c
		})
	}},
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
				return complain("use tokenFile", "it has credentials in it")
			case u.RawQuery != "" || u.Fragment != "" || u.ForceQuery:
				return complain(hint, "it has a query")
			case u.Path != "" && !strings.HasSuffix(u.Path, "/"):
				return complain(hint, "its path does not end with a slash")
			}
			_, c := parseEndpoint(u.Host)
			return c
		})
	}},
	{"tokenFile", func(d *decoder, n *yaml.Node, _ *registry.Hop) { d.at.hops[len(d.at.hops)-1].tokenFile = n }},
	{"caFile", func(d *decoder, n *yaml.Node, _ *registry.Hop) { d.at.hops[len(d.at.hops)-1].rootFile = n }},
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
		case slices.Contains(to.To, s):
			d.errorf(n, "keep one of them", "gateway %q is listed twice", clip(s))
		default:
			to.To = append(to.To, s)
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
		hop := &d.cfg.Services[at.service].Via[at.hop]
		content := func(n *yaml.Node, what string) []byte {
			if n == nil {
				return nil
			}
			name, ok := d.text(n, what)
			if !ok {
				return nil
			}
			if !filepath.IsAbs(name) {
				name = filepath.Join(filepath.Dir(path), name)
			}
			b, err := read(name, maxAuthSize)
			if err != nil {
				d.errorf(n, "paths are relative to the configuration file", "%v", err)
				return nil
			}
			d.cfg.files = append(d.cfg.files, name)
			all = append(all, b)
			if why := writable(name); why != "" {
				d.errorf(n, "chmod go-w it", "%q %s", name, why)
			}
			return b
		}
		hop.Roots = string(content(at.rootFile, "caFile"))
		if at.rootFile != nil && hop.Roots != "" && !strings.Contains(hop.Roots, "-----BEGIN CERTIFICATE-----") {
			d.errorf(at.rootFile, "write certificates in PEM", "caFile has no certificate in it")
		}
		if at.tokenFile == nil {
			continue
		}
		token := strings.TrimSpace(string(content(at.tokenFile, "tokenFile")))
		if strings.ContainsFunc(token, func(r rune) bool { return r <= ' ' || r > '~' }) {
			d.errorf(at.tokenFile, "put the one token into it and nothing else", "tokenFile has more than one word in it, or what no token has")
			continue
		}
		hop.Token = registry.Secret(token)
	}
	return all
}
