package udp

import (
	queue "container/list"
	"math"
	"time"

	"culvert.dev/tunnel"
)

// sockets are those that sessions have to services. Each takes a descriptor,
// and whoever forges sources makes sessions as fast as it sends datagrams: they
// have half of what there is, and of them the sessions that are least certain to
// be somebody's make room for new ones. The Server's mu guards it.
//
// Without QUIC the answer of a service proves nothing of a client, but the
// client may be done: so few are kept as of those that have no answer. A client
// that speaks again may have heard the answer, or guessed its time.
type sockets struct {
	n        int
	unproven queue.List // sessions of which nothing is proven, oldest first, as all
	answered queue.List // sessions without QUIC whose client has said nothing since the answer
	again    queue.List // sessions without QUIC whose client has
}

// A seat is a session's place among the sockets.
type seat struct {
	counted bool
	on      *queue.List // one of the Server's sockets, nil for none
	at      *queue.Element
}

// maxSockets is how many sockets sessions may have. It is never reached where
// there is no limit.
func (s *Server) maxSockets() int {
	if s.Budget == nil {
		return math.MaxInt
	}
	return max(int(s.Budget.Limit/2), 1)
}

// occupy counts a socket for k, which nothing is proven of. It may cost another
// session its own, which the caller ends once it has given up mu. The caller
// holds mu.
func (s *Server) occupy(k *session) (crowded *session, err error) {
	if most := s.maxSockets(); s.sockets.n >= most {
		if crowded = s.leastProven(); crowded == nil {
			return nil, tunnel.Refusef(tunnel.Overload, "the %d descriptors that sessions of UDP may have are taken: half of all", most)
		}
		s.vacate(crowded)
	}
	s.sockets.n++
	k.seat.counted = true
	k.rank(&s.sockets.unproven)
	return crowded, nil
}

// occupyMore counts a second socket of a session, if there may be one more.
func (s *Server) occupyMore() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.sockets.n >= s.maxSockets() || !s.Budget.Take(1) {
		return false
	}
	s.sockets.n++
	return true
}

// vacate gives back the place of k's socket, if it has one. The caller holds mu.
func (s *Server) vacate(k *session) {
	if k.seat.counted {
		k.seat.counted = false
		s.sockets.n--
	}
	k.rank(nil)
}

// rank puts k at the end of l, and takes it from where it was; nil is none. The
// caller holds mu.
func (k *session) rank(l *queue.List) {
	if k.seat.on != nil {
		k.seat.on.Remove(k.seat.at)
	}
	if k.seat.on = l; l != nil {
		k.seat.at = l.PushBack(k)
	}
}

// answered notes the first answer to a client that does not speak QUIC.
func (s *Server) answered(k *session) {
	s.mu.Lock()
	var crowded *session
	if k.half && k.state == carried {
		k.proven()
		if s.Limits.PendingFull(s.sockets.answered.Len()) {
			crowded = s.sockets.answered.Front().Value.(*session)
			crowded.rank(nil)
		}
		k.rank(&s.sockets.answered)
	}
	s.mu.Unlock()
	crowded.crowdedOut()
}

// resting is how long a session must have been quiet to make room for a new one
// although its client has spoken after an answer.
const resting = 250 * time.Millisecond

// leastProven is the session that makes room for a new one: the oldest of those
// that have not spoken after an answer, or else one without QUIC that rests. It
// is nil where all are in use. The caller holds mu.
func (s *Server) leastProven() *session {
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
		if now.Sub(k.start)-time.Duration(k.moved.Load()) >= resting {
			return k
		}
		k.rank(&s.sockets.again)
	}
	return nil
}
