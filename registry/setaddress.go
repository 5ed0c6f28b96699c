package registry

import (
	"net/netip"
	"slices"

	"culvert.dev/tunnel"
)

// A SetAddress is addresses that clients in one network reach a service of the cluster set by, and
// that lead to a gateway there: those that a cluster gives to what it imports.
type SetAddress struct {
	Name    tunnel.Name  // SERVICE.NAMESPACE.svc.clusterset.local
	Network string       // of the clients
	IPs     []netip.Addr // of either family
}

// addSetAddresses compiles the addresses of snapshots. The first of a name in a network count.
func (b *builder) addSetAddresses(snapshots []Snapshot) {
	for i := range snapshots {
		for _, a := range snapshots[i].SetAddresses {
			key := setAddressKey{a.Name, b.indexOf(a.Network)}
			if _, there := b.setAddresses[key]; there || key.network < 0 || len(a.IPs) == 0 {
				continue
			}
			if b.setAddresses == nil {
				b.setAddresses = map[setAddressKey][]netip.Addr{}
			}
			b.setAddresses[key] = slices.Clone(a.IPs)
		}
	}
}

// A setAddressKey is a service as clients in a network, by its index, know it.
type setAddressKey struct {
	name    tunnel.Name
	network int32
}
