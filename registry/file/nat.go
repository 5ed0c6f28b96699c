package file

import (
	"net/netip"
	"slices"
	"strings"
	"time"

	"culvert.dev/registry"
)

// A NAT says which ports the router in front of this gateway maps.
type NAT struct {
	Ports []NATPort `yaml:"ports,required" what:"a port" empty:"list the addresses of listeners that are to be reached from outside"`

	// Router is the address of the router; zero means that of the default route.
	Router netip.Addr `yaml:"router" as:"routerAddress"`

	// Protocols are tried, in the order of preference that is nat.Protocols; empty means
	// all of them.
	Protocols []string `yaml:"protocols" what:"a protocol" oneof:"pcp nat-pmp upnp" unique:"protocol" empty:"leave the key out for all of them"`

	Lifetime    time.Duration `yaml:"lifetime,min=2m" default:"2h"` // of mappings, to ask for
	STUNServers []string      `yaml:"stunServers" what:"a server" as:"stunServer" unique:"server" empty:"leave the key out to ask the router alone"`
}

// A NATPort is the port of one listener.
type NATPort struct {
	Listener string `yaml:"listener,required,short"`  // its address, as in listeners
	External uint16 `yaml:"external,min=1,max=65535"` // to have outside; 0 means the same
}

func parseRouterAddress(_, s string) (netip.Addr, *complaint) {
	a, err := netip.ParseAddr(s)
	if err != nil || !a.Unmap().Is4() || !a.Unmap().IsGlobalUnicast() {
		return netip.Addr{}, complain("write the address that the router has in this network, such as 192.168.1.1", "%q is not an IPv4 address of a router", clip(s))
	}
	return a.Unmap(), nil
}

func parseSTUNServer(_, s string) (string, *complaint) {
	if c := checkHostPort(s); c != nil {
		return "", complain(c.hint, "server %q: %s", clip(s), c.msg)
	}
	return s, nil
}

// checkNAT finds ports that are none of a listener that others may reach.
func (d *decoder) checkNAT() {
	c, at := d.cfg.NAT, d.root.object("nat")
	if c == nil {
		return
	}
	type outside struct {
		udp  bool
		port uint16
	}
	taken := map[outside]string{}
	for i := range c.Ports {
		p, n := &c.Ports[i], at.item("ports", i)
		if p.Listener == "" {
			continue // which was reported
		}
		l := slices.IndexFunc(d.cfg.Listeners, func(l Listener) bool { return l.Address == p.Listener })
		if l < 0 {
			hint := "write the address of one of listeners, as it is there; the admin port is never mapped"
			d.errorf(n, hint, "there is no listener %q", clip(p.Listener))
			continue
		}
		port := listenPort(p.Listener)
		switch {
		case isSocket(p.Listener):
			d.errorf(n, "leave it out", "%s is a socket of this machine, and has no port to map", clip(p.Listener))
			continue
		case isInherited(p.Listener):
			d.errorf(n, "write the port in the listener, or leave it out", "%s is opened by systemd, and its port is not known here", clip(p.Listener))
			continue
		case registry.OnLoopback(strings.TrimPrefix(p.Listener, udpPrefix)):
			d.errorf(n, "have the listener at an address that the router reaches, or leave the port out", "%s is reached from this machine alone", clip(p.Listener))
			continue
		}
		key := outside{d.cfg.Listeners[l].UDP(), p.External}
		if key.port == 0 {
			key.port = port
		}
		if other, twice := taken[key]; twice {
			d.errorf(n, "give one of them another external port", "%s and %s are to have the same port outside", other, clip(p.Listener))
		}
		taken[key] = p.Listener
	}
}
