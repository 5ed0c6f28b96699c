package kept

import (
	"net/netip"
	"time"

	"culvert.dev/registry"
	"culvert.dev/tunnel"
)

// What follows is the registry's model as it is written: all of it but for
// secrets, of which there is no field. A test finds what is forgotten.

type network struct {
	Name     string         `json:"name,omitempty"`
	CIDRs    []netip.Prefix `json:"cidrs,omitempty"`
	Near     []string       `json:"near,omitempty"`
	Gateways []gateway      `json:"gateways,omitempty"`
	Via      []hop          `json:"via,omitempty"`
	Insecure bool           `json:"insecure,omitempty"`
}

type gateway struct {
	Address    endpoint `json:"address"`
	Public     endpoint `json:"public"`
	Transports []string `json:"transports,omitempty"`
	Weight     uint16   `json:"weight,omitempty"`
	Check      check    `json:"check"`
}

type check struct {
	Kind     string        `json:"kind,omitempty"`
	Host     string        `json:"host,omitempty"`
	Path     string        `json:"path,omitempty"`
	Interval time.Duration `json:"interval,omitempty"`
	Timeout  time.Duration `json:"timeout,omitempty"`
}

type service struct {
	Name          string       `json:"name,omitempty"`
	Listed        bool         `json:"listed,omitempty"` // of the snapshot's Services, and not only a backend
	Names         []string     `json:"names,omitempty"`
	Ports         []uint16     `json:"ports,omitempty"`
	Addresses     []netip.Addr `json:"addresses,omitempty"`
	Via           []hop        `json:"via,omitempty"`
	ID            *id          `json:"id,omitempty"`
	Exported      bool         `json:"exported,omitempty"`
	Headless      bool         `json:"headless,omitempty"`
	ALPN          []string     `json:"alpn,omitempty"`
	Named         []namedPort  `json:"named,omitempty"`
	VIP           bool         `json:"vip,omitempty"`
	Check         *check       `json:"check,omitempty"`
	Exposed       bool         `json:"exposed,omitempty"`
	ExposedTo     []string     `json:"exposedTo,omitempty"`
	Publish       bool         `json:"publish,omitempty"`
	Idle          int64        `json:"idle,omitempty"`
	HalfClosed    int64        `json:"halfClosed,omitempty"`
	TLS           *backendTLS  `json:"tls,omitempty"`
	ProxyProtocol int          `json:"proxyProtocol,omitempty"`
	Origin        string       `json:"origin,omitempty"`
}

type id struct {
	Service   string `json:"service,omitempty"`
	Namespace string `json:"namespace,omitempty"`
	Cluster   string `json:"cluster,omitempty"`
}

type namedPort struct {
	Name     string `json:"name,omitempty"`
	Protocol string `json:"protocol,omitempty"`
	Port     uint16 `json:"port,omitempty"`
}

type endpoint struct {
	Host        string     `json:"host,omitempty"`
	Addr        netip.Addr `json:"addr,omitzero"`
	Port        uint16     `json:"port,omitempty"`
	ServicePort uint16     `json:"for,omitempty"`
	Name        string     `json:"name,omitempty"`
	Network     string     `json:"network,omitempty"`
	Cluster     string     `json:"cluster,omitempty"`
	Guarded     bool       `json:"guarded,omitempty"`
}

type hop struct {
	Proto       string            `json:"proto,omitempty"`
	To          []string          `json:"to,omitempty"`
	User        string            `json:"user,omitempty"`
	Roots       string            `json:"roots,omitempty"`
	HTTP2       bool              `json:"http2,omitempty"`
	Certificate string            `json:"certificate,omitempty"`
	Peers       []string          `json:"peers,omitempty"`
	Behind      []string          `json:"behind,omitempty"`
	Trust       map[string]string `json:"trust,omitempty"`
	Insecure    bool              `json:"insecure,omitempty"`
}

type backendTLS struct {
	ServerName  string   `json:"serverName,omitempty"`
	Roots       string   `json:"roots,omitempty"`
	SANs        []string `json:"sans,omitempty"`
	Certificate string   `json:"certificate,omitempty"`
}

type listener struct {
	Name     string     `json:"name,omitempty"`
	Protocol string     `json:"protocol,omitempty"`
	Address  netip.Addr `json:"address,omitzero"`
	Port     uint16     `json:"port,omitempty"`
	Origin   string     `json:"origin,omitempty"`
}

type section struct {
	Name  string `json:"name,omitempty"`
	Host  string `json:"host,omitempty"`
	Istio bool   `json:"istio,omitempty"`
}

type rule struct {
	Name     string    `json:"name,omitempty"`
	Names    []string  `json:"names,omitempty"`
	Backends []backend `json:"backends,omitempty"`
	Idle     int64     `json:"idle,omitempty"`
	Origin   string    `json:"origin,omitempty"`
}

type backend struct {
	Weight  uint32 `json:"weight,omitempty"`
	Service *int   `json:"service,omitempty"` // which of its source's services in the file
	Broken  string `json:"broken,omitempty"`
	Of      string `json:"of,omitempty"`
}

// without is what a backend says that can't work without what is not written.
const without = "it needs a key, which is not kept: it works again when its source is back"

// needs reports whether s does not work without a secret.
func needs(s *registry.Service) bool {
	if s.TLS != nil && s.TLS.Key != "" {
		return true
	}
	for i := range s.Via {
		if h := &s.Via[i]; h.Token != "" || h.Password != "" || h.Key != "" {
			return true
		}
	}
	return false
}

func ofNetwork(n *registry.Network) *network {
	return &network{n.Name, n.CIDRs, n.Near, each(n.Gateways, ofGateway), each(n.Via, ofHop), n.Insecure}
}

func (n *network) registry() registry.Network {
	return registry.Network{Name: n.Name, CIDRs: n.CIDRs, Near: n.Near, Gateways: each(n.Gateways, (*gateway).registry), Via: each(n.Via, (*hop).registry), Insecure: n.Insecure}
}

func ofGateway(g *registry.Gateway) gateway {
	return gateway{endpoint(g.Address), endpoint(g.Public), g.Transports, g.Weight, check(g.Check)}
}

func (g *gateway) registry() registry.Gateway {
	return registry.Gateway{Address: registry.Endpoint(g.Address), Public: registry.Endpoint(g.Public), Transports: g.Transports, Weight: g.Weight, Check: registry.Check(g.Check)}
}

func ofHop(h *registry.Hop) hop {
	return hop{h.Proto, h.Addresses, h.User, h.Roots, h.HTTP2, h.Certificate, h.Peers, h.InnerPeers, h.Trust, h.Insecure}
}

func (h *hop) registry() registry.Hop {
	return registry.Hop{Proto: h.Proto, Addresses: h.To, User: h.User, Roots: h.Roots, HTTP2: h.HTTP2, Certificate: h.Certificate, Peers: h.Peers, InnerPeers: h.Behind, Trust: h.Trust, Insecure: h.Insecure}
}

// ofService returns s without its endpoints.
func ofService(s *registry.Service, listed bool) *service {
	out := &service{
		Name: s.Name, Listed: listed, Names: each(s.Names, ofPattern), Ports: s.Ports, Addresses: s.Addresses, Via: each(s.Via, ofHop),
		Exported: s.Exported, Headless: s.Headless, ALPN: s.ALPN, Named: each(s.NamedPorts, func(p *registry.NamedPort) namedPort { return namedPort(*p) }),
		VIP: s.VIP, Exposed: s.Exposed, ExposedTo: s.ExposedTo, Publish: s.Publish, Idle: int64(s.IdleTimeout), HalfClosed: int64(s.HalfClosedTimeout),
		ProxyProtocol: s.ProxyProtocol, Origin: s.Origin,
	}
	if s.ID != (registry.ID{}) {
		i := id(s.ID)
		out.ID = &i
	}
	if s.Check != (registry.Check{}) {
		c := check(s.Check)
		out.Check = &c
	}
	if t := s.TLS; t != nil {
		out.TLS = &backendTLS{t.ServerName, t.Roots, t.SANs, t.Certificate}
	}
	if needs(s) {
		out.Via, out.TLS = nil, nil // with none of them and no endpoints it leads nowhere
	}
	return out
}

func (s *service) registry() (*registry.Service, error) {
	names, err := patterns(s.Names)
	if err != nil {
		return nil, err
	}
	out := &registry.Service{
		Name: s.Name, Names: names, Ports: s.Ports, Addresses: s.Addresses, Via: each(s.Via, (*hop).registry),
		Exported: s.Exported, Headless: s.Headless, ALPN: s.ALPN, NamedPorts: each(s.Named, func(p *namedPort) registry.NamedPort { return registry.NamedPort(*p) }),
		VIP: s.VIP, Exposed: s.Exposed, ExposedTo: s.ExposedTo, Publish: s.Publish, IdleTimeout: time.Duration(s.Idle), HalfClosedTimeout: time.Duration(s.HalfClosed),
		ProxyProtocol: s.ProxyProtocol, Origin: s.Origin,
	}
	if s.ID != nil {
		out.ID = registry.ID(*s.ID)
	}
	if s.Check != nil {
		out.Check = registry.Check(*s.Check)
	}
	if t := s.TLS; t != nil {
		out.TLS = &registry.BackendTLS{ServerName: t.ServerName, Roots: t.Roots, SANs: t.SANs, Certificate: t.Certificate}
	}
	return out, nil
}

func ofPattern(p *tunnel.Pattern) string { return p.String() }

func patterns(all []string) ([]tunnel.Pattern, error) {
	if len(all) == 0 {
		return nil, nil
	}
	out := make([]tunnel.Pattern, len(all))
	for i, s := range all {
		p, err := tunnel.ParsePattern(s)
		if err != nil {
			return nil, err
		}
		out[i] = p
	}
	return out, nil
}

// each is nil for none.
func each[A, B any](all []A, f func(*A) B) []B {
	if len(all) == 0 {
		return nil
	}
	out := make([]B, len(all))
	for i := range all {
		out[i] = f(&all[i])
	}
	return out
}
