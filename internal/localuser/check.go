package localuser

import (
	"fmt"
	"net/netip"
	"slices"

	"culvert.dev/tunnel"
)

// A Check admits the connections of some users of this machine. Root is always among them:
// it can do what they can.
type Check struct {
	UIDs []uint32

	// lookup is User in tests.
	lookup func(client, server netip.AddrPort) (uint32, error)
}

// Admit returns nil if the socket at client, which is connected to server, belongs to a
// process of one of the users. Otherwise, and where that is not known, its error is a
// *tunnel.Error. Both addresses are of this machine and network namespace.
func (c *Check) Admit(client, server netip.AddrPort) error {
	lookup := c.lookup
	if lookup == nil {
		lookup = User
	}
	uid, err := lookup(client, server)
	if err != nil {
		return tunnel.Refusef(tunnel.Denied, "listener: cannot find the user of the connection from %s: %w", client, err)
	}
	return c.admit(uid)
}

// AdmitProcess is Admit for a process that has connected to a Unix socket; nil is one that
// is not known.
func (c *Check) AdmitProcess(p *tunnel.Process) error {
	if p == nil {
		return tunnel.Refusef(tunnel.Denied, "listener: cannot find the user of a connection to the Unix socket")
	}
	return c.admit(p.UID)
}

func (c *Check) admit(uid uint32) error {
	if uid != 0 && !slices.Contains(c.UIDs, uid) {
		return tunnel.Refusef(tunnel.Denied, "listener: user %d may not connect here", uid)
	}
	return nil
}

// errNotLoopback refuses connections of other machines.
func errNotLoopback(client netip.AddrPort) error {
	return fmt.Errorf("%s is no address of loopback", client.Addr())
}
