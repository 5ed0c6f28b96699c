package nat

import (
	"fmt"
	"net/netip"
)

// A Kind says what is between a host and the internet.
type Kind string

// The kinds.
const (
	Unknown   Kind = "unknown"
	NoNAT     Kind = "none"
	SingleNAT Kind = "single"
	DoubleNAT Kind = "double"
	CGNAT     Kind = "cgnat" // of the provider
)

// Ranges of addresses that are not public.
var (
	cgnatPrefix  = netip.MustParsePrefix("100.64.0.0/10") // RFC 6598
	dsLitePrefix = netip.MustParsePrefix("192.0.0.0/29")  // RFC 6333: IPv4 over a NAT of the provider
)

// IsCGNAT reports whether a is an address behind the NAT of a provider.
func IsCGNAT(a netip.Addr) bool {
	return cgnatPrefix.Contains(a.Unmap()) || dsLitePrefix.Contains(a.Unmap())
}

// IsPublic reports whether a may be an address of the public internet.
func IsPublic(a netip.Addr) bool {
	a = a.Unmap()
	return a.IsValid() && a.IsGlobalUnicast() && !a.IsPrivate() && !IsCGNAT(a) && a != netip.AddrFrom4([4]byte{255, 255, 255, 255}) &&
		!zeroNetwork.Contains(a) && !reserved.Contains(a)
}

var (
	zeroNetwork = netip.MustParsePrefix("0.0.0.0/8")
	reserved    = netip.MustParsePrefix("240.0.0.0/4")
)

// Assess returns which NAT is between a host and the internet, and an explanation. It compares the
// host's own address, the outside address that the router says it has, and the address that STUN
// servers see. router and seen may be the zero Addr.
func Assess(local, router, seen netip.Addr) (Kind, string) {
	switch {
	case IsPublic(local) && (!router.IsValid() || router == local) && (!seen.IsValid() || seen == local):
		return NoNAT, fmt.Sprintf("this host has the public address %s: no mapping is needed", local)
	case IsCGNAT(local) || IsCGNAT(router):
		at := router
		if !IsCGNAT(at) {
			at = local
		}
		return CGNAT, fmt.Sprintf("%s is an address behind the provider's NAT (CGNAT): no port of the router can be reached from outside; ask the provider for a public address, or let this gateway connect to another one", at)
	case router.IsValid() && !IsPublic(router):
		return DoubleNAT, fmt.Sprintf("the router's outside address %s is private (double NAT): there is another router in front of it; have that one forward its ports to this one, or make it a bridge", router)
	case router.IsValid() && seen.IsValid() && router != seen:
		return DoubleNAT, fmt.Sprintf("the router says that its outside address is %s, and STUN servers see %s (double NAT): there is another NAT in front of the router", router, seen)
	case router.IsValid():
		return SingleNAT, fmt.Sprintf("the router has the outside address %s", router)
	case seen.IsValid() && seen != local:
		return SingleNAT, fmt.Sprintf("STUN servers see this host at %s, and the router does not say whether that is its own address", seen)
	}
	return Unknown, "neither the router nor a STUN server has said which outside address this host has"
}
