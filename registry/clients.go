package registry

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"culvert.dev/tunnel"
)

// A ClientFilter says which clients may connect, by their address: that of the
// connection, or the one that a trusted PROXY header gives. Behind another gateway
// or a NAT many clients share one address. The zero ClientFilter admits every client.
type ClientFilter struct {
	Allow []netip.Prefix // empty means every address
	Deny  []netip.Prefix // wins over Allow
}

// maxClientRanges is how many address ranges ParseClientRanges takes.
const maxClientRanges = 256

// ParseClientRanges returns the address ranges of a list with commas, such as an
// annotation has.
func ParseClientRanges(list string) ([]netip.Prefix, error) {
	items := strings.Split(list, ",")
	if len(items) > maxClientRanges {
		return nil, fmt.Errorf("it has %d address ranges, limit %d", len(items), maxClientRanges)
	}
	ranges := make([]netip.Prefix, len(items))
	for i, item := range items {
		p, err := netip.ParsePrefix(strings.TrimSpace(item))
		if err != nil || p != p.Masked() {
			return nil, fmt.Errorf("item %d is not an address range: write 192.0.2.0/24 or 2001:db8::/32", i+1)
		}
		ranges[i] = p
	}
	return ranges, nil
}

// IsZero reports whether f admits every client.
func (f ClientFilter) IsZero() bool { return len(f.Allow) == 0 && len(f.Deny) == 0 }

// equal reports whether f and o have the same lists in the same order.
func (f ClientFilter) equal(o ClientFilter) bool {
	return slices.Equal(f.Allow, o.Allow) && slices.Equal(f.Deny, o.Deny)
}

// A clientFilter is a ClientFilter for lookups. A nil one admits every client.
type clientFilter struct {
	allow, deny prefixTable
}

func compileClientFilter(f ClientFilter) *clientFilter {
	if f.IsZero() {
		return nil
	}
	return &clientFilter{allow: prefixSet(f.Allow), deny: prefixSet(f.Deny)}
}

func prefixSet(prefixes []netip.Prefix) prefixTable {
	set := prefixTable{byPrefix: make(map[netip.Prefix]int32, len(prefixes))}
	for _, p := range prefixes {
		set.add(normalPrefix(p), 0)
	}
	return set
}

// admits returns nil if f lets the client of req connect to what, and the refusal
// otherwise. A client whose address is not known, as at a Unix socket, is refused.
// admits does not allocate, refusals apart.
func (f *clientFilter) admits(req *tunnel.Request, kind, name, origin string) *tunnel.Error {
	if f == nil {
		return nil
	}
	client, why := req.Source.Addr(), ""
	switch {
	case !client.IsValid():
		why = "its address is not known"
	case f.deny.find(client) >= 0:
		why = "its address is in a denied range"
	case len(f.allow.byPrefix) > 0 && f.allow.find(client) < 0:
		why = "its address is in none of the allowed ranges"
	default:
		return nil
	}
	return tunnel.Refusef(tunnel.Denied, "registry: %s %q of %s does not admit the client %s: %s", kind, name, orUnknown(origin), client, why)
}
