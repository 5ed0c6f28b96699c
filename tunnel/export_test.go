package tunnel

// Account returns what the Server counts now: places held by all sources,
// unfinished preambles, and connections that Close would close.
func (s *Server) Account() (open, halfOpen, waiting int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	perSource := 0
	for _, src := range s.slots.sources.accounts {
		open += src.Open
		perSource += src.HalfOpen
	}
	listed := 0
	for k := s.slots.oldest; k != nil; k = k.next {
		listed++
	}
	if perSource != s.slots.halfOpen || listed != s.slots.halfOpen {
		panic("the counts of unfinished preambles disagree")
	}
	return open, s.slots.halfOpen, len(s.slots.waiting)
}

// Sources returns how many sources the Server remembers.
func (s *Server) Sources() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.slots.sources.accounts)
}

// Reserved returns how many tunnels the Router counts.
func (r *Router) Reserved() int { return int(r.tunnels.Load()) }

// InKernel is false where the event loop carries nothing.
const InKernel = inKernel

// Listeners returns how many listeners s knows of.
func (s *Server) Listeners() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.listeners)
}
