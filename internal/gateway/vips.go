package gateway

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"time"

	"culvert.dev/registry"
	"culvert.dev/registry/alloc"
)

// VIPs configures virtual IPs: each service that asks for one gets an address of its
// own from each range, and keeps it for as long as it is there.
type VIPs struct {
	Ranges     []netip.Prefix // one of a family, as registry.CheckVIPRange wants them
	State      string         // path of the file that keeps who has which address; one gateway's alone
	ReuseAfter time.Duration  // how long nobody else gets the addresses of a service that is gone; 0 means alloc.DefaultReuseAfter
}

// StatusVIPs says how many services have virtual IPs.
type StatusVIPs struct {
	Ranges   []string `json:"ranges"`
	Services int      `json:"services"` // that have at least one
	Missing  int      `json:"missing"`  // addresses that services want and do not have
	Kept     int      `json:"kept"`     // addresses that are nobody's yet, as their services are gone
	Problems []string `json:"problems,omitempty"`
}

// vipController assigns virtual IPs to the services of the table.
type vipController struct {
	tableWatcher
	g *Gateway

	// Of run's goroutine alone.
	*assignmentFile[alloc.VIP]      // nil while no service has an address to itself
	cfg                        VIPs // in use
	logged                     errorLog[vipKey]

	mu      sync.Mutex // guards what follows
	state   StatusVIPs
	settled bool // the first table has been dealt with
}

// A vipKey is a service and the family of an address.
type vipKey struct{ service, family string }

// newVIPController reads who has which address, if any service is to have one. The configured listeners are open
// already: a second gateway by mistake has failed before it touches the state.
func newVIPController(g *Gateway) (*vipController, error) {
	k := &vipController{tableWatcher: newTableWatcher(), g: g}
	if g.cfg.VIPs == nil {
		k.settled = true
		return k, nil
	}
	if err := g.cfg.VIPs.check(); err != nil {
		return nil, err
	}
	return k, k.use(g.cfg.VIPs)
}

// use has other settings used from now on. With another State it is as if all services were
// new, with what that file says. After an error no service has an address.
func (k *vipController) use(next *VIPs) (err error) {
	if k.assignmentFile != nil && next.State != k.cfg.State {
		k.end()
	}
	if k.assignmentFile == nil {
		if k.assignmentFile, err = openAssignmentFile("vips", "addresses", k.g.log, alloc.VIPFile(next.State)); err != nil {
			return err
		}
	}
	k.cfg = *next
	k.mu.Lock()
	k.state.Ranges = next.ranges()
	k.mu.Unlock()
	return nil
}

// end closes the file: no service has an address any more.
func (k *vipController) end() {
	if k.assignmentFile == nil {
		return
	}
	k.assign(nil)
	k.assignmentFile.close()
	k.assignmentFile, k.logged = nil, nil
	k.mu.Lock()
	k.state = StatusVIPs{}
	k.mu.Unlock()
	k.g.log.Info("virtual IPs given back")
}

// assign gives services their addresses, and has followers of the table know.
func (k *vipController) assign(list []registry.VIP) {
	k.g.registry.AssignVIPs(list)
	if k.g.cfg.OnTable != nil {
		k.g.cfg.OnTable()
	}
}

// fail reports that the file of State can't be used.
func (k *vipController) fail(next *VIPs, err error) {
	problems := []string{err.Error()}
	k.mu.Lock()
	is := slices.Equal(k.state.Problems, problems)
	k.state = StatusVIPs{Ranges: next.ranges(), Problems: problems}
	k.mu.Unlock()
	if !is {
		k.g.log.Error("no service has a virtual IP: the state cannot be used", "err", err)
	}
}

// run follows the table until ctx is done.
func (k *vipController) run(ctx context.Context) error {
	k.watch(ctx, &k.g.stopping, k.update)
	return nil
}

// check returns what is wrong with the ranges.
func (c *VIPs) check() error {
	for _, r := range c.Ranges {
		if err := registry.CheckVIPRange(r); err != nil {
			return fmt.Errorf("vips: range %s: %w", r, err)
		}
	}
	return nil
}

// ranges returns the ranges as text.
func (c *VIPs) ranges() (all []string) {
	for _, r := range c.Ranges {
		all = append(all, r.String())
	}
	return all
}

// plan returns the plan for the addresses of a table.
func (c *VIPs) plan(t *registry.Table) *alloc.VIPPlan {
	p := &alloc.VIPPlan{Ranges: c.Ranges, ReuseAfter: c.ReuseAfter, Now: now()}
	for _, r := range c.Ranges {
		p.Taken = append(p.Taken, t.UsedAddresses(r)...)
	}
	return p
}

// update assigns addresses to the services of the current table. It is false where a
// service has none now and is to be tried again.
func (k *vipController) update(context.Context) (complete bool) {
	t := k.g.registry.Table()
	if t == nil {
		return true
	}
	cfg := k.g.settings.Load().VIPs
	if cfg == nil {
		k.end()
		k.mu.Lock()
		k.state = StatusVIPs{}
		k.mu.Unlock()
		return true
	}
	if err := k.use(cfg); err != nil {
		k.fail(cfg, err)
		return false
	}
	next, failed := k.cfg.plan(t).Assign(t.VIPRequests(), k.assigned)
	before := k.assigned
	saved := k.save(next)
	if !saved {
		known := make(map[alloc.VIP]bool, len(before))
		for _, a := range before {
			known[withoutTimes(a)] = true
		}
		next = slices.DeleteFunc(next, func(a alloc.VIP) bool {
			if !a.Gone.IsZero() || known[withoutTimes(a)] {
				return false
			}
			failed = append(failed, alloc.VIPFailure{Service: a.Service, Family: alloc.Family(a.Address), Err: errors.New(k.saveError)})
			return true
		})
	}
	list := alloc.AssignedVIPs(next)
	k.assign(list)
	k.logChanges(before, next, failed)
	k.mu.Lock()
	defer k.mu.Unlock()
	k.settled = true
	k.state.Services, k.state.Missing, k.state.Kept, k.state.Problems = len(list), len(failed), 0, nil
	for i := range next {
		if !next[i].Gone.IsZero() {
			k.state.Kept++
		}
	}
	for _, f := range failed[:min(len(failed), maxLogged)] {
		k.state.Problems = append(k.state.Problems, fmt.Sprintf("%s has no %s address: %v", f.Service, f.Family, f.Err))
	}
	return saved && len(failed) == 0
}

// withoutTimes is a without its times.
func withoutTimes(a alloc.VIP) alloc.VIP {
	return alloc.VIP{Service: a.Service, Address: a.Address}
}

// logChanges logs what has changed.
func (k *vipController) logChanges(before, after []alloc.VIP, failed []alloc.VIPFailure) {
	slices.SortFunc(failed, func(a, b alloc.VIPFailure) int {
		return cmp.Or(cmp.Compare(a.Service, b.Service), cmp.Compare(a.Family, b.Family))
	})
	missing := len(k.logged)
	k.logged.logNew(len(failed),
		func(i int) (vipKey, error) { return vipKey{failed[i].Service, failed[i].Family}, failed[i].Err },
		func(i int) {
			k.log.Warn("service has no virtual IP", "service", failed[i].Service, "family", failed[i].Family, "err", failed[i].Err)
		},
		func(n int) { k.log.Warn("more services have no virtual IP", "addresses", n) })
	if slices.Equal(before, after) {
		return
	}
	had, given, left, moved := make(map[vipKey]netip.Addr, len(before)), 0, 0, 0
	for _, a := range before {
		if a.Gone.IsZero() {
			had[vipKey{a.Service, alloc.Family(a.Address)}] = a.Address
		}
	}
	for _, a := range after {
		key := vipKey{a.Service, alloc.Family(a.Address)}
		was, ok := had[key]
		switch {
		case !a.Gone.IsZero():
			if ok && was == a.Address {
				left++
			}
		case !ok:
			given++
		case was != a.Address:
			if moved++; moved <= maxLogged {
				k.log.Warn("virtual IP reassigned: the old one is in use or outside the range", "service", a.Service, "was", was, "now", a.Address)
			}
		}
	}
	if given > 0 || left > 0 || moved > 0 || missing != len(k.logged) {
		k.log.Info("virtual IPs assigned", "new", given, "released", left, "changed", moved, "unassigned", len(k.logged), "ranges", k.cfg.ranges())
	}
}

// status returns what /status shows; settled is false before the first table
// has been dealt with.
func (k *vipController) status() (s StatusVIPs, settled bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.state, k.settled
}

// ForecastVIPs says which addresses the services of t have and would have, by the
// state that is kept, for a Registry that is asked without a gateway. A
// StateError tells that the state can't be read.
func ForecastVIPs(cfg VIPs, t *registry.Table) ([]registry.VIP, error) {
	have, err := alloc.VIPFile(cfg.State).Load()
	if err != nil {
		return nil, &StateError{"vips", "addresses", err}
	}
	next, _ := cfg.plan(t).Assign(t.VIPRequests(), have)
	return alloc.AssignedVIPs(next), nil
}

// ClusterSetAddresses returns the addresses that a service of the cluster set has
// to itself.
func (g *Gateway) ClusterSetAddresses(namespace, service string) (all []netip.Addr) {
	v4, v6 := g.registry.Table().SetVIPs(registry.ID{Namespace: namespace, Service: service})
	for _, a := range []netip.Addr{v4, v6} {
		if a.IsValid() {
			all = append(all, a)
		}
	}
	return all
}
