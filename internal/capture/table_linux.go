package capture

import (
	"fmt"
	"hash/fnv"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"culvert.dev/internal/capture/nft"
)

// Priorities of hooks: before NAT and routing of others.
const (
	priorityNAT        = Priority
	priorityPreRouting = -151 // just before mangle
	priorityFilter     = 0
)

const (
	chainOutput = "output" // for connections of this host
	dnsPort     = 53
)

// Numbers of packets for Rules.TransparentPort.
const (
	transparentMark  = 0x63760002 // for Rules without a Name
	transparentTable = 76         // of routing, for Rules without a Name
	namedNumbers     = 0x63770000 // and a hash, both numbers of Rules with a Name
)

// complete checks r and puts the numbers in that belong to its Name.
func (r *Rules) complete() error {
	if err := CheckName(r.Name); err != nil {
		return err
	}
	mark, table := uint32(transparentMark), uint32(transparentTable)
	if r.Name != "" {
		h := fnv.New32a()
		_, _ = h.Write([]byte(r.Name))
		mark = namedNumbers | h.Sum32()&0xffff
		table = mark
	}
	if r.TransparentMark == 0 {
		r.TransparentMark = mark
	}
	if r.RoutingTable == 0 {
		r.RoutingTable = table
	}
	return nil
}

// table returns r as a table, with the numbers of its Cgroups.
func table(r *Rules, cgroups []cgroup, vips4, vips6 []netip.Addr) *nft.Table {
	t := &nft.Table{Name: TableName(r.Name), Owned: !r.Stay}
	vips := []*nft.Set{{Name: "vips4", Key: nft.IPv4Addr, Addrs: vips4}, {Name: "vips6", Key: nft.IPv6Addr, Addrs: vips6}}
	cidrs, except := rangeSets("cidrs", r.CIDRs), rangeSets("except", r.Except)
	t.Sets = slices.Concat(vips, cidrs, except)

	// Whom and what the rules leave alone. ToLocal is no part of it: DNS at this host is
	// redirected.
	var programs, exempt []nft.Rule
	for _, uid := range r.ExceptUIDs {
		exempt = append(exempt, nft.All(nft.UID(uid), nft.Return()))
	}
	if r.Mark != 0 {
		exempt = append(exempt, nft.All(nft.Mark(r.Mark), nft.Return()))
	}
	var spared []nft.Rule
	for _, s := range except {
		spared = append(spared, nft.All(nft.InSet(s), nft.Return()))
	}
	exempt = append(exempt, spared...)
	local := nft.All(nft.ToLocal(), nft.Return())

	// What they are about.
	for _, g := range cgroups {
		programs = append(programs, nft.Cgroup(g.id, g.level))
	}
	for _, uid := range r.UIDs {
		programs = append(programs, nft.UID(uid))
	}
	sets := cidrs
	if r.VIPs {
		sets = append(vips, cidrs...)
	}
	var destinations []nft.Rule
	for _, s := range sets {
		destinations = append(destinations, nft.InSet(s))
	}
	if r.All || len(destinations) == 0 && len(programs) > 0 {
		destinations = []nft.Rule{nil}
	}
	if len(programs) == 0 {
		programs = []nft.Rule{nil}
	}

	tcp, udp := nft.L4(syscall.IPPROTO_TCP), nft.L4(syscall.IPPROTO_UDP)
	opening := nft.All(tcp, nft.Opening())
	output, datagrams := slices.Clone(exempt), append(slices.Clone(exempt), local)
	for _, p := range programs {
		if r.DNSPort == 0 {
			break
		}
		for _, proto := range []nft.Rule{udp, tcp} {
			output = append(output, nft.All(p, proto, nft.ToPort(dnsPort), nft.Redirect(r.DNSPort)))
		}
		datagrams = append(datagrams, nft.All(p, udp, nft.RejectUnreachable()))
	}
	output = append(output, local)
	for _, d := range destinations {
		for _, p := range programs {
			output = append(output, nft.All(d, p, opening, nft.Redirect(r.Port)))
		}
	}
	if len(destinations) == 0 && r.Port != 0 {
		// The kernel tracks connections for as long as a rule redirects some, and those that were
		// captured need that. What this one is about has returned just now.
		output = append(output, nft.All(nft.ToLocal(), opening, nft.Redirect(r.Port)))
	}
	t.Chains = append(t.Chains, nft.Chain{Name: chainOutput, Type: nft.NAT, Hook: nft.Output, Priority: priorityNAT, Rules: output})
	t.Chains = append(t.Chains, routedChains(r, sets, slices.Concat(spared, []nft.Rule{local}))...)
	if r.DNSPort != 0 {
		t.Chains = append(t.Chains, nft.Chain{Name: "datagrams", Type: nft.Filter, Hook: nft.Output, Priority: priorityFilter, Rules: datagrams})
	}
	return t
}

// routedChains returns the chains for what this host routes for others, to addresses of sets. Rules
// that spare packets come first.
func routedChains(r *Rules, sets []*nft.Set, spared []nft.Rule) []nft.Chain {
	from := []nft.Rule{nil}
	if len(r.Interfaces) > 0 {
		from = nil
		for _, name := range r.Interfaces {
			from = append(from, nft.InInterface(name))
		}
	}
	tcp := nft.L4(syscall.IPPROTO_TCP)
	opening := nft.All(tcp, nft.Opening())
	if r.TransparentPort != 0 {
		routed := append([]nft.Rule{nft.All(tcp, nft.OfTransparentSocket(), nft.SetMark(r.TransparentMark), nft.Accept())}, spared...)
		for _, s := range sets {
			to := netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), r.TransparentPort)
			if s.Key == nft.IPv6Addr {
				to = netip.AddrPortFrom(netip.IPv6Loopback(), r.TransparentPort)
			}
			for _, f := range from {
				routed = append(routed, nft.All(f, nft.InSet(s), opening, nft.TProxy(to, r.TransparentMark)))
			}
		}
		return []nft.Chain{{Name: "prerouting", Type: nft.Filter, Hook: nft.PreRouting, Priority: priorityPreRouting, Rules: routed}}
	}
	if len(r.Interfaces) == 0 {
		return nil
	}
	routed := slices.Clone(spared)
	for _, f := range from {
		for _, s := range sets {
			routed = append(routed, nft.All(f, nft.InSet(s), opening, nft.Redirect(r.Port)))
		}
		if r.All {
			routed = append(routed, nft.All(f, opening, nft.Redirect(r.Port)))
		}
	}
	return []nft.Chain{{Name: "prerouting", Type: nft.NAT, Hook: nft.PreRouting, Priority: priorityNAT, Rules: routed}}
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

// A cgroup is what the kernel knows a cgroup by.
type cgroup struct {
	id    uint64 // the inode of its folder
	level int    // below the root, from 1
}

// findCgroups returns those at paths.
func findCgroups(paths []string) ([]cgroup, error) {
	var all []cgroup
	for _, path := range paths {
		g, err := findCgroup(path)
		if err != nil {
			return nil, err
		}
		all = append(all, g)
	}
	return all, nil
}

func findCgroup(path string) (cgroup, error) {
	rel := strings.Trim(filepath.Clean("/"+path), "/")
	if rel == "" {
		return cgroup{}, fmt.Errorf("cgroup %q: name one below the root, such as user.slice", path)
	}
	for _, root := range cgroupRoots {
		if _, err := os.Stat(filepath.Join(root, "cgroup.procs")); err != nil {
			continue
		}
		info, err := os.Stat(filepath.Join(root, rel))
		if err != nil {
			return cgroup{}, fmt.Errorf("cgroup %q: %w: it has to be there before it can be captured", path, err)
		}
		return cgroup{info.Sys().(*syscall.Stat_t).Ino, 1 + strings.Count(rel, "/")}, nil
	}
	return cgroup{}, fmt.Errorf("cgroup %q: there is no cgroup of version 2 at %s", path, strings.Join(cgroupRoots, " or "))
}
