package reverse

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"culvert.dev/tunnel"
)

// maxLogged bounds the lines of one kind for one list of names.
const maxLogged = 3

// A refusedName is a name that a connector has asked for and does not get.
type refusedName struct {
	reg Registration
	err error
}

// report tells the Outcomes of refused, the first few names, of so many in total: as those of
// other requests.
func (x *serverSession) report(refused []refusedName, total int) {
	observe := x.server.Router.Observe
	if observe == nil {
		return
	}
	for i := range refused {
		r, target := &refused[i], refused[i].reg.Name.String()
		if r.reg.Port != 0 {
			target = fmt.Sprintf("%s:%d", target, r.reg.Port)
		}
		observe(&tunnel.Outcome{
			Start: time.Now(), Proto: x.req.Proto, Listener: x.req.Listener, Source: x.req.Source, Process: x.req.Process, Peer: x.req.Peer,
			Target: target, Reason: tunnel.ReasonOf(r.err), Err: r.err,
		})
	}
	if more := total - len(refused); more > 0 {
		x.server.log().Info("more names refused to a connector", "names", more, "owner", x.req.Peer.ID, "source", x.req.Source.String())
	}
}

// A memberKey identifies a registration of a session.
type memberKey struct {
	name tunnel.Pattern
	port uint16
}

// Recheck decides again about the names of open sessions, after a change of what Groups.Authorize
// decides by. It tells connectors of each name that they lose or get.
func (s *Server) Recheck() {
	s.Groups.Recheck()
	s.recheck()
}

// recheck registers the names again that sessions have lost or did not get, and tells their
// connectors of changes.
func (s *Server) recheck() {
	all, attached := s.open()
	for _, x := range all {
		x.recheck()
	}
	for _, a := range attached {
		a.recheck()
	}
}

// recheck registers the names of x again that it has lost, or did not get before.
func (x *serverSession) recheck() {
	x.mu.Lock()
	refused, lost := x.refused, false
	for _, m := range x.members {
		lost = lost || m.hasLeft()
	}
	if refused == 0 && !lost {
		x.mu.Unlock()
		return
	}
	x.registerLocked(x.asked, false)
	changed := lost || x.refused != refused
	if changed {
		x.changes++
	}
	x.mu.Unlock()
	if !changed {
		return
	}
	go func() { // the connector may not read
		defer func() {
			if v := recover(); v != nil {
				x.server.caught(v)
			}
		}()
		_ = x.sendResults()
	}()
}

// sendResults sends the connector the results of its names, if it does not have them. Before the
// control stream is open it does nothing: serveControl calls it then.
func (x *serverSession) sendResults() error {
	x.sending.Lock()
	defer x.sending.Unlock()
	x.mu.Lock()
	s, results, known := x.control, x.results, x.sent == x.changes
	if s != nil {
		x.sent = x.changes
	}
	x.mu.Unlock()
	if s == nil || known {
		return nil
	}
	return s.send(control{Kind: kindRegistered, Names: results})
}

// register makes the names of x those of list.
func (x *serverSession) register(list []Registration) {
	first, refused := x.registerFresh(list)
	x.report(first, refused)
}

// registerFresh is register, and returns the first few of so many names that are refused.
func (x *serverSession) registerFresh(list []Registration) (first []refusedName, refused int) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.changes++
	first = x.registerLocked(list, true)
	return first, x.refused
}

// registerLocked is register for a caller that holds mu. A list is fresh where the connector
// has sent it: the first few refusals are returned.
func (x *serverSession) registerLocked(list []Registration, fresh bool) []refusedName {
	d := nameDecisions{
		session: x, fresh: fresh, wanted: make(map[memberKey]bool, len(list)),
		asked: make([]Registration, 0, min(len(list), maxNamesOf)), shared: map[tunnel.Pattern]bool{},
	}
	results := make([]Result, len(list))
	for i := range list {
		results[i] = d.decide(list[i])
	}
	for k, m := range x.members {
		if !d.wanted[k] {
			d.left = append(d.left, m)
			delete(x.members, k)
		}
	}
	for _, m := range d.left {
		m.Leave()
	}
	if fresh {
		x.over = d.over
		if len(d.over) > 0 {
			x.server.log().Info("names refused to a connector", "names", len(d.over), "owner", x.req.Peer.ID, "source", x.req.Source.String(), "reason", string(tunnel.Overload), "error", errNames.Error())
		}
	} else {
		results = append(results, x.over...)
	}
	if more := len(d.shared) - maxLogged; more > 0 {
		x.server.log().Info("more names have several connectors, which share their requests", "names", more, "owner", x.req.Peer.ID, "source", x.req.Source.String())
	}
	x.asked, x.refused, x.results = d.asked, d.refused, results
	return d.first
}

// nameDecisions are the decisions about the names of one list. The mu of the session is held.
type nameDecisions struct {
	session *serverSession
	fresh   bool
	wanted  map[memberKey]bool
	asked   []Registration          // those that recheck decides about again
	over    []Result                // those beyond the limit, which it does not
	left    []*Membership           // end after all others have joined, so that a name is not without a session
	refused int                     // by Groups
	first   []refusedName           // the first few of those
	shared  map[tunnel.Pattern]bool // names that are new, and that other connectors have, too
	texts   int                     // bytes of the errors in results
}

// decide decides about one registration.
func (d *nameDecisions) decide(reg Registration) Result {
	x, k := d.session, memberKey{reg.Name, reg.Port}
	result := Result{Name: reg.Name, Port: reg.Port}
	if d.wanted[k] {
		return result // the list has it twice
	}
	if len(d.wanted) >= maxNamesOf {
		result.Reason, result.Error = tunnel.Overload, d.text(errNames.Error())
		d.over = append(d.over, result)
		return result
	}
	d.wanted[k] = true
	d.asked = append(d.asked, reg)
	if old := x.members[k]; old != nil {
		if old.Registration.equal(&reg) && !old.hasLeft() {
			return result
		}
		d.left = append(d.left, old)
	}
	delete(x.members, k)
	m, err := x.server.Groups.join(x.req, x, x.connector, reg)
	if err != nil {
		result.Reason, result.Error, result.Taken = tunnel.ReasonOf(err), d.text(publicError(err)), errors.Is(err, errTaken)
		if d.refused++; d.fresh && d.refused <= maxLogged {
			d.first = append(d.first, refusedName{reg, err})
		}
		return result
	}
	switch {
	case !d.fresh:
		x.server.log().Info("name is now registered", "name", reg.Name.String(), "port", reg.Port, "owner", x.req.Peer.ID, "source", x.req.Source.String())
	case x.server.Groups.isShared(m):
		result.Shared = true
		if !d.shared[reg.Name] && len(d.shared) < maxLogged {
			x.server.Groups.logShared(m)
		}
		d.shared[reg.Name] = true
	}
	if x.draining {
		m.Drain()
	}
	x.members[k] = m
	return result
}

// text returns the text of an error for a Result, and "" if the texts of the list are too long: the
// Reason says enough.
func (d *nameDecisions) text(s string) string {
	if d.texts += len(s); d.texts > maxTexts {
		return ""
	}
	return s
}

// errNames is the error for a name beyond the limit of a session.
var errNames = fmt.Errorf("reverse: a session has %d names, the limit", maxNamesOf)

func (r *Registration) equal(o *Registration) bool {
	return r.Name == o.Name && r.Port == o.Port && r.Group == o.Group && r.Weight == o.Weight && r.Insecure == o.Insecure && slices.Equal(r.Allow, o.Allow)
}

// leaveAll ends the memberships of x.
func (x *serverSession) leaveAll() {
	x.mu.Lock()
	defer x.mu.Unlock()
	for k, m := range x.members {
		m.Leave()
		delete(x.members, k)
	}
}
