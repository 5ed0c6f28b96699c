package admin

import (
	"net"
	"net/http"
	"sync"
)

// A crowd bounds the open connections of a port. Where there are too many it
// closes one of the client address that has most, and never the one that has
// just come from an address with fewer: a probe gets its answer even if other
// clients hold connections open.
type crowd struct {
	limit int

	mu    sync.Mutex // guards what follows
	conns map[net.Conn]*member
	count map[string]int // connections of an address
	last  uint64         // the number of the newest
}

// A member is an open connection.
type member struct {
	address string
	number  uint64 // in the order of their coming
	busy    bool   // a request, or a part of one, was read and is not answered yet
}

func newCrowd(limit int) *crowd {
	return &crowd{limit: limit, conns: map[net.Conn]*member{}, count: map[string]int{}}
}

// observe is an http.Server's ConnState.
func (w *crowd) observe(c net.Conn, s http.ConnState) {
	w.mu.Lock()
	defer w.mu.Unlock()
	switch s {
	case http.StateNew:
		w.last++
		m := &member{address: addressOf(c), number: w.last}
		w.conns[c] = m
		w.count[m.address]++
		if len(w.conns) > w.limit {
			victim := w.pick(m)
			w.remove(victim)
			_ = victim.Close()
		}
	case http.StateActive, http.StateIdle:
		if m := w.conns[c]; m != nil {
			m.busy = s == http.StateActive
		}
	case http.StateClosed, http.StateHijacked:
		w.remove(c)
	}
}

// pick returns the connection to close: of the address that has most, one
// without a request before one with, and the oldest of these. It is never
// newcomer.
func (w *crowd) pick(newcomer *member) net.Conn {
	var victim net.Conn
	var its *member
	for c, m := range w.conns {
		if m != newcomer && (its == nil || w.before(m, its)) {
			victim, its = c, m
		}
	}
	return victim
}

// before reports whether a is closed before b.
func (w *crowd) before(a, b *member) bool {
	if na, nb := w.count[a.address], w.count[b.address]; na != nb {
		return na > nb
	}
	if a.busy != b.busy {
		return b.busy
	}
	return a.number < b.number
}

func (w *crowd) remove(c net.Conn) {
	m := w.conns[c]
	if m == nil {
		return
	}
	delete(w.conns, c)
	if w.count[m.address]--; w.count[m.address] == 0 {
		delete(w.count, m.address)
	}
}

// addressOf is the host that c comes from; "" for a socket's.
func addressOf(c net.Conn) string {
	host, _, err := net.SplitHostPort(c.RemoteAddr().String())
	if err != nil {
		return ""
	}
	return host
}
