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
	news   chan struct{}
}

func newNATService(g *Gateway) *natService {
	n := &natService{g: g, news: make(chan struct{}, 1)}
	n.manager = nat.Manager{
		FindUPnP: g.cfg.FindUPnP, Secret: g.cfg.NATSecret, Lookup: g.cfg.Lookup,
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
	select {
	case n.news <- struct{}{}:
	default:
	}
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
