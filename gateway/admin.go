package gateway

import (
	"context"
	"iter"
	"math"
	"net"
	"net/url"
	"sync/atomic"
	"time"

	"culvert.dev/admin"
	"culvert.dev/tunnel"
	"culvert.dev/udp"
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

	Stale        *StatusStale   `json:"stale,omitempty"`         // while the table may be old
	Restart      []string       `json:"restartNeeded,omitempty"` // parts of the configuration that have changed and are not in force
	ServicePorts *StatusPorts   `json:"servicePorts,omitempty"`
	Health       []StatusHealth `json:"health,omitempty"` // the worst first
	DNS          *StatusDNS     `json:"dns,omitempty"`
	VIPs         *StatusVIPs    `json:"vips,omitempty"`

	SourceListeners []StatusSourceListener `json:"sourceListeners,omitempty"`
	Certificates    []Certificate          `json:"certificates,omitempty"` // those of files; what expires first is first

	Kubernetes any `json:"kubernetes,omitempty"` // what Config.Kubernetes returns
}

// StatusPorts are the ports of services.
type StatusPorts struct {
	Range string        `json:"range"`
	Ports []ServicePort `json:"ports"` // by name; those that are kept for nobody, too
}

// A StatusListener is one listener.
type StatusListener struct {
	Configured string   `json:"configured"`
	Address    string   `json:"address"`
	Protocols  []string `json:"protocols"`
}

// Status says how the gateway is.
func (g *Gateway) Status() Status {
	s := Status{Version: g.cfg.Version, Started: g.started, Tunnels: g.relay.Open(), DNS: g.cfg.DNS.status()}
	s.Ready, s.Why = g.Ready()
	for i, ln := range g.cfg.Listeners {
		l := StatusListener{Configured: ln.Address, Address: g.addrs[i].String()}
		for _, p := range ln.Protocols {
			l.Protocols = append(l.Protocols, p.Name())
		}
		if ln.Datagrams != nil {
			l.Address = udp.Scheme + l.Address
			l.Protocols = append(l.Protocols, ln.Datagrams.Protos()...)
		}
		s.Listeners = append(s.Listeners, l)
	}
	if t := g.registry.Table(); t != nil {
		s.Generation, s.Services = t.Generation(), t.Len()
	}
	s.Stale, s.Health = g.staleStatus(), g.health()
	if parts := g.restart.Load(); parts != nil {
		s.Restart = *parts
	}
	if g.ports != nil {
		list, _ := g.ports.status()
		s.ServicePorts = &StatusPorts{Range: g.cfg.ServicePorts.Range.String(), Ports: append([]ServicePort{}, list...)}
	}
	s.SourceListeners, _ = g.dynamic.status()
	s.Certificates = g.expiry.certificates()
	if g.cfg.Kubernetes != nil {
		s.Kubernetes = g.cfg.Kubernetes()
	}
	if g.vips != nil {
		state, _ := g.vips.status()
		s.VIPs = &state
	}
	return s
}

// listenAdmin opens the admin port and the health port, and has the guard keep
// clients from them.
func (g *Gateway) listenAdmin(ctx context.Context, guard *tunnel.Guard) error {
	for _, p := range []struct {
		address string
		remote  bool
		to      *net.Listener
	}{
		{g.cfg.Admin, g.cfg.AdminRemote, &g.adminLn},
		{g.cfg.Health, true, &g.healthLn},
	} {
		if p.address == "" {
			continue
		}
		if err := admin.CheckAddr(p.address, p.remote); err != nil {
			return err
		}
		ln, err := admin.Listen(ctx, p.address)
		if err != nil {
			return err
		}
		guard.OwnAdmin(ln.Addr())
		*p.to = ln
	}
	return nil
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

// admin returns the admin server.
func (g *Gateway) admin() *admin.Admin {
	return &admin.Admin{
		Ready:   g.Ready,
		Metrics: g.metrics.Handler(),
		Status:  func() any { return g.Status() },
		Explain: func(ctx context.Context, v url.Values) (any, error) {
			q, err := queryOf(v)
			if err != nil {
				return nil, err
			}
			return g.explain(ctx, q)
		},
		Resolve:  func(_ context.Context, v url.Values) (any, error) { return g.resolve(v) },
		Registry: func(ctx context.Context, v url.Values) iter.Seq[any] { return ListRegistry(ctx, g.registry, v) },
		Pprof:    true,
		Tunnels:  g.relay.List,
		CloseTunnels: func(match func(*tunnel.Live) bool) int {
			return g.relay.EndFunc(tunnel.Killed, match)
		},
		Control: g.cfg.AdminControl,
		Log:     g.log,
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

// RestartNeeded says which parts of the configuration have changed since the
// start where only a restart takes them up.
func (g *Gateway) RestartNeeded(parts []string) { g.restart.Store(&parts) }

// gauges registers what the metrics read at each scrape.
func (g *Gateway) gauges(budget *tunnel.Budget) {
	m := g.metrics
	m.Gauge("culvert_tunnels_open", "Tunnels that have not ended.", func() float64 { return float64(g.relay.Open()) })
	m.Gauge("culvert_udp_sessions", "Sessions of UDP, those without a route yet among them.", func() float64 { return float64(g.datagrams.server.Stats().Sessions) })
	m.Gauge("culvert_udp_sessions_half_open", "Of them, those whose client is not proven to hear the answers.", func() float64 { return float64(g.datagrams.server.Stats().HalfOpen) })
	m.Counter("culvert_udp_dropped_total", "Datagrams of clients that were of no session and began none, or did not fit.", func() float64 { return float64(g.datagrams.server.Stats().Dropped) })
	m.Counter("culvert_loop_stalls_total", "Times that a connection waited unannounced and held up an event loop for 100 to 200 ms.", func() float64 { return float64(g.loops.Stalls()) })
	m.Gauge("culvert_descriptors_used", "Descriptors taken by connections, tunnels and pipes.", func() float64 { return float64(budget.Used()) })
	if budget != nil && budget.Limit < math.MaxInt64 {
		m.Gauge("culvert_descriptors_limit", "Descriptors that connections, tunnels and pipes may take.", func() float64 { return float64(budget.Limit) })
	}
	m.Gauge("culvert_backlog_bytes", "Bytes that tunnels hold because a side does not take them.", func() float64 { return float64(budget.Buffered()) })
	m.Gauge("culvert_memory_used_bytes", "Memory in use, without garbage, of the limit that is nearest. 0 without a limit.", func() float64 { return float64(g.memory.used.Load()) })
	m.Gauge("culvert_memory_limit_bytes", "That limit. 0 without one.", func() float64 { return float64(g.memory.of.Load()) })
	m.Gauge("culvert_memory_pressure", "0 calm, 1 short: requests are refused, 2 full: nothing is accepted.", func() float64 { return float64(budget.Pressure()) })
	m.Gauge("culvert_ready", "1 while the gateway takes traffic.", func() float64 {
		if ok, _ := g.Ready(); ok {
			return 1
		}
		return 0
	})
	m.Gauge("culvert_registry_generation", "Generation of the table that is served.", func() float64 {
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
	m.Gauge("culvert_service_ports_open", "Ports of services that are listened at.", func() float64 { return g.ports.count(func(s *ServicePort) bool { return s.State == PortOpen }) })
	m.Gauge("culvert_service_ports_missing", "Services, or ports of them, that are to have a port of their own and have none that works.", func() float64 {
		return g.ports.count(func(s *ServicePort) bool { return s.Problem != "" })
	})
	m.Gauge("culvert_source_listeners_open", "Listeners that sources know of and that are served.", func() float64 { return g.dynamic.count(false) })
	m.Gauge("culvert_source_listeners_missing", "Listeners that sources know of and that can't be opened, or of which a part can't be served.", func() float64 { return g.dynamic.count(true) })
	m.Gauge("culvert_vips_services", "Services that have an address to themselves.", func() float64 { s, _ := g.vips.status(); return float64(s.Services) })
	m.Gauge("culvert_vips_missing", "Addresses that services want and do not have.", func() float64 { s, _ := g.vips.status(); return float64(s.Missing) })
	m.Counter("culvert_config_reloads_total", "Configurations read again and taken up.", func() float64 { return float64(g.reloads.good.Load()) })
	m.Counter("culvert_config_reload_failures_total", "Configurations read again and refused.", func() float64 { return float64(g.reloads.bad.Load()) })
	m.Gauge("culvert_config_last_reload_timestamp_seconds", "When a configuration was last taken up, 0 for not since the start.", func() float64 { return float64(g.reloads.last.Load()) })
	m.GaugeSet("culvert_certificate_expiry_timestamp_seconds", "When the certificate of a file, or of a Secret of a Gateway, that the gateway shows expires.", []string{"used_by", "file"}, g.expiry.gauges)
	if g.cfg.Metrics != nil {
		g.cfg.Metrics(m.GaugeSet)
	}
	if g.cfg.DroppedLogLines != nil {
		m.Counter("culvert_log_lines_dropped_total", "Log lines lost because the log was not read.", g.cfg.DroppedLogLines)
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
