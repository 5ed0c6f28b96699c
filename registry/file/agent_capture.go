package file

import (
	"net/netip"
	"runtime"
	"slices"
	"strings"

	"culvert.dev/tunnel"
)

// An AgentCapture says which TCP connections of programs on this host go to the agent, whatever
// the programs know of it: those whose destination and whose program are listed.
type AgentCapture struct {
	// Destinations. Without any, every one is captured.
	VIPs  bool           `yaml:"vips"` // the virtual IPs of services
	CIDRs []netip.Prefix `yaml:"cidrs" what:"a range" as:"cidr" unique:"range" empty:"leave the key out for no range"`

	// Programs. Without any, those of the users that may use the agent are captured.
	Cgroups []string    `yaml:"cgroups" what:"a cgroup" as:"cgroup" unique:"cgroup" empty:"leave the key out for no cgroup"`
	UIDs    []LocalUser `yaml:"uids" what:"a user" as:"localUser" unique:"user" empty:"leave the key out for the users of the agent"`

	Except []netip.Prefix `yaml:"except" what:"a range" as:"cidr" unique:"range" empty:"leave the key out for no exception"` // destinations
}

// parseCgroup parses the path of a cgroup below the root of the hierarchy.
func parseCgroup(what, s string) (string, *complaint) {
	const hint = "write it as systemd-cgls prints it, such as user.slice or system.slice/backup.service"
	path := strings.Trim(s, "/")
	switch {
	case path == "":
		return "", complain(hint, "%s %q is that of all programs", what, clip(s))
	case strings.ContainsRune(path, 0):
		return "", complain(hint, "%s %q is no path", what, clip(s))
	}
	for part := range strings.SplitSeq(path, "/") {
		if part == "" || part == "." || part == ".." {
			return "", complain(hint, "%s %q is no path below the root", what, clip(s))
		}
	}
	return path, nil
}

// check finds a capture of nothing, and one that this system does not have.
func (c *AgentCapture) check(d *decoder, at mapping) {
	if !c.VIPs && len(c.CIDRs) == 0 && len(c.Cgroups) == 0 && len(c.UIDs) == 0 {
		d.errorf(at.node, "add vips: true, cidrs, cgroups or uids", "capture captures nothing")
	}
	if runtime.GOOS != "linux" {
		d.errorf(at.node, "use the proxy settings of programs, or forwards", "capture needs Linux")
	}
}

// checkVIPs finds a capture of virtual IPs where nothing has one.
func (a *Agent) checkVIPs(d *decoder, c *configuration, at mapping) {
	named := a.DNS != nil && len(a.Names) > 0 && !slices.Contains(a.Names, tunnel.AnyName)
	if a.Capture == nil || !a.Capture.VIPs || c.VIPs != nil || named {
		return
	}
	n := keyOf(at.object("capture").node, "vips")
	const hint = `add vips with ranges to the file, or dns and names other than "*" to agent`
	if len(a.Capture.CIDRs) == 0 {
		d.errorf(n, hint, "vips captures nothing: no service and no name has a virtual IP")
	} else {
		d.warnf(n, hint, "vips captures nothing, and cidrs alone count: no service and no name has a virtual IP")
	}
}

// CapturedUsers returns the numbers of the users whose programs are captured, where own is the
// one that the agent runs as. None means that every user's are, or those of Cgroups alone.
func (a *Agent) CapturedUsers(own uint32) (uids []uint32) {
	users := a.Capture.UIDs
	if len(users) == 0 && len(a.Capture.Cgroups) == 0 && !a.AnyLocalUser {
		if users = a.LocalUsers; len(users) == 0 {
			users = []LocalUser{{Own: true}}
		}
	}
	for _, u := range users {
		if u.Own {
			u.UID = own
		}
		uids = append(uids, u.UID)
	}
	return uids
}
