package tunnel

import (
	"cmp"
	"slices"
)

// A ClientUse is what one client or one principal holds.
type ClientUse struct {
	Name        string // an address, the prefix of several, a user of this machine, or the ID of a principal
	Principal   bool
	Connections int64 // and sessions; none of a principal
	Pending     int64 // of them, those that have not asked for anything yet
	Tunnels     int64 // open or being dialed
	Unread      int64 // bytes that it has sent on shared connections and that nobody reads
}

// Most returns the clients and principals that hold something, at most n: those with the
// most tunnels first, and then those with the most connections.
func (m *Clients) Most(n int) []ClientUse {
	var all []ClientUse
	m.mu.Lock()
	for _, c := range m.accounts {
		if c.prefix.Bits() != sitePrefix { // which is counted with its clients
			all = c.appendUse(all)
		}
	}
	for _, c := range m.users {
		all = c.appendUse(all)
	}
	for _, c := range m.known {
		all = c.appendUse(all)
	}
	m.mu.Unlock()
	slices.SortFunc(all, func(a, b ClientUse) int {
		return cmp.Or(cmp.Compare(b.Tunnels, a.Tunnels), cmp.Compare(b.Connections, a.Connections), cmp.Compare(a.Name, b.Name))
	})
	return slices.Clone(all[:min(len(all), n)])
}

// MostTunnels returns how many tunnels the address or user of this machine has that has
// most, and the principal that has most.
func (m *Clients) MostTunnels() (address, principal int64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, c := range m.accounts {
		if c.prefix.Bits() != sitePrefix {
			address = max(address, c.Tunnels.Load())
		}
	}
	for _, c := range m.users {
		address = max(address, c.Tunnels.Load())
	}
	for _, c := range m.known {
		principal = max(principal, c.Tunnels.Load())
	}
	return address, principal
}

func (c *Client) appendUse(to []ClientUse) []ClientUse {
	u := ClientUse{c.name, c.principal, c.Open.Load(), c.Pending.Load(), c.Tunnels.Load(), c.held.Load()}
	if u.Connections == 0 && u.Tunnels == 0 {
		return to
	}
	return append(to, u)
}
