package peer

import (
	"context"
	"fmt"
	"net"
	"strings"
	"sync/atomic"
	"time"

	"culvert.dev/tunnel"
)

// MaxSubscriptions is how many streams one principal that is no peer may have: all replicas of a
// workload may have the same identity.
const MaxSubscriptions = 1000

// maxViews is how many different catalogs the streams of one principal may need. Streams with the
// same credentials and from the same network share one.
const maxViews = 64

// subscribers are the callers that read the catalog and are no peers, by principal. One is listed for
// as long as it has a stream.
type subscribers map[string]*subscriber

// A subscriber is one principal. Its peer offers nothing, and is not in the configuration.
type subscriber struct {
	*peer
	streams int // open ones, and those that begin
}

// with returns the peers, and the subscribers as peers. The caller holds the lock of both.
func (m subscribers) with(peers []*peer) []*peer {
	all := append(make([]*peer, 0, len(peers)+len(m)), peers...)
	for _, one := range m {
		all = append(all, one.peer)
	}
	return all
}

// enter counts a stream of a caller, and returns its principal. leave ends that.
func (p *Peers) enter(caller *tunnel.Peer) *subscriber {
	p.mu.Lock()
	defer p.mu.Unlock()
	key := caller.Method + " " + caller.ID
	one := p.others[key]
	if one == nil {
		one = &subscriber{peer: &peer{
			Config: &Config{Name: tunnel.Clip(caller.ID)}, owner: p, subscriber: true, changed: make(chan struct{}, 1), offers: map[string]*catalog{}, since: time.Now(),
		}}
		if p.others == nil {
			p.others = subscribers{}
		}
		p.others[key] = one
	}
	one.streams++
	return one
}

func (p *Peers) leave(caller *tunnel.Peer, one *subscriber) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if one.streams--; one.streams == 0 {
		delete(p.others, caller.Method+" "+caller.ID)
	}
}

// serveSubscriber serves the catalog to a caller that is no peer.
func (p *Peers) serveSubscriber(ctx context.Context, req *tunnel.Request) {
	t := p.Table()
	switch {
	case t == nil || p.Settled != nil && !p.Settled():
		p.refuse(req, tunnel.Refusef(tunnel.Overload, "peer: this gateway does not know all of its services yet"))
		return
	case req.Peer.Method == "":
		p.refuse(req, tunnel.Refusef(tunnel.Denied, "peer: a catalog is for callers with an identity"))
		return
	case !t.HasCatalog():
		p.refuse(req, tunnel.Refusef(tunnel.Denied, "peer: %q is not the id of a peer's gateway, and no policy with the verb catalog lets others see services", tunnel.Clip(req.Peer.ID)))
		return
	}
	one := p.enter(&req.Peer)
	defer p.leave(&req.Peer, one)
	s, err := one.newSession(req.Peer, req.Source.Addr(), false, req.Source.String())
	if err != nil {
		p.refuse(req, err)
		return
	}
	stream, end, err := p.admit(req, s)
	if err != nil {
		one.forget(s)
		return
	}
	defer func() { end(err) }()
	one.begin(s, stream)
	if p.isDraining() { // Drain may have looked before
		s.drain()
	}
	if err = one.serve(ctx, s); err != nil && !isRoutine(err) {
		p.log().Warn("stream of a subscriber ended", "subscriber", one.Name, "source", s.by, "error", err.Error())
	}
}

func (p *Peers) isDraining() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.draining
}

// inNetwork reports whether the address of a subscriber is still in the network for which its
// catalog was made.
func (s *session) inNetwork() bool {
	network, _ := s.peer.owner.Table().Network(s.from)
	return network == s.network
}

// admit accepts req within the limits of its client. The caller calls end once, when the stream is
// closed. If there is an error, the client has its answer.
func (p *Peers) admit(req *tunnel.Request, s *session) (_ net.Conn, end func(error), err error) {
	if p.Router == nil {
		stream, err := req.Accept()
		return stream, func(error) {}, err
	}
	admitted, err := p.Router.Admit(req, Host)
	if err != nil {
		return nil, nil, err
	}
	c := &carried{session: s, conn: admitted.Conn}
	s.last.Store(time.Now().UnixNano())
	admitted.Carry(c)
	if req.Peer.Revoked() != nil { // since it was admitted
		c.Kill(tunnel.Revoked)
	}
	return admitted.Conn, func(err error) {
		e := tunnel.End{Reason: tunnel.Done, In: s.in.Load(), Out: s.out.Load()}
		switch why := c.why.Load(); {
		case why != nil:
			e.Reason = *why
		case err != nil && !isRoutine(err):
			e.Reason, e.Err = tunnel.Reset, err
		}
		admitted.End(e)
	}, nil
}

// A carried is the stream of a subscriber, as the Router lists it.
type carried struct {
	session *session
	conn    net.Conn
	why     atomic.Pointer[tunnel.Reason] // why it was killed; nil if it was not
}

// Progress implements tunnel.Carrier.
func (c *carried) Progress() (in, out int64, moved time.Time) {
	return c.session.in.Load(), c.session.out.Load(), time.Unix(0, c.session.last.Load())
}

// Kill implements tunnel.Carrier.
func (c *carried) Kill(why tunnel.Reason) {
	c.why.CompareAndSwap(nil, &why)
	_ = c.conn.Close()
}

// viewOf returns a key of all that the catalog of a caller depends on, beside the table: what
// policies know of the caller, and the network of its address.
func viewOf(caller *tunnel.Peer, network string) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%q", network)
	for at := caller; at != nil; {
		fmt.Fprintf(&b, " %q %q", at.Method, at.ID)
		if at.Auth == nil {
			break
		}
		fmt.Fprintf(&b, " %q %q %q %q %q", at.Auth.TrustDomain, at.Auth.Namespace, at.Auth.ServiceAccount, at.Auth.Issuer, at.Auth.Claims)
		at = at.Auth.Actor
	}
	return b.String()
}
