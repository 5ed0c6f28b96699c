package registry

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"culvert.dev/internal/background"
	"culvert.dev/tunnel"
)

const (
	// minRebuildInterval is the least time between two tables: a source that flaps
	// must not take a core.
	minRebuildInterval = 100 * time.Millisecond

	// firstTableTimeout is how long the first table waits for the first update of
	// every source: a partial table refuses what the gateway in fact serves.
	firstTableTimeout = 5 * time.Second

	// The wait before a source that failed is run again doubles between these.
	minRestart = time.Second
	maxRestart = 30 * time.Second
)

// A Registry holds the current table and resolves requests by it. The zero
// value is ready and refuses everything until a table is there. It is safe
// for use by many goroutines, and must not be copied.
type Registry struct {
	// Mesh is how tables are made.
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

	// OnTable is called whenever another table has become current, but for those
	// that Publish and AssignVIPs make. It must not block. May be nil.
	OnTable func()

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

// Run runs the sources and swaps in a table whenever one of them sends an update,
// until ctx is done; then it waits for the sources and returns nil. It may be
// called once.
//
// The last snapshot of a source that fails stays in force, and the source is run again after a
// while. While one fails, Stale reports it, and the log repeats it every 10 minutes. The first
// table waits for the first update of every source, for at most 5 seconds. Tables are made at most
// every 100 ms.
func (r *Registry) Run(ctx context.Context, sources ...Source) error {
	if len(sources) == 0 {
		return errors.New("registry: no source to run")
	}
	log := r.Log
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	r.pendingSources.Store(int32(len(sources)))
	news := make(chan sourceEvent)
	var running sync.WaitGroup
	for i, src := range sources {
		running.Go(func() { runSource(ctx, log, i, src, news) })
	}
	defer running.Wait()

	var (
		known           = map[snapshotKey]Snapshot{}
		pendingFirst    = len(sources) // sources that have neither sent anything nor failed
		seen            = make([]struct{ any, snapshot bool }, len(sources))
		pendingSnapshot = len(sources) // sources that have not sent a snapshot
		dirty           bool
		late            = time.NewTimer(firstTableTimeout)
		tick            = time.NewTimer(0)
		wait            = true // for tick
	)
	defer late.Stop()
	defer tick.Stop()
	remind := time.NewTicker(staleLogInterval)
	defer remind.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case m := <-news:
			from := &seen[m.source]
			if !from.any {
				from.any = true
				pendingFirst--
			}
			if !from.snapshot && m.err == nil && (m.update == nil || m.update.Err == nil) {
				from.snapshot = true
				pendingSnapshot--
			}
			r.freshness.observe(log, &m)
			if m.update == nil || m.update.Err != nil {
				break
			}
			k := snapshotKey{m.source, m.update.Source}
			if before, ok := known[k]; !ok || !before.sameSlices(&m.update.Snapshot) {
				known[k] = m.update.Snapshot
				dirty = true
			}
		case <-remind.C:
			r.freshness.logStale(log)
		case <-late.C:
			pendingFirst = 0
		case <-tick.C:
			wait = false
		}
		if dirty {
			if pendingFirst > 0 || wait {
				continue
			}
			background.Do(func() { r.merge(log, known) })
			dirty, wait = false, true
			tick.Reset(minRebuildInterval)
		}
		r.pendingSources.Store(int32(pendingSnapshot)) // not before the table has it
	}
}

// A snapshotKey identifies the snapshot that one source sent under one name. Keys are
// ordered by precedence.
type snapshotKey struct {
	source int
	name   string
}

// merge swaps in the table of everything known.
func (r *Registry) merge(log *slog.Logger, known map[snapshotKey]Snapshot) {
	keys := slices.SortedFunc(maps.Keys(known), func(a, b snapshotKey) int {
		if a.source != b.source {
			return a.source - b.source
		}
		if a.name < b.name {
			return -1
		}
		return 1
	})
	snapshots := make([]Snapshot, len(keys))
	for i, k := range keys {
		snapshots[i] = known[k]
	}
	t, err := r.Merge(snapshots...)
	if err != nil {
		log.Warn("ignored conflicting definitions", "err", err)
	}
	t = r.Swap(t)
	log.Info("routing table changed", "generation", t.Generation(), "services", t.Len())
}

// A sourceEvent is an update of a source, or the end of its run, with the reason if
// it failed.
type sourceEvent struct {
	source int
	update *Update
	kind   string // of the source, for people
	err    error
}

// runSource runs one source, again after each failure, and passes on its updates.
func runSource(ctx context.Context, log *slog.Logger, i int, src Source, news chan<- sourceEvent) {
	send := func(m sourceEvent) {
		select {
		case news <- m:
		case <-ctx.Done():
		}
	}
	for pause := minRestart; ; pause = min(2*pause, maxRestart) {
		updates := make(chan Update)
		done := make(chan error, 1)
		go func() { done <- runSafely(ctx, src, updates) }()
		var err error
		for ended := false; !ended; {
			select {
			case u := <-updates:
				send(sourceEvent{source: i, update: &u})
				pause = minRestart
			case err = <-done:
				ended = true
			}
		}
		if ctx.Err() != nil {
			return
		}
		send(sourceEvent{source: i, kind: fmt.Sprintf("%T", src), err: err})
		if err == nil {
			return
		}
		log.Error("source failed; keeping its last snapshot", "source", fmt.Sprintf("%T", src), "err", err, "again", pause)
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			return
		}
	}
}

// runSafely turns a panic of a source into an error: a source must not take the
// tunnels down.
func runSafely(ctx context.Context, src Source, updates chan<- Update) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("panic: %v", p)
		}
	}()
	return src.Run(ctx, updates)
}

var _ tunnel.Resolver = (*Registry)(nil)
