package reverse

import (
	"cmp"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"culvert.dev/tunnel"
)

// firstOwnPort is the first of the ports that FreePort gives: those that nobody registers
// for a protocol, RFC 6335 section 6.
const firstOwnPort = 49152

// An AttachedSession is the session of a connector whose protocol opens streams of its own,
// as SSH does.
type AttachedSession interface {
	Session
	tunnel.Carrier

	// NameChanged is called when a name is not registered any more, with the reason, and with nil
	// when it is registered again. It must not block.
	NameChanged(reg *Registration, err error)

	// Draining is called when the gateway is about to stop. It must not block.
	Draining()
}

// An Attachment is an AttachedSession among the sessions of a Server, until End.
type Attachment struct {
	server    *Server
	session   AttachedSession
	req       *tunnel.Request
	id        uint64
	connector string
	since     time.Time
	admitted  *tunnel.Session

	mu       sync.Mutex // guards what follows
	names    map[memberKey]*attachedName
	draining bool
	ended    bool
}

// An attachedName is a name that was registered.
type attachedName struct {
	reg  Registration
	m    *Membership
	lost tunnel.Reason // why m has left, by a policy; "" where it has not
}

// Attach lists x. req is that of its connector, whose Accept and Refuse are called as for
// any request; its Peer owns the names. connector is what the connector calls itself. The
// error is that of a Router, which has told the Outcome.
func (s *Server) Attach(req *tunnel.Request, x AttachedSession, connector string) (*Attachment, error) {
	a := &Attachment{server: s, session: x, req: req, connector: clip(connector), since: time.Now(), names: map[memberKey]*attachedName{}}
	if err := s.listAttached(a); err != nil {
		s.Router.Refuse(req, err)
		return nil, err
	}
	admitted, err := s.Router.Admit(req, Name.String())
	if err != nil {
		s.unlistAttached(a)
		return nil, err
	}
	a.admitted = admitted
	admitted.Carry(x)
	if req.Peer.Revoked() != nil { // since it was admitted
		x.Kill(tunnel.Revoked)
	}
	s.log().Info("connector joined", "owner", req.Peer.ID, "source", req.Source.String(), "connector", a.connector)
	return a, nil
}

func (s *Server) listAttached(a *Attachment) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	id, err := s.count(a.req)
	if err != nil {
		return err
	}
	a.id = id
	if s.attached == nil {
		s.attached = map[*Attachment]struct{}{}
	}
	s.attached[a] = struct{}{}
	return nil
}

func (s *Server) unlistAttached(a *Attachment) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.attached, a)
	s.uncount(a.req)
}

// attachments returns those that are listed. The caller holds mu.
func (s *Server) attachments() []*Attachment {
	all := make([]*Attachment, 0, len(s.attached))
	for a := range s.attached {
		all = append(all, a)
	}
	return all
}

// FreePort returns a port at which no session serves name, for a connector that leaves the
// port to the gateway.
func (s *Server) FreePort(name tunnel.Pattern) uint16 {
	g := s.Groups
	g.mu.RLock()
	defer g.mu.RUnlock()
	used := map[uint16]bool{}
	if h := g.names[name]; h != nil {
		for _, m := range h.members {
			used[m.Port] = true
		}
	}
	for {
		p := firstOwnPort + rand.N[uint16](1<<16-1-firstOwnPort)
		if !used[p] { // of a name there are fewer than maxMembers
			return p
		}
	}
}

// Register has the session serve what reg says, until Unregister or End. The error is that
// of Groups.Join.
func (a *Attachment) Register(reg Registration) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	k := memberKey{reg.Name, reg.Port}
	switch {
	case a.ended:
		return ErrEnded
	case a.names[k] != nil:
		return tunnel.Refusef(tunnel.BadRequest, "reverse: %q: the session has registered it before, with port %d", reg.Name, reg.Port)
	}
	m, err := a.server.Groups.Join(a.req, a.session, reg)
	if err != nil {
		return err
	}
	if a.server.Groups.isShared(m) {
		a.server.Groups.logShared(m)
	}
	if a.draining {
		m.Drain()
	}
	a.names[k] = &attachedName{reg: reg, m: m}
	return nil
}

// Unregister ends a registration. Its streams go on.
func (a *Attachment) Unregister(name tunnel.Pattern, port uint16) {
	a.mu.Lock()
	defer a.mu.Unlock()
	k := memberKey{name, port}
	if n := a.names[k]; n != nil {
		n.m.Leave()
		delete(a.names, k)
	}
}

// Withdraw is Unregister of a name that the connector may not have any longer, for the reason why,
// which is logged.
func (a *Attachment) Withdraw(name tunnel.Pattern, port uint16, why error) {
	a.Unregister(name, port)
	a.server.Groups.logLost(a.req, name, port, why)
}

// recheck registers again the names that a has lost, and tells the session of changes.
func (a *Attachment) recheck() {
	type change struct {
		reg Registration
		err error
	}
	var changes []change
	a.mu.Lock()
	for _, n := range a.names {
		if !n.m.hasLeft() {
			continue
		}
		m, err := a.server.Groups.Join(a.req, a.session, n.reg)
		if err == nil {
			if n.m = m; a.draining {
				m.Drain()
			}
		}
		lost := tunnel.Reason("")
		if err != nil {
			lost = tunnel.ReasonOf(err)
		} else {
			a.server.log().Info("name is now registered", "name", n.reg.Name.String(), "port", n.reg.Port, "owner", a.req.Peer.ID, "source", a.req.Source.String())
		}
		if (lost == "") != (n.lost == "") {
			changes = append(changes, change{n.reg, err})
		}
		n.lost = lost
	}
	a.mu.Unlock()
	for i := range changes {
		a.session.NameChanged(&changes[i].reg, changes[i].err)
	}
}

// drain has other sessions preferred, and the connector told.
func (a *Attachment) drain() {
	a.mu.Lock()
	a.draining = true
	for _, n := range a.names {
		n.m.Drain()
	}
	a.mu.Unlock()
	a.session.Draining()
}

// End takes the session and its names from the list. Calls after the first do nothing.
func (a *Attachment) End(e tunnel.End) {
	a.mu.Lock()
	ended := a.ended
	a.ended = true
	for k, n := range a.names {
		n.m.Leave()
		delete(a.names, k)
	}
	a.mu.Unlock()
	if ended {
		return
	}
	a.server.unlistAttached(a)
	a.admitted.End(e)
	a.server.log().Info("connector left", "owner", a.req.Peer.ID, "source", a.req.Source.String(), "connector", a.connector, "lasted", time.Since(a.since).Round(time.Microsecond))
}

func (a *Attachment) info() SessionInfo {
	in, out, _ := a.session.Progress()
	i := SessionInfo{
		ID: a.id, Owner: a.req.Peer.ID, Connector: a.connector, Source: a.req.Source, Listener: a.req.Listener, Proto: a.req.Proto,
		Secure: a.req.TLS != nil, Since: a.since, Streams: a.session.Streams(), In: in, Out: out,
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	i.Draining = a.draining
	for _, n := range a.names {
		if n.lost == "" {
			i.Names = append(i.Names, n.reg)
		} else {
			i.Refused = append(i.Refused, Result{Name: n.reg.Name, Port: n.reg.Port, Reason: n.lost})
		}
	}
	slices.SortFunc(i.Names, func(a, b Registration) int {
		return cmp.Or(cmp.Compare(a.Name.String(), b.Name.String()), cmp.Compare(a.Port, b.Port))
	})
	return i
}

// PublicError returns the text of an error of Groups.Join for a connector.
func PublicError(err error) string { return publicError(err) }
