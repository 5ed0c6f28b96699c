// Package gateway composes the pieces into a running gateway: listeners and
// their protocols, the registry with its sources, the router, the relay, the
// admin port, and the order in which they stop.
//
//	g, err := gateway.New(ctx, gateway.Config{
//		Listeners: []gateway.Listener{{Address: ":443", Protocols: []tunnel.Protocol{&sni.Protocol{}, &connect.Protocol{}}}},
//		Sources:   []registry.Source{&file.Source{Path: "culvert.yaml"}},
//	})
//	if err != nil {
//		return err
//	}
//	return g.Run(ctx, nil)
//
// It reads no flags and no files: those are the command's.
package gateway

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"culvert.dev/identity"
	"culvert.dev/identity/enroll"
	"culvert.dev/identity/jwt"
	"culvert.dev/internal/admin"
	"culvert.dev/internal/gateway/inbound"
	"culvert.dev/internal/gateway/upstream"
	"culvert.dev/internal/metrics"
	"culvert.dev/internal/names"
	"culvert.dev/internal/udp"
	"culvert.dev/nat"
	"culvert.dev/registry"
	"culvert.dev/registry/checks"
	"culvert.dev/registry/peer"
	"culvert.dev/registry/peer/join"
	"culvert.dev/reverse"
	"culvert.dev/tunnel"
)

// Defaults of a Config.
const (
	DefaultDrainDelay   = 5 * time.Second
	DefaultDrainTimeout = 30 * time.Second
)

// firstTableTimeout is how long serving waits for the sources at the start. What
// connects meanwhile waits in the kernel.
const firstTableTimeout = 5 * time.Second

// reservedDescriptors descriptors are never given to clients: they are for the admin
// port, DNS, reloading, logs.
const reservedDescriptors = 64

// ErrInterrupted is the cause of Run's context where somebody at a terminal
// ended it. Nobody waits to hear then that the gateway is not ready any more,
// and without tunnels it ends at once.
var ErrInterrupted = errors.New("interrupted")

// A Gateway serves from New to the end of Run.
type Gateway struct {
	cfg        Config
	log        *slog.Logger
	registry   *registry.Registry
	names      *names.Source // of the registry: what DNS answers
	checker    *checks.Checker
	upstreams  *upstream.Transports
	router     *tunnel.Router
	handler    *reservedNames // of all streams: before the router
	peers      *peer.Peers
	site       *join.Site // the peers that have joined
	authority  *enroll.Authority
	groups     *reverse.Groups
	sessions   *reverse.Server // of connectors
	keeper     *reverse.Keeper // of groups
	connector  *connector      // of Config.Reverse
	loops      *tunnel.Loops
	relay      *tunnel.Relay
	server     *tunnel.Server
	metrics    *metrics.Metrics
	access     *admin.AccessLog
	refusals   admin.RefusalLog
	listeners  []tunnel.Listener
	datagrams  *udp.Server
	toReplicas *upstream.Transports // to other replicas
	replicas   *reverse.Replicas

	droppedDatagrams atomic.Uint64 // on the way to clients of CONNECT-UDP

	sockets   []*inbound.Socket // of Config.Listeners
	http3     http3Sockets
	addrs     []net.Addr // of all listeners, in the order of the Config
	ports     *servicePorts
	vips      *vipController
	inbound   *listeners
	dns       *dnsService
	adminPort *socketSet[string]
	healthLn  net.Listener
	started   time.Time
	stopping  atomic.Bool
	reloads   reloads
	restart   atomic.Pointer[[]PendingChange] // what RestartNeeded was told
	memory    memoryWatch
	expiry    *expiryWatch
	secrets   secretKeys
	tokens    *jwt.Tokens

	credentials *credentialWatch

	policyUses policyUses

	reconfiguring sync.Mutex // held by Reconfigure, which sets what follows
	currentLimits atomic.Pointer[tunnel.Limits]
	nat           *natService
	revoker       *revoker
	settings      atomic.Pointer[Config] // the last one: what of it Reconfigure takes up counts
}

// New opens the listeners. Run serves them, or Close gives them back.
func New(ctx context.Context, cfg Config) (*Gateway, error) {
	if cfg.Identity == nil {
		cfg.Identity = new(identity.Store)
	}
	g := &Gateway{cfg: cfg, log: cfg.Log, metrics: metrics.New(), started: time.Now(), secrets: secretKeys{store: cfg.Identity}}
	if g.log == nil {
		g.log = slog.New(slog.DiscardHandler)
	}
	if len(cfg.Listeners) == 0 && cfg.ServicePorts == nil && cfg.DNS == nil && len(cfg.SourceListeners) == 0 && !cfg.SourcesListen && !cfg.DialOnly && cfg.Reverse == nil {
		return nil, errors.New("gateway: no listener")
	}
	g.expiry = newExpiryWatch(g.log, cfg.Identity)
	g.currentLimits.Store(&cfg.Limits)
	g.settings.Store(&cfg)
	guard, budget := &tunnel.Guard{}, descriptors()
	if cfg.DNS != nil {
		budget.Limit = max(budget.Limit-dnsDescriptors, budget.Limit/2)
	}
	g.access = &admin.AccessLog{Log: g.log}
	observe := func(o *tunnel.Outcome) {
		g.metrics.Observe(o)
		g.access.Observe(o)
		g.refusals.Observe(o)
		if cfg.Observe != nil {
			cfg.Observe(o)
		}
	}
	g.tokens = &jwt.Tokens{Log: g.log, ReadFile: cfg.ReadFile, Dial: cfg.Sockets.DialContext}
	g.tokens.Trust = cfg.Identity.Trust
	if err := g.tokens.Use(cfg.Issuers); err != nil {
		return nil, err
	}
	g.credentials = newCredentialWatch(g)
	g.groups = &reverse.Groups{Log: g.log}
	g.sessions = &reverse.Server{Groups: g.groups, CurrentVia: g.via, Log: g.log}
	builder := &inbound.Builder{
		Sessions:       g.sessions,
		CredentialGone: g.credentials.add,
		STUN:           new(nat.Responder).Answer,
		Tokens:         g.tokens,
		CurrentVia:     g.via, Table: func() *registry.Table { return g.registry.Table() },
		Limits: g.currentLimits.Load, Budget: budget, Observe: observe, Log: g.log, Identity: cfg.Identity,
		UDP: &udp.Dialer{Guard: guard, DontFragment: true, Sockets: cfg.Sockets}, DroppedDatagrams: &g.droppedDatagrams, // RFC 9298 section 5
	}
	g.dns, g.adminPort = newDNSService(ctx, g, guard), newAdminPort(g, guard)
	g.inbound = newListeners(g, guard, builder)
	if err := g.listen(ctx, guard); err != nil {
		g.Close()
		return nil, err
	}
	direct := &tunnel.NetDialer{Guard: guard, Sockets: cfg.Sockets}
	g.upstreams = &upstream.Transports{Direct: direct, Lookup: cfg.Lookup, Budget: budget, CurrentVia: g.via, Identity: cfg.Identity, ReadFile: cfg.ReadFile, JWTSVID: cfg.JWTSVID, RunCommand: cfg.RunCommand, Log: g.log}
	if err := g.upstreams.UseProxy(cfg.UpstreamProxy); err != nil {
		g.Close()
		return nil, err
	}
	g.keeper = &reverse.Keeper{Groups: g.groups, Log: g.log}
	g.upstreams.Group = g.groups.Transport
	g.registry = &registry.Registry{Live: g.groups.Service, Mesh: cfg.Mesh, Lookup: cfg.Lookup, Refuses: cfg.Refuses, NewTransport: g.upstreams.New, Log: g.log}
	g.groups.Authorize = g.registry.MayRegister
	g.names = &names.Source{Registry: g.registry, VIPs: g.dns.vips, DeferIdentity: g.dns.defersIdentity, Local: g.dns.local}
	g.loops = &tunnel.Loops{Count: cfg.Loops, Budget: budget}
	g.relay = &tunnel.Relay{CurrentLimits: g.currentLimits.Load, Loops: g.loops, Log: g.log}
	g.router = &tunnel.Router{
		Resolver: newDialBackResolver(g.registry), Dialer: direct, Relay: g.relay, Budget: budget,
		Observe: observe, CurrentLimits: g.currentLimits.Load,
	}
	g.nat = newNATService(g)
	g.connector = newConnector(g, budget, direct, observe)
	g.connector.use(cfg.Reverse)
	g.sessions.Router = g.router
	g.handler = &reservedNames{router: g.router, arrived: g.nat.proofs.arrived, handlers: map[tunnel.Name]reservedName{
		reverse.Name: {Handler: g.sessions}, reverse.PoolName: {Handler: g.sessions.Pool(), Anonymous: true}, dialBackName: {Handler: g.router},
	}}
	g.newReplicas(direct, budget)
	if err := g.newPeers(); err != nil {
		g.Close()
		return nil, err
	}
	g.revoker = newRevoker(g.router, g.sessions, cfg.Identity, g.log)
	g.registry.OnSwap = g.revoker.swapped
	g.server = &tunnel.Server{Handler: g.handler, CurrentLimits: g.currentLimits.Load, Budget: budget, Observe: observe, Log: g.log, Loops: g.loops}
	g.datagrams = &udp.Server{
		Router: g.router, Dialer: &udp.Dialer{Guard: guard, Sockets: cfg.Sockets}, Budget: budget, CurrentLimits: g.currentLimits.Load, Observe: observe, Log: g.log,
	}
	if err := g.openStates(guard, budget); err != nil {
		g.Close()
		return nil, err
	}
	g.onTable(g.inbound.tableChanged)
	g.checker = &checks.Checker{Registry: g.registry, Dial: direct.DialEndpoint, TLS: g.upstreams.TLSLayer, Lookup: cfg.Lookup, Budget: budget, Log: g.log}
	g.onTable(g.checker.Changed)
	g.onTable(g.peers.TableChanged)
	g.onTable(g.nat.tableChanged)
	if cfg.OnTable != nil {
		g.onTable(cfg.OnTable)
	}
	if cfg.DNS != nil {
		g.dns.prepare(cfg.DNS.Server)
	}
	g.watchMemory(budget)
	g.gauges(budget)
	return g, nil
}

// openStates locks and reads the state files of ports and addresses.
func (g *Gateway) openStates(guard *tunnel.Guard, budget *tunnel.Budget) (err error) {
	if g.ports, err = newServicePorts(g, guard, budget); err != nil {
		return err
	}
	g.onTable(g.ports.tableChanged)
	if g.vips, err = newVIPController(g); err != nil {
		return err
	}
	g.onTable(g.vips.tableChanged)
	g.useSite(&g.cfg)
	return nil
}

// closeStates unlocks the files of openStates.
func (g *Gateway) closeStates() {
	if g.site != nil {
		g.site.Close()
		g.authority.Close()
	}
	if g.keeper != nil {
		g.keeper.Close()
	}
	if g.ports != nil && g.ports.assignmentFile != nil {
		g.ports.assignmentFile.close()
	}
	if g.vips != nil && g.vips.assignmentFile != nil {
		g.vips.assignmentFile.close()
	}
}

// via returns what this gateway calls itself.
func (g *Gateway) via() string { return g.settings.Load().Via }

// listen opens every socket and tells the guard which are our own.
func (g *Gateway) listen(ctx context.Context, guard *tunnel.Guard) error {
	for _, l := range g.cfg.Listeners {
		if l.Datagrams != nil {
			s, err := g.inbound.builder.OpenSocket(ctx, l.Address, l.Address, l.Datagrams)
			if err != nil {
				return err
			}
			guard.OwnListener(s.Conn.LocalAddr())
			g.addrs = append(g.addrs, s.Conn.LocalAddr())
			g.sockets = append(g.sockets, s)
			continue
		}
		ln := l.Socket
		if ln == nil {
			var err error
			if ln, err = tunnel.Listen(ctx, l.Address); err != nil {
				return err
			}
		}
		guard.OwnListener(ln.Addr())
		g.addrs = append(g.addrs, ln.Addr())
		g.listeners = append(g.listeners, tunnel.Listener{Listener: ln, Name: l.Address, Protocols: l.Protocols, ConnHeader: l.ConnHeader, RequireTLS: l.RequireTLS})
	}
	if err := g.inbound.openAll(ctx, g.cfg.SourceListeners); err != nil {
		return err
	}
	for _, l := range g.cfg.SourceListeners {
		g.addrs = append(g.addrs, g.inbound.open[l.Name].addr())
	}
	if err := g.dns.openAll(ctx); err != nil {
		return err
	}
	if err := g.adminPort.openAll(ctx); err != nil {
		return err
	}
	return g.listenHealth(ctx, guard)
}

// Close gives back the sockets and the states of a Gateway that was never run.
func (g *Gateway) Close() {
	for _, ln := range g.listeners {
		_ = ln.Close()
	}
	for _, s := range g.sockets {
		s.Close()
	}
	g.inbound.closeAll()
	g.dns.closeAll()
	g.adminPort.closeAll()
	if g.healthLn != nil {
		_ = g.healthLn.Close()
	}
	g.closeStates()
}

// Addrs returns the addresses of the Listeners and then of the SourceListeners of the
// Config, in their order.
func (g *Gateway) Addrs() []net.Addr { return slices.Clone(g.addrs) }

// Table returns the table that holds now, nil before the first.
func (g *Gateway) Table() *registry.Table { return g.registry.Table() }

// Run serves until ctx is done, then drains: it is no longer ready at once,
// accepts for Config.DrainDelay, then refuses new connections while tunnels may
// end, and aborts those that are left over the last fifth of Config.DrainTimeout.
// A close of now, which may be nil, ends the drain at once.
//
// It returns nil after a drain, and has closed everything then.
func (g *Gateway) Run(ctx context.Context, now <-chan struct{}) error {
	// What serves outlives ctx: a drain goes on after it.
	work, stop := context.WithCancel(context.WithoutCancel(ctx))
	defer stop()
	failed := make(chan error, 2*len(g.cfg.Listeners)+8)
	var wg sync.WaitGroup
	run := func(f func() error) {
		wg.Go(func() {
			if err := f(); err != nil && work.Err() == nil {
				failed <- err
			}
		})
	}
	g.ports.serve = func(ctx context.Context, ln tunnel.Listener) {
		run(func() error {
			err := g.server.Serve(ctx, ln)
			if !errors.Is(err, tunnel.ErrServerClosed) && !errors.Is(err, net.ErrClosed) {
				g.log.Error("service port closed", "listener", ln.Name, "err", err)
			}
			return nil
		})
	}
	run(func() error { return g.ports.run(work) })
	run(func() error { return g.vips.run(work) })
	sources := g.cfg.Sources
	if len(sources) > 0 {
		sources = append(slices.Clone(sources), g.nat) // whose addresses complete those of the others
	}
	run(func() error { return g.registry.Run(work, sources...) })
	run(func() error { return g.nat.manager.Run(work) })
	run(func() error { return g.checker.Run(work) })
	run(func() error { return g.pruneMetrics(work) })
	run(func() error { return g.revoker.run(work) })
	run(func() error { return g.memory.run(work) })
	run(func() error { return g.expiry.run(work) })
	run(func() error { g.tokens.Run(work); return nil })
	run(func() error { return g.credentials.run(work) })
	g.adminPort.run, g.dns.run = run, run
	g.adminPort.serveAll(work)
	run(func() error { return g.adminPort.watchSockets(work) })
	if g.healthLn != nil {
		run(func() error { return g.probes().Serve(work, g.healthLn) })
		g.log.Info("serving the health port", "address", g.healthLn.Addr().String())
	}
	g.dns.serveAll(work)
	run(func() error { return g.dns.watchDNS(work) })
	g.awaitTable(ctx)
	for _, ln := range g.listeners {
		run(func() error {
			if err := g.server.Serve(work, ln); !errors.Is(err, tunnel.ErrServerClosed) {
				return err
			}
			return nil
		})
		g.log.Info("serving", "listener", ln.Name, "address", ln.Addr().String())
	}
	for _, s := range g.sockets {
		g.http3.add(s)
		run(func() error { return s.Serve(work, g.datagrams, g.handler) })
		g.log.Info("serving", "listener", s.Name(), "address", s.Conn.LocalAddr().String())
	}
	run(func() error { return g.connector.run(work) })
	run(func() error { return g.keeper.Run(work) })
	run(func() error { return g.replicas.Run(work) })
	g.inbound.serve = g.serveListener(run)
	g.inbound.serveAll(work)
	run(func() error { return g.inbound.run(work) })
	if g.cfg.Serving != nil {
		g.cfg.Serving()
	}
	var err error
	select {
	case <-ctx.Done():
		g.drain(work, now, errors.Is(context.Cause(ctx), ErrInterrupted))
	case err = <-failed:
		g.stopping.Store(true)
		_ = g.server.Close()
	}
	_ = g.relay.Close()
	_ = g.server.Close()
	g.dns.stop()
	g.http3.close()
	_ = g.datagrams.Close()
	g.upstreams.Close()
	g.toReplicas.Close()
	_ = g.loops.Close()
	stop()
	wg.Wait()
	g.closeStates()
	g.access.Flush()
	return err
}

// awaitTable waits a while for the first table.
func (g *Gateway) awaitTable(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, firstTableTimeout)
	defer cancel()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for g.registry.Table() == nil {
		select {
		case <-ctx.Done():
			g.log.Warn("no configuration loaded yet; refusing all requests")
			return
		case <-tick.C:
		}
	}
}

// Ready says whether the gateway takes traffic, and if not, why. If it does, why
// says that what it serves may be old, or nothing.
func (g *Gateway) Ready() (ok bool, why string) {
	switch {
	case g.stopping.Load():
		return false, "draining"
	case g.registry.Table() == nil:
		return false, "no source has sent its configuration" + g.staleSuffix()
	case g.registry.PendingSources() > 0:
		// What the others said is served. But a replica that takes the place of one
		// that knows more must not have its clients.
		return false, "a source has not sent its configuration yet" + g.staleSuffix()
	}
	if _, settled := g.ports.status(); !settled {
		return false, "the ports of services are not open yet"
	}
	if !g.inbound.settled() {
		return false, "the listeners that sources know of are not open yet"
	}
	if _, settled := g.vips.status(); !settled {
		return false, "virtual IPs are not assigned yet"
	}
	return true, g.stale()
}
