package gateway

import (
	"context"
	"maps"
	"net"
	"slices"
	"sync"

	"culvert.dev/internal/gateway/inbound"
	"culvert.dev/registry"
	"culvert.dev/tunnel"
)

// A StatusSourceListener is a listener of a source.
type StatusSourceListener struct {
	Name     string `json:"name"`
	Protocol string `json:"protocol"`
	Address  string `json:"address"`
	Sections int    `json:"sections"`
	State    string `json:"state"`
	Problem  string `json:"problem,omitempty"`
	Origin   string `json:"origin,omitempty"`
}

// listeners opens the listeners of the table, changes them, and closes those that left it.
type listeners struct {
	tableWatcher
	g       *Gateway
	guard   *tunnel.Guard
	budget  *tunnel.Budget
	builder *inbound.Builder
	serve   func(ctx context.Context, o *openListener) // does not wait
	changes chan struct{}                              // holds one if the result of ListenerErrors has changed

	// Of New's goroutine, and then of run's alone.
	open   map[string]*openListener // by name
	logged errorLog[string]

	mu         sync.Mutex             // guards what follows
	configured []StatusListener       // those with Settings
	list       []StatusSourceListener // the others
	errs       map[string]error       // of listeners, by name
	parts      map[string]error       // of those of their sections that can't be served, by name
	serving    map[string]*openListener
	generation uint64 // the generation of the table that has been dealt with last; 0 before the first
}

func (f *listeners) describe(l *registry.Listener, err error) StatusSourceListener {
	s := StatusSourceListener{Name: l.Name, Protocol: l.Protocol, Address: inbound.Address(l), Sections: len(l.Sections), State: ListenerOpen, Origin: l.Origin}
	if err != nil {
		s.State, s.Problem = ListenerFailed, err.Error()
	}
	return s
}

func (f *listeners) describeConfigured(l *registry.Listener, err error) StatusListener {
	s := StatusListener{Configured: l.Name, Protocols: l.Settings.Protocols}
	if o := f.open[l.Name]; o != nil {
		serving := ready(o.Listener)
		s = statusOf(&serving, o.addr())
	}
	s.RequireTLS, s.TLS = l.Settings.RequireTLS, describeTLS(l.Settings)
	if err != nil {
		s.Problem = err.Error()
	}
	return s
}

// publish stores the state for readers, and signals a change.
func (f *listeners) publish(t *registry.Table, configured []StatusListener, list []StatusSourceListener, errs, parts map[string]error, changed bool) {
	same := func(a, b error) bool { return a.Error() == b.Error() }
	f.mu.Lock()
	changed = changed || f.generation == 0 || !maps.EqualFunc(f.errs, errs, same) || !maps.EqualFunc(f.parts, parts, same)
	f.configured, f.list, f.errs, f.parts, f.generation, f.serving = configured, list, errs, parts, t.Generation(), maps.Clone(f.open)
	f.mu.Unlock()
	if changed {
		select {
		case f.changes <- struct{}{}:
		default:
		}
	}
}

// logChanges logs what has changed.
func (f *listeners) logChanges(opened, closed int, names []string, errs map[string]error) {
	slices.Sort(names)
	before := len(f.logged)
	f.logged.logNew(len(names),
		func(i int) (string, error) { return names[i], errs[names[i]] },
		func(i int) {
			f.g.log.Warn("cannot serve a listener", "listener", names[i], "err", errs[names[i]])
		},
		func(n int) { f.g.log.Warn("cannot serve more listeners", "listeners", n) })
	if opened > 0 || closed > 0 || before != len(f.logged) {
		f.g.log.Info("listeners changed", "opened", opened, "closed", closed, "open", len(f.open), "failed", len(f.logged))
	}
}

// describeAll returns what /status shows: the listeners with Settings, and the others.
func (f *listeners) describeAll() ([]StatusListener, []StatusSourceListener) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.configured, f.list
}

// settled reports whether the first table has been dealt with.
func (f *listeners) settled() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.generation > 0
}

// addrs returns the addresses of the configured listeners that are open.
func (f *listeners) addrs() (all []net.Addr) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, o := range f.serving {
		if o.Table().Settings != nil {
			all = append(all, o.addr())
		}
	}
	return all
}

// count returns how many listeners have a problem, or have none.
func (f *listeners) count(problem bool) float64 {
	configured, list := f.describeAll()
	n := 0
	for i := range configured {
		if (configured[i].Problem != "") == problem {
			n++
		}
	}
	for i := range list {
		if (list[i].Problem != "") == problem {
			n++
		}
	}
	return float64(n)
}

// listeners returns the open listeners for Explain: by their own names, and by those
// of their sections.
func (f *listeners) listeners() []Listener {
	f.mu.Lock()
	defer f.mu.Unlock()
	var all []Listener
	for _, name := range slices.Sorted(maps.Keys(f.serving)) {
		l := ready(f.serving[name].Listener)
		l.Address = name
		all = append(all, l)
		for _, s := range f.serving[name].Table().Sections {
			if s.Name != name {
				l.Address = s.Name
				all = append(all, l)
			}
		}
	}
	return all
}

// ListenerErrors returns the listeners that sources know of by their names: nil
// for those that are open, and else what is wrong. One can't be opened, which is
// tried again, or it stands behind an earlier one of the same name or address.
// Those that are not there have not been tried. Sections that can't be served are
// there by their own names: a listener that has others is open.
func (g *Gateway) ListenerErrors() map[string]error {
	g.inbound.mu.Lock()
	defer g.inbound.mu.Unlock()
	all := maps.Clone(g.inbound.errs)
	if all == nil {
		all = make(map[string]error, len(g.inbound.serving))
	}
	for name := range g.inbound.serving {
		all[name] = nil
	}
	maps.Copy(all, g.inbound.parts)
	return all
}

// ListenersChanged receives when a listener that a source knows of was opened or
// closed, or ListenerErrors has changed, after it has: once for several changes.
// It is for one goroutine.
func (g *Gateway) ListenersChanged() <-chan struct{} { return g.inbound.changes }
