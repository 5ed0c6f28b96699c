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
	"slices"
	"strings"
	"sync"
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
	rules     capture.Rules  // without the addresses of hosts
	hosts     []string       // that are not captured
	names     *capture.Names // that have addresses; nil for none
	lookup    func(ctx context.Context, host string) ([]netip.Addr, error)
	resolvers func() []netip.Addr // of this host, which are not captured, either
	listeners []net.Listener
	log       *slog.Logger
	changed   chan struct{} // the table is another one

	g         *gateway.Gateway
	installed *capture.Capture

	mu    sync.Mutex // guards what follows
	state agentCaptureStatus
}

// An agentCaptureStatus is what an agent captures.
type agentCaptureStatus struct {
	Table   string   `json:"table"`          // of nftables
	All     bool     `json:"all,omitempty"`  // every destination
	VIPs    *int     `json:"vips,omitempty"` // how many addresses; nil where they are not captured
	CIDRs   []string `json:"cidrs,omitempty"`
	UIDs    []uint32 `json:"uids,omitempty"`
	Cgroups []string `json:"cgroups,omitempty"`
	Except  []string `json:"except,omitempty"`
	Problem string   `json:"problem,omitempty"`
}

// newAgentCapture opens the listeners of what c wants to be captured, and adds them to cfg. The
// caller closes it.
func newAgentCapture(ctx context.Context, c *file.Config, cfg *gateway.Config, log *slog.Logger) (*agentCapture, error) {
	if c.Agent == nil || c.Agent.Capture == nil {
		return nil, nil
	}
	want, own := c.Agent.Capture, os.Getuid()
	a := &agentCapture{lookup: cfg.Lookup, resolvers: new(dns.Resolver).Upstreams, hosts: uncapturedHosts(c), log: log, changed: make(chan struct{}, 1)}
	a.rules = capture.Rules{
		Name: fmt.Sprintf("agent-%d", own), Mark: cfg.Sockets.Mark, VIPs: want.VIPs, CIDRs: want.CIDRs, All: !want.VIPs && len(want.CIDRs) == 0,
		UIDs: c.Agent.CapturedUsers(uint32(own)), Cgroups: want.Cgroups, Except: want.Except,
	}
	// With "*" every name of the world would lead here.
	if want.VIPs && len(c.Agent.Names) > 0 && !slices.Contains(c.Agent.Names, tunnel.AnyName) {
		a.names = new(capture.Names)
		a.rules.CIDRs = append(slices.Clone(want.CIDRs), capture.NameRanges()...)
	}
	if err := a.listen(ctx); err != nil {
		return nil, fmt.Errorf("agent.capture: %w", err)
	}
	a.state = agentCaptureStatus{Table: capture.TableName(a.rules.Name), All: a.rules.All, CIDRs: texts(want.CIDRs), UIDs: a.rules.UIDs, Cgroups: want.Cgroups, Except: texts(want.Except)}
	if want.VIPs {
		a.state.VIPs = new(int)
	}
	protocol := &capture.Protocol{ServerName: sni.ServerName, Serves: a.serves, Log: log}
	if a.names != nil {
		protocol.Resolve = a.names.Resolve
	}
	for _, ln := range a.listeners {
		cfg.Listeners = append(cfg.Listeners, gateway.Listener{Address: "captured", Socket: ln, Protocols: []tunnel.Protocol{protocol}})
	}
	cfg.OnTable = func() {
		select {
		case a.changed <- struct{}{}:
		default:
		}
	}
	cfg.Capture = func() any { return a.status() }
	a.use(cfg)
	return a, nil
}

// texts returns ranges as text.
func texts(ranges []netip.Prefix) (all []string) {
	for _, r := range ranges {
		all = append(all, r.String())
	}
	return all
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

// use has names of the agent be answered with addresses that are captured, where cfg answers by
// DNS and has no other address for them.
func (a *agentCapture) use(cfg *gateway.Config) {
	if a == nil || a.names == nil || cfg.DNS == nil || cfg.DNS.Local == nil {
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
	rules := a.rules
	rules.Except = slices.Concat(a.rules.Except, a.literals())
	if a.installed, err = capture.Install(rules); err != nil {
		return nil, agentCaptureError(err)
	}
	a.log.Info("capturing connections", "table", a.state.Table, "vips", rules.VIPs, "cidrs", rules.CIDRs, "uids", rules.UIDs, "cgroups", rules.Cgroups)
	ctx, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	wg.Go(func() { a.run(ctx) })
	return func() { cancel(); wg.Wait() }, nil
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
	var except []netip.Prefix
	for {
		now := a.exceptions(ctx)
		var err error
		if !slices.Equal(now, except) {
			rules := a.rules
			rules.Except = slices.Concat(a.rules.Except, now)
			err = a.installed.Update(rules)
		}
		if err == nil {
			except = now
			err = errors.Join(a.installed.Refresh(), a.setVIPs())
		}
		a.report(err)
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

// literals are the addresses among hosts, and those of resolvers.
func (a *agentCapture) literals() (all []netip.Prefix) {
	if a.resolvers != nil {
		for _, addr := range a.resolvers() {
			all = append(all, hostRange(addr))
		}
	}
	for _, host := range a.hosts {
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
func (a *agentCapture) exceptions(ctx context.Context) []netip.Prefix {
	all := a.literals()
	for _, host := range a.hosts {
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
	if !a.rules.VIPs {
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
	*a.state.VIPs = len(addrs)
	return nil
}

// report keeps a problem for the status, and logs a new one.
func (a *agentCapture) report(err error) {
	problem := ""
	if err != nil {
		problem = err.Error()
	}
	a.mu.Lock()
	before := a.state.Problem
	a.state.Problem = problem
	a.mu.Unlock()
	if problem != "" && problem != before {
		a.log.Error("cannot change the rules of capture; they are as before, and are tried again", "err", err, "retry_in", captureInterval)
	}
}

// String says what is captured, for people.
func (s *agentCaptureStatus) String() string {
	var to []string
	if s.All {
		to = append(to, "every address")
	}
	if s.VIPs != nil {
		to = append(to, plural(*s.VIPs, "virtual IP"))
	}
	to = append(to, s.CIDRs...)
	if len(s.Except) > 0 {
		to = append(to, "but "+strings.Join(s.Except, ", "))
	}
	of := "every program"
	if n := len(s.UIDs) + len(s.Cgroups); n > 0 {
		var who []string
		for _, uid := range s.UIDs {
			who = append(who, fmt.Sprintf("uid %d", uid))
		}
		for _, path := range s.Cgroups {
			who = append(who, "cgroup "+path)
		}
		of = strings.Join(who, ", ")
	}
	text := fmt.Sprintf("%s, of %s (table inet %s)", strings.Join(to, ", "), of, s.Table)
	if s.Problem != "" {
		text += ": " + s.Problem
	}
	return text
}

func (a *agentCapture) status() agentCaptureStatus {
	a.mu.Lock()
	defer a.mu.Unlock()
	s := a.state
	if s.VIPs != nil {
		n := *s.VIPs
		s.VIPs = &n
	}
	return s
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
	if a.names != nil {
		if named, mine := a.names.Name(dst.Addr()); mine {
			return named.String(), named == name
		}
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
