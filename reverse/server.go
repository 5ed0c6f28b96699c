package reverse

import (
	"cmp"
	"context"
	"crypto/rand"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"culvert.dev/tunnel"
)

// DefaultSessionsPerOwner is how many sessions one owner may have.
const DefaultSessionsPerOwner = 1000

// A Server takes the sessions of connectors: it is the Handler of requests for Name. Its
// fields are not to be changed once it serves. It must not be copied.
type Server struct {
	Groups *Groups
	Router *tunnel.Router // admits sessions, and lists them

	// CurrentVia returns what this gateway calls itself. May be nil.
	CurrentVia func() string

	// SessionsPerOwner is how many sessions one owner may have; 0 means
	// DefaultSessionsPerOwner.
	SessionsPerOwner int

	// Log receives which connectors join and leave. Nil discards it.
	Log *slog.Logger

	once    sync.Once
	replica string // set by once

	panics atomic.Int64

	mu       sync.Mutex // guards what follows
	draining bool
	lastID   uint64
	sessions map[*serverSession]struct{}
	attached map[*Attachment]struct{}
	owners   map[string]int            // sessions by owner
	lists    map[string]int            // bytes of the lists of names of their sessions, by owner
	tickets  map[[32]byte]issuedTicket // by their hash
}

// Replica returns what this process calls itself to connectors. Each has another.
func (s *Server) Replica() string {
	s.once.Do(func() { s.replica = rand.Text() })
	return s.replica
}

// ServeTunnel implements tunnel.Handler. It returns when the session has ended.
func (s *Server) ServeTunnel(ctx context.Context, req *tunnel.Request) {
	x := &serverSession{server: s, req: req, since: time.Now(), members: map[memberKey]*Membership{}, ready: make(chan struct{}), gone: make(chan struct{})}
	if err := s.enter(x); err != nil {
		s.Router.Refuse(req, err)
		return
	}
	defer s.leave(x)
	admitted, err := s.Router.Admit(req, Name.String())
	if err != nil {
		return
	}
	x.carrier = newCarrierConn(admitted.Conn)
	admitted.Carry(x)
	end := tunnel.End{Reason: tunnel.Internal}
	defer func() {
		close(x.gone)
		x.endPool()
		_ = x.carrier.Close()
		_ = x.dialer.Close()
		admitted.End(end)
	}()
	stop := context.AfterFunc(ctx, func() {
		defer func() {
			if v := recover(); v != nil {
				s.caught(v)
			}
		}()
		x.Kill(tunnel.Drain)
	})
	defer stop()
	err = x.serve(ctx)
	end = x.end(err)
}

// enter lists x.
func (s *Server) enter(x *serverSession) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	id, err := s.count(x.req)
	if err != nil {
		return err
	}
	if s.sessions == nil {
		s.sessions = map[*serverSession]struct{}{}
	}
	x.id = id
	s.sessions[x] = struct{}{}
	return nil
}

// count counts a session of the caller of req, and returns its id. The caller holds mu.
func (s *Server) count(req *tunnel.Request) (uint64, error) {
	owner := req.Peer.ID
	if req.Peer.Method == "" || owner == "" {
		return 0, tunnel.Refusef(tunnel.Denied, "reverse: a session has an owner, and the caller has no identity")
	}
	if s.draining {
		return 0, tunnel.Refusef(tunnel.Drain, "reverse: the gateway is stopping")
	}
	if n, most := s.owners[owner], cmp.Or(s.SessionsPerOwner, DefaultSessionsPerOwner); n >= most {
		return 0, tunnel.Refusef(tunnel.Overload, "reverse: %d sessions are open, the limit of one owner", n)
	}
	if s.owners == nil {
		s.owners = map[string]int{}
	}
	s.lastID++
	s.owners[owner]++
	return s.lastID, nil
}

// uncount ends the count of a session of the caller of req. The caller holds mu.
func (s *Server) uncount(req *tunnel.Request) {
	if s.owners[req.Peer.ID]--; s.owners[req.Peer.ID] <= 0 {
		delete(s.owners, req.Peer.ID)
	}
}

func (s *Server) leave(x *serverSession) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.sessions, x)
	s.uncount(x.req)
	s.unhold(x)
}

// Drain tells connectors that the gateway is about to stop, and accepts no more sessions. Open ones
// go on until their connectors end them. Drain does not wait.
func (s *Server) Drain() {
	s.mu.Lock()
	s.draining = true
	s.mu.Unlock()
	all, attached := s.open()
	for _, x := range all {
		x.sendDrain()
		x.stopPool()
	}
	for _, a := range attached {
		a.drain()
	}
}

// open returns the sessions and attachments, which register names.
func (s *Server) open() ([]*serverSession, []*Attachment) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Collect(maps.Keys(s.sessions)), s.attachments()
}

func (s *Server) via() string {
	if s.CurrentVia == nil {
		return ""
	}
	return s.CurrentVia()
}

func (s *Server) log() *slog.Logger {
	if s.Log == nil {
		return slog.New(slog.DiscardHandler)
	}
	return s.Log
}

// caught logs a panic, the first few of them.
func (s *Server) caught(v any) {
	if s.panics.Add(1) <= 10 {
		p := tunnel.Caught(v)
		s.log().Error("panic in a reverse session", "error", p.Error(), "stack", string(p.Stack))
	}
}

// A SessionInfo describes a session of a Server.
type SessionInfo struct {
	ID        uint64
	Owner     string
	Connector string // what the connector calls its process
	Source    netip.AddrPort
	Listener  string
	Proto     string // the carrier
	Secure    bool   // inside of TLS
	Since     time.Time
	Streams   int
	In, Out   int64 // bytes, of all streams
	Draining  bool
	Pool      int // pool connections that wait
	Names     []Registration
	Refused   []Result // names that it has asked for and does not have
}

// Sessions returns the open sessions, the oldest first.
func (s *Server) Sessions() []SessionInfo {
	s.mu.Lock()
	all := make([]*serverSession, 0, len(s.sessions))
	for x := range s.sessions {
		all = append(all, x)
	}
	attached := s.attachments()
	s.mu.Unlock()
	list := make([]SessionInfo, 0, len(all)+len(attached))
	for _, x := range all {
		list = append(list, x.info())
	}
	for _, a := range attached {
		list = append(list, a.info())
	}
	slices.SortFunc(list, func(a, b SessionInfo) int { return cmp.Compare(a.ID, b.ID) })
	return list
}
