package tunnel

import (
	"cmp"
	"iter"
	"net/netip"
	"slices"
	"time"
)

// A Live is an open tunnel as it was at one moment.
type Live struct {
	ID       uint64 // of the request, as in its Outcome; this and what follows is empty for a Tunnel without About
	Start    time.Time
	Age      time.Duration // since Start, whatever the wall clock did
	Proto    string
	Listener string
	Source   netip.AddrPort
	Peer     Peer
	Target   string
	Service  string
	Pattern  string
	Endpoint string

	In         int64         // bytes taken from the client and given to the service's socket, so far
	Out        int64         // bytes taken from the service and given to the client's socket, so far
	Quiet      time.Duration // since a byte moved or a side ended
	HalfClosed bool          // one side has ended its stream
}

// listed is an open tunnel to those who list and end them, whichever way it
// is carried. Its methods may be called at any time, by anyone.
type listed interface {
	about() *record
	look() (p progress, open bool)
	kill(why Reason, err error) // an abort; no more than an order where a loop carries
}

// progress is what changes in a tunnel's life.
type progress struct {
	in, out int64
	moved   int64 // clock of the last byte or end
	half    bool
}

// List yields the tunnels that are open when it is ranged over, in the order of
// their IDs, each as it is when its turn comes. Those that have ended by then
// are left out. It takes as long as its caller does and holds up no tunnel.
func (r *Relay) List() iter.Seq[Live] {
	return func(yield func(Live) bool) {
		for _, t := range r.sorted() {
			if v, open := live(t); open && !yield(v) {
				return
			}
		}
	}
}

// End aborts the tunnel of the given ID, never as an end of stream. It is false
// where there is no such tunnel. The end itself is reported by the tunnel's
// Ended, and has another reason where it was about to come anyway.
func (r *Relay) End(id uint64, why Reason) bool {
	for _, t := range r.all() {
		if id == 0 || t.about().number() != id {
			continue
		}
		_, open := t.look()
		if open {
			t.kill(why, nil)
		}
		return open
	}
	return false
}

// EndFunc aborts, like End, every tunnel that is open now and that match wants
// gone, and returns how many those are. They are shown to match in the order of
// their IDs; it must not keep what it is shown.
func (r *Relay) EndFunc(why Reason, match func(*Live) bool) int {
	n := 0
	for _, t := range r.sorted() {
		if v, open := live(t); open && match(&v) {
			t.kill(why, nil)
			n++
		}
	}
	return n
}

// all returns the open tunnels, in no order.
func (r *Relay) all() []listed {
	return r.sessions.appendAll(append(r.kernel.all(r), r.copies.all()...))
}

// sorted returns them in the order of their IDs.
func (r *Relay) sorted() []listed {
	all := r.all()
	slices.SortFunc(all, func(a, b listed) int { return cmp.Compare(a.about().number(), b.about().number()) })
	return all
}

// live is t now. It is false where t has ended.
func live(t listed) (Live, bool) {
	p, open := t.look()
	if !open {
		return Live{}, false
	}
	v := Live{In: p.in, Out: p.out, Quiet: time.Duration(max(clock()-p.moved, 0)), HalfClosed: p.half}
	if o := t.about().outcome(); o != nil {
		v.ID, v.Start, v.Age, v.Proto, v.Listener = o.ID, o.Start, t.about().age(), o.Proto, o.Listener
		v.Source, v.Peer, v.Target = o.Source, o.Peer, o.Target
		v.Service, v.Pattern, v.Endpoint = o.Service, o.Pattern, o.Endpoint
	}
	return v, true
}
