package gateway

import (
	"culvert.dev/internal/admin"
	"culvert.dev/registry/peer"
)

// Reconfigure has the gateway use what of next may change while it serves: Limits, Memory,
// DrainDelay, DrainTimeout, Via, Admin, AdminControl, DNS, NAT, UpstreamProxy, Issuers, Peers, Join, Enrollment, ServicePorts,
// VIPs, Reverse and Replicas. It
// ignores everything else. After an error nothing has changed.
//
// Where ServicePorts or VIPs come, a State that cannot be used is tried again, and no service
// has a port, or an address, meanwhile. As long as they are there, State does not change.
//
// Via counts for requests from now on. Transports of the table have it from the next table
// on.
//
// No limit that becomes lower ends a tunnel, and open tunnels keep the idle limits that
// they began with. A socket that cannot be opened is tried again; the one in whose place
// it is stays open meanwhile.
func (g *Gateway) Reconfigure(next Config) error {
	if next.Admin != "" {
		if err := admin.CheckAddr(next.Admin, next.AdminRemote); err != nil {
			return err
		}
	}
	if next.VIPs != nil {
		if err := next.VIPs.check(); err != nil {
			return err
		}
	}
	g.reconfiguring.Lock()
	defer g.reconfiguring.Unlock()
	if err := g.tokens.Use(next.Issuers); err != nil {
		return err
	}
	if err := peer.Check(next.Peers); err != nil {
		return err
	}
	if err := g.upstreams.UseProxy(next.UpstreamProxy); err != nil {
		return err
	}
	limits := next.Limits
	g.currentLimits.Store(&limits)
	g.memory.change(next.Memory)
	g.dns.use(next.DNS)
	g.nat.use(next.NAT)
	was := g.settings.Load()
	if next.ServicePorts != nil && was.ServicePorts != nil {
		p := *next.ServicePorts
		p.State = was.ServicePorts.State
		next.ServicePorts = &p
	}
	if next.VIPs != nil && was.VIPs != nil {
		v := *next.VIPs
		v.State = was.VIPs.State
		next.VIPs = &v
	}
	g.settings.Store(&next)
	g.useSite(&next)
	g.connector.use(next.Reverse)
	g.replicas.Use(next.Replicas.config())
	g.adminPort.tableChanged()
	g.dns.tableChanged()
	g.ports.tableChanged()
	g.vips.tableChanged()
	return nil
}
