package command

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"net/url"
	"os"
	"reflect"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"culvert.dev/dns"
	"culvert.dev/internal/capture"
	"culvert.dev/internal/gateway"
	"culvert.dev/registry/file"
	"culvert.dev/sni"
	"culvert.dev/tunnel"
)

// captureInterval is how often an agent looks up whom it does not capture, and which cgroups there
// are.
const captureInterval = 30 * time.Second

// useSockets has the sockets of an agent of c that captures have the mark of what is not captured.
func useSockets(c *file.Config, cfg *gateway.Config) {
	if c.Agent == nil || c.Agent.Capture == nil {
		return
	}
	cfg.Sockets.Mark = capture.Mark
	cfg.Lookup = (&dns.Resolver{Sockets: cfg.Sockets}).Lookup
}

// An agentCapture leads connections of programs on this host to an agent, as agent.capture of its
// file says. A nil one captures nothing.
type agentCapture struct {
	rules     capture.Rules // that capture nothing
	names     capture.Names // that have addresses
	lookup    func(ctx context.Context, host string) ([]netip.Addr, error)
	resolvers func() []netip.Addr // of this host, which are not captured
	listeners []net.Listener
	log       *slog.Logger
	changed   chan struct{} // the table is another one, or what is wanted

	g         *gateway.Gateway
	installed *capture.Capture
	wanted    atomic.Pointer[wantedCapture] // by the file

	mu      sync.Mutex // guards what follows
	inForce *wantedCapture
	except  []netip.Prefix // of hosts, in force
	vips    int            // in force
	problem string
}

// A wantedCapture is what a file wants to be captured. It is not changed.
type wantedCapture struct {
	on    bool
	rules capture.Rules  // without the addresses of hosts
	cidrs []netip.Prefix // of the file
	hosts []string       // that are not captured
	named bool           // names without a virtual IP are captured, too
}

// newAgentCapture opens the listeners of what c wants to be captured, and adds them to cfg. The
// caller closes it.
func newAgentCapture(ctx context.Context, c *file.Config, cfg *gateway.Config, log *slog.Logger) (*agentCapture, error) {
	if c.Agent == nil || c.Agent.Capture == nil {
		return nil, nil
	}
	a := &agentCapture{lookup: cfg.Lookup, resolvers: new(dns.Resolver).Upstreams, log: log, changed: make(chan struct{}, 1)}
	a.rules = capture.Rules{Name: fmt.Sprintf("agent-%d", os.Getuid()), Mark: cfg.Sockets.Mark}
	if err := a.listen(ctx); err != nil {
		return nil, fmt.Errorf("agent.capture: %w", err)
	}
	wanted := a.want(c)
	a.wanted.Store(wanted)
	protocol := &capture.Protocol{ServerName: sni.ServerName, Serves: a.serves, Log: log, Resolve: a.names.Resolve}
	for _, ln := range a.listeners {
		cfg.Listeners = append(cfg.Listeners, gateway.Listener{Address: "captured", Socket: ln, Protocols: []tunnel.Protocol{protocol}})
	}
	cfg.OnTable = a.change
	cfg.Capture = func() any {
		if s := a.status(); s != nil {
			return s
		}
		return nil
	}
	others := cfg.Metrics
	cfg.Metrics = func(add addGauges) {
		if others != nil {
			others(add)
		}
		a.metrics(add)
	}
	a.answer(cfg, wanted)
	return a, nil
}

// want returns what c wants to be captured; nil of a nil a.
func (a *agentCapture) want(c *file.Config) *wantedCapture {
	if a == nil {
		return nil
	}
	w := &wantedCapture{rules: a.rules}
	if c.Agent == nil || c.Agent.Capture == nil {
		return w
	}
	from, r := c.Agent.Capture, &w.rules
	w.on, w.cidrs, w.hosts = true, from.CIDRs, uncapturedHosts(c)
	r.VIPs, r.CIDRs, r.All = from.VIPs, from.CIDRs, !from.VIPs && len(from.CIDRs) == 0
	r.UIDs, r.Cgroups, r.Except = c.Agent.CapturedUsers(uint32(os.Getuid())), from.Cgroups, from.Except
	// With "*" every name of the world would lead here.
	if from.VIPs && len(c.Agent.Names) > 0 && !slices.Contains(c.Agent.Names, tunnel.AnyName) {
		w.named, r.CIDRs = true, slices.Concat(from.CIDRs, capture.NameRanges())
	}
	return w
}

// follow has w be captured from now on. Connections that stand are left alone.
func (a *agentCapture) follow(w *wantedCapture) {
	if a == nil || reflect.DeepEqual(w, a.wanted.Load()) {
		return
	}
	a.wanted.Store(w)
	a.change()
}

// change has run look at what is to be captured.
func (a *agentCapture) change() {
	select {
	case a.changed <- struct{}{}:
	default:
	}
}

// listen opens a listener of each family of loopback, at the same port.
func (a *agentCapture) listen(ctx context.Context) error {
	for try := 0; ; try++ {
		v4, err := tunnel.Listen(ctx, "127.0.0.1:0")
		if err != nil {
			return err
		}
		a.rules.Port = v4.Addr().(*net.TCPAddr).AddrPort().Port()
		v6, err := tunnel.Listen(ctx, fmt.Sprintf("[::1]:%d", a.rules.Port))
		switch {
		case err == nil:
			a.listeners = []net.Listener{v4, v6}
			return nil
		case errors.Is(err, syscall.EADDRNOTAVAIL), errors.Is(err, syscall.EAFNOSUPPORT): // a host without IPv6
			a.listeners = []net.Listener{v4}
			return nil
		}
		_ = v4.Close()
		if try == 10 || !errors.Is(err, syscall.EADDRINUSE) {
			return err
		}
	}
}

// answer has names of the agent be answered with addresses that are captured as w has it, where cfg
// answers by DNS and has no other address for them.
func (a *agentCapture) answer(cfg *gateway.Config, w *wantedCapture) {
	if a == nil || !w.named || cfg.DNS == nil || cfg.DNS.Local == nil {
		return
	}
	others := cfg.DNS.Local.Addrs
	cfg.DNS.Local.Addrs = func(name tunnel.Name) []netip.Addr {
		if others != nil {
			if addrs := others(name); len(addrs) > 0 {
				return addrs
			}
		}
		v4, v6 := a.names.Addrs(name)
		if len(a.listeners) == 1 {
			return []netip.Addr{v4}
		}
		return []netip.Addr{v4, v6}
	}
}

// uncapturedHosts returns whom programs of this host reach without the agent: the gateways, the
// proxy on the way to them, and resolvers of the file.
func uncapturedHosts(c *file.Config) []string {
	all := map[string]bool{}
	add := func(address string) {
		if host, _, err := net.SplitHostPort(address); err == nil {
			address = host
		}
		if address = strings.Trim(address, "[]"); address != "" {
			all[address] = true
		}
	}
	for _, n := range c.Networks {
		for i := range n.Gateways {
			add(n.Gateways[i].Address.String())
			add(n.Gateways[i].Public.String())
		}
	}
	if c.Reverse != nil {
		for i := range c.Reverse.Gateways {
			for _, address := range c.Reverse.Gateways[i].Addresses {
				add(address)
			}
		}
	}
	if c.UpstreamProxy != nil {
		if u, err := url.Parse(c.UpstreamProxy.URL); err == nil {
			add(u.Host)
		}
	}
	if c.DNS != nil {
		upstreams := c.DNS.Upstreams
		for _, z := range c.DNS.Forward {
			upstreams = slices.Concat(upstreams, z.Upstreams)
		}
		for _, u := range upstreams {
			add(u.Address)
		}
	}
	return slices.Sorted(maps.Keys(all))
}

// start installs the rules, which go with the process. They end with ctx, too: what drains then is
// what was captured before.
func (a *agentCapture) start(ctx context.Context, g *gateway.Gateway) (stop func(), err error) {
	if a == nil {
		return func() {}, nil
	}
	a.g = g
	w := a.wanted.Load()
	except := a.literals(w)
	if a.installed, err = capture.Install(w.with(except)); err != nil {
		return nil, agentCaptureError(err)
	}
	a.use(w, except)
	w.log(a.log, "capturing connections")
	ctx, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	wg.Go(func() { a.run(ctx) })
	return func() { cancel(); wg.Wait() }, nil
}

// with returns the rules of w, with the addresses of hosts.
func (w *wantedCapture) with(except []netip.Prefix) capture.Rules {
	r := w.rules
	r.Except = slices.Concat(r.Except, except)
	return r
}

func (w *wantedCapture) log(log *slog.Logger, message string) {
	r := &w.rules
	log.Info(message, "table", capture.TableName(r.Name), "vips", r.VIPs, "cidrs", r.CIDRs, "uids", r.UIDs, "cgroups", r.Cgroups)
}

// agentCaptureError adds to an error of capture what to do about it.
func agentCaptureError(err error) error {
	hint := ""
	switch {
	case errors.Is(err, capture.ErrNotPermitted):
		hint = "add AmbientCapabilities=CAP_NET_ADMIN to the systemd unit of the agent, or run: sudo setcap cap_net_admin=ep " + os.Args[0]
	case errors.Is(err, capture.ErrOwned):
		hint = "stop the other agent of this user: one of them captures"
	}
	return &cliError{err: fmt.Errorf("agent.%w", err), hint: hint, code: exitFailed}
}

// run keeps the rules as they should be until ctx is done, and removes them.
func (a *agentCapture) run(ctx context.Context) {
	tick := time.NewTicker(captureInterval)
	defer tick.Stop()
	for {
		a.report(a.apply(ctx))
		select {
		case <-ctx.Done():
			if err := a.installed.Close(); err != nil {
				a.log.Error("cannot remove the rules of capture; they end with the process", "err", err)
			}
			return
		case <-tick.C:
		case <-a.changed:
		}
	}
}

// apply has the rules be what the file wants. After an error those before stay, and still follow
// the virtual IPs and cgroups.
func (a *agentCapture) apply(ctx context.Context) error {
	w := a.wanted.Load()
	except := a.exceptions(ctx, w)
	var refused error
	if w != a.inForce || !slices.Equal(except, a.except) {
		if refused = a.installed.Update(w.with(except)); refused == nil {
			if w != a.inForce {
				w.log(a.log, "capturing other connections")
			}
			a.use(w, except)
		}
	}
	return errors.Join(refused, a.installed.Refresh(), a.setVIPs())
}

// use notes what is in force.
func (a *agentCapture) use(w *wantedCapture, except []netip.Prefix) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.inForce, a.except = w, except
}

// literals are the addresses among hosts, and those of resolvers.
func (a *agentCapture) literals(w *wantedCapture) (all []netip.Prefix) {
	if a.resolvers != nil {
		for _, addr := range a.resolvers() {
			all = append(all, hostRange(addr))
		}
	}
	for _, host := range w.hosts {
		if addr, err := netip.ParseAddr(host); err == nil {
			all = append(all, hostRange(addr))
		}
	}
	return all
}

func hostRange(a netip.Addr) netip.Prefix {
	a = a.Unmap().WithZone("")
	return netip.PrefixFrom(a, a.BitLen())
}

// exceptions are the addresses of hosts now.
func (a *agentCapture) exceptions(ctx context.Context, w *wantedCapture) []netip.Prefix {
	all := a.literals(w)
	for _, host := range w.hosts {
		if _, err := netip.ParseAddr(host); err == nil || a.lookup == nil {
			continue
		}
		addrs, _ := a.lookup(ctx, host) // the agent finds out that there are none when it dials
		for _, addr := range addrs {
			all = append(all, hostRange(addr))
		}
	}
	slices.SortFunc(all, netip.Prefix.Compare)
	return slices.Compact(all)
}

// setVIPs captures the addresses that services have now.
func (a *agentCapture) setVIPs() error {
	if !a.inForce.rules.VIPs {
		return nil
	}
	var addrs []netip.Addr
	for _, v := range a.g.Table().AllVIPs() {
		for _, addr := range [...]netip.Addr{v.V4, v.V6} {
			if addr.IsValid() {
				addrs = append(addrs, addr)
			}
		}
	}
	if err := a.installed.SetVIPs(addrs); err != nil {
		return err
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.vips = len(addrs)
	return nil
}

// close closes the listeners.
func (a *agentCapture) close() {
	if a == nil {
		return
	}
	for _, ln := range a.listeners {
		_ = ln.Close()
	}
}

// serves reports whether the service at a virtual IP, or the name that has an address, is that
// of a ClientHello.
func (a *agentCapture) serves(dst netip.AddrPort, hello string) (service string, ok bool) {
	name, err := tunnel.ParseName(hello)
	if err != nil {
		return "", true
	}
	if named, mine := a.names.Name(dst.Addr()); mine {
		return named.String(), named == name
	}
	t := a.g.Table()
	i, ok := t.ByVIP(dst.Addr())
	if !ok {
		return "", true
	}
	for s := range t.Services() {
		if i--; i < 0 {
			return s.Name, slices.ContainsFunc(s.Names, func(p tunnel.Pattern) bool { return p.Matches(name) })
		}
	}
	return "", true
}
