package tunnel

import "culvert.dev/tunnel/internal/relay"

// Account returns what the Server's clients have: places held, pending
// connections, and connections that Close would close.
func (s *Server) Account() (open, pending, waiting int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	m := s.accounts()
	m.mu.Lock()
	defer m.mu.Unlock()
	counted := 0
	for c := range m.each() {
		if c.prefix.IsValid() && c.prefix.Bits() == sitePrefix && c.prefix.Addr().Is6() {
			continue // counted with its clients
		}
		open += int(c.Open.Load())
		counted += int(c.Pending.Load())
	}
	listed := 0
	for p := s.slots.pending.Oldest(); p != nil; p = p.Next() {
		listed++
	}
	if counted != listed || listed != s.slots.pending.Len() {
		panic("the counts of pending connections disagree")
	}
	return open, listed, len(s.slots.waiting)
}

// Clients returns how many clients are remembered,.
func (s *Server) Clients() int { return s.accounts().Len() }

func (s *Server) accounts() *Clients {
	if s.Budget != nil {
		return &s.Budget.clients
	}
	return &s.clients
}

// Reserved returns how many tunnels the Router counts.
func (r *Router) Reserved() int { return int(r.tunnels.Load()) }

// Counted returns how many connections the Relay counts, of all services.
func (r *Relay) Counted() int {
	r.loads.mu.RLock()
	defer r.loads.mu.RUnlock()
	n := 0
	for _, s := range r.loads.loads {
		n += int(s.connections.Load())
	}
	return n
}

// InKernel is false where the event loop carries nothing.
const InKernel = relay.InKernel

// Listeners returns how many listeners s knows of.
func (s *Server) Listeners() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.listeners)
}

// CarryFor is Carry of a tunnel that is charged to c.
func (r *Relay) CarryFor(c *Client, t Tunnel) {
	var carried relay.Tunnel
	r.carry(&carried, t.Client, t.Server, t.IdleTimeout, t.HalfClosedTimeout, &chargedInfo{r.newCarriedInfo(&t), c}, nil)
}

type chargedInfo struct {
	carriedInfo
	client *Client
}

func (rec *chargedInfo) ChargedTo() (key any, name string) { return rec.client, rec.client.name }
