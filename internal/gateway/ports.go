package gateway

import (
	"cmp"
	"context"
	"errors"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"culvert.dev/registry"
	"culvert.dev/registry/alloc"
	"culvert.dev/tunnel"
)

// ServicePorts configures ports of services: each service that is Publishable gets a
// port of its own, and keeps it for as long as it is there.
type ServicePorts struct {
	Range      registry.PortRange
	Address    netip.Addr    // to listen at; the zero Addr means every address
	State      string        // path of the file that keeps who has which port; one gateway's alone
	ReuseAfter time.Duration // how long nobody else gets the port of a service that is gone; 0 means alloc.DefaultReuseAfter
}

// listenAddress returns the address of a port, as listeners have theirs configured.
func (c *ServicePorts) listenAddress(port uint16) string {
	host := ""
	if c.Address.IsValid() {
		host = c.Address.String()
	}
	return net.JoinHostPort(host, strconv.Itoa(int(port)))
}

// servicePorts assigns ports to services by the table, and listens at them.
type servicePorts struct {
	tableWatcher
	g      *Gateway
	guard  *tunnel.Guard
	budget *tunnel.Budget
	serve  func(ctx context.Context, tl tunnel.Listener) // does not wait

	// Of run's goroutine alone.
	*assignmentFile[alloc.Port]              // nil while no service has a port to itself
	cfg                         ServicePorts // in use
	open                        map[alloc.PortKey]*servicePort
	logged                      errorLog[alloc.PortKey]

	mu      sync.Mutex // guards what follows
	list    []ServicePort
	ports   registry.PortRange // of cfg
	problem string             // why the file can't be used
	settled bool               // the first table has been dealt with
}

// A servicePort is the open port of one service.
type servicePort struct {
	net.Listener
	portTarget
	address  netip.Addr // as ServicePorts.Address
	assigned uint16
}

// A portTarget is where an assigned port leads. It may change while the port is
// served.
type portTarget struct {
	target atomic.Pointer[registry.Published]
}

// protocol returns the Protocol of the port.
func (t *portTarget) protocol() tunnel.Protocol { return &tunnel.Fixed{Fill: t.fill} }

// fill leaves out the local port: its number was assigned, and does not say which
// port of the service is meant.
func (t *portTarget) fill(req *tunnel.Request) {
	to := t.target.Load()
	req.Name, req.Port, req.LocalPort = to.Name, to.Port, 0
}

// newServicePorts reads who has which port, if any service is to have one. The configured
// listeners are open already: a second gateway by mistake has failed before it touches the
// state.
func newServicePorts(g *Gateway, guard *tunnel.Guard, budget *tunnel.Budget) (*servicePorts, error) {
	p := &servicePorts{
		tableWatcher: newTableWatcher(), g: g, guard: guard, budget: budget, open: map[alloc.PortKey]*servicePort{},
	}
	if g.cfg.ServicePorts == nil {
		p.settled = true
		return p, nil
	}
	return p, p.use(g.cfg.ServicePorts)
}

// use has other settings used from now on. With another State it is as if all services were
// new, with what that file says. After an error no service has a port.
func (p *servicePorts) use(next *ServicePorts) (err error) {
	if p.assignmentFile != nil && next.State != p.cfg.State {
		p.end()
	}
	if p.assignmentFile == nil {
		if p.assignmentFile, err = openAssignmentFile("service ports", "ports", p.g.log, alloc.PortFile(next.State)); err != nil {
			return err
		}
	}
	p.mu.Lock()
	same := p.ports == next.Range
	p.ports, p.problem = next.Range, ""
	p.mu.Unlock()
	p.cfg = *next
	if system, clash := ephemeral(p.cfg.Range); clash && !same {
		p.g.log.Warn("service ports overlap the system's ephemeral ports; a service may find its port taken",
			"range", p.cfg.Range.String(), "system", system.String(), "hint", "choose another range, or reserve it: net.ipv4.ip_local_reserved_ports")
	}
	return nil
}

// end closes all ports and the file: no service has a port any more.
func (p *servicePorts) end() {
	if p.assignmentFile == nil {
		return
	}
	p.g.registry.Publish(nil)
	closed := len(p.open)
	for key := range p.open {
		p.close(key)
	}
	p.assignmentFile.close()
	p.assignmentFile, p.logged = nil, nil
	p.mu.Lock()
	p.list, p.ports = nil, registry.PortRange{}
	p.mu.Unlock()
	p.g.log.Info("service ports closed", "ports", closed)
}

// fail reports that the file of State can't be used.
func (p *servicePorts) fail(err error) {
	p.mu.Lock()
	is := p.problem == err.Error()
	p.problem = err.Error()
	p.mu.Unlock()
	if !is {
		p.g.log.Error("no service has a port: the state cannot be used", "err", err)
	}
}

// run follows the table until ctx is done.
func (p *servicePorts) run(ctx context.Context) error {
	defer func() {
		for key := range p.open {
			p.close(key)
		}
	}()
	p.watch(ctx, &p.g.stopping, p.update)
	return nil
}

// update assigns, opens and closes ports by the current table. It is false where a
// service has no port now and is to be tried again.
func (p *servicePorts) update(ctx context.Context) (complete bool) {
	t := p.g.registry.Table()
	if t == nil {
		return true
	}
	next := p.g.settings.Load().ServicePorts
	if next == nil {
		p.end()
		p.mu.Lock()
		p.problem = ""
		p.mu.Unlock()
		return true
	}
	if err := p.use(next); err != nil {
		p.fail(err)
		return false
	}
	return p.assignAll(ctx, t)
}

// assignAll is update by the settings in use.
func (p *servicePorts) assignAll(ctx context.Context, t *registry.Table) (complete bool) {
	wishes, keys := portRequests(t)
	next, opened, failed := p.assign(ctx, keys)
	saved := p.save(next)
	if !saved {
		// An assignment that is not on the disk is not announced.
		next = slices.DeleteFunc(next, func(a alloc.Port) bool {
			if !a.Gone.IsZero() || p.wasAssigned(a) {
				return false
			}
			if opened[a.PortKey] {
				p.close(a.PortKey)
			}
			failed = append(failed, alloc.PortFailure{PortKey: a.PortKey, Err: errors.New(p.saveError)})
			return true
		})
	}
	wanted := map[alloc.PortKey]uint16{}
	for _, a := range next {
		if a.Gone.IsZero() {
			wanted[a.PortKey] = a.Assigned
		}
	}
	var published []registry.Published
	for key, o := range p.open {
		if w, ok := wishes[key]; ok && wanted[key] == o.assigned {
			w.Assigned = o.assigned
			published = append(published, w)
		}
	}
	p.g.registry.Publish(published)
	closed := 0
	for key, o := range p.open {
		if _, ok := wishes[key]; !ok || wanted[key] != o.assigned {
			p.close(key)
			closed++
		}
	}
	for key, o := range p.open {
		w := wishes[key]
		o.target.Store(&w)
	}
	begun := 0
	for key := range opened {
		if o := p.open[key]; o != nil {
			begun++
			p.serve(ctx, tunnel.Listener{Listener: o.Listener, Name: (&ServicePorts{Address: o.address}).listenAddress(o.assigned), Protocols: []tunnel.Protocol{o.protocol()}})
		}
	}
	p.logChanges(begun, closed, failed)
	list := describe(&p.cfg, wishes, next, failed, func(a alloc.Port) bool { return p.open[a.PortKey] != nil })
	p.mu.Lock()
	p.list, p.settled = list, true
	p.mu.Unlock()
	return saved && len(failed) == 0
}

// wasAssigned reports whether the state file has the assignment.
func (p *servicePorts) wasAssigned(a alloc.Port) bool {
	return slices.ContainsFunc(p.assigned, func(h alloc.Port) bool {
		return h.Service == a.Service && h.Protocol == a.Protocol && h.Assigned == a.Assigned
	})
}

// rekeyOpen moves open ports to the new keys of their services: a service that begins
// to name its port keeps the one it has.
func (p *servicePorts) rekeyOpen(next []alloc.Port) {
	at := make(map[protocolPort]alloc.PortKey, len(p.open))
	for key, o := range p.open {
		at[protocolPort{key.Protocol, o.assigned}] = key
	}
	for _, a := range next {
		was, ok := at[protocolPort{a.Protocol, a.Assigned}]
		if ok && a.Gone.IsZero() && was != a.PortKey && was.Service == a.Service {
			p.open[a.PortKey] = p.open[was]
			delete(p.open, was)
		}
	}
}

// assign finds a port for each key and opens those that are not open. A port that
// another process has is skipped, unless it was assigned before: then the assignment
// stays, and the port fails.
func (p *servicePorts) assign(ctx context.Context, keys []alloc.PortKey) (next []alloc.Port, opened map[alloc.PortKey]bool, failed []alloc.PortFailure) {
	known := make(map[alloc.PortKey]uint16, len(p.assigned))
	for _, a := range p.assigned {
		known[a.PortKey] = a.Assigned
	}
	ours := p.g.ownPorts()
	held := map[protocolPort]bool{}
	plan := alloc.PortPlan{
		Range: p.cfg.Range, ReuseAfter: p.cfg.ReuseAfter, Now: now(),
		Taken: func(protocol string, port uint16) bool { return ours[port] || held[protocolPort{protocol, port}] },
	}
	opened, bad := map[alloc.PortKey]bool{}, map[alloc.PortKey]error{}
	next = p.assigned
	for {
		var full []alloc.PortFailure
		next, full = plan.Assign(keys, next)
		p.rekeyOpen(next)
		again := false
		next = slices.DeleteFunc(next, func(a alloc.Port) bool {
			was := p.open[a.PortKey]
			if !a.Gone.IsZero() || was != nil && was.assigned == a.Assigned && was.address == p.cfg.Address || bad[a.PortKey] != nil {
				return false
			}
			err := p.listen(ctx, a, p.cfg.Address)
			if was != nil && was.assigned == a.Assigned && inUse(err) && !heldByOthers(err, was.Addr()) { // it may be in the way, at another address
				p.closePort(was)
				delete(p.open, a.PortKey)
				if err = p.listen(ctx, a, p.cfg.Address); err != nil {
					opened[a.PortKey] = p.listen(ctx, a, was.address) == nil
				}
			} else if was != nil && err == nil {
				p.closePort(was)
			}
			if err == nil {
				opened[a.PortKey] = true
				return false
			}
			if known[a.PortKey] == a.Assigned || !inUse(err) {
				bad[a.PortKey] = err
				return false
			}
			held[protocolPort{a.Protocol, a.Assigned}], again = true, true
			return true
		})
		if !again {
			failed = full
			break
		}
	}
	for key, err := range bad {
		failed = append(failed, alloc.PortFailure{PortKey: key, Err: err})
	}
	return next, opened, failed
}

// A protocolPort is a port of a protocol.
type protocolPort struct {
	protocol string
	port     uint16
}

// inUse reports whether err is that another socket has the port.
func inUse(err error) bool {
	const windows = syscall.Errno(10048) // WSAEADDRINUSE
	errno, ok := errors.AsType[syscall.Errno](err)
	return ok && (errno == syscall.EADDRINUSE || errno == windows)
}

// listen opens the port of an assignment at an address.
func (p *servicePorts) listen(ctx context.Context, a alloc.Port, address netip.Addr) error {
	if !p.budget.Take(1) {
		return errors.New("every descriptor is taken")
	}
	ln, err := tunnel.Listen(ctx, (&ServicePorts{Address: address}).listenAddress(a.Assigned))
	if err != nil {
		p.budget.Give(1)
		return err
	}
	p.guard.OwnListener(ln.Addr())
	p.open[a.PortKey] = &servicePort{Listener: ln, address: address, assigned: a.Assigned}
	return nil
}

// close closes the port of a key. Its tunnels go on.
func (p *servicePorts) close(key alloc.PortKey) {
	p.closePort(p.open[key])
	delete(p.open, key)
}

func (p *servicePorts) closePort(o *servicePort) {
	_ = o.Close()
	p.guard.Disown(o.Addr())
	p.budget.Give(1)
}

// logChanges logs what has changed.
func (p *servicePorts) logChanges(begun, closed int, failed []alloc.PortFailure) {
	slices.SortFunc(failed, func(a, b alloc.PortFailure) int { return a.Compare(b.PortKey) })
	before := len(p.logged)
	p.logged.logNew(len(failed),
		func(i int) (alloc.PortKey, error) { return failed[i].PortKey, failed[i].Err },
		func(i int) {
			p.g.log.Warn("service has no port", "service", failed[i].PortKey.String(), "err", failed[i].Err)
		},
		func(n int) { p.g.log.Warn("more services have no port", "services", n) })
	if begun > 0 || closed > 0 || before != len(p.logged) {
		p.g.log.Info("serving service ports", "opened", begun, "closed", closed, "open", len(p.open), "without", len(p.logged), "range", p.cfg.Range.String())
	}
}

// describe returns what /status shows with those settings.
func (p *servicePorts) describe(cfg *ServicePorts) *StatusPorts {
	p.mu.Lock()
	defer p.mu.Unlock()
	ports := cmp.Or(p.ports, cfg.Range) // before there is a port it is not in use yet
	return &StatusPorts{Range: ports.String(), Problem: p.problem, Ports: append([]ServicePort{}, p.list...)}
}

// status returns what /status shows; settled is false before the first table
// has been dealt with.
func (p *servicePorts) status() (list []ServicePort, settled bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.list, p.settled
}

// count returns how many ports are meant.
func (p *servicePorts) count(meant func(*ServicePort) bool) float64 {
	list, _ := p.status()
	n := 0
	for i := range list {
		if meant(&list[i]) {
			n++
		}
	}
	return float64(n)
}

// listeners returns the open ports as listeners, for Explain.
func (p *servicePorts) listeners() []Listener {
	var all []Listener
	list, _ := p.status()
	for _, s := range list {
		if name, err := tunnel.ParseName(s.Name); err == nil && s.State == PortOpen {
			d := &portTarget{}
			d.target.Store(&registry.Published{Name: name, Port: s.Port})
			all = append(all, Listener{Address: s.Address, Protocols: []tunnel.Protocol{d.protocol()}})
		}
	}
	return all
}

// ownPorts returns the ports of the configured listeners and of the admin port.
func (g *Gateway) ownPorts() map[uint16]bool {
	all := map[uint16]bool{}
	add := func(addr net.Addr) {
		if a, ok := addr.(*net.TCPAddr); ok {
			all[uint16(a.Port)] = true
		}
	}
	for _, ln := range g.listeners {
		add(ln.Addr())
	}
	for _, addr := range g.inbound.addrs() {
		add(addr)
	}
	for _, addr := range g.adminPort.addrs() {
		add(addr)
	}
	return all
}

// portRequests returns the services of a table that get a port, by key.
func portRequests(t *registry.Table) (map[alloc.PortKey]registry.Published, []alloc.PortKey) {
	list := t.Publishable()
	wishes, keys := make(map[alloc.PortKey]registry.Published, len(list)), make([]alloc.PortKey, len(list))
	for i, w := range list {
		keys[i] = alloc.PortKey{Protocol: w.Protocol, Service: w.Name.String(), Port: w.Port}
		wishes[keys[i]] = w
	}
	return wishes, keys
}
