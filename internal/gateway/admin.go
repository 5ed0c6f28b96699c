package gateway

import (
	"context"
	"iter"
	"math"
	"net"
	"net/url"
	"sync/atomic"
	"time"

	"culvert.dev/identity/jwt"
	"culvert.dev/internal/admin"
	"culvert.dev/internal/udp"
	"culvert.dev/nat"
	"culvert.dev/registry"
	"culvert.dev/registry/peer"
	"culvert.dev/tunnel"
)

// A Status is what /status shows.
type Status struct {
	Version    string           `json:"version,omitempty"`
	Ready      bool             `json:"ready"`
	Why        string           `json:"why,omitempty"` // it is not ready, or what it serves may be old
	Started    time.Time        `json:"started"`
	Tunnels    int              `json:"tunnels"`
	Listeners  []StatusListener `json:"listeners"`
	Generation uint64           `json:"generation"` // of the table
	Services   int              `json:"services"`

	Insecure     *StatusInsecure   `json:"insecure,omitempty"`      // what plaintext may go to without mutual TLS
	Stale        *StatusStale      `json:"stale,omitempty"`         // while the table may be old
	Restart      []PendingChange   `json:"restartNeeded,omitempty"` // what of the configuration has changed and is not in force
	ServicePorts *StatusPorts      `json:"servicePorts,omitempty"`
	Health       []StatusHealth    `json:"health,omitempty"`     // the worst first
	Transports   []StatusTransport `json:"transports,omitempty"` // of gateways, in order of preference
	Limits       []StatusLimit     `json:"limits,omitempty"`     // of services, those first that use most of theirs; 20 at most
	MoreLimits   int               `json:"moreLimits,omitempty"` // services with limits that are not listed
	Clients      []StatusClient    `json:"clients,omitempty"`    // that hold most tunnels; 10 at most
	DNS          *StatusDNS        `json:"dns,omitempty"`
	Admin        []StatusAdmin     `json:"admin,omitempty"` // with one that stays open as the configured one cannot be opened
	VIPs         *StatusVIPs       `json:"vips,omitempty"`
	NAT          *nat.Status       `json:"nat,omitempty"`

	Reverse         *ReverseStatus         `json:"reverse,omitempty"`
	SourceListeners []StatusSourceListener `json:"sourceListeners,omitempty"`
	Certificates    []Certificate          `json:"certificates,omitempty"` // those of files; what expires first is first
	Issuers         []jwt.Status           `json:"issuers,omitempty"`      // of tokens, with the state of their keys

	Peers       []peer.Status `json:"peers,omitempty"`       // other sites
	SiteProblem string        `json:"siteProblem,omitempty"` // why no site can join, and none that has joined is in Peers
	Catalog     *peer.Status  `json:"catalog,omitempty"`     // of the gateways of an agent

	Kubernetes any `json:"kubernetes,omitempty"` // what Config.Kubernetes returns
	Identity   any `json:"identity,omitempty"`   // what Config.IdentitySources returns
	Capture    any `json:"capture,omitempty"`    // what Config.Capture returns
}

// StatusInsecure is what the configuration permits plaintext to by "insecure: true".
type StatusInsecure struct {
	Networks []string `json:"networks,omitempty"`
	Services []string `json:"services,omitempty"` // the first of them
	Count    int      `json:"count,omitempty"`    // of all services
}

// StatusPorts are the ports of services.
type StatusPorts struct {
	Range   string        `json:"range"`
	Ports   []ServicePort `json:"ports"`             // by name; those that are kept for nobody, too
	Problem string        `json:"problem,omitempty"` // why no service has a port: its state can't be used
}

// A StatusListener is one listener.
type StatusListener struct {
	Configured string   `json:"configured"`
	Address    string   `json:"address"` // "" where it is not open
	Protocols  []string `json:"protocols"`
	Problem    string   `json:"problem,omitempty"` // why it is not open, or does not serve all that is configured

	RequireTLS bool        `json:"requireTLS,omitempty"`
	TLS        []StatusTLS `json:"tls,omitempty"` // that ends there, as configured
}

// A StatusTLS is how TLS ends at a listener for some names.
type StatusTLS struct {
	Names              []string `json:"names"`         // empty for any
	Any                bool     `json:"any,omitempty"` // whether it ends for all other names, too
	Protocols          []string `json:"protocols"`     // inside
	ClientCertificates string   `json:"clientCertificates"`
}

// describeTLS describes how TLS ends at a listener with settings s.
func describeTLS(s *registry.ListenerSettings) (all []StatusTLS) {
	for i := range s.TLS {
		t := &s.TLS[i]
		one := StatusTLS{Names: []string{}, Any: t.Any, Protocols: t.Protocols, ClientCertificates: t.ClientCertificates()}
		for _, p := range t.Names {
			one.Names = append(one.Names, p.String())
		}
		all = append(all, one)
	}
	return all
}

// statusOf describes a listener that is open at addr.
func statusOf(l *Listener, addr net.Addr) StatusListener {
	s := StatusListener{Configured: l.Address, Address: addressText(addr)}
	for _, p := range l.Protocols {
		s.Protocols = append(s.Protocols, p.Name())
	}
	if l.Datagrams != nil {
		s.Address, s.Protocols = udp.Scheme+s.Address, l.Datagrams.Protos()
	}
	return s
}

// Status says how the gateway is.
func (g *Gateway) Status() Status {
	s := Status{Version: g.cfg.Version, Started: g.started, Tunnels: g.relay.Open(), DNS: g.dns.status(), Admin: g.adminStatus()}
	s.Ready, s.Why = g.Ready()
	for i := range g.cfg.Listeners {
		s.Listeners = append(s.Listeners, statusOf(&g.cfg.Listeners[i], g.addrs[i]))
	}
	if t := g.registry.Table(); t != nil {
		s.Generation, s.Services, s.Insecure = t.Generation(), t.Len(), insecureIn(t)
		var all int
		s.Limits, all = g.limits()
		s.MoreLimits = all - len(s.Limits)
	}
	s.Clients, s.Reverse = g.clients(), g.reverseStatus()
	s.Stale, s.Health, s.Transports = g.staleStatus(), g.health(), g.transportStatus()
	if waiting := g.restart.Load(); waiting != nil {
		s.Restart = *waiting
	}
	if p := g.settings.Load().ServicePorts; p != nil {
		s.ServicePorts = g.ports.describe(p)
	}
	configured, others := g.inbound.describeAll()
	s.Listeners, s.SourceListeners = append(s.Listeners, configured...), others
	s.Certificates = g.expiry.certificates()
	s.Issuers, s.Peers = g.tokens.Status(), g.peers.Status()
	s.Catalog = g.peers.Catalog()
	if err := g.site.Problem(); err != nil {
		s.SiteProblem = err.Error()
	}
	if g.cfg.Kubernetes != nil {
		s.Kubernetes = g.cfg.Kubernetes()
	}
	if g.cfg.IdentitySources != nil {
		s.Identity = g.cfg.IdentitySources()
	}
	if g.cfg.Capture != nil {
		s.Capture = g.cfg.Capture()
	}
	s.NAT = g.nat.status()
	if v := g.settings.Load().VIPs; v != nil {
		state, _ := g.vips.status()
		s.VIPs = &state
	}
	return s
}

// insecureIn returns what of t is said to be insecure, nil for nothing.
func insecureIn(t *registry.Table) *StatusInsecure {
	const most = 20
	var s StatusInsecure
	for n := range t.Networks() {
		if n.Insecure {
			s.Networks = append(s.Networks, n.Name)
		}
	}
	for e := range t.Services() {
		if !e.Insecure {
			continue
		}
		if s.Count++; s.Count <= most {
			s.Services = append(s.Services, e.Name)
		}
	}
	if s.Count == 0 && len(s.Networks) == 0 {
		return nil
	}
	return &s
}

// probes returns the server of the health port. What it answers tells nothing
// of clients, and changes nothing.
func (g *Gateway) probes() *admin.Admin {
	return &admin.Admin{Ready: g.Ready, Metrics: g.metrics.Handler(), Brief: true, Log: g.log}
}

// HealthAddr returns the address of the health port; nil means that there is none.
func (g *Gateway) HealthAddr() net.Addr {
	if g.healthLn == nil {
		return nil
	}
	return g.healthLn.Addr()
}

// adminServer returns the admin server.
func (g *Gateway) adminServer() *admin.Admin {
	return &admin.Admin{
		Ready:   g.Ready,
		Metrics: g.metrics.Handler(),
		Status:  func() any { return g.Status() },
		Explain: func(ctx context.Context, v url.Values) (any, error) {
			q, err := queryOf(v)
			if err != nil {
				return nil, err
			}
			x, err := g.explain(ctx, q)
			if err == nil {
				x.AddResolution(g.names, q)
			}
			return x, err
		},
		Connectors: func() any { return g.Connectors() },
		Resolve:    func(_ context.Context, v url.Values) (any, error) { return g.resolve(v) },
		Registry:   func(ctx context.Context, v url.Values) iter.Seq[any] { return ListRegistry(ctx, g.registry, v) },
		Pprof:      true,
		Tunnels:    g.relay.List,
		CloseTunnels: func(match func(*tunnel.Live) bool) int {
			return g.relay.EndFunc(tunnel.Killed, match)
		},
		Refusals: &g.refusals,
		Sites:    g.Sites,
		Devices:  func() any { return g.authority.Devices() },
		Control:  func() bool { return g.settings.Load().AdminControl },
		Log:      g.log,
	}
}

// reloads counts what Reloaded is told.
type reloads struct {
	good, bad atomic.Int64
	last      atomic.Int64 // unix seconds of the last good one
}

// Reloaded tells the metrics that a configuration was read again, and whether
// it was taken up.
func (g *Gateway) Reloaded(ok bool) {
	if !ok {
		g.reloads.bad.Add(1)
		return
	}
	g.reloads.good.Add(1)
	g.reloads.last.Store(time.Now().Unix())
}

// A PendingChange is a key of the configuration that has changed since the start and that
// only a restart takes up.
type PendingChange struct {
	Key        string `json:"key"`
	InForce    string `json:"inForce"`    // "" for nothing
	Configured string `json:"configured"` // "" for nothing
}

// RestartNeeded says what of the configuration waits for a restart, for /status.
func (g *Gateway) RestartNeeded(list []PendingChange) { g.restart.Store(&list) }

// gauges registers what the metrics read at each scrape.
func (g *Gateway) gauges(budget *tunnel.Budget) {
	m := g.metrics
	m.OpenTunnels(g.relay.OpenByService, g.relay.BytesByService)
	g.reverseGauges()
	m.Gauge("culvert_udp_sessions", "Open UDP sessions, including those without a route yet.", func() float64 { return float64(g.datagrams.Stats().Sessions) })
	m.Gauge("culvert_udp_sessions_half_open", "UDP sessions whose client has not proven yet that it receives answers.", func() float64 { return float64(g.datagrams.Stats().HalfOpen) })
	m.Counter("culvert_udp_dropped_total", "Datagrams from clients that belong to no session and start none, or do not fit: a flood, or clients whose session ended.", func() float64 { return float64(g.datagrams.Stats().Dropped) })
	m.Counter("culvert_connect_udp_dropped_total", "Datagrams between gateways, or to clients of CONNECT-UDP, that were lost here: the other side takes fewer, or they are too large for the path by HTTP/3.", func() float64 {
		return float64(g.droppedDatagrams.Load() + g.upstreams.DroppedDatagrams.Load())
	})
	m.Counter("culvert_loop_stalls_total", "Times that an event loop was blocked for 100 ms or more. This is a bug of culvert: please report it.", func() float64 { return float64(g.loops.Stalls()) })
	m.Gauge("culvert_descriptors_used", "File descriptors used by connections, tunnels and pipes.", func() float64 { return float64(budget.Used()) })
	if budget != nil && budget.Limit < math.MaxInt64 {
		m.Gauge("culvert_descriptors_limit", "File descriptors that connections, tunnels and pipes may use.", func() float64 { return float64(budget.Limit) })
	}
	m.Gauge("culvert_backlog_bytes", "Bytes buffered because a side of a tunnel does not read them, and the memory of unfinished TLS handshakes.", func() float64 { return float64(budget.Buffered()) })
	m.Gauge("culvert_memory_used_bytes", "Memory in use without garbage, measured against the closest limit. 0 without a limit.", func() float64 { return float64(g.memory.used.Load()) })
	m.Gauge("culvert_memory_limit_bytes", "The memory limit that is closest. 0 without a limit.", func() float64 { return float64(g.memory.of.Load()) })
	m.Gauge("culvert_memory_pressure", "Memory pressure: 0 normal, 1 short (new requests are refused), 2 full (no connections are accepted).", func() float64 { return float64(budget.Pressure()) })
	m.Gauge("culvert_ready", "1 while the gateway is ready, otherwise 0.", func() float64 {
		if ok, _ := g.Ready(); ok {
			return 1
		}
		return 0
	})
	m.Gauge("culvert_registry_generation", "Generation of the table. It increases with each change.", func() float64 {
		if t := g.registry.Table(); t != nil {
			return float64(t.Generation())
		}
		return 0
	})
	m.Gauge("culvert_registry_services", "Services in the table.", func() float64 {
		if t := g.registry.Table(); t != nil {
			return float64(t.Len())
		}
		return 0
	})
	g.healthGauges(m)
	g.limitGauges(m)
	g.nat.gauges()
	m.Gauge("culvert_service_ports_open", "Open ports of servicePorts.", func() float64 { return g.ports.count(func(s *ServicePort) bool { return s.State == PortOpen }) })
	m.Gauge("culvert_service_ports_missing", "Services, or ports of services, that should have a port of servicePorts and have none that works.", func() float64 {
		return g.ports.count(func(s *ServicePort) bool { return s.Problem != "" })
	})
	m.Gauge("culvert_source_listeners_open", "Open listeners of the configuration file, of Gateways and of other sources.", func() float64 { return g.inbound.count(false) })
	m.Gauge("culvert_source_listeners_missing", "Listeners of the configuration file, of Gateways and of other sources that cannot be opened, or only in part. DNS listeners and the admin port count as well.", func() float64 {
		return g.inbound.count(true) + float64(g.dns.problems()+g.adminPort.problems())
	})
	m.Gauge("culvert_vips_services", "Services with virtual IPs.", func() float64 { s, _ := g.vips.status(); return float64(s.Services) })
	m.Gauge("culvert_vips_missing", "Virtual IPs that services ask for and do not have.", func() float64 { s, _ := g.vips.status(); return float64(s.Missing) })
	m.Counter("culvert_config_reloads_total", "Successful configuration reloads.", func() float64 { return float64(g.reloads.good.Load()) })
	m.Counter("culvert_config_reload_failures_total", "Failed configuration reloads.", func() float64 { return float64(g.reloads.bad.Load()) })
	m.Gauge("culvert_config_last_reload_timestamp_seconds", "Unix time of the last successful configuration reload. 0 before the first.", func() float64 { return float64(g.reloads.last.Load()) })
	m.GaugeSet("culvert_peer_connected", "1 while what a peer offers is up to date, otherwise 0: its last catalog is kept meanwhile.", []string{"peer"}, g.peerGauges(func(s *peer.Status) float64 {
		if s.Connected {
			return 1
		}
		return 0
	}))
	m.GaugeSet("culvert_peer_services", "Services that a peer offers and that are taken.", []string{"peer"}, g.peerGauges(func(s *peer.Status) float64 { return float64(s.Services) }))
	m.GaugeSet("culvert_peer_services_left_out", "Services of a peer, or names or gateways of it, that are left out: it does not speak for them, or they are malformed.", []string{"peer"}, g.peerGauges(func(s *peer.Status) float64 { return float64(len(s.LeftOut) + s.MoreLeft) }))
	m.GaugeSet("culvert_peer_services_offered", "Services that policies let a peer see.", []string{"peer"}, g.peerGauges(func(s *peer.Status) float64 { return float64(s.Offered) }))
	m.GaugeSet("culvert_peer_last_contact_timestamp_seconds", "Unix time at which something has come from a peer last. Only for peers from which something has come.", []string{"peer"}, func(yield func([]string, float64)) {
		for _, s := range g.peers.Status() {
			if !s.Contact.IsZero() {
				yield([]string{s.Name}, float64(s.Contact.Unix()))
			}
		}
	})
	m.GaugeSet("culvert_transport_up", "Whether a transport to a gateway is in use: 0 while others are preferred because it failed, or while the gateway is unreachable by its only one.", []string{"gateway", "carrier"}, g.transportGauges)
	m.GaugeSet("culvert_certificate_expiry_timestamp_seconds", "Unix time at which a certificate that the gateway presents expires, or one that it verifies by. used_by is listener, dns, via, service or gateway-api, and file is the path in the configuration, or Secret NAMESPACE/NAME; or used_by is key, trust or revocation-list, and file is the name in identity.keys or identity.trust.", []string{"used_by", "file"}, g.expiry.gauges)
	m.CounterSet("culvert_tokens_total", "JSON Web Tokens of clients, by their issuer, which is empty for one that is not configured. result is accepted, or why the token was refused: too-large, malformed, encrypted, algorithm, unknown-issuer, signer, expired, not-yet-valid, audience, no-keys, unknown-key, signature, claims or certificate.", []string{"issuer", "result"}, func(yield func([]string, float64)) {
		g.tokens.Counts(func(issuer string, c jwt.Cause, n uint64) { yield([]string{issuer, string(c)}, float64(n)) })
	})
	m.GaugeSet("culvert_issuer_keys", "Keys of an issuer that tokens are verified by. 0 while there are none.", []string{"issuer"}, func(yield func([]string, float64)) {
		for _, s := range g.tokens.Status() {
			yield([]string{s.Issuer}, float64(s.Keys))
		}
	})
	m.GaugeSet("culvert_issuer_keys_fetched_timestamp_seconds", "Unix time at which the keys of an issuer were fetched last without an error. Only for issuers whose keys are fetched, and were.", []string{"issuer"}, func(yield func([]string, float64)) {
		for _, s := range g.tokens.Status() {
			if s.Fetched != nil {
				yield([]string{s.Issuer}, float64(s.Fetched.Unix()))
			}
		}
	})
	m.GaugeSet("culvert_issuer_problem", "1 where there are no keys of an issuer, or they could not be fetched the last time. The last ones are kept meanwhile.", []string{"issuer"}, func(yield func([]string, float64)) {
		for _, s := range g.tokens.Status() {
			v := 0.0
			if s.Error != "" {
				v = 1
			}
			yield([]string{s.Issuer}, v)
		}
	})
	if g.cfg.Metrics != nil {
		g.cfg.Metrics(m.GaugeSet)
	}
	if g.cfg.DroppedLogLines != nil {
		m.Counter("culvert_log_lines_dropped_total", "Log lines dropped because the log was not read fast enough.", g.cfg.DroppedLogLines)
	}
	m.BuildInfo(g.cfg.Version)
}

// pruneMetrics drops the metrics of services that are gone, once a minute, so that
// services that come and go don't use up the labels.
func (g *Gateway) pruneMetrics(ctx context.Context) error {
	tick := time.NewTicker(time.Minute)
	defer tick.Stop()
	var seen uint64
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
		t := g.registry.Table()
		if t == nil || t.Generation() == seen {
			continue
		}
		seen = t.Generation()
		names := make(map[string]bool, t.Len())
		for s := range t.Services() {
			names[s.Name] = true
		}
		for r := range t.Rules() {
			names[r.Name] = true
		}
		g.metrics.Forget(func(service string) bool { return names[service] })
	}
}
