package gateway

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"slices"

	"culvert.dev/internal/gateway/inbound"
	"culvert.dev/internal/unixsocket"
	"culvert.dev/registry"
	"culvert.dev/tunnel"
)

// States of a listener of the table.
const (
	ListenerOpen    = "open"    // it is listened at
	ListenerFailed  = "failed"  // it is open, and a part of it can't be served; or it can't be opened, and is tried again
	ListenerRefused = "refused" // an earlier one has its name, or its address and port
)

// An openListener is a listener of the table that is open. One of its sockets is nil.
type openListener struct {
	*inbound.Listener
	key    socketKey
	stream net.Listener
	socket *inbound.Socket
	moving bool // it has left the table, and the listener in its place can't be opened
}

func newListeners(g *Gateway, guard *tunnel.Guard, builder *inbound.Builder) *listeners {
	return &listeners{tableWatcher: newTableWatcher(), g: g, guard: guard, budget: builder.Budget, builder: builder, changes: make(chan struct{}, 1), open: map[string]*openListener{}}
}

// openAll opens listeners before there is a table. An error is one for the start of the
// gateway.
func (f *listeners) openAll(ctx context.Context, all []*registry.Listener) error {
	for _, l := range all {
		o, err := f.listen(ctx, nil, l)
		if err != nil {
			return err
		}
		f.open[l.Name] = o
		f.configured = append(f.configured, f.describeConfigured(l, nil))
	}
	f.serving = maps.Clone(f.open)
	return nil
}

// serveAll serves what openAll has opened.
func (f *listeners) serveAll(ctx context.Context) {
	for _, name := range slices.Sorted(maps.Keys(f.open)) {
		f.begin(ctx, f.open[name])
	}
}

// begin serves a listener.
func (f *listeners) begin(ctx context.Context, o *openListener) {
	f.serve(ctx, o)
	if l := o.Table(); l.Settings != nil {
		f.g.log.Info("serving", "listener", l.Name, "address", addressText(o.addr()))
	}
}

// run follows the table until ctx is done.
func (f *listeners) run(ctx context.Context) error {
	defer f.closeAll()
	f.watch(ctx, &f.g.stopping, f.update)
	return nil
}

func (f *listeners) closeAll() {
	for name := range f.open {
		f.close(name)
	}
}

// update opens, changes and closes listeners by the current table. It is false where one
// can't be opened now and is to be tried again.
func (f *listeners) update(ctx context.Context) (complete bool) {
	t := f.g.registry.Table()
	if t == nil {
		return true
	}
	wanted := slices.Collect(t.Listeners())
	errs, names := map[string]error{}, []string(nil)
	parts := map[string]error{} // of sections
	failed := func(l *registry.Listener, err error) {
		if errs[l.Name] == nil {
			errs[l.Name] = err
			names = append(names, l.Name)
		}
	}
	before := f.open
	kept, renamed := f.keepOpen(t, wanted, failed)
	leaving, moves := f.leaving(before, kept, wanted)
	closed, opened := 0, 0
	gone := map[*openListener]bool{} // of moves
	for _, o := range before {       // first, as another one may want the port
		if kept[o] || moves[o] {
			continue
		}
		if l, err := f.unusable(t, wanted, o); err != nil {
			f.open[l.Name] = o
			failed(l, fmt.Errorf("%w; what was served before is served on", err))
			continue
		}
		f.closeListener(o)
		closed++
	}
	complete = true
	for _, l := range wanted {
		o := f.open[l.Name]
		if o == nil {
			var err error
			if o, err = f.listen(ctx, t, l); inUse(err) {
				if away := f.makeRoom(l, err, moves, gone); len(away) > 0 {
					closed += len(away)
					if o, err = f.listen(ctx, t, l); err != nil {
						opened += f.bringBack(ctx, t, away, leaving)
					}
				}
			}
			from := leaving[l]
			if gone[from] {
				from = nil
			}
			if err != nil {
				if from != nil {
					err = f.stay(t, from, l, err)
				}
				failed(l, err)
				complete = false
				continue
			}
			if from != nil {
				f.remove(from)
				gone[from] = true
				closed++
			}
			opened++
			f.open[l.Name] = o
			f.begin(ctx, o)
		}
		if err := o.Problem(parts); err != nil {
			failed(l, err)
		}
	}
	configured, list := []StatusListener(nil), make([]StatusSourceListener, 0, len(wanted))
	for _, l := range wanted {
		if l.Settings != nil {
			configured = append(configured, f.describeConfigured(l, errs[l.Name]))
		} else {
			list = append(list, f.describe(l, errs[l.Name]))
		}
	}
	for _, name := range slices.Sorted(maps.Keys(f.open)) {
		if o := f.open[name]; o.moving {
			configured = append(configured, f.describeConfigured(o.Table(), errMoving))
		}
	}
	for l, err := range t.RefusedListeners() {
		if f.open[l.Name] == nil {
			failed(l, err)
		}
		if l.Settings != nil {
			configured = append(configured, StatusListener{Configured: l.Name, Problem: err.Error()})
			continue
		}
		s := f.describe(l, err)
		s.State = ListenerRefused
		list = append(list, s)
	}
	f.logChanges(opened, closed, names, errs)
	f.publish(t, configured, list, errs, parts, renamed || opened+closed > 0)
	return complete
}

// keepOpen leaves the listeners open that stay, by the names that they have now, and
// has them serve what they serve by the table. It returns which those are, and whether
// one of the names is new. One that stays at its address stays open under another name:
// several Gateways may share it, and the one that it is named after may go. Of UDP
// another name is another listener, as the sessions of its clients lead where the
// earlier one did.
func (f *listeners) keepOpen(t *registry.Table, wanted []*registry.Listener, failed func(*registry.Listener, error)) (kept map[*openListener]bool, renamed bool) {
	at := make(map[socketKey]*openListener, len(f.open))
	for _, o := range f.open {
		at[o.key] = o
	}
	stays := make(map[string]*openListener, len(wanted))
	kept = make(map[*openListener]bool, len(wanted))
	for _, l := range wanted {
		o := at[keyOf(l)]
		if o == nil || !o.CanUse(l) {
			continue
		}
		was := o.Table().Name
		if err := o.use(t, l); err != nil {
			failed(l, err)
		}
		if o.stream != nil {
			tunnel.DeferAccept(o.stream, o.Current().Protocols)
		}
		stays[l.Name], kept[o] = o, true
		o.moving = false
		renamed = renamed || was != l.Name
	}
	f.open = stays
	return kept, renamed
}

// leaving returns the listeners that leave the table and seem to move, by those that are
// new in their place: they do the same at another address.
func (f *listeners) leaving(before map[string]*openListener, kept map[*openListener]bool, wanted []*registry.Listener) (from map[*registry.Listener]*openListener, moves map[*openListener]bool) {
	from, moves = map[*registry.Listener]*openListener{}, map[*openListener]bool{}
	names := slices.Sorted(maps.Keys(before))
	for _, l := range wanted {
		if f.open[l.Name] != nil {
			continue
		}
		for _, name := range names {
			if o := before[name]; !kept[o] && !moves[o] && o.MovesTo(l) {
				from[l], moves[o] = o, true
				break
			}
		}
	}
	return from, moves
}

// unusable returns the listener that is wanted at the socket of o, and why it cannot be
// served. The error is nil where it can, and where there is none.
func (f *listeners) unusable(t *registry.Table, wanted []*registry.Listener, o *openListener) (*registry.Listener, error) {
	i := slices.IndexFunc(wanted, func(l *registry.Listener) bool { return keyOf(l) == o.key })
	if i < 0 {
		return nil, nil
	}
	_, err := f.builder.New(t, wanted[i])
	return wanted[i], err
}

// remove closes a listener that was to move, and may have been to stay.
func (f *listeners) remove(o *openListener) {
	if name := o.Table().Name; f.open[name] == o {
		delete(f.open, name)
	}
	f.closeListener(o)
}

// makeRoom closes listeners that are to move and are in the way of l, which could not be
// opened because of err: at the same address, as where two change places, or at another one
// of the same port. It closes none where others are in the way, too.
func (f *listeners) makeRoom(l *registry.Listener, err error, moves, gone map[*openListener]bool) (away []*openListener) {
	key := keyOf(l)
	var addrs []net.Addr
	for o := range moves {
		if gone[o] || !o.key.conflicts(key) {
			continue
		}
		away, addrs = append(away, o), append(addrs, o.addr())
	}
	if heldByOthers(err, addrs...) {
		return nil
	}
	for _, o := range away {
		f.remove(o)
		gone[o] = true
	}
	return away
}

// bringBack opens listeners again that were closed in vain, and returns how many are open.
// They stay until what is in their place can be opened.
func (f *listeners) bringBack(ctx context.Context, t *registry.Table, away []*openListener, leaving map[*registry.Listener]*openListener) (opened int) {
	for _, o := range away {
		was := o.Table()
		if f.open[was.Name] != nil {
			continue // another one has its place
		}
		back, err := f.listen(ctx, t, was)
		if err != nil {
			continue // another program was faster
		}
		opened++
		back.moving = true
		f.open[was.Name] = back
		f.begin(ctx, back)
		for l, from := range leaving {
			if from == o {
				leaving[l] = back
			}
		}
	}
	return opened
}

// stay keeps a listener open that should move, as the new one can't be opened because of
// err. It has the credentials and keys of the new one.
func (f *listeners) stay(t *registry.Table, o *openListener, to *registry.Listener, err error) error {
	stays := *to
	was := o.Table()
	stays.Name, stays.Address, stays.Host, stays.Port, stays.Unix, stays.Inherited = was.Name, was.Address, was.Host, was.Port, was.Unix, was.Inherited
	if failed := o.Use(t, &stays); failed != nil {
		err = errors.Join(err, failed)
	}
	o.moving = true
	f.open[was.Name] = o
	return fmt.Errorf("%w; until it can be opened, %s stays open", err, was.Name)
}

// errMoving is the problem of an openListener that is moving.
var errMoving = errors.New("it is not configured any more, and stays open until the listener in its place can be opened")

// listen opens the socket of a listener.
func (f *listeners) listen(ctx context.Context, t *registry.Table, l *registry.Listener) (*openListener, error) {
	o := &openListener{key: keyOf(l)}
	var err error
	if o.Listener, err = f.builder.New(t, l); err != nil {
		return nil, err
	}
	if !f.budget.Take(1) {
		return nil, errors.New("every descriptor is taken")
	}
	if d := o.Datagrams(); d != nil {
		o.socket, err = f.builder.OpenSocket(ctx, inbound.Address(l), l.Name, d)
	} else if u := l.Unix; u != nil {
		o.stream, err = unixsocket.Listen(ctx, unixsocket.Config{Path: u.Path, Mode: u.Mode, Group: u.Group})
	} else if l.Inherited != "" {
		o.stream, err = f.inherit(l)
	} else {
		o.stream, err = tunnel.Listen(ctx, inbound.Address(l))
	}
	if err != nil {
		f.budget.Give(1)
		if inUse(err) && l.Unix == nil && l.Inherited == "" {
			if who := f.portHolder(l); who != "" {
				err = fmt.Errorf("%w: %s", err, who)
			}
		}
		return nil, err
	}
	f.guard.OwnListener(o.addr())
	return o, nil
}

func (o *openListener) addr() net.Addr {
	if o.socket != nil {
		return o.socket.Conn.LocalAddr()
	}
	return o.stream.Addr()
}

// close closes the listener of a name.
func (f *listeners) close(name string) {
	o := f.open[name]
	delete(f.open, name)
	f.closeListener(o)
}

// closeListener closes a listener. Its tunnels go on; those of UDP end, as only that
// socket can reach their clients.
func (f *listeners) closeListener(o *openListener) {
	if o.socket != nil {
		o.socket.Close()
	} else {
		_ = o.stream.Close()
		if o.key.inherited != "" {
			f.g.cfg.Inherited.Release(o.key.inherited)
		}
		o.Drain()
	}
	f.guard.Disown(o.addr())
	f.budget.Give(1)
}

// ready returns what l serves at this moment.
func ready(l *inbound.Listener) Listener {
	out := Listener{Address: l.Table().Name, Datagrams: l.Datagrams()}
	if out.Datagrams == nil {
		c := l.Current()
		out.Protocols, out.ConnHeader, out.RequireTLS = c.Protocols, c.ConnHeader, c.RequireTLS
	}
	return out
}

// Prepare returns what a gateway would serve at listeners of sources, without opening
// them. An error says what one of them can't serve.
func Prepare(listeners []*registry.Listener) ([]Listener, error) {
	b := &inbound.Builder{}
	var all []Listener
	for _, l := range listeners {
		o, err := b.New(nil, l)
		if err != nil {
			return nil, fmt.Errorf("listener %s: %w", l.Name, err)
		}
		all = append(all, ready(o))
	}
	return all, nil
}

// serveListener returns what serves a listener, by functions given to run.
func (g *Gateway) serveListener(run func(func() error)) func(context.Context, *openListener) {
	return func(ctx context.Context, o *openListener) {
		run(func() error {
			var err error
			if o.socket != nil {
				g.http3.add(o.socket)
				err = o.socket.Serve(ctx, g.datagrams, g.handler)
				g.http3.remove(o.socket)
			} else {
				err = g.server.Serve(ctx, tunnel.Listener{Listener: o.stream, Current: o.Current})
			}
			if err != nil && !errors.Is(err, tunnel.ErrServerClosed) && !errors.Is(err, net.ErrClosed) {
				g.log.Error("listener closed", "listener", o.Table().Name, "err", err)
			}
			return nil
		})
	}
}
