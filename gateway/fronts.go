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

	"culvert.dev/registry"
	"culvert.dev/sni"
	"culvert.dev/tunnel"
	"culvert.dev/udp"
)

// What may be said of a listener of the table.
const (
	ListenerOpen    = "open"    // it is listened at
	ListenerFailed  = "failed"  // it is open, and a part of it can't be served; or it can't be opened, and is tried again
	ListenerRefused = "refused" // an earlier one has its name, or its address and port
)

// A StatusSourceListener is a listener that a source knows of.
type StatusSourceListener struct {
	Name     string `json:"name"`
	Protocol string `json:"protocol"`
	Address  string `json:"address"`
	Sections int    `json:"sections"`
	State    string `json:"state"`
	Problem  string `json:"problem,omitempty"`
	Origin   string `json:"origin,omitempty"`
}

// fronts keeps the listeners of the table open, and no others.
type fronts struct {
	follower
	g      *Gateway
	guard  *tunnel.Guard
	budget *tunnel.Budget
	serve  func(ctx context.Context, f *openFront) // does not wait
	news   chan struct{}                           // something has changed that ListenerErrors tells

	// Of run's goroutine alone.
	open map[string]*openFront // by name
	said troubles[string]

	mu      sync.Mutex // guards what follows
	list    []StatusSourceListener
	errs    map[string]error // of listeners, by name
	parts   map[string]error // of those of their sections that can't be served, by name
	serving map[string]*openFront
	settled uint64 // the generation of the table that has been dealt with last; 0 before the first
}

// An openFront is a listener of the table that is open. One of its sockets is nil.
type openFront struct {
	*front
	where    where
	stream   net.Listener
	datagram *net.UDPConn
	protocol tunnel.Protocol // of stream
	plain    *plainFront     // of datagram
}

// A where is all that makes a listener the same one.
type where struct {
	protocol string
	addr     netip.Addr
	port     uint16
}

func whereOf(l *registry.Listener) where { return where{l.Protocol, l.Address, l.Port} }

// String returns the address as those of configured listeners are written.
func (w where) String() string {
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

func newFronts(g *Gateway, guard *tunnel.Guard, budget *tunnel.Budget) *fronts {
	return &fronts{follower: newFollower(), g: g, guard: guard, budget: budget, news: make(chan struct{}, 1), open: map[string]*openFront{}}
}

// run follows the table until ctx is done.
func (f *fronts) run(ctx context.Context) error {
	defer func() {
		for name := range f.open {
			f.close(name)
		}
	}()
	f.follow(ctx, &f.g.stopping, f.update)
	return nil
}

// update brings the listeners in line with the current table. It is false where
// one can't be opened that may be later, table or no table.
func (f *fronts) update(ctx context.Context) (whole bool) {
	t := f.g.registry.Table()
	if t == nil {
		return true
	}
	var wanted []*registry.Listener
	for l := range t.Listeners() {
		wanted = append(wanted, l)
	}
	stays, kept, renamed := f.keep(t, wanted)
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
	whole = true
	for _, l := range wanted {
		if f.open[l.Name] == nil {
			o, err := f.listen(ctx, t, l)
			if err != nil {
				failed(l, err)
				whole = false
				continue
			}
			opened++
			f.open[l.Name] = o
			f.serve(ctx, o)
		}
		if err := f.open[l.Name].has.Load().problem(parts); err != nil {
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
	f.tell(opened, closed, names, errs)
	f.publish(t, list, errs, parts, renamed || opened+closed > 0)
	return whole
}

// keep returns the open listeners that stay, by the names that they have now, and whether
// one of those is new. One whose
// address and protocol are those of before stays open under another name: several
// Gateways may share it, and the one that it is named after may go. Of UDP another name
// is another listener, as the sessions of its clients lead where the earlier one did.
func (f *fronts) keep(t *registry.Table, wanted []*registry.Listener) (stays map[string]*openFront, kept map[*openFront]bool, renamed bool) {
	type named struct {
		name string
		*openFront
	}
	at := make(map[where]named, len(f.open))
	for name, o := range f.open {
		at[o.where] = named{name, o}
	}
	stays, kept = make(map[string]*openFront, len(wanted)), make(map[*openFront]bool, len(wanted))
	for _, l := range wanted {
		o := at[whereOf(l)]
		if o.openFront == nil || o.name != l.Name && l.Protocol == registry.UDP {
			continue
		}
		o.has.Store(newOffer(t, l, o.has.Load()))
		stays[l.Name], kept[o.openFront] = o.openFront, true
		renamed = renamed || o.name != l.Name
	}
	return stays, kept, renamed
}

func (f *fronts) describe(l *registry.Listener, err error) StatusSourceListener {
	s := StatusSourceListener{Name: l.Name, Protocol: l.Protocol, Address: whereOf(l).String(), Sections: len(l.Sections), State: ListenerOpen, Origin: l.Origin}
	if err != nil {
		s.State, s.Problem = ListenerFailed, err.Error()
	}
	return s
}

// publish says how things are, and that they are not as before.
func (f *fronts) publish(t *registry.Table, list []StatusSourceListener, errs, parts map[string]error, changed bool) {
	same := func(a, b error) bool { return a.Error() == b.Error() }
	f.mu.Lock()
	changed = changed || f.settled == 0 || !maps.EqualFunc(f.errs, errs, same) || !maps.EqualFunc(f.parts, parts, same)
	f.list, f.errs, f.parts, f.settled, f.serving = list, errs, parts, t.Generation(), maps.Clone(f.open)
	f.mu.Unlock()
	if changed {
		select {
		case f.news <- struct{}{}:
		default:
		}
	}
}

// listen opens the socket of a listener.
func (f *fronts) listen(ctx context.Context, t *registry.Table, l *registry.Listener) (*openFront, error) {
	if !f.budget.Take(1) {
		return nil, errors.New("every descriptor is taken")
	}
	o := &openFront{where: whereOf(l)}
	var err error
	if l.Protocol == registry.UDP {
		o.datagram, err = udp.Listen(ctx, o.where.String())
	} else {
		o.stream, err = tunnel.Listen(ctx, o.where.String())
	}
	if err != nil {
		f.budget.Give(1)
		if inUse(err) {
			err = fmt.Errorf("%w: %s", err, f.holder(o.where))
		}
		return nil, err
	}
	switch l.Protocol {
	case registry.TLS:
		p := &tlsFront{}
		o.front, o.protocol = &p.front, p
	case registry.HTTP:
		p := &httpFront{}
		o.front, o.protocol = &p.front, p
	default:
		o.plain = &plainFront{}
		o.front, o.protocol = &o.plain.front, o.plain
	}
	o.registry, o.at = f.g.registry, o.where.String()
	o.has.Store(newOffer(t, l, nil))
	f.guard.OwnListener(o.addr())
	return o, nil
}

// name is that of the listener by the current table.
func (o *openFront) name() string { return o.has.Load().Name }

func (o *openFront) addr() net.Addr {
	if o.datagram != nil {
		return o.datagram.LocalAddr()
	}
	return o.stream.Addr()
}

// close gives up a listener. The tunnels that came by it stand; of UDP the
// sessions end, as only that socket can tell their clients anything.
func (f *fronts) close(name string) {
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

// holder says who has a port, as far as that is us.
func (f *fronts) holder(w where) string {
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

// tell logs what has changed.
func (f *fronts) tell(opened, closed int, names []string, errs map[string]error) {
	slices.Sort(names)
	before := len(f.said)
	f.said.tell(len(names),
		func(i int) (string, error) { return names[i], errs[names[i]] },
		func(i int) {
			f.g.log.Warn("cannot serve a dynamic listener", "listener", names[i], "err", errs[names[i]])
		},
		func(n int) { f.g.log.Warn("cannot serve more dynamic listeners", "listeners", n) })
	if opened > 0 || closed > 0 || before != len(f.said) {
		f.g.log.Info("serving dynamic listeners", "opened", opened, "closed", closed, "open", len(f.open), "failed", len(f.said))
	}
}

// status returns what /status shows; settled is false before the first table
// has been dealt with.
func (f *fronts) status() (list []StatusSourceListener, settled bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.list, f.settled > 0
}

// count returns how many listeners have a problem, or have none.
func (f *fronts) count(problem bool) float64 {
	list, _ := f.status()
	n := 0
	for i := range list {
		if (list[i].Problem != "") == problem {
			n++
		}
	}
	return float64(n)
}

// listeners returns them for those who ask what they do: by their own names, and
// by those of their sections.
func (f *fronts) listeners() []Listener {
	f.mu.Lock()
	defer f.mu.Unlock()
	var all []Listener
	for _, name := range slices.Sorted(maps.Keys(f.serving)) {
		o := f.serving[name]
		l := Listener{Address: name, Protocols: []tunnel.Protocol{o.protocol}}
		all = append(all, l)
		for _, s := range o.has.Load().Sections {
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
	g.fronts.mu.Lock()
	defer g.fronts.mu.Unlock()
	all := maps.Clone(g.fronts.errs)
	if all == nil {
		all = make(map[string]error, len(g.fronts.serving))
	}
	for name := range g.fronts.serving {
		all[name] = nil
	}
	maps.Copy(all, g.fronts.parts)
	return all
}

// ListenersChanged receives when a listener that a source knows of was opened or
// closed, or ListenerErrors has changed, after it has: once for several changes.
// It is for one goroutine.
func (g *Gateway) ListenersChanged() <-chan struct{} { return g.fronts.news }

// serveFronts returns what serves a listener, by functions given to run.
func (g *Gateway) serveFronts(run func(func() error)) func(context.Context, *openFront) {
	return func(ctx context.Context, o *openFront) {
		run(func() error {
			var err error
			if o.datagram != nil {
				err = g.datagrams.server.Serve(ctx, udp.Listener{Conn: o.datagram, Name: o.name(), To: o.plain.direct})
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
func explainFront(f *front, p tunnel.Protocol, q *Query, req *tunnel.Request, x *Explanation) (*tunnel.Request, error) {
	has := f.has.Load()
	req.Listener = has.Name
	switch p := p.(type) {
	case *httpFront:
		return nil, tunnel.Refusef(tunnel.Unsupported, "listener %s: HTTP is not routed", has.Name)
	case *plainFront:
		p.direct(req)
		req.Proto = cmp.Or(map[string]string{registry.UDP: "udp"}[has.Protocol], "tcp")
		x.Proto, x.Listener = req.Proto, req.Listener
		return req, nil
	case *tlsFront:
		if q.Host != "" {
			var err error
			if req.Name, err = sni.ParseName(q.Host); err != nil {
				return nil, err
			}
		}
		req.Proto = "sni"
		if !p.direct(has, req) {
			req.Proto = "tls"
			if k := has.keys[req.Listener]; k.err != nil {
				return nil, &tunnel.Error{Reason: tunnel.Internal, Err: k.err}
			}
		}
		x.Proto, x.Listener = req.Proto, req.Listener
		return req, nil
	}
	return nil, tunnel.Refusef(tunnel.Internal, "listener %s has a protocol that can't be explained", has.Name)
}
