// Package hostdns has the resolver of this host ask a DNS server of this process for some
// names, for as long as the process lives.
//
//	r, err := hostdns.UseResolved(ctx, hostdns.Settings{Server: addr, Domains: []string{"shop.example"}}, log)
//	...
//	err = r.Close()
//
// With systemd-resolved the settings are those of a network interface, which goes with the
// process, also where it is killed. It needs root or CAP_NET_ADMIN, and Linux. UseResolvConf is
// for hosts without it: another process brings resolv.conf back.
package hostdns

import (
	"net/netip"
	"slices"
)

// Settings are what the resolver is told.
type Settings struct {
	Server  netip.AddrPort // the DNS server, by UDP and TCP
	Domains []string       // of names that it is asked for, each with all names below
}

func (s *Settings) equal(o *Settings) bool {
	return s.Server == o.Server && slices.Equal(s.Domains, o.Domains)
}
