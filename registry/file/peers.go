package file

import (
	"slices"
	"strings"

	"culvert.dev/registry"
	"culvert.dev/tunnel"
	"go.yaml.in/yaml/v3"
)

// A Peer is another site, with which this one exchanges its catalog of services.
type Peer struct {
	Name     string
	Gateways []registry.Gateway // that are asked for the catalog; none for a peer that opens the stream itself
	IDs      []string           // of its gateways, of one trust domain; one that ends with /* is of all below
	Zones    []tunnel.Pattern   // names that it may offer

	ExposedTo []string // networks whose clients may ask for what it offers; empty means all
	State     string   // the folder where its last catalog is kept; an absolute path once it is read, "" for none
}

// A peerEntry is an element of peers.
type peerEntry struct {
	Name      string           `yaml:"name,required" as:"label"`
	Gateways  []gateway        `yaml:"gateways" what:"a gateway" empty:"leave the key out for a peer that opens the stream itself"`
	IDs       []string         `yaml:"ids,required" what:"a SPIFFE id" as:"spiffePattern" unique:"id" empty:"list the ids of its gateways"`
	Zones     []tunnel.Pattern `yaml:"zones" what:"a zone" as:"pattern" unique:"zone" empty:"leave the key out for a peer that offers nothing"`
	ExposedTo []string         `yaml:"exposedTo" what:"a network" unique:"network" empty:"leave the key out for all networks"`
	State     string           `yaml:"state"`
}

// peers are registered with the places that they have in the file.
type peers []Peer

func (l *peers) decode(d *decoder, n *yaml.Node, key string) {
	if !d.is(n, yaml.SequenceNode, key) {
		return
	}
	for _, n := range n.Content {
		if isNull(n) {
			d.errorf(n, "give it a value, or take it out", "%s has an empty element", key)
			continue
		}
		var p peerEntry
		into(d, n, "a peer", &p)
		out := Peer{Name: p.Name, IDs: readable(p.IDs), Zones: p.Zones, ExposedTo: p.ExposedTo, State: p.State}
		for i := range p.Gateways {
			out.Gateways = append(out.Gateways, p.Gateways[i].registered())
		}
		*l = append(*l, out)
		d.peers = append(d.peers, mapping{n})
	}
}

// network returns the peer as the network that it is in the table.
func (p *Peer) network() *registry.Network {
	return &registry.Network{Name: "peer/" + p.Name, Gateways: p.Gateways}
}

// eachPeerGateway calls f with each gateway of a peer, and where it is.
func (d *decoder) eachPeerGateway(f func(p *Peer, g *registry.Gateway, at mapping)) {
	for i := range d.cfg.Peers {
		p := &d.cfg.Peers[i]
		for j := range p.Gateways {
			f(p, &p.Gateways[j], mapping{d.peers[i].item("gateways", j)})
		}
	}
}

// checkPeers finds peers that can't be what they say.
func (d *decoder) checkPeerEntries() {
	names, zones := map[string]*yaml.Node{}, map[tunnel.Pattern]string{}
	for i := range d.cfg.Peers {
		p, at := &d.cfg.Peers[i], d.peers[i]
		if first := names[p.Name]; first != nil && p.Name != "" {
			d.errorf(at.where("name"), "list all its gateways together", "peer %q is already in line %d", clip(p.Name), first.Line)
		} else {
			names[p.Name] = at.where("name")
		}
		for j, zone := range p.Zones {
			if zone == (tunnel.Pattern{}) {
				continue
			}
			if zone.Suffix.IsReserved() {
				d.errorf(at.item("zones", j), "leave it out", "zone %q: %s", zone, registry.ReservedName)
			}
			set := strings.HasSuffix(zone.Suffix.String(), registry.Clusterset)
			if other, taken := zones[zone]; taken && !set {
				d.errorf(at.item("zones", j), "give it to one of them: a name has one peer", "zone %q is that of peer %q already", zone, clip(other))
			}
			zones[zone] = p.Name
		}
		for j, name := range p.ExposedTo {
			d.knownNetwork(at.item("exposedTo", j), name)
		}
		domains := domainsOf(p.IDs)
		if len(domains) > 1 {
			d.errorf(at.where("ids"), "a peer has one trust domain: make it two peers", "the ids of peer %q are of %d trust domains", clip(p.Name), len(domains))
		}
		network := p.network()
		for j := range p.Gateways {
			d.checkTransports(network, &p.Gateways[j], at, mapping{at.item("gateways", j)})
			d.checkPeerTransports(p, &p.Gateways[j], mapping{at.item("gateways", j)}, domains)
		}
	}
}

// checkPeerTransports finds transports to the gateway g of p by which the two do not know
// each other, and completes the others: whom they lead to, and by what that is verified.
func (d *decoder) checkPeerTransports(p *Peer, g *registry.Gateway, at mapping, domains []string) {
	const hint = "write transports: [{protocol: connect-h2, tls: true, key: NAME}], with the name of one in identity.keys"
	list := at.value("transports")
	if list == nil {
		d.errorf(at.node, hint, "a gateway of peer %q needs transports: its catalog is asked for by mutual TLS", clip(p.Name))
		return
	}
	if list.Kind != yaml.SequenceNode || len(list.Content) != len(g.Transports) {
		return
	}
	if !slices.ContainsFunc(g.Transports, func(h registry.Hop) bool { return h.Proto != "sni" && h.Proto != "quic" }) {
		d.errorf(list, hint, "a gateway of peer %q is asked for its catalog by mutual TLS, and its transports have none", clip(p.Name))
	}
	for i := range g.Transports {
		h, n := &g.Transports[i], list.Content[i]
		if h.Proto == "" || h.Proto == "sni" || h.Proto == "quic" { // by which clients go there, and DNS leads them
			continue
		}
		own := mapping{n}
		hop := h.At(g.AddressFrom("", ""))
		_, clear := hop.CleartextAddress(false)
		if clear || n.Kind != yaml.MappingNode || own.value("key") == nil && own.value("certificateFile") == nil {
			d.errorf(n, hint, "the catalog of peer %q is asked for by mutual TLS, and %s has none here", clip(p.Name), h.Proto)
			continue
		}
		if own.value("peers") == nil {
			h.Peers = slices.Clone(p.IDs)
		}
		if own.value("trust") == nil && own.value("caFile") == nil && len(domains) == 1 {
			h.TrustNames = domains
			known := d.root.object("identity").object("trust").value(domains[0]) != nil
			if c := d.cfg.Identity; !known && (c == nil || c.Trust[domains[0]] == nil) {
				d.errorf(n, "add it to identity.trust, or name trust or caFile here", "there is no trust %q in identity.trust, by which the gateways of peer %q are verified", clip(domains[0]), clip(p.Name))
			}
		}
	}
}
