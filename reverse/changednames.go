package reverse

import (
	"cmp"
	"slices"
	"time"

	"culvert.dev/tunnel"
)

// maxRecent is how many changes of names are remembered, at least.
const maxRecent = 1 << 13

// recentNames has the names that have changed last, for streams to other replicas: what one
// costs does not depend on how many other names there are.
type recentNames struct {
	on    bool // there was a stream, ever
	first uint64
	names []tunnel.Pattern // of the changes first, first+1, ...
}

// note has the streams to other replicas look at a name again. The caller holds mu.
func (g *Groups) note(name tunnel.Pattern) {
	r := &g.recent
	if !r.on {
		return
	}
	if len(r.names) >= 2*maxRecent {
		r.first += maxRecent
		r.names = append(r.names[:0], r.names[maxRecent:]...)
	}
	r.names = append(r.names, name)
}

// A localNames is what other replicas are to know of names of this one.
type localNames struct {
	names map[tunnel.Pattern]*replicaName // nil for a name that is not to be known
	all   bool                            // what is not in names is not to be known, either
	next  uint64                          // of the next call of local
	news  <-chan struct{}                 // closed with the next change
}

// local returns what other replicas are to know of the names that have changed since a call
// that returned next; of all names where that is long ago, or next is 0. Names that another replica
// has sessions for are that one's to tell.
func (g *Groups) local(next uint64) localNames {
	now := time.Now()
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.news == nil {
		g.news = make(chan struct{})
	}
	r := &g.recent
	if !r.on {
		r.on, r.first = true, 1
	}
	l := localNames{next: r.first + uint64(len(r.names)), news: g.news, names: map[tunnel.Pattern]*replicaName{}}
	if l.all = next < r.first; l.all {
		for name, h := range g.names {
			if n := h.local(now); n != nil {
				l.names[name] = n
			}
		}
		return l
	}
	for _, name := range r.names[next-r.first:] {
		if _, twice := l.names[name]; twice {
			continue
		}
		l.names[name] = nil
		if h := g.names[name]; h != nil {
			l.names[name] = h.local(now)
		}
	}
	return l
}

// local returns what other replicas are to know of h; nil for nothing. The caller holds mu.
func (h *heldName) local(now time.Time) *replicaName {
	n := &replicaName{Name: h.name, Owner: h.owner, Since: h.since, Allow: h.allow}
	switch {
	case len(h.owner) > maxOwner:
		return nil
	case len(h.members) > 0:
	case len(h.remotes) > 0:
		return nil
	default:
		if n.Left = int(h.until.Sub(now) / time.Second); n.Left < 1 {
			return nil
		}
	}
	for _, m := range h.members {
		n.add(m)
	}
	slices.SortFunc(n.Serves, func(a, b replicaGroup) int {
		return cmp.Or(cmp.Compare(a.Group, b.Group), cmp.Compare(a.Port, b.Port))
	})
	return n
}
