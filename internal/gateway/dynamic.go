package gateway

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"sync"

	"culvert.dev/internal/udp"
	"culvert.dev/registry"
	"culvert.dev/sni"
	"culvert.dev/tunnel"
)

// States of a listener of the table.
const (
	ListenerOpen    = "open"    // it is listened at
	ListenerFailed  = "failed"  // it is open, and a part of it can't be served; or it can't be opened, and is tried again
	ListenerRefused = "refused" // an earlier one has its name, or its address and port
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

// dynamicListeners opens the listeners of the table, and closes those that left it.
type dynamicListeners struct {
	tableWatcher
	g       *Gateway
	guard   *tunnel.Guard
	budget  *tunnel.Budget
	serve   func(ctx context.Context, f *openListener) // does not wait
	changes chan struct{}                              // holds one if the result of ListenerErrors has changed

	// Of run's goroutine alone.
	open   map[string]*openListener // by name
	logged errorLog[string]

	mu         sync.Mutex // guards what follows
	list       []StatusSourceListener
	errs       map[string]error // of listeners, by name
	parts      map[string]error // of those of their sections that can't be served, by name
	serving    map[string]*openListener
	generation uint64 // the generation of the table that has been dealt with last; 0 before the first
}

// An openListener is a listener of the table that is open. One of its sockets is nil.
type openListener struct {
	*listenerState
	listenAddr listenAddr
	stream     net.Listener
	datagram   *net.UDPConn
	protocol   tunnel.Protocol // of stream
	plain      *plainProtocol  // of datagram
}

// A listenAddr identifies the socket of a listener.
type listenAddr struct {
	protocol string
	addr     netip.Addr
	port     uint16
}

func listenAddrOf(l *registry.Listener) listenAddr { return listenAddr{l.Protocol, l.Address, l.Port} }

// String returns the address as those of configured listeners are written.
func (w listenAddr) String() string {
	host := ""
	if w.addr.IsValid() {
		host = w.addr.String()
	}
	s := net.JoinHostPort(host, strconv.Itoa(int(w.port)))
	if w.protocol == registry.UDP {
		s = udp.Scheme + s
	}
	return s
}

func newDynamicListeners(g *Gateway, guard *tunnel.Guard, budget *tunnel.Budget) *dynamicListeners {
	return &dynamicListeners{tableWatcher: newTableWatcher(), g: g, guard: guard, budget: budget, changes: make(chan struct{}, 1), open: map[string]*openListener{}}
}

// run follows the table until ctx is done.
func (f *dynamicListeners) run(ctx context.Context) error {
	defer func() {
		for name := range f.open {
			f.close(name)
		}
	}()
	f.watch(ctx, &f.g.stopping, f.update)
	return nil
}

// update opens and closes listeners by the current table. It is false where one can't
// be opened now and is to be tried again.
func (f *dynamicListeners) update(ctx context.Context) (complete bool) {
	t := f.g.registry.Table()
	if t == nil {
		return true
	}
	var wanted []*registry.Listener
	for l := range t.Listeners() {
		wanted = append(wanted, l)
	}
	stays, kept, renamed := f.keepOpen(t, wanted)
	closed, opened := 0, 0
	for name, o := range f.open { // first, as another one may want the port
		if !kept[o] {
			f.close(name)
			closed++
		}
	}
	f.open = stays
	errs, names := map[string]error{}, []string(nil)
	parts := map[string]error{} // of sections
	failed := func(l *registry.Listener, err error) {
		if errs[l.Name] == nil {
			errs[l.Name] = err
			names = append(names, l.Name)
		}
	}
	complete = true
	for _, l := range wanted {
		if f.open[l.Name] == nil {
			o, err := f.listen(ctx, t, l)
			if err != nil {
				failed(l, err)
				complete = false
				continue
			}
			opened++
			f.open[l.Name] = o
			f.serve(ctx, o)
		}
		if err := f.open[l.Name].config.Load().problem(parts); err != nil {
			failed(l, err)
		}
	}
	list := make([]StatusSourceListener, 0, len(wanted))
	for _, l := range wanted {
		list = append(list, f.describe(l, errs[l.Name]))
	}
	for l, err := range t.RefusedListeners() {
		s := f.describe(l, err)
		s.State = ListenerRefused
		list = append(list, s)
		if f.open[l.Name] == nil {
			failed(l, err)
		}
	}
	f.logChanges(opened, closed, names, errs)
	f.publish(t, list, errs, parts, renamed || opened+closed > 0)
	return complete
}

// keepOpen returns the open listeners that stay, by the names that they have now, and whether
// one of those is new. One whose
// address and protocol are those of before stays open under another name: several
// Gateways may share it, and the one that it is named after may go. Of UDP another name
// is another listener, as the sessions of its clients lead where the earlier one did.
func (f *dynamicListeners) keepOpen(t *registry.Table, wanted []*registry.Listener) (stays map[string]*openListener, kept map[*openListener]bool, renamed bool) {
	type named struct {
		name string
		*openListener
	}
	at := make(map[listenAddr]named, len(f.open))
	for name, o := range f.open {
		at[o.listenAddr] = named{name, o}
	}
	stays, kept = make(map[string]*openListener, len(wanted)), make(map[*openListener]bool, len(wanted))
	for _, l := range wanted {
		o := at[listenAddrOf(l)]
		if o.openListener == nil || o.name != l.Name && l.Protocol == registry.UDP {
			continue
		}
		o.config.Store(newListenerConfig(t, l, o.config.Load()))
		stays[l.Name], kept[o.openListener] = o.openListener, true
		renamed = renamed || o.name != l.Name
	}
	return stays, kept, renamed
}

func (f *dynamicListeners) describe(l *registry.Listener, err error) StatusSourceListener {
	s := StatusSourceListener{Name: l.Name, Protocol: l.Protocol, Address: listenAddrOf(l).String(), Sections: len(l.Sections), State: ListenerOpen, Origin: l.Origin}
	if err != nil {
		s.State, s.Problem = ListenerFailed, err.Error()
	}
	return s
}

// publish stores the state for readers, and signals a change.
func (f *dynamicListeners) publish(t *registry.Table, list []StatusSourceListener, errs, parts map[string]error, changed bool) {
	same := func(a, b error) bool { return a.Error() == b.Error() }
	f.mu.Lock()
	changed = changed || f.generation == 0 || !maps.EqualFunc(f.errs, errs, same) || !maps.EqualFunc(f.parts, parts, same)
	f.list, f.errs, f.parts, f.generation, f.serving = list, errs, parts, t.Generation(), maps.Clone(f.open)
	f.mu.Unlock()
	if changed {
		select {
		case f.changes <- struct{}{}:
		default:
		}
	}
}

// listen opens the socket of a listener.
func (f *dynamicListeners) listen(ctx context.Context, t *registry.Table, l *registry.Listener) (*openListener, error) {
	if !f.budget.Take(1) {
		return nil, errors.New("every descriptor is taken")
	}
	o := &openListener{listenAddr: listenAddrOf(l)}
	var err error
	if l.Protocol == registry.UDP {
		o.datagram, err = udp.Listen(ctx, o.listenAddr.String())
	} else {
		o.stream, err = tunnel.Listen(ctx, o.listenAddr.String())
	}
	if err != nil {
		f.budget.Give(1)
		if inUse(err) {
			err = fmt.Errorf("%w: %s", err, f.portHolder(o.listenAddr))
		}
		return nil, err
	}
	switch l.Protocol {
	case registry.TLS:
		p := &tlsProtocol{}
		o.listenerState, o.protocol = &p.listenerState, p
	case registry.HTTP:
		p := &httpProtocol{}
		o.listenerState, o.protocol = &p.listenerState, p
	default:
		o.plain = newPlainProtocol()
		o.listenerState, o.protocol = &o.plain.listenerState, o.plain
	}
	o.registry, o.address = f.g.registry, o.listenAddr.String()
	o.config.Store(newListenerConfig(t, l, nil))
	f.guard.OwnListener(o.addr())
	return o, nil
}

// name returns the name of the listener in the current table.
func (o *openListener) name() string { return o.config.Load().Name }

func (o *openListener) addr() net.Addr {
	if o.datagram != nil {
		return o.datagram.LocalAddr()
	}
	return o.stream.Addr()
}

// close closes a listener. Its tunnels go on; the sessions of UDP end, as only that
// socket can reach their clients.
func (f *dynamicListeners) close(name string) {
	o := f.open[name]
	delete(f.open, name)
	if o.datagram != nil {
		_ = o.datagram.Close()
	} else {
		_ = o.stream.Close()
	}
	f.guard.Disown(o.addr())
	f.budget.Give(1)
}

// portHolder says which part of the gateway has a port, if one does.
func (f *dynamicListeners) portHolder(w listenAddr) string {
	hold := func(a net.Addr) (all, is bool) {
		var ap netip.AddrPort
		switch a := a.(type) {
		case *net.TCPAddr:
			if w.protocol == registry.UDP {
				return false, false
			}
			ap = a.AddrPort()
		case *net.UDPAddr:
			if w.protocol != registry.UDP {
				return false, false
			}
			ap = a.AddrPort()
		}
		one, other := ap.Addr().Unmap(), w.addr.Unmap()
		anywhere := !other.IsValid() || other.IsUnspecified()
		return one != other && !(one.IsUnspecified() && anywhere), ap.Port() == w.port && (one == other || one.IsUnspecified() || anywhere)
	}
	said := func(who string, differs bool) string {
		if differs {
			return who + " has the port at other addresses: all addresses and a single one exclude each other"
		}
		return who + " has it"
	}
	for i, a := range f.g.addrs {
		if differs, is := hold(a); is {
			return said("the configured listener "+f.g.cfg.Listeners[i].Address, differs)
		}
	}
	for who, ln := range map[string]net.Listener{"the admin port": f.g.adminLn, "the health port": f.g.healthLn} {
		if ln == nil {
			continue
		}
		if differs, is := hold(ln.Addr()); is {
			return said(who, differs)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(f.open)) {
		if differs, is := hold(f.open[name].addr()); is {
			return said("listener "+strconv.Quote(name), differs)
		}
	}
	return "another process has it, or a part of this gateway"
}

// logChanges logs what has changed.
func (f *dynamicListeners) logChanges(opened, closed int, names []string, errs map[string]error) {
	slices.Sort(names)
	before := len(f.logged)
	f.logged.logNew(len(names),
		func(i int) (string, error) { return names[i], errs[names[i]] },
		func(i int) {
			f.g.log.Warn("cannot serve a dynamic listener", "listener", names[i], "err", errs[names[i]])
		},
		func(n int) { f.g.log.Warn("cannot serve more dynamic listeners", "listeners", n) })
	if opened > 0 || closed > 0 || before != len(f.logged) {
		f.g.log.Info("serving dynamic listeners", "opened", opened, "closed", closed, "open", len(f.open), "failed", len(f.logged))
	}
}

// status returns what /status shows; settled is false before the first table
// has been dealt with.
func (f *dynamicListeners) status() (list []StatusSourceListener, settled bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.list, f.generation > 0
}

// count returns how many listeners have a problem, or have none.
func (f *dynamicListeners) count(problem bool) float64 {
	list, _ := f.status()
	n := 0
	for i := range list {
		if (list[i].Problem != "") == problem {
			n++
		}
	}
	return float64(n)
}

// listeners returns the open listeners for Explain: by their own names, and by those
// of their sections.
func (f *dynamicListeners) listeners() []Listener {
	f.mu.Lock()
	defer f.mu.Unlock()
	var all []Listener
	for _, name := range slices.Sorted(maps.Keys(f.serving)) {
		o := f.serving[name]
		l := Listener{Address: name, Protocols: []tunnel.Protocol{o.protocol}}
		all = append(all, l)
		for _, s := range o.config.Load().Sections {
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
	g.dynamic.mu.Lock()
	defer g.dynamic.mu.Unlock()
	all := maps.Clone(g.dynamic.errs)
	if all == nil {
		all = make(map[string]error, len(g.dynamic.serving))
	}
	for name := range g.dynamic.serving {
		all[name] = nil
	}
	maps.Copy(all, g.dynamic.parts)
	return all
}

// ListenersChanged receives when a listener that a source knows of was opened or
// closed, or ListenerErrors has changed, after it has: once for several changes.
// It is for one goroutine.
func (g *Gateway) ListenersChanged() <-chan struct{} { return g.dynamic.changes }

// serveDynamic returns what serves a listener, by functions given to run.
func (g *Gateway) serveDynamic(run func(func() error)) func(context.Context, *openListener) {
	return func(ctx context.Context, o *openListener) {
		run(func() error {
			var err error
			if o.datagram != nil {
				err = g.datagrams.server.Serve(ctx, udp.Listener{Conn: o.datagram, Name: o.name(), To: o.plain.Direct})
			} else {
				err = g.server.Serve(ctx, tunnel.Listener{Listener: o.stream, NameNow: o.name, Protocols: []tunnel.Protocol{o.protocol}})
			}
			if !errors.Is(err, tunnel.ErrServerClosed) && !errors.Is(err, net.ErrClosed) {
				g.log.Error("dynamic listener closed", "listener", o.name(), "err", err)
			}
			return nil
		})
	}
}

// explain completes the request that would be made at a listener of the table.
// It returns nil where there is none, and says so.
func explainDynamic(f *listenerState, p tunnel.Protocol, q *Query, req *tunnel.Request, x *Explanation) (*tunnel.Request, error) {
	has := f.config.Load()
	req.Listener = has.Name
	switch p := p.(type) {
	case *httpProtocol:
		return nil, tunnel.Refusef(tunnel.Unsupported, "listener %s: HTTP is not routed", has.Name)
	case *plainProtocol:
		p.Direct(req)
		req.Proto = cmp.Or(map[string]string{registry.UDP: "udp"}[has.Protocol], "tcp")
		x.Proto, x.Listener = req.Proto, req.Listener
		return req, nil
	case *tlsProtocol:
		if q.Host != "" {
			var err error
			if req.Name, err = sni.ParseName(q.Host); err != nil {
				return nil, err
			}
		}
		req.Proto = "sni"
		if !p.route(has, req) {
			req.Proto = "tls"
			if k := has.keySets[req.Listener]; k.err != nil {
				return nil, &tunnel.Error{Reason: tunnel.Internal, Err: k.err}
			}
		}
		x.Proto, x.Listener = req.Proto, req.Listener
		return req, nil
	}
	return nil, tunnel.Refusef(tunnel.Internal, "listener %s has a protocol that can't be explained", has.Name)
}
