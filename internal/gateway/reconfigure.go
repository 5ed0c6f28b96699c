package gateway

import "culvert.dev/internal/admin"

// Reconfigure has the gateway use what of next may change while it serves: Limits, Memory,
// DrainDelay, DrainTimeout, Admin, AdminControl, DNS, and of ServicePorts and VIPs all but
// State. ServicePorts and VIPs do not come and go. It ignores everything else. After an error
// nothing has changed.
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
	limits := next.Limits
	g.currentLimits.Store(&limits)
	g.memory.change(next.Memory)
	g.dns.use(next.DNS)
	g.settings.Store(&next)
	g.adminPort.tableChanged()
	g.dns.tableChanged()
	if g.ports != nil {
		g.ports.tableChanged()
	}
	if g.vips != nil {
		g.vips.tableChanged()
	}
	return nil
}
