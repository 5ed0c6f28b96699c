package registry

import (
	"sync"
	"time"
)

// maxSticky bounds the clients of a service whose endpoints are remembered. Beyond it
// the client goes that has connected least recently.
const maxSticky = 1 << 16

// stickyClients remember which endpoint each client of a service has. The zero value is
// ready.
type stickyClients struct {
	mu       sync.Mutex // guards what follows
	epoch    time.Time  // from which times are counted
	byClient map[uint64]int32
	clients  []stickyClient // of byClient, and the unused ones
	newest   int32          // the head of the list by last connection, as an index plus 1; 0 for none
	oldest   int32          // and its tail
	unused   int32          // the first of the unused ones, in a list by older
}

// A stickyClient is a client and its endpoint. There is no pointer in it, so that the
// garbage collector does not look at clients.
type stickyClient struct {
	client       uint64
	endpoint     uint64        // hashOf the endpoint
	last         time.Duration // of the last connection
	newer, older int32         // clients, as indices plus 1; 0 for none
}

// find returns hashOf the endpoint of a client, or 0.
func (s *stickyClients) find(client uint64, stickyFor time.Duration, now time.Time) uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	end := s.expire(stickyFor, now)
	if at := s.byClient[client]; at != 0 && s.clients[at-1].last > end {
		return s.clients[at-1].endpoint
	}
	return 0
}

// left returns how long a client keeps its endpoint if it does not connect again, 0
// where it has none.
func (s *stickyClients) left(client uint64, stickyFor time.Duration, now time.Time) time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	at := s.byClient[client]
	if at == 0 {
		return 0
	}
	return max(0, stickyFor-(now.Sub(s.epoch)-s.clients[at-1].last))
}

// set remembers that a client connects to an endpoint now.
func (s *stickyClients) set(client, endpoint uint64, stickyFor time.Duration, now time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.expire(stickyFor, now)
	at := s.byClient[client]
	switch {
	case at != 0:
		s.unlink(at)
	case s.unused != 0:
		at = s.unused
		s.unused = s.clients[at-1].older
	case len(s.clients) < maxSticky:
		s.clients = append(s.clients, stickyClient{})
		at = int32(len(s.clients))
	default:
		at = s.oldest
		delete(s.byClient, s.clients[at-1].client)
		s.unlink(at)
	}
	if s.byClient == nil {
		s.byClient, s.epoch = map[uint64]int32{}, now
	}
	s.byClient[client] = at
	s.clients[at-1] = stickyClient{client: client, endpoint: endpoint, last: now.Sub(s.epoch), older: s.newest}
	if s.newest != 0 {
		s.clients[s.newest-1].newer = at
	}
	s.newest = at
	if s.oldest == 0 {
		s.oldest = at
	}
}

// expire forgets a few of the clients whose time is over, which is that of those that
// connected last at end or before. The caller holds mu.
func (s *stickyClients) expire(stickyFor time.Duration, now time.Time) (end time.Duration) {
	const atOnce = 8 // so that no request waits for long
	end = now.Sub(s.epoch) - stickyFor
	for range atOnce {
		if s.oldest == 0 || s.clients[s.oldest-1].last > end {
			break
		}
		at := s.oldest
		delete(s.byClient, s.clients[at-1].client)
		s.unlink(at)
		s.clients[at-1] = stickyClient{older: s.unused}
		s.unused = at
	}
	if len(s.byClient) == 0 && len(s.clients) > 0 { // give the memory back
		s.byClient, s.clients, s.unused = nil, nil, 0
	}
	return end
}

// unlink takes a client out of the list. The caller holds mu.
func (s *stickyClients) unlink(at int32) {
	c := &s.clients[at-1]
	if c.newer != 0 {
		s.clients[c.newer-1].older = c.older
	} else {
		s.newest = c.older
	}
	if c.older != 0 {
		s.clients[c.older-1].newer = c.newer
	} else {
		s.oldest = c.newer
	}
}
