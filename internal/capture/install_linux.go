package capture

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"

	"culvert.dev/internal/capture/nft"
	"culvert.dev/internal/capture/route"
)

// Priorities of hooks: before NAT and routing of others.
const (
	priorityOutput     = -101 // just before dstnat
	priorityPreRouting = -151 // just before mangle
	priorityFilter     = 0
)

// A Capture is the installed Rules.
type Capture struct {
	mu    sync.Mutex // guards what follows
	conn  *nft.Conn
	vips4 []netip.Addr // in the kernel, sorted
	vips6 []netip.Addr
	rules Rules
}

// Install installs r in the network namespace of the thread, in place of a table that stayed
// from before. The caller closes the Capture.
func Install(r Rules) (*Capture, error) {
	t, err := table(&r)
	if err != nil {
		return nil, fmt.Errorf("capture: %w", err)
	}
	conn, err := nft.Open()
	if err != nil {
		return nil, fmt.Errorf("capture: %w", err)
	}
	if r.TransparentPort != 0 {
		if err := routeTransparent(); err != nil {
			_ = conn.Close()
			return nil, fmt.Errorf("capture: %w", err)
		}
	}
	if err := conn.Replace(t); err != nil {
		_ = conn.Close()
		return nil, fmt.Errorf("capture: %w", err)
	}
	return &Capture{conn: conn, rules: r}, nil
}

// Remove deletes a table that stayed after its process. One that is not there is no error.
func Remove() error {
	conn, err := nft.Open()
	if err != nil {
		return fmt.Errorf("capture: %w", err)
	}
	defer conn.Close()
	if err := conn.Delete(Table); err != nil && !errors.Is(err, syscall.ENOENT) {
		return fmt.Errorf("capture: %w", err)
	}
	return nil
}

// SetVIPs replaces the VIPs, in one transaction. After an error they are as they were.
func (c *Capture) SetVIPs(addrs []netip.Addr) error {
	var v4, v6 []netip.Addr
	for _, a := range addrs {
		if a = a.Unmap(); a.Is4() {
			v4 = append(v4, a)
		} else if a.IsValid() {
			v6 = append(v6, a)
		}
	}
	normal := func(list []netip.Addr) []netip.Addr {
		slices.SortFunc(list, netip.Addr.Compare)
		return slices.Compact(list)
	}
	v4, v6 = normal(v4), normal(v6)
	c.mu.Lock()
	defer c.mu.Unlock()
	err := c.conn.ChangeSets(Table, change("vips4", c.vips4, v4), change("vips6", c.vips6, v6))
	if err != nil {
		return fmt.Errorf("capture: %w", err)
	}
	c.vips4, c.vips6 = v4, v6
	return nil
}

// change returns what makes before after. Both are sorted.
func change(set string, before, after []netip.Addr) nft.SetChange {
	c := nft.SetChange{Set: set}
	for len(before) > 0 || len(after) > 0 {
		switch {
		case len(after) == 0 || len(before) > 0 && before[0].Less(after[0]):
			c.Removed, before = append(c.Removed, before[0]), before[1:]
		case len(before) == 0 || after[0].Less(before[0]):
			c.Added, after = append(c.Added, after[0]), after[1:]
		default:
			before, after = before[1:], after[1:]
		}
	}
	return c
}

// Close ends the capture, unless the Rules stay.
func (c *Capture) Close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.rules.TransparentPort != 0 && !c.rules.Stay {
		for _, r := range transparentRules() {
			_ = r.Delete()
		}
	}
	return c.conn.Close()
}

func transparentRules() [2]route.Rule {
	return [2]route.Rule{{Mark: transparentMark, Table: transparentTable}, {IPv6: true, Mark: transparentMark, Table: transparentTable}}
}

// routeTransparent has packets with the mark of TPROXY come to this host. What it adds has no
// effect on others.
func routeTransparent() error {
	for _, to := range []string{"0.0.0.0/0", "::/0"} {
		if err := (route.Route{To: netip.MustParsePrefix(to), Dev: "lo", Local: true, Table: transparentTable}).Add(); err != nil {
			return err
		}
	}
	for _, r := range transparentRules() {
		if err := r.Add(); err != nil {
			return err
		}
	}
	return nil
}

// table returns r as a table.
func table(r *Rules) (*nft.Table, error) {
	t := &nft.Table{Name: Table, Owned: !r.Stay}
	vips := []*nft.Set{{Name: "vips4", Key: nft.IPv4Addr}, {Name: "vips6", Key: nft.IPv6Addr}}
	cidrs, except := rangeSets("cidrs", r.CIDRs), rangeSets("except", r.Except)
	t.Sets = slices.Concat(vips, cidrs, except)
	var spared, output, routed []nft.Rule
	for _, uid := range r.ExceptUIDs {
		output = append(output, nft.All(nft.UID(uid), nft.Return()))
	}
	if r.Mark != 0 {
		output = append(output, nft.All(nft.Mark(r.Mark), nft.Return()))
	}
	for _, s := range except {
		spared = append(spared, nft.All(nft.InSet(s), nft.Return()))
	}
	spared = append(spared, nft.All(nft.ToLocal(), nft.Return()))
	if r.DNSPort != 0 {
		for _, proto := range []byte{syscall.IPPROTO_UDP, syscall.IPPROTO_TCP} {
			output = append(output, nft.All(nft.L4(proto), nft.ToPort(53), nft.Redirect(r.DNSPort)))
		}
	}
	output = append(output, spared...)
	opening := nft.All(nft.L4(syscall.IPPROTO_TCP), nft.Opening())
	redirect := func(match nft.Rule) { output = append(output, nft.All(match, opening, nft.Redirect(r.Port))) }
	sets := cidrs
	if r.VIPs {
		sets = append(vips, cidrs...)
	}
	for _, s := range sets {
		redirect(nft.InSet(s))
	}
	for _, path := range r.Cgroups {
		id, level, err := cgroup(path)
		if err != nil {
			return nil, err
		}
		redirect(nft.Cgroup(id, level))
	}
	for _, uid := range r.UIDs {
		redirect(nft.UID(uid))
	}
	if r.All {
		redirect(nil)
	}
	t.Chains = append(t.Chains, nft.Chain{Name: "output", Type: nft.NAT, Hook: nft.Output, Priority: priorityOutput, Rules: output})
	if r.TransparentPort != 0 {
		routed = append(routed, nft.All(nft.L4(syscall.IPPROTO_TCP), nft.OfTransparentSocket(), nft.SetMark(transparentMark), nft.Accept()))
		routed = append(routed, spared...)
		for _, s := range sets {
			to := netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), r.TransparentPort)
			if s.Key == nft.IPv6Addr {
				to = netip.AddrPortFrom(netip.IPv6Loopback(), r.TransparentPort)
			}
			routed = append(routed, nft.All(nft.InSet(s), opening, nft.TProxy(to, transparentMark)))
		}
		t.Chains = append(t.Chains, nft.Chain{Name: "prerouting", Type: nft.Filter, Hook: nft.PreRouting, Priority: priorityPreRouting, Rules: routed})
	}
	if r.DNSPort != 0 {
		t.Chains = append(t.Chains, nft.Chain{Name: "datagrams", Type: nft.Filter, Hook: nft.Output, Priority: priorityFilter, Rules: []nft.Rule{
			nft.All(nft.ToLocal(), nft.Return()),
			nft.All(nft.L4(syscall.IPPROTO_UDP), nft.RejectUnreachable()),
		}})
	}
	return t, nil
}

// rangeSets returns a set of each family of which there are ranges.
func rangeSets(name string, ranges []netip.Prefix) (all []*nft.Set) {
	v4, v6 := &nft.Set{Name: name + "4", Key: nft.IPv4Addr}, &nft.Set{Name: name + "6", Key: nft.IPv6Addr}
	for _, p := range ranges {
		if p.Addr().Is4() {
			v4.Ranges = append(v4.Ranges, p)
		} else {
			v6.Ranges = append(v6.Ranges, p)
		}
	}
	for _, s := range []*nft.Set{v4, v6} {
		if len(s.Ranges) > 0 {
			all = append(all, s)
		}
	}
	return all
}

// cgroupRoots are where cgroups of version 2 are mounted: alone, or beside those of version 1.
var cgroupRoots = []string{"/sys/fs/cgroup", "/sys/fs/cgroup/unified"}

// cgroup returns what the kernel knows a cgroup by.
func cgroup(path string) (id uint64, level int, err error) {
	rel := strings.Trim(filepath.Clean("/"+path), "/")
	if rel == "" {
		return 0, 0, fmt.Errorf("cgroup %q: name one below the root, such as user.slice", path)
	}
	for _, root := range cgroupRoots {
		if _, err := os.Stat(filepath.Join(root, "cgroup.procs")); err != nil {
			continue
		}
		info, err := os.Stat(filepath.Join(root, rel))
		if err != nil {
			return 0, 0, fmt.Errorf("cgroup %q: %w: it has to be there before it can be captured", path, err)
		}
		return info.Sys().(*syscall.Stat_t).Ino, 1 + strings.Count(rel, "/"), nil
	}
	return 0, 0, fmt.Errorf("cgroup %q: there is no cgroup of version 2 at %s", path, strings.Join(cgroupRoots, " or "))
}
