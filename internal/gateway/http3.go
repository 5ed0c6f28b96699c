package gateway

import (
	"context"
	"sync"

	"culvert.dev/connect/h3"
	"culvert.dev/internal/gateway/inbound"
)

// http3Sockets are the open sockets at which HTTP/3 ends.
type http3Sockets struct {
	mu      sync.Mutex // guards what follows
	sockets map[*inbound.Socket]struct{}
}

func (s *http3Sockets) add(one *inbound.Socket) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if one.HTTP3 == nil {
		return
	}
	if s.sockets == nil {
		s.sockets = make(map[*inbound.Socket]struct{})
	}
	s.sockets[one] = struct{}{}
}

func (s *http3Sockets) remove(one *inbound.Socket) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.sockets, one)
}

// servers returns their servers.
func (s *http3Sockets) servers() (all []*h3.Server) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for one := range s.sockets {
		all = append(all, &one.HTTP3.Server)
	}
	return all
}

// shutdown drains them, and waits for that.
func (s *http3Sockets) shutdown(ctx context.Context) {
	var wg sync.WaitGroup
	for _, server := range s.servers() {
		wg.Go(func() { _ = server.Shutdown(ctx) })
	}
	wg.Wait()
}

// close ends everything.
func (s *http3Sockets) close() {
	for _, server := range s.servers() {
		_ = server.Close()
	}
}
