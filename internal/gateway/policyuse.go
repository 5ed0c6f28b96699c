package gateway

import (
	"sync"

	"culvert.dev/registry"
)

// policyUses remembers what the policies of the last table are about.
type policyUses struct {
	mu    sync.Mutex // guards the rest
	table *registry.Table
	uses  map[string]registry.PolicyUse
}

// PolicyUses returns what the policies of the current table are about, by their Origin. It
// must not be changed.
func (g *Gateway) PolicyUses() map[string]registry.PolicyUse {
	u := &g.policyUses
	u.mu.Lock()
	defer u.mu.Unlock()
	if t := g.registry.Table(); t != u.table {
		u.table, u.uses = t, t.PolicyUses()
	}
	return u.uses
}
