package registry

import (
	"context"
	"log/slog"
	"net/netip"
	"sync"
	"sync/atomic"

	"culvert.dev/tunnel"
)

// A Registry holds the current table and resolves requests by it. The zero
// value is ready and refuses everything until a table is there. It is safe
// for use by many goroutines, and must not be copied.
type Registry struct {
	// Mesh is how tables are made of snapshots without one.
	Mesh Mesh

	// Lookup finds the addresses of an endpoint's DNS name. It is called once
	// for each name and request, so it should cache. An error with a
	// Timeout() bool method that says true is LookupTime. Nil means that
	// endpoints with DNS names have no address.
	Lookup func(ctx context.Context, host string) ([]netip.Addr, error)

	// Refuses returns why an endpoint that is Guarded may not be at an address,
	// or "". It is called for every address of its name and every request. Nil
	// means that such endpoints are refused at every address.
	Refuses func(netip.Addr) string

	// NewTransport makes a transport to the endpoints of a service: with the gateways
	// of its Via on the way, and the PROXY header and the TLS that it asks for. Where
	// the endpoints are in another network, the transport leads over a gateway of that
	// network, at an endpoint. A nil Transport stands for the Router's Dialer. Merge
	// calls NewTransport once for each distinct triple; the endpoint and the gateway
	// may be nil. Services without settings of their own share the transports over a
	// gateway, and are then one empty service.
	//
	// An error makes the service refuse with Internal. Without a NewTransport, a
	// service that has a Via is refused, and gateways are asked by SNI only.
	NewTransport func(*Service, *Endpoint, *Gateway) (tunnel.Transport, error)

	// Live returns the service that has a name which no service in the table has, for as
	// long as it comes with reverse sessions: nil for none. Before the catch-all service it
	// is asked, after all others. It is called for every request for such a name, so it must
	// not block, and returns the same pointer as long as nothing changes. May be nil.
	Live func(tunnel.Name) *LiveService

	// OnTable is called whenever another table has become current, but for those
	// that Publish and AssignVIPs make. It must not block. May be nil.
	OnTable func()

	// OnSwap is called by Swap with each table and the one before it, which is nil at
	// first, in order: it misses none of them. It must neither block nor call the
	// Registry's Swap. May be nil.
	OnSwap func(before, now *Table)

	// Log receives new tables, conflicts and failing sources. Nil discards.
	Log *slog.Logger

	current        atomic.Pointer[state]
	health         health
	ejections      *ejectionEvents // made by the first Swap; mu guards it
	freshness      freshness
	pendingSources atomic.Int32 // sources without a first snapshot

	mu sync.Mutex // held while a table is swapped in, so that generations go up
}

// A state is a table and the data that belongs to this one table only.
type state struct {
	table      *Table
	turns      []atomic.Uint32 // requests so far: of each service, then of each rule and backend
	ruleOffset int32           // the index of the first rule's
}

// Table returns the current table, nil before the first one.
func (r *Registry) Table() *Table {
	s := r.current.Load()
	if s == nil {
		return nil
	}
	return s.table
}

// PendingSources returns how many of the running sources have not sent a snapshot
// yet: a table without them has less than was served before a restart. It goes down
// when the table has the snapshot, so that a Table that is read afterwards is
// complete.
func (r *Registry) PendingSources() int { return int(r.pendingSources.Load()) }

// Swap makes t the current table and returns it with its generation. Requests
// that have begun go on with the table they began with. Endpoints that are in
// both tables keep their failures, services of the same name their turn, and
// those that are still to have a port or an address of their own the one they have.
func (r *Registry) Swap(t *Table) *Table {
	if t == nil {
		t = &Table{}
	}
	if r.OnTable != nil {
		defer r.OnTable()
	}
	r.mu.Lock()
	defer r.mu.Unlock()

	old := r.current.Load()
	next := *t
	next.generation = 1
	if r.Live != nil {
		next.live = &liveServices{find: r.Live, newTransport: r.NewTransport}
	}
	s := newState(&next)
	if old != nil {
		next.generation = old.table.generation + 1
		carryTurns(old, s)
		next.publish(old.table.published)
		next.assignVIPs(old.table.AllVIPs())
	}
	if r.ejections == nil {
		r.ejections = &ejectionEvents{log: r.Log}
	}
	for _, b := range next.balances {
		b.outliers.events.Store(r.ejections)
	}
	r.current.Store(s)
	if r.OnSwap != nil {
		var before *Table
		if old != nil {
			before = old.table
		}
		r.OnSwap(before, &next)
	}
	r.health.prune(&next)
	return &next
}

func newState(t *Table) *state {
	n := len(t.services)
	if t.listeners != nil {
		n += int(t.listeners.turns)
	}
	return &state{table: t, turns: make([]atomic.Uint32, n), ruleOffset: int32(len(t.services))}
}

// nextTurn counts a request for a service, or a rule and backend. A live service has no turns: it
// has one endpoint for each port.
func (s *state) nextTurn(counter int32) uint32 {
	if counter < 0 {
		return 0
	}
	return s.turns[counter].Add(1) - 1
}

func carryTurns(from, to *state) {
	carryRuleTurns(from, to)
	turns := make(map[string]uint32, from.ruleOffset)
	for i := range from.turns[:from.ruleOffset] {
		if n := from.turns[i].Load(); n > 0 {
			turns[from.table.services[i].Name] = n
		}
	}
	if len(turns) == 0 {
		return
	}
	for i := range to.turns[:to.ruleOffset] {
		to.turns[i].Store(turns[to.table.services[i].Name])
	}
}

func carryRuleTurns(from, to *state) {
	var turns map[turnKey]uint32
	from.eachTurn(func(k turnKey, turn int32) {
		if n := from.turns[turn].Load(); n > 0 {
			if turns == nil {
				turns = make(map[turnKey]uint32)
			}
			turns[k] = n
		}
	})
	if turns != nil {
		to.eachTurn(func(k turnKey, turn int32) { to.turns[turn].Store(turns[k]) })
	}
}

var _ tunnel.Resolver = (*Registry)(nil)
