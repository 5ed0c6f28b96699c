package gateway

import (
	"context"
	"net/netip"
	"slices"
	"sync"

	"culvert.dev/nat"
	"culvert.dev/registry"
)

// A natService has the router map ports. It is the registry.Source of the outside addresses
// that other gateways have connected to.
type natService struct {
	g       *Gateway
	manager nat.Manager
	proofs  proofs

	mu     sync.Mutex // guards what follows
	public []registry.PublicAddress
	asked  []netip.AddrPort // gateways of other networks, of the table before
	news   chan struct{}
}

func newNATService(g *Gateway) *natService {
	n := &natService{g: g, news: make(chan struct{}, 1)}
	n.manager = nat.Manager{
		Dial: g.cfg.Sockets.DialContext, FindUPnP: g.cfg.FindUPnP, Secret: g.cfg.NATSecret, Lookup: g.cfg.Lookup,
		Verify: n.verify, OnChange: n.changed, Log: g.log,
	}
	n.use(g.cfg.NAT)
	return n
}

// use has other settings used from now on; nil means that nothing is mapped.
func (n *natService) use(s *nat.Settings) {
	if s == nil {
		s = &nat.Settings{}
	}
	n.manager.Use(*s)
}

// changed takes in what the manager has reached.
func (n *natService) changed(s nat.Status) {
	var public []registry.PublicAddress
	for i := range s.Mappings {
		p := &s.Mappings[i]
		if at, ok := p.Public(); ok && p.Network == "tcp" && s.Route != nil {
			public = append(public, registry.PublicAddress{Address: netip.AddrPortFrom(s.Route.Local, p.Port), Public: at})
		}
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if slices.Equal(public, n.public) {
		return
	}
	n.public = public
	n.g.peers.Moved()
	select {
	case n.news <- struct{}{}:
	default:
	}
}

// tableChanged has mappings verified at once where there are other gateways to ask.
func (n *natService) tableChanged() {
	t := n.g.registry.Table()
	if t == nil || n.g.settings.Load().NAT == nil {
		return
	}
	var others []netip.AddrPort
	for network := range t.Networks() {
		for i := range network.Gateways {
			if gw := &network.Gateways[i]; gw.HasCarriers() && network.Name != t.Mesh().Network {
				others = append(others, netip.AddrPortFrom(gw.Address.Addr, gw.Address.Port))
			}
		}
	}
	n.mu.Lock()
	same := slices.Equal(others, n.asked)
	n.asked = others
	n.mu.Unlock()
	if !same && len(others) > 0 {
		n.manager.Reverify()
	}
}

// publicOf returns the verified outside address of one of this host, the zero AddrPort where
// there is none, and whether it is one that is not reached without.
func (n *natService) publicOf(at netip.AddrPort) (public netip.AddrPort, mapped bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, p := range n.public {
		if p.Address == at {
			return p.Public, true
		}
	}
	s := n.g.settings.Load().NAT
	return netip.AddrPort{}, s != nil && !nat.IsPublic(at.Addr()) && slices.ContainsFunc(s.Ports, func(p nat.Port) bool {
		return p.Network == "tcp" && p.Internal == at.Port()
	})
}

// Run implements registry.Source.
func (n *natService) Run(ctx context.Context, updates chan<- registry.Update) error {
	for {
		n.mu.Lock()
		public := n.public
		n.mu.Unlock()
		select {
		case updates <- registry.Update{Source: "nat", Snapshot: registry.Snapshot{Public: public}}:
		case <-ctx.Done():
			return nil
		}
		select {
		case <-n.news:
		case <-ctx.Done():
			return nil
		}
	}
}

// Supplements implements registry.Supplement.
func (n *natService) Supplements() {}

var _ registry.Supplement = (*natService)(nil)

// status returns what is reached, nil where nothing is to be mapped.
func (n *natService) status() *nat.Status {
	if n.g.settings.Load().NAT == nil {
		return nil
	}
	s := n.manager.Status()
	return &s
}

// gauges adds the metrics of mappings.
func (n *natService) gauges() {
	n.g.metrics.GaugeSet("culvert_nat_mapping", "Ports that a router maps to this gateway: 1 in the state that it has, pending, mapped, verified or direct.", []string{"listener", "state"}, func(yield func(labels []string, v float64)) {
		if s := n.status(); s != nil {
			for i := range s.Mappings {
				yield([]string{s.Mappings[i].Listener, s.Mappings[i].State}, 1)
			}
		}
	})
}
