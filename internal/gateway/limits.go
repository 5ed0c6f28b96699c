package gateway

import (
	"cmp"
	"iter"
	"slices"

	"culvert.dev/internal/metrics"
	"culvert.dev/registry"
	"culvert.dev/tunnel"
)

// A StatusLimit is a service with limits, and how much of them it uses.
type StatusLimit struct {
	Service        string `json:"service"`
	Connections    int    `json:"connections"`              // open or being dialed
	MaxConnections int    `json:"maxConnections,omitempty"` // 0 for no limit
	MaxPerEndpoint int    `json:"maxConnectionsPerEndpoint,omitempty"`
	NewPerSecond   int    `json:"newPerSecond,omitempty"` // 0 for no limit
}

// Full reports whether nearly all of the connections are in use.
func (l *StatusLimit) Full() bool {
	return l.MaxConnections > 0 && l.Connections >= l.MaxConnections-l.MaxConnections/10
}

// maxLimitsShown is how many services with limits /status lists.
const maxLimitsShown = 20

// limitOf returns the limits of a service and their use; relay may be nil.
func limitOf(relay *tunnel.Relay, service string, l *tunnel.ServiceLimits) StatusLimit {
	s := StatusLimit{Service: service, MaxConnections: l.Connections, MaxPerEndpoint: l.ConnectionsPerEndpoint, NewPerSecond: l.NewPerSecond}
	if relay != nil {
		s.Connections = relay.Connections(service)
	}
	return s
}

// limited yields the services of t that have limits, each name once.
func limited(t *registry.Table) iter.Seq[*registry.Service] {
	return func(yield func(*registry.Service) bool) {
		seen := map[string]bool{}
		for _, all := range []iter.Seq[*registry.Service]{t.Services(), t.Backends()} {
			for s := range all {
				if s.Limits == nil || seen[s.Name] {
					continue
				}
				seen[s.Name] = true
				if !yield(s) {
					return
				}
			}
		}
	}
}

// limits returns the services with limits, those first that use most of theirs, and how
// many there are.
func (g *Gateway) limits() (list []StatusLimit, all int) {
	for s := range limited(g.registry.Table()) {
		list = append(list, limitOf(g.relay, s.Name, s.Limits))
	}
	share := func(l *StatusLimit) float64 {
		if l.MaxConnections == 0 {
			return 0
		}
		return float64(l.Connections) / float64(l.MaxConnections)
	}
	slices.SortFunc(list, func(a, b StatusLimit) int {
		return cmp.Or(cmp.Compare(share(&b), share(&a)), cmp.Compare(a.Service, b.Service))
	})
	return list[:min(len(list), maxLimitsShown)], len(list)
}

// A StatusClient is what one client holds: an address, or a principal wherever it comes
// from. Tunnels of a principal are not those of its address.
type StatusClient struct {
	Client         string `json:"client"` // an address or a prefix, or the ID of a principal
	Principal      bool   `json:"principal,omitempty"`
	Tunnels        int64  `json:"tunnels"`              // open or being dialed
	MaxTunnels     int    `json:"maxTunnels,omitempty"` // 0 for no fixed limit
	Connections    int64  `json:"connections,omitempty"`
	MaxConnections int    `json:"maxConnections,omitempty"`
	Pending        int64  `json:"pending,omitempty"`     // connections that have not asked for anything yet
	Unread         int64  `json:"unreadBytes,omitempty"` // that it has sent on shared connections and that nobody reads
}

// Full reports whether nearly all that the client may have is in use.
func (c *StatusClient) Full() bool {
	full := func(n int64, most int) bool { return most > 0 && n >= int64(most-most/10) }
	return full(c.Tunnels, c.MaxTunnels) || full(c.Connections, c.MaxConnections)
}

// maxClientsShown is how many clients /status lists.
const maxClientsShown = 10

// clients returns the clients that hold most tunnels.
func (g *Gateway) clients() (list []StatusClient) {
	if g.router.Budget == nil {
		return nil
	}
	l := g.currentLimits.Load()
	for _, u := range g.router.Budget.Clients().Most(maxClientsShown) {
		c := StatusClient{
			Client: u.Name, Principal: u.Principal, Tunnels: u.Tunnels, MaxTunnels: max(l.MaxConnectionsPerClient, 0),
			Connections: u.Connections, MaxConnections: max(l.MaxConnectionsPerClient, 0), Pending: u.Pending, Unread: u.Unread,
		}
		if c.Principal {
			c.MaxTunnels, c.MaxConnections = max(l.MaxConnectionsPerPrincipal, 0), 0
		}
		list = append(list, c)
	}
	return list
}

// limitGauges registers what the metrics read of clients, and of services with limits.
func (g *Gateway) limitGauges(m *metrics.Metrics) {
	m.GaugeSet("culvert_client_tunnels_max", "Tunnels of the client that has most: kind is address or principal.", []string{"kind"}, func(yield func([]string, float64)) {
		address, principal := int64(0), int64(0)
		if g.router.Budget != nil {
			address, principal = g.router.Budget.Clients().MostTunnels()
		}
		yield([]string{"address"}, float64(address))
		yield([]string{"principal"}, float64(principal))
	})
	each := func(value func(s *registry.Service) int) func(yield func([]string, float64)) {
		return func(yield func([]string, float64)) {
			n := 0
			for s := range limited(g.registry.Table()) {
				if s.Limits.Connections == 0 {
					continue
				}
				if n++; n > metrics.MaxServices {
					return
				}
				yield([]string{s.Name}, float64(value(s)))
			}
		}
	}
	m.GaugeSet("culvert_service_connections", "Connections of a service that are open or being dialed. Only for services with limits.connections.",
		[]string{"service"}, each(func(s *registry.Service) int { return g.relay.Connections(s.Name) }))
	m.GaugeSet("culvert_service_connections_limit", "limits.connections of a service.",
		[]string{"service"}, each(func(s *registry.Service) int { return s.Limits.Connections }))
}
