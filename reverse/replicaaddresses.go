package reverse

import (
	"cmp"
	"maps"
	"net"
	"net/netip"
	"slices"

	"culvert.dev/tunnel"
)

// withLearned returns found, and the addresses of replicas that cached answers of DNS may lack: those
// that have opened a stream to this one, and those that others have sent. Where c has addresses
// and no name, there are no others. The channel is closed when another replica opens a stream, or
// sends addresses.
func (r *Replicas) withLearned(c *ReplicaConfig, found map[string]string) (map[string]string, <-chan struct{}) {
	all := maps.Clone(found)
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.learned == nil {
		r.learned = make(chan struct{})
	}
	add := func(replica string, addr netip.Addr) {
		for _, to := range c.To {
			host, port, err := net.SplitHostPort(to)
			if _, literal := netip.ParseAddr(host); err != nil || literal == nil {
				continue
			}
			if at := net.JoinHostPort(addr.String(), port); !r.linkedElsewhere(replica, at) {
				all[at] = cmp.Or(all[at], host)
			}
		}
	}
	for s := range r.serving {
		if s.replica != "" && s.addr.IsValid() {
			add(s.replica, s.addr)
		}
	}
	for _, l := range r.links {
		for _, o := range l.learned() {
			add(o.Replica, o.Address)
		}
	}
	return all, r.learned
}

// linkedElsewhere reports whether there is a stream to a replica by another address than at. The
// caller holds mu.
func (r *Replicas) linkedElsewhere(replica, at string) bool {
	return slices.ContainsFunc(r.links, func(l *replicaLink) bool {
		l.mu.Lock()
		defer l.mu.Unlock()
		return l.address != at && l.connected && l.replica == replica
	})
}

// wakeFollow has follow look at the addresses again. The caller holds mu.
func (r *Replicas) wakeFollow() {
	if r.learned != nil {
		close(r.learned)
		r.learned = nil
	}
}

// wakeOthers wakes the streams to all replicas but that of s, which send what others returns now.
// The caller holds mu.
func (r *Replicas) wakeOthers(s *replicaServing) {
	for o := range r.serving {
		if o != s {
			o.poke()
		}
	}
}

// A replicaAddress is the address of a replica, as another one sends it.
type replicaAddress struct {
	Replica string     `json:"replica"`
	Address netip.Addr `json:"address"`
}

// others returns the replicas other than that of s that have a stream, sorted.
func (r *Replicas) others(s *replicaServing) []replicaAddress {
	r.mu.Lock()
	defer r.mu.Unlock()
	all := []replicaAddress{} // not nil: an empty list is sent, too
	for o := range r.serving {
		if o.replica != "" && o.replica != s.replica && o.addr.IsValid() {
			all = append(all, replicaAddress{o.replica, o.addr})
		}
	}
	slices.SortFunc(all, func(a, b replicaAddress) int {
		return cmp.Or(cmp.Compare(a.Replica, b.Replica), a.Address.Compare(b.Address))
	})
	return slices.Compact(all)
}

// setOthers keeps those addresses of other replicas that this one has sent and that may be dialed.
func (l *replicaLink) setOthers(list []replicaAddress) {
	var others []replicaAddress
	for _, o := range list[:min(len(list), maxReplicas)] {
		o.Replica, o.Address = clip(o.Replica), o.Address.Unmap().WithZone("")
		if o.Replica == "" || o.Replica == l.replicas.Server.Replica() || !o.Address.IsValid() {
			continue
		}
		if _, forbidden := tunnel.Forbidden(o.Address); !forbidden {
			others = append(others, o)
		}
	}
	l.mu.Lock()
	same := slices.Equal(l.others, others)
	l.others = others
	l.mu.Unlock()
	if same {
		return
	}
	l.replicas.mu.Lock()
	defer l.replicas.mu.Unlock()
	l.replicas.wakeFollow()
}

// learned returns the addresses that setOthers has kept.
func (l *replicaLink) learned() []replicaAddress {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.others
}
