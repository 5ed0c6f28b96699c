package mcs

import (
	"context"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"

	"culvert.dev/internal/kube/client"
	"culvert.dev/internal/kube/watch"
	mcsv1 "sigs.k8s.io/mcs-api/pkg/apis/v1beta1"
)

const (
	// resolveInterval is the least time between two rounds of resolving and writing.
	resolveInterval = 200 * time.Millisecond

	// retryInterval is the time after which failed writes are retried, and after which leadership
	// is checked again.
	retryInterval = 10 * time.Second

	// namespaceRetries is how many of these pass before a namespace that did not exist is tried
	// again.
	namespaceRetries = 6
)

// A Controller keeps ServiceExports and ServiceImports. The zero value is ready;
// it must not be copied, nor its fields be changed once it is used.
type Controller struct {
	// Cluster is the gateway's own, and ID tells it from other gateways of that cluster. Both are
	// recorded in ServiceImports, as their writer.
	Cluster, ID string

	// Leads reports whether this replica writes; nil means that it does.
	Leads func() bool

	// VIPs returns the addresses of a service in the cluster set; nil means none.
	// See Changed.
	VIPs func(namespace, name string) []netip.Addr

	// OnImports is called with the imports of the own cluster that are at an address, once they have
	// been read and when they change, by every replica. It must not block or change the map. Address
	// returns the address that such an import has in the own cluster; it is false while that is not
	// known. See Changed. Both may be nil.
	OnImports func(imports map[Name]Imported)
	Address   func(name Name) (a Address, known bool)

	// Refuses returns why a service may not be exported, or "". May be nil.
	Refuses func(namespace, name string) string

	// OnExports is called with what a cluster exports, at first and when that changes, by every
	// replica; it must not block or change the map. It may be nil.
	OnExports func(cluster string, exports map[Name]bool)

	// Log receives what is refused or fails. Nil discards it.
	Log *slog.Logger

	once   sync.Once
	signal watch.Signal
	log    *slog.Logger
	logged client.Once

	mu               sync.Mutex // guards the following, and what members hold
	members          map[string]*member
	reported         map[string]map[Name]bool // what OnExports was called with
	imported         map[Name]Imported        // what OnImports was called with; nil before
	namespaceMissing bool                     // in a cluster that an import was to be written to

	refused map[string]string // what has been said of ServiceExports; Run's own
}

func (c *Controller) init() {
	c.once.Do(func() {
		c.signal, c.members, c.reported = watch.NewSignal(), map[string]*member{}, map[string]map[Name]bool{}
		c.log = c.Log
		if c.log == nil {
			c.log = slog.New(slog.DiscardHandler)
		}
	})
}

func (c *Controller) notify() { c.signal.Notify() }

// Changed has VIPs and Address asked again. It may be called at any time, and does not wait.
func (c *Controller) Changed() {
	c.init()
	c.notify()
}

// Add makes a cluster a member of the set, until ctx is done and remove is called,
// or only the latter, which waits. It may be called at any time; a cluster of the
// same name takes the other's place.
func (c *Controller) Add(ctx context.Context, name string, cluster Cluster) (remove func()) {
	c.init()
	m := &member{
		name: name, Cluster: cluster, c: c,
		exports: map[Name]*mcsv1.ServiceExport{}, imports: map[Name]*mcsv1.ServiceImport{}, services: map[Name]Service{},
	}
	ctx, cancel := context.WithCancel(ctx)
	var running sync.WaitGroup
	c.mu.Lock()
	c.members[name] = m
	m.start(ctx, &running)
	c.mu.Unlock()
	return func() {
		cancel()
		running.Wait()
		c.mu.Lock()
		if c.members[name] == m {
			delete(c.members, name)
			delete(c.reported, name)
		}
		c.mu.Unlock()
		c.notify()
	}
}

// Run writes what follows from the exports, until ctx is done.
func (c *Controller) Run(ctx context.Context) error {
	c.init()
	tick := time.NewTicker(retryInterval)
	defer tick.Stop()
	pending := false
	for ticks := 0; ; {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-c.signal:
		case <-tick.C:
			ticks++
			if !pending && (!c.isNamespaceMissing() || ticks%namespaceRetries != 0) {
				continue
			}
		}
		todo := c.settle()
		c.mu.Lock()
		c.namespaceMissing = false
		c.mu.Unlock()
		leads := c.Leads == nil || c.Leads()
		pending = len(todo) > 0
		if leads && pending {
			pending = !c.write(ctx, todo)
		}
		select {
		case <-time.After(resolveInterval):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func (c *Controller) isNamespaceMissing() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.namespaceMissing
}

// settle resolves the exports of all members, calls OnExports, and returns what is to be written.
func (c *Controller) settle() []change {
	c.mu.Lock()
	members := map[string]*Member{}
	for name, m := range c.members {
		members[name] = m.view()
	}
	vips, refuses := c.vips(), c.refuses()
	c.mu.Unlock()

	set := Resolve(members, vips, refuses) // without the lock, because it calls functions of others

	c.logRefusals(&set)

	c.mu.Lock()
	var tell []string
	for _, name := range slices.Sorted(maps.Keys(set.Exported)) {
		if c.members[name] == nil || members[name].Unseen && !c.members[name].absent() {
			continue
		}
		if told, ok := c.reported[name]; !ok || !maps.Equal(told, set.Exported[name]) {
			c.reported[name] = set.Exported[name]
			tell = append(tell, name)
		}
	}
	imports := c.newImports()
	var todo []change
	for _, name := range slices.Sorted(maps.Keys(c.members)) {
		if members[name] != nil && !members[name].Unseen && !c.members[name].absent() {
			todo = append(todo, c.changes(c.members[name], &set)...)
		}
	}
	c.mu.Unlock()
	for _, name := range tell {
		if c.OnExports != nil {
			c.OnExports(name, set.Exported[name])
		}
	}
	if imports != nil {
		c.OnImports(imports)
	}
	return todo
}

func (c *Controller) vips() func(Name) []netip.Addr {
	if c.VIPs == nil {
		return nil
	}
	return func(n Name) []netip.Addr { return c.VIPs(n.Namespace, n.Name) }
}

func (c *Controller) refuses() func(Name) string {
	if c.Refuses == nil {
		return nil
	}
	return func(n Name) string { return c.Refuses(n.Namespace, n.Name) }
}

// view returns what a member has, in maps of its own.
func (m *member) view() *Member {
	out := &Member{Exports: map[Name]Export{}, Services: map[Name]Service{}, Unseen: !m.listed() && (!m.absent() || m.forbidden())}
	for name, e := range m.exports {
		if e.DeletionTimestamp != nil {
			continue
		}
		out.Exports[name] = Export{Created: e.CreationTimestamp.Time, Generation: e.Generation}
		if s, ok := m.services[name]; ok {
			out.Services[name] = s
		}
	}
	return out
}
