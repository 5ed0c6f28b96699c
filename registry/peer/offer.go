package peer

import (
	"encoding/json"
	"maps"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"sync"

	"culvert.dev/registry"
	"culvert.dev/tunnel"
)

// NetworkPrefix begins the names of networks that stand for peers.
const NetworkPrefix = "peer/"

// A catalog has the services that are offered to one peer. Its generation grows with each change.
type catalog struct {
	instance string

	refreshing sync.Mutex // held by Peers.refresh; guards what follows
	table      *registry.Table
	from       netip.Addr
	leftOut    int

	mu         sync.Mutex // guards what follows
	generation uint64
	entries    map[string]*offer
	removed    map[string]uint64 // by key: the generation that took it away
	floor      uint64            // what was removed up to this generation is forgotten
}

// An offer is a service in a catalog.
type offer struct {
	service    *registry.Service
	ownPort    uint16
	line       json.RawMessage // the Service
	names      int             // of it
	generation uint64          // in which it has changed last
	seen       bool            // by the update that is running
}

// maxRemoved is how many services that were taken away are remembered, for those that
// reconnect.
const maxRemoved = MaxServices

// update makes the catalog what t offers to a gateway of the peer. It returns how many services were
// left out because the other side would refuse a larger catalog.
func (c *catalog) update(t *registry.Table, site string, gateway tunnel.Peer, from netip.Addr) (leftOut int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	next, changed, size := c.generation+1, false, 0
	if c.entries == nil {
		c.entries, c.removed = map[string]*offer{}, map[string]uint64{}
	}
	count, names := 0, 0
	for s := range t.Offered(gateway, from) {
		if isPeers(s) {
			continue // no transit
		}
		if count++; count > MaxServices {
			leftOut++
			continue
		}
		key := c.keyOf(s)
		own := ownPort(t, s)
		e := c.entries[key]
		if e == nil || e.service != s || e.ownPort != own {
			described := describe(t, site, key, own, s)
			line, err := json.Marshal(described)
			if err != nil || len(line) > maxService {
				leftOut++
				continue
			}
			if e == nil || string(e.line) != string(line) {
				e, changed = &offer{line: line, names: len(described.Names), generation: next}, true
				c.entries[key] = e
				delete(c.removed, key)
			}
			e.service, e.ownPort = s, own
		}
		if size+len(e.line)+1 > MaxCatalog*9/10 || names+e.names > MaxNames {
			leftOut++
			continue // which takes it away, if it was there
		}
		size += len(e.line) + 1
		names += e.names
		e.seen = true
	}
	for key, e := range c.entries {
		if !e.seen {
			delete(c.entries, key)
			c.removed[key], changed = next, true
		}
		e.seen = false
	}
	if !changed && c.generation > 0 {
		return leftOut
	}
	c.generation = next
	if len(c.removed) > maxRemoved {
		c.floor, c.removed = next, map[string]uint64{}
	}
	return leftOut
}

// maxService is the size of the largest service that is offered, in bytes.
const maxService = MaxLine / 2

// keyOf returns a key for s that none of the services seen by this update has.
func (c *catalog) keyOf(s *registry.Service) string {
	key := s.Name
	if len(key) > maxWord {
		key = key[:maxWord]
	}
	if key == "" {
		key = "-"
	}
	for n, first := 2, key; c.entries[key] != nil && c.entries[key].seen; n++ {
		key = first + "#" + strconv.Itoa(n)
	}
	return key
}

// isPeers reports whether s comes from a catalog.
func isPeers(s *registry.Service) bool {
	return len(s.Endpoints) > 0 && strings.HasPrefix(s.Endpoints[0].Network, NetworkPrefix) || strings.HasPrefix(s.Origin, catalogPrefix)
}

// originPrefix begins the Origin of services that peers offer, and catalogPrefix that of all
// services of catalogs.
const (
	catalogPrefix = "the catalog of "
	originPrefix  = catalogPrefix + "peer "
)

// ownPort returns a port of the gateway that leads to s alone; 0 for none.
func ownPort(t *registry.Table, s *registry.Service) uint16 {
	for _, n := range s.Names {
		if n.Wildcard {
			continue
		}
		if all := t.PublishedAs(n.Suffix); len(all) > 0 {
			return all[0].Assigned
		}
	}
	return 0
}

// describe returns s as it is sent to other sites.
func describe(t *registry.Table, site, key string, own uint16, s *registry.Service) *Service {
	out := &Service{Key: key, Site: site, Name: s.Name, Ports: s.Ports, ALPN: s.ALPN, OwnPort: own, VIP: s.VIP}
	names := map[string]bool{}
	for _, n := range registry.PolicyTarget(t.Mesh(), s).Names {
		if text := n.String(); !names[text] && n != tunnel.AnyName {
			names[text] = true
			out.Names = append(out.Names, text)
		}
	}
	for _, p := range s.NamedPorts {
		out.NamedPorts = append(out.NamedPorts, NamedPort(p))
	}
	if s.Exported {
		out.Service, out.Namespace, out.Cluster = s.ID.Service, s.ID.Namespace, s.ID.Cluster
		out.Headless = s.Headless
	}
	return out
}

// since returns what has changed after a generation: all of the catalog for 0. ok is false if that is
// not known any more.
func (c *catalog) since(generation uint64) (services []json.RawMessage, removed []string, now uint64, ok bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if generation > c.generation || generation > 0 && generation < c.floor {
		return nil, nil, c.generation, false
	}
	for _, key := range slices.Sorted(maps.Keys(c.entries)) {
		if e := c.entries[key]; e.generation > generation {
			services = append(services, e.line)
		}
	}
	if generation > 0 {
		for key, at := range c.removed {
			if at > generation {
				removed = append(removed, key)
			}
		}
		slices.Sort(removed)
	}
	return services, removed, c.generation, true
}

// state returns the generation, and the number of services.
func (c *catalog) state() (generation uint64, services int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.generation, len(c.entries)
}
