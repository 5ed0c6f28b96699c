package gateway

import (
	"culvert.dev/registry"
	"culvert.dev/registry/peer"
	"culvert.dev/tunnel"
)

// newPeers makes what exchanges catalogs with other sites.
func (g *Gateway) newPeers() error {
	g.peers = &peer.Peers{
		Site: g.cfg.Site, Table: func() *registry.Table { return g.registry.Table() }, NewTransport: g.upstreams.New,
		Refuse: g.router.Refuse, Log: g.log,
	}
	g.handler.handlers[tunnel.MustParseName(peer.Host)] = reservedName{Handler: g.peers}
	return g.peers.Configure(g.cfg.Peers)
}

// Peers returns the source of what other sites offer. It belongs behind all sources that this
// site knows by itself: what these have goes before.
func (g *Gateway) Peers() registry.Source { return g.peers }

// peerGauges yields a number of each peer.
func (g *Gateway) peerGauges(of func(*peer.Status) float64) func(yield func([]string, float64)) {
	return func(yield func([]string, float64)) {
		for _, s := range g.peers.Status() {
			yield([]string{s.Name}, of(&s))
		}
	}
}
