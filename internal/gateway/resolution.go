package gateway

import (
	"cmp"
	"fmt"
	"net/netip"
	"net/url"
	"slices"

	"culvert.dev/dns"
	"culvert.dev/internal/names"
	"culvert.dev/registry"
	"culvert.dev/tunnel"
)

// A Resolution is what a name means, from each of some networks.
type Resolution struct {
	Name       string `json:"name"`
	Generation uint64 `json:"generation"` // of the table
	Views      []View `json:"views"`
}

// A View is what a name means from one network.
type View struct {
	Network  string          `json:"network"` // "" for those in none
	Here     bool            `json:"here,omitempty"`
	Reason   tunnel.Reason   `json:"reason,omitempty"` // why it means nothing; "" where it does
	Detail   string          `json:"detail,omitempty"`
	Services []ViewedService `json:"services,omitempty"`
	DNS      []string        `json:"dns"` // the addresses that are answered, in order; names of which addresses are looked up
}

// A ViewedService is one service of a name, and where it is.
type ViewedService struct {
	Service   string           `json:"service"`
	Pattern   string           `json:"pattern"`
	Endpoint  bool             `json:"endpoint,omitempty"` // one of its endpoints was asked for
	VIPs      []netip.Addr     `json:"vips,omitempty"`
	Endpoints []ViewedEndpoint `json:"endpoints,omitempty"` // that are reached directly
	Gateways  []ViewedGateway  `json:"gateways,omitempty"`  // in the order of their distance
	Why       string           `json:"why"`
}

// A ViewedEndpoint is an endpoint that is reached directly.
type ViewedEndpoint struct {
	Address string `json:"address"`
	Name    string `json:"name,omitempty"`
	Healthy bool   `json:"healthy"`
	State   string `json:"state,omitempty"` // as /status has it; "" where nothing is known
	Error   string `json:"error,omitempty"` // why it is not up, as /status has it
}

// A ViewedGateway is a gateway that leads to a service.
type ViewedGateway struct {
	Network    string   `json:"network"`
	Address    string   `json:"address"`
	Rank       int      `json:"rank"` // 0 for the nearest network's
	Weight     uint16   `json:"weight"`
	Transports []string `json:"transports"`
	Healthy    bool     `json:"healthy"`
	State      string   `json:"state,omitempty"`
	Error      string   `json:"error,omitempty"`
}

// ResolveFrom says what name means from a network, or from an address; from
// every network of the table, and none, where from is "". It is what DNS answers
// that has the same src and, from the network of the registry's own, where a
// gateway goes.
func ResolveFrom(src *names.Source, name, from string) (*Resolution, error) {
	reg := src.Registry
	t := reg.Table()
	if t == nil {
		return nil, fmt.Errorf("no source has sent its configuration")
	}
	n, err := tunnel.ParseName(name)
	if err != nil {
		return nil, fmt.Errorf("name: %w", err)
	}
	networks := []string{from}
	var client netip.Addr
	switch a, err := netip.ParseAddr(from); {
	case from == "":
		networks = networks[:0]
		for network := range t.Networks() {
			networks = append(networks, network.Name)
		}
		networks = append(networks, "")
	case from == "none":
		networks[0] = ""
	case err == nil:
		networks[0], _ = t.Network(a)
		client = a
	default:
		known, found := "", false
		for network := range t.Networks() {
			known += network.Name + ", "
			found = found || network.Name == from
		}
		if !found {
			return nil, fmt.Errorf("unknown network %q; use %san address, or \"none\" for clients outside all networks", from, known)
		}
	}
	r := &Resolution{Name: n.String(), Generation: t.Generation()}
	states := reg.States()
	for _, network := range networks {
		r.Views = append(r.Views, view(src, t, n, network, cmp.Or(client, addressIn(t, network)), states))
	}
	return r, nil
}

// addressIn returns an address of a network, and none where it has none.
func addressIn(t *registry.Table, network string) (a netip.Addr) {
	for n := range t.Networks() {
		if n.Name == network && len(n.CIDRs) > 0 {
			return n.CIDRs[0].Addr()
		}
	}
	return a
}

// view returns what name is to clients in a network, at the address of one of them.
func view(src *names.Source, t *registry.Table, name tunnel.Name, network string, client netip.Addr, states func(netip.AddrPort) (string, error)) View {
	v := View{Network: network, Here: network != "" && network == t.Mesh().Network, DNS: []string{}}
	places, ok := t.Locations(name, network)
	if !ok {
		err := t.Refusal(name, network)
		v.Reason, v.Detail = tunnel.ReasonOf(err), err.Error()
		if src.Registry.PendingSources() > 0 {
			v.Detail += "; but a source has not sent its configuration yet, and DNS answers SERVFAIL in its zones"
		}
		return v
	}
	viewer := names.Viewer(client, name, src.DeferIdentity != nil && src.DeferIdentity())
	places = slices.DeleteFunc(places, func(p registry.Location) bool { return !t.Sees(viewer, &p) })
	if len(places) == 0 {
		v.Reason, v.Detail = tunnel.Denied, fmt.Sprintf("no policy with the verb catalog lets the client see what %q is", name)
		return v
	}
	for i := range places {
		v.Services = append(v.Services, viewed(src.Registry, &places[i], states))
	}
	for _, typ := range []dns.Type{dns.TypeA, dns.TypeAAAA} {
		var a dns.Answer
		src.Names().Answer(dns.Question{Name: name.String(), Type: typ, View: network, From: client}, &a)
		v.DNS = append(v.DNS, answered(&a, typ)...)
	}
	return v
}

// answered returns the addresses of an answer, and with those of IPv4 the names
// of which addresses are looked up, in the order of their ranks.
func answered(a *dns.Answer, typ dns.Type) []string {
	type ranked struct {
		rank uint8
		what string
	}
	var all []ranked
	for _, addr := range a.Addrs {
		if addr.Addr.Is4() == (typ == dns.TypeA) {
			all = append(all, ranked{addr.Rank, addr.Addr.String()})
		}
	}
	for _, target := range a.Targets {
		if typ == dns.TypeA {
			all = append(all, ranked{target.Rank, target.Host})
		}
	}
	slices.SortStableFunc(all, func(a, b ranked) int { return cmp.Compare(a.rank, b.rank) })
	list := make([]string, len(all))
	for i := range all {
		list[i] = all[i].what
	}
	return list
}

func viewed(reg *registry.Registry, p *registry.Location, states func(netip.AddrPort) (string, error)) ViewedService {
	s := ViewedService{Service: p.Service.Name, Pattern: p.Pattern, Endpoint: p.Single}
	for _, a := range p.VIPs {
		if a.IsValid() {
			s.VIPs = append(s.VIPs, a)
		}
	}
	healthy := func(ep *registry.Endpoint, port uint16) bool {
		return !ep.Addr.IsValid() || reg.Healthy(netip.AddrPortFrom(ep.Addr, cmp.Or(ep.Port, port)))
	}
	state := func(ep *registry.Endpoint, port uint16) (state, problem string) {
		if !ep.Addr.IsValid() {
			return "", ""
		}
		state, err := states(netip.AddrPortFrom(ep.Addr, cmp.Or(ep.Port, port)))
		if err != nil {
			problem = err.Error()
		}
		return state, problem
	}
	for i := range p.Endpoints {
		ep := &p.Endpoints[i]
		one := ViewedEndpoint{Address: ep.String(), Name: ep.Name, Healthy: healthy(ep, p.Port)}
		one.State, one.Error = state(ep, p.Port)
		s.Endpoints = append(s.Endpoints, one)
	}
	for i := range p.Gateways {
		e := &p.Gateways[i]
		g := ViewedGateway{Network: e.Network, Address: e.Address.String(), Rank: e.Rank, Weight: cmp.Or(e.Gateway.Weight, 1), Transports: e.Gateway.Protocols(), Healthy: healthy(&e.Address, 0)}
		g.State, g.Error = state(&e.Address, 0)
		s.Gateways = append(s.Gateways, g)
	}
	switch {
	case len(s.Endpoints) > 0:
		s.Why = "its endpoints are reached from here"
	case len(s.Gateways) > 0:
		s.Why = "its endpoints are in another network, whose gateways lead there"
	case len(p.Service.Via) > 0, p.Service.HasEndpointVia():
		s.Why = "it is reached via another gateway, and the network of this one has none to ask"
	case len(p.Service.Endpoints) == 0:
		s.Why = "it has no endpoint"
	default:
		s.Why = "its endpoints are in another network, which has no gateway that leads there"
	}
	return s
}

// resolve answers /resolve.
func (g *Gateway) resolve(v url.Values) (any, error) {
	return ResolveFrom(g.names, v.Get("name"), v.Get("from"))
}
