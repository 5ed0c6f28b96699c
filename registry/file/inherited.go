package file

import (
	"runtime"
	"strings"

	"go.yaml.in/yaml/v3"
)

// inheritedPrefix begins the address of a socket that systemd passes to the process.
const inheritedPrefix = "fd:"

func isInherited(address string) bool { return strings.HasPrefix(address, inheritedPrefix) }

// Inherited reports whether l is at a socket that systemd passes: of TCP or a Unix socket, as
// its unit says.
func (l *Listener) Inherited() bool { return isInherited(l.Address) }

// checkInherited returns what is wrong with the name of a socket of systemd.
func checkInherited(name string) *complaint {
	const hint = "write fd:NAME, with NAME as in FileDescriptorName= of the socket unit"
	switch {
	case runtime.GOOS != "linux":
		return complain("write 127.0.0.1:PORT", "only systemd, of Linux, passes sockets")
	case name == "":
		return complain(hint, "it has no name")
	case len(name) > 255: // FDNAME_MAX
		return complain(hint, "the name has %d bytes, limit 255", len(name))
	case strings.ContainsFunc(name, func(r rune) bool { return r <= ' ' || r > '~' || r == ':' || r == '/' }):
		return complain(hint, "a name has printable ASCII characters, and no space, colon or slash")
	}
	return nil
}

// checkInheritedListener finds what does not go with a socket of systemd.
func (d *decoder) checkInheritedListener(l *Listener, at mapping) {
	const why = "%s has no effect: systemd opens the socket"
	for key, hint := range map[string]string{"mode": "write SocketMode= in the socket unit", "group": "write SocketGroup= in the socket unit"} {
		if n := at.value(key); n != nil {
			d.errorf(n, hint, why, key)
		}
	}
}

// checkAnyLocalUser finds sockets of systemd whose users are not checked: they may be at an
// address that other hosts reach.
func (a *Agent) checkAnyLocalUser(d *decoder, address string, n *yaml.Node) {
	if a.AnyLocalUser && isInherited(address) {
		d.errorf(n, "write localUsers in place of anyLocalUser", "with anyLocalUser other hosts could use the agent by %s, if its unit has it so", clip(address))
	}
}
