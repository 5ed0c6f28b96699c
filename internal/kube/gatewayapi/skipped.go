package gatewayapi

import (
	"fmt"
	"net/netip"

	discoveryv1 "k8s.io/api/discovery/v1"

	"culvert.dev/tunnel"
)

// skippedEndpoints says which endpoints are not used whatever their state is, or is "". The owner of
// a namespace can write EndpointSlices, and a gateway reaches what the owner does not: itself, the
// metadata service of its host, and by name any host at all, as with an ExternalName
// (CVE-2021-25740).
func skippedEndpoints(of []*discoveryv1.EndpointSlice) string {
	first, more := "", -1 // by what is said of it: slices come in any order
	for _, s := range of {
		for i := range s.Endpoints {
			as := s.Endpoints[i].Addresses
			if len(as) == 0 {
				continue
			}
			why := ""
			if s.AddressType == discoveryv1.AddressTypeFQDN {
				why = "is a name, which culvert does not follow"
			} else if a, err := netip.ParseAddr(as[0]); err != nil {
				why = "is no address"
			} else if kind, never := tunnel.Forbidden(a); never {
				why = "is never dialed: " + kind
			}
			if why == "" {
				continue
			}
			if text := fmt.Sprintf("EndpointSlice %s: %q %s", s.Name, as[0], why); first == "" || text < first {
				first = text
			}
			more++
		}
	}
	if more > 0 {
		first += fmt.Sprintf(", and %d more", more)
	}
	return first
}
