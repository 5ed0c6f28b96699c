package udp

import (
	queue "container/list"
	"math"
	"time"

	"culvert.dev/tunnel"
)

// sockets counts the sockets of sessions to services. Each takes a descriptor, and
// forged source addresses make sessions as fast as datagrams come: sessions may have
// half of all descriptors, and those that are least likely in use make room for new
// ones. The Server's mu guards it.
//
// Without QUIC the answer of a service proves nothing about a client, but the client
// may be done: as few such sessions are kept as of those without an answer. A client
// that sends again may have got the answer, or guessed its time.
type sockets struct {
	n        int
	unproven queue.List // sessions that are not proven; oldest first, as in all
	answered queue.List // sessions without QUIC whose client has sent nothing since the answer
	again    queue.List // sessions without QUIC whose client has
}

// A socketSlot is the entry of a session in sockets.
type socketSlot struct {
	counted bool
	on      *queue.List // one of the Server's sockets, nil for none
	at      *queue.Element
}

// maxSockets returns how many sockets sessions may have: practically any number
// without a Budget.
func (s *Server) maxSockets() int {
	if s.Budget == nil {
		return math.MaxInt
	}
	return max(int(s.Budget.Limit/2), 1)
}

// occupy counts a socket for k, which is not proven. It may evict another session,
// which the caller ends after unlocking mu. The caller holds mu.
func (s *Server) occupy(k *session) (evicted *session, err error) {
	if most := s.maxSockets(); s.sockets.n >= most {
		if evicted = s.evictable(); evicted == nil {
			return nil, tunnel.Refusef(tunnel.Overload, "the %d descriptors that sessions of UDP may have are taken: half of all", most)
		}
		s.vacate(evicted)
	}
	s.sockets.n++
	k.socketSlot.counted = true
	k.rank(&s.sockets.unproven)
	return evicted, nil
}

// occupyExtra counts a second socket of a session, unless the limit is reached.
func (s *Server) occupyExtra() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.sockets.n >= s.maxSockets() || !s.Budget.Take(1) {
		return false
	}
	s.sockets.n++
	return true
}

// vacate no longer counts k's socket, if it has one. The caller holds mu.
func (s *Server) vacate(k *session) {
	if k.socketSlot.counted {
		k.socketSlot.counted = false
		s.sockets.n--
	}
	k.rank(nil)
}

// rank moves k to the end of l; nil is no list. The caller holds mu.
func (k *session) rank(l *queue.List) {
	if k.socketSlot.on != nil {
		k.socketSlot.on.Remove(k.socketSlot.at)
	}
	if k.socketSlot.on = l; l != nil {
		k.socketSlot.at = l.PushBack(k)
	}
}

// answered notes the first answer to a client that does not speak QUIC.
func (s *Server) answered(k *session) {
	s.mu.Lock()
	var evicted *session
	if k.half && k.state == carried {
		k.proven()
		if s.limits().PendingFull(s.sockets.answered.Len()) {
			evicted = s.sockets.answered.Front().Value.(*session)
			evicted.rank(nil)
		}
		k.rank(&s.sockets.answered)
	}
	s.mu.Unlock()
	evicted.evict()
}

// minQuietToEvict is how long a session whose client has sent again after an answer
// must have been quiet to make room for a new one.
const minQuietToEvict = 250 * time.Millisecond

// evictable returns the session that makes room for a new one: the oldest of those
// whose client has not sent again after an answer, or else one without QUIC that is
// quiet. It is nil where all are in use. The caller holds mu.
func (s *Server) evictable() *session {
	var oldest *session
	for _, l := range [...]*queue.List{&s.sockets.unproven, &s.sockets.answered} {
		if e := l.Front(); e != nil {
			if k := e.Value.(*session); oldest == nil || k.start.Before(oldest.start) {
				oldest = k
			}
		}
	}
	if oldest != nil {
		return oldest
	}
	const looks = 64 // at most, as mu is held
	now := time.Now()
	for range min(looks, s.sockets.again.Len()) {
		k := s.sockets.again.Front().Value.(*session)
		if now.Sub(k.start)-time.Duration(k.moved.Load()) >= minQuietToEvict {
			return k
		}
		k.rank(&s.sockets.again)
	}
	return nil
}
