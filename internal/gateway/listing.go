package gateway

import (
	"cmp"
	"context"
	"iter"
	"net/netip"
	"net/url"
	"reflect"
	"slices"
	"strings"
	"time"

	"culvert.dev/internal/background"
	"culvert.dev/registry"
	"culvert.dev/tunnel"
)

// A RegistryEvent is a line of /registry: a service that is in the table, or with
// watch one that came, changed or went.
type RegistryEvent struct {
	Event      string         `json:"event"` // "is", "added", "changed", "removed"; "network" for a network
	Generation uint64         `json:"generation"`
	Service    *ListedService `json:"service,omitempty"`
	Network    *ListedNetwork `json:"network,omitempty"`
}

// A ListedService is a service in the table.
type ListedService struct {
	Name      string           `json:"name"`
	Names     []string         `json:"names"`
	Cluster   string           `json:"cluster,omitempty"`
	Namespace string           `json:"namespace,omitempty"`
	Exported  bool             `json:"exported,omitempty"`
	Headless  bool             `json:"headless,omitempty"`
	Ports     []uint16         `json:"ports,omitempty"` // none means any
	Exposed   bool             `json:"exposed"`
	ExposedTo []string         `json:"exposedTo,omitempty"` // none means everyone
	Addresses []netip.Addr     `json:"addresses,omitempty"`
	Endpoints []ListedEndpoint `json:"endpoints"`
	Via       []string         `json:"via,omitempty"`      // the gateways on the way there
	Insecure  bool             `json:"insecure,omitempty"` // plaintext may go there by transports that are not mutual
	Origin    string           `json:"origin,omitempty"`

	// Listeners and Policies are listed with the key policies of a question.
	Listeners []string       `json:"listeners,omitempty"` // that lead to the service
	Policies  []ListedPolicy `json:"policies,omitempty"`  // that select it, by name
}

// A ListedPolicy is a policy of a service.
type ListedPolicy struct {
	Name    string   `json:"name"`
	Origin  string   `json:"origin,omitempty"`
	Tier    string   `json:"tier"`
	Action  string   `json:"action"`
	DryRun  bool     `json:"dryRun,omitempty"`
	Callers []string `json:"callers"` // of its rules; none means nobody
}

// A ListedEndpoint is an endpoint of a service.
type ListedEndpoint struct {
	Address string   `json:"address"`
	Name    string   `json:"name,omitempty"`
	Network string   `json:"network,omitempty"`
	Cluster string   `json:"cluster,omitempty"`
	Via     []string `json:"via,omitempty"` // the gateways on the way to it alone, nearest first
}

// A ListedNetwork is a network in the table.
type ListedNetwork struct {
	Name     string          `json:"name"`
	CIDRs    []netip.Prefix  `json:"cidrs,omitempty"`
	Near     []string        `json:"near,omitempty"`
	Gateways []ListedGateway `json:"gateways,omitempty"`
	Here     bool            `json:"here,omitempty"`
	Insecure bool            `json:"insecure,omitempty"` // plaintext may go there by transports that are not mutual
}

// A ListedGateway is a gateway of a network.
type ListedGateway struct {
	Address    string   `json:"address"`
	Public     string   `json:"public,omitempty"`
	Transports []string `json:"transports,omitempty"`
	Weight     uint16   `json:"weight"`
}

func listService(t *registry.Table, s *registry.Service) *ListedService {
	l := &ListedService{
		Name: s.Name, Cluster: s.ID.Cluster, Namespace: s.ID.Namespace, Exported: s.Exported, Headless: s.Headless, Ports: s.Ports,
		Exposed: s.Exposed, ExposedTo: s.ExposedTo, Addresses: s.Addresses, Insecure: s.Insecure, Origin: s.Origin, Names: []string{}, Endpoints: []ListedEndpoint{},
	}
	for _, n := range s.Names {
		l.Names = append(l.Names, n.String())
	}
	l.Via = listHops(s.Via)
	for i := range s.Endpoints {
		ep := &s.Endpoints[i]
		one := ListedEndpoint{Address: ep.String(), Name: ep.Name, Network: ep.Network, Cluster: ep.Cluster, Via: listHops(ep.Hops())}
		if one.Network == "" && len(s.Via) == 0 && len(one.Via) == 0 {
			one.Network, _ = t.Network(ep.Addr)
		}
		l.Endpoints = append(l.Endpoints, one)
	}
	return l
}

// listHops returns hops for people.
func listHops(hops []registry.Hop) (list []string) {
	for _, hop := range hops {
		list = append(list, hop.Proto+" "+strings.Join(hop.Addresses, ", "))
	}
	return list
}

func listNetwork(n *registry.Network, here string) *ListedNetwork {
	l := &ListedNetwork{Name: n.Name, CIDRs: n.CIDRs, Near: n.Near, Here: n.Name == here, Insecure: n.Insecure}
	for i := range n.Gateways {
		g := &n.Gateways[i]
		one := ListedGateway{Address: g.Address.String(), Weight: cmp.Or(g.Weight, 1)}
		if len(g.Transports) > 0 {
			one.Transports = g.Protocols()
		}
		if g.Public != (registry.Endpoint{}) {
			one.Public = g.Public.String()
		}
		l.Gateways = append(l.Gateways, one)
	}
	return l
}

// watchInterval is how often a watched table is looked at.
const watchInterval = 100 * time.Millisecond

// ListRegistry yields the services of reg's table, or those with a name; with
// networks its networks; and with watch, until ctx ends, what changes of them: nil
// where there is no more for now.
func ListRegistry(ctx context.Context, reg *registry.Registry, q url.Values) iter.Seq[any] {
	name, watch := q.Get("name"), q.Get("watch") != ""
	wanted := func(s *registry.Service) bool {
		return name == "" || s.Name == name || slices.ContainsFunc(s.Names, func(p tunnel.Pattern) bool { return p.String() == name })
	}
	return func(yield func(any) bool) {
		t := reg.Table()
		if q.Get("networks") != "" {
			for n := range t.Networks() {
				if !yield(RegistryEvent{Event: "network", Generation: t.Generation(), Network: listNetwork(n, t.Mesh().Network)}) {
					return
				}
			}
			return
		}
		if q.Get("policies") != "" {
			for l := range listPolicies(t, wanted) {
				if !yield(RegistryEvent{Event: "is", Generation: t.Generation(), Service: l}) {
					return
				}
			}
			return
		}
		for s := range t.Services() {
			if wanted(s) && !yield(RegistryEvent{Event: "is", Generation: t.Generation(), Service: listService(t, s)}) {
				return
			}
		}
		if !watch || !yield(nil) {
			return
		}
		tick := time.NewTicker(watchInterval)
		defer tick.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
			}
			next := reg.Table()
			if next.Generation() == t.Generation() {
				continue
			}
			var changes []serviceChange
			background.Do(func() { changes = diffServices(t, next) })
			for _, c := range changes {
				in := next
				if c.event == "removed" {
					in = t
				}
				if wanted(c.service) && !yield(RegistryEvent{Event: c.event, Generation: next.Generation(), Service: listService(in, c.service)}) {
					return
				}
			}
			if !yield(nil) {
				return
			}
			t = next
		}
	}
}

// A serviceChange is a service in which two tables differ.
type serviceChange struct {
	event   string // "added", "changed", "removed"
	service *registry.Service
}

// diffServices returns the services in which two tables differ, wherever their files have them.
func diffServices(from, to *registry.Table) []serviceChange {
	var changes []serviceChange
	old := make(map[string][]*registry.Service, from.Len())
	for s := range from.Services() {
		old[s.Name] = append(old[s.Name], s)
	}
	for s := range to.Services() {
		list := old[s.Name]
		same := slices.IndexFunc(list, func(o *registry.Service) bool { return sameService(o, s) })
		switch {
		case same >= 0:
			old[s.Name] = slices.Delete(list, same, same+1)
		case len(list) > 0:
			changes = append(changes, serviceChange{"changed", s})
			old[s.Name] = list[1:]
		default:
			changes = append(changes, serviceChange{"added", s})
		}
	}
	for s := range from.Services() {
		if list := old[s.Name]; len(list) > 0 {
			old[s.Name] = list[1:]
			changes = append(changes, serviceChange{"removed", list[0]})
		}
	}
	return changes
}

func sameService(a, b *registry.Service) bool {
	x, y := *a, *b
	x.Origin, y.Origin = "", ""
	return reflect.DeepEqual(&x, &y)
}
