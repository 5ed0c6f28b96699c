package relay

import (
	"cmp"
	"container/heap"
	"fmt"
	"net"
	"slices"
	"time"

	"culvert.dev/tunnel/internal/poll"
)

// A heldTunnel is a tunnel with the bytes that it keeps because a side does not
// take them.
type heldTunnel struct {
	Live
	held  int64
	quiet bool // nothing has moved for a moment
}

const (
	// leastHeld is what a tunnel keeps at least that is ended to free memory, and
	// quietAfter is how long one has moved nothing that is ended before others.
	minBuffered  = 2 << 10
	stalledAfter = time.Second
)

// FreedMemory is the result of Relay.FreeMemory.
type FreedMemory struct {
	Ended  int   // tunnels
	Freed  int64 // bytes that they kept
	Client string
	Late   bool // which tunnels keep most is not known: a loop did not answer in time
}

// FreeMemory ends tunnels that keep bytes because a side does not take them,
// until about n bytes are free. It is called when memory is full. The next tunnel
// to end is always one of the client that keeps most: first one that moves
// nothing, and of those the one that keeps most. Tunnels that keep next to
// nothing are left alone.
//
// kernel says that what the kernel keeps for the sockets counts, too.
func (r *Relay) FreeMemory(n int64, kernel bool) (did FreedMemory) {
	clients, ok := r.buffersByClient(kernel)
	did.Late = !ok
	for did.Freed < n && len(clients) > 0 {
		h := clients[0]
		t := h.tunnels[0]
		if did.Ended == 0 {
			did.Client = h.name
		}
		did.Ended++
		did.Freed += t.held
		t.Kill(Overload, fmt.Errorf("memory is full, and the tunnel kept %d bytes that were not taken", t.held))
		h.held -= t.held
		if h.tunnels = h.tunnels[1:]; len(h.tunnels) == 0 {
			heap.Pop(&clients)
		} else {
			heap.Fix(&clients, 0)
		}
	}
	return did
}

// clientBuffers is what the tunnels of one client keep.
type clientBuffers struct {
	name    string
	held    int64
	tunnels []heldTunnel
}

// buffersHeap is a heap with the largest first.
type buffersHeap []*clientBuffers

func (h buffersHeap) Len() int           { return len(h) }
func (h buffersHeap) Less(i, j int) bool { return h[i].held > h[j].held }
func (h buffersHeap) Swap(i, j int)      { h[i], h[j] = h[j], h[i] }
func (h *buffersHeap) Push(x any)        { *h = append(*h, x.(*clientBuffers)) }
func (h *buffersHeap) Pop() any {
	old := *h
	last := old[len(old)-1]
	*h = old[:len(old)-1]
	return last
}

// buffersByClient returns what clients keep, each with its tunnels in the order in which
// they are to be ended, and false where that is not known.
func (r *Relay) buffersByClient(kernel bool) (buffersHeap, bool) {
	inLoops, ok := r.sockets.held(r, kernel)
	if !ok {
		return nil, false
	}
	by := make(map[any]*clientBuffers)
	for _, t := range append(inLoops, r.copies.held(kernel)...) {
		if t.held < minBuffered {
			continue
		}
		key, name := t.Owner().ChargedTo()
		h := by[key]
		if h == nil {
			h = &clientBuffers{name: name}
			by[key] = h
		}
		h.held += t.held
		h.tunnels = append(h.tunnels, t)
	}
	all := make(buffersHeap, 0, len(by))
	for _, h := range by {
		slices.SortFunc(h.tunnels, func(a, b heldTunnel) int {
			if a.quiet != b.quiet {
				if a.quiet {
					return -1
				}
				return 1
			}
			return cmp.Compare(b.held, a.held)
		})
		all = append(all, h)
	}
	heap.Init(&all)
	return all, true
}

// held returns what each tunnel keeps: what a pump has read and its other side has
// not taken, and what the streams keep.
func (r *copyRelay) held(kernel bool) []heldTunnel {
	now := clock()
	var all []heldTunnel
	for some := range r.pieces() {
		for _, ct := range some {
			t := heldTunnel{Live: ct, quiet: now-ct.moved.Load() >= int64(stalledAfter)}
			for i := range ct.pumps {
				t.held += ct.pumps[i].kept.Load() + keptBelow(ct.pumps[i].src, kernel)
			}
			all = append(all, t)
		}
	}
	return all
}

// keptBelow returns what a stream keeps, and with kernel what the kernel does
// where it is a socket.
func keptBelow(c net.Conn, kernel bool) (n int64) {
	below := BaseConn(c)
	if h, ok := below.(holder); ok {
		_ = guard(func() error { n = int64(h.Held()); return nil })
	}
	if kernel {
		n += poll.KernelMemory(below)
	}
	return n
}
