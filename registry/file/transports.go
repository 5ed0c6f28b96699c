package file

import (
	"cmp"
	"slices"
	"strings"

	"culvert.dev/registry"
	"go.yaml.in/yaml/v3"
)

// A transport is a protocol that a gateway speaks, or an object with what else is needed
// to ask it by that.
type transport struct {
	Protocol string `yaml:"protocol,required,short" what:"a protocol" oneof:"sni connect connect-h2 connect-h3 websocket hbone socks5 quic"`
	TLS      bool   `yaml:"tls"`
	Path     string `yaml:"path" as:"tunnelPath"` // of websocket; "" means the default
	hopAccess
}

// A GatewayTransport is how the gateways that discovery has found are asked.
type GatewayTransport struct {
	Path string `yaml:"path" as:"tunnelPath"` // of websocket; "" means the default
	hopAccess
}

// registered returns t as the registry has it, without the content of its files.
func (t *transport) registered() registry.Hop {
	out := t.hopAccess.registered()
	out.Proto, out.TLS, out.Path = t.Protocol, t.TLS, t.Path
	return out
}

func (t *GatewayTransport) registered() registry.Hop {
	out := t.hopAccess.registered()
	out.Path = t.Path
	return out
}

func (t *transport) check(d *decoder, at mapping) {
	n, hasTLS := at.node, t.TLS
	switch t.Protocol {
	case "":
		return // which was reported
	case "sni", "quic":
		for i := 0; i+1 < len(n.Content); i += 2 {
			if key := n.Content[i]; key.Value != "protocol" {
				d.errorf(key, "leave it out", "%s has no effect: by %s what a client sends goes on as it is", key.Value, t.Protocol)
			}
		}
		return
	case "connect-h3", "hbone":
		if has(n, "tls") && !t.TLS {
			d.errorf(keyOf(n, "tls"), "leave it out", "%s is always inside of TLS", t.Protocol)
		}
		hasTLS = true
	case "socks5":
		if has(n, "tls") {
			d.errorf(keyOf(n, "tls"), "leave it out", "tls has no effect: socks5 has no TLS of its own")
		}
		hasTLS = false
	}
	if has(n, "path") && t.Protocol != "websocket" {
		d.errorf(keyOf(n, "path"), "leave it out", "path has no effect: it is for websocket only")
	}
	d.checkAccess(n, t.Protocol, hasTLS)
	if !hasTLS && t.Protocol != "socks5" {
		for _, key := range []string{"certificateFile", "caFile"} {
			if has(n, key) {
				d.errorf(keyOf(n, key), "add tls: true, or leave it out", "%s has no effect: there is no TLS to the gateway", key)
			}
		}
	}
	if has(n, "http2") && !hasTLS && t.Protocol == "websocket" {
		d.errorf(keyOf(n, "http2"), "add tls: true, or leave it out", "http2 has no effect: there is no TLS to the gateway")
	}
	h := t.registered()
	d.checkPeers(n, &h)
}

func (t *GatewayTransport) check(d *decoder, at mapping) {
	n := at.node
	d.checkCredentials(n, "caFile")
	d.checkOneCredential(n)
	h := t.registered()
	d.checkPeers(n, &h)
}

// gatewayTransport returns kubernetes.discovery.gatewayTransport.
func (d *decoder) gatewayTransport() mapping {
	return d.root.object("kubernetes").object("discovery").object("gatewayTransport")
}

// checkTransports finds what is wrong with the transports of a gateway together. The
// gateway is at g, and its network at network.
func (d *decoder) checkTransports(network *registry.Network, g *registry.Gateway, at mapping, where mapping) {
	list := where.value("transports")
	if list == nil || list.Kind != yaml.SequenceNode || len(list.Content) != len(g.Transports) {
		return
	}
	entries := g.AddressFrom(network.Name, "")
	seen := map[string]bool{}
	secure := ""
	for i := range g.Transports {
		h, n := &g.Transports[i], list.Content[i]
		if h.Proto == "" {
			continue
		}
		if seen[h.Proto] {
			d.errorf(n, "keep one of them", "protocol %q is listed twice", h.Proto)
			continue
		}
		seen[h.Proto] = true
		if h.Proto == "sni" || h.Proto == "quic" || h.Proto == "hbone" && !has(n, "certificateFile") && !has(n, "key") {
			continue
		}
		hop := h.At(entries)
		d.checkSecrets(n, cmp.Or(valueOf(n, "tokenFile"), valueOf(n, "jwtSVID"), valueOf(n, "userFile")), &hop, true)
		switch _, clear := hop.CleartextAddress(false); {
		case !clear:
			secure = cmp.Or(secure, h.Proto)
		case secure != "" && !h.Insecure:
			hint := "write {protocol: " + h.Proto + ", tls: true}, put it first, or add insecure: true to use it all the same"
			if h.Proto == "socks5" {
				hint = "put it first, or add insecure: true to use it all the same"
			}
			d.errorf(n, hint, "%s has no TLS and comes after %s, which has: whoever blocks the one could read the other", h.Proto, secure)
		}
	}
	d.checkEntrance(network, g, at, list)
}

// checkEntrance finds a gateway that takes nothing for which this gateway knows enough, in
// a network without a via. Those of our own network are for others, whose files say it.
func (d *decoder) checkEntrance(network *registry.Network, g *registry.Gateway, at mapping, list *yaml.Node) {
	if len(g.Transports) == 0 || has(at.node, "via") || network.Name == d.cfg.Mesh.Network {
		return
	}
	if slices.ContainsFunc(list.Content, func(n *yaml.Node) bool { return n.Kind != yaml.ScalarNode || n.Value != "hbone" }) {
		return
	}
	d.errorf(list, "write {protocol: hbone, certificateFile: FILE, keyFile: FILE} or {protocol: hbone, key: NAME}, or add another to its transports",
		"gateway %q of network %q takes only %s, which needs a certificate", g.Address, clip(network.Name), strings.Join(g.Protocols(), " and "))
}
