package command

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"culvert.dev/dns"
	"culvert.dev/registry/file"
)

// askDNS asks one DNS server for the addresses of a name.
func askDNS(ctx context.Context, server, host string) ([]netip.Addr, error) {
	return (&dns.Resolver{Servers: []string{server}, Timeout: oneCheck}).Lookup(ctx, host+".")
}

// names looks whether the agent answers its names by DNS, and whether the resolver of this host
// asks it. It tries a name of a forward, of which the answer is known.
func (d *doctor) names(ctx context.Context, c *file.Config) {
	if c.Agent == nil || c.Agent.DNS == nil {
		return
	}
	server := c.Agent.DNS.UDPAddress()
	host, want := "", []netip.Addr(nil)
	for _, f := range c.Agent.Forwards.All {
		if addrs := c.ForwardAddrs(f.Service); len(addrs) > 0 && strings.Contains(f.Service.String(), ".") {
			host, want = f.Service.String(), addrs
			break
		}
	}
	if host == "" || server == "" {
		d.add("names", "", checkSkipped, "", "no forward of the agent is at the port of its service, so no name can be tried")
		return
	}
	same := func(got []netip.Addr) bool {
		return slices.ContainsFunc(got, func(a netip.Addr) bool { return slices.Contains(want, a) })
	}
	ctx, cancel := context.WithTimeout(ctx, oneCheck)
	defer cancel()
	got, err := d.ask(ctx, server, host)
	if err != nil || !same(got) {
		d.add("names", host, checkFailed, "start the agent: culvert agent --config FILE", "the agent does not answer %s by DNS at %s", host, server)
		return
	}
	found, err := d.lookup(ctx, host)
	for _, a := range found {
		if addr, bad := netip.ParseAddr(a); bad == nil {
			if same([]netip.Addr{addr.Unmap()}) {
				d.add("names", host, checkOK, "", "the resolver of this host asks the agent for %s", host)
				return
			}
		}
	}
	answer := "it says " + strings.Join(found, " and ")
	if err != nil {
		answer = "it says: " + err.Error()
	}
	remedy := fmt.Sprintf("add install: systemd-resolved or install: resolv.conf to agent.dns, or have the resolver ask %s for %s", server, strings.Join(c.AgentDomains(nil), " and "))
	if c.Agent.DNS.Install != "" {
		remedy = "see the log of the agent; another program may have changed the resolver since"
	}
	d.add("names", host, checkFailed, remedy, "the resolver of this host does not ask the agent for %s: %s", host, answer)
}
