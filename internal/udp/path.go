package udp

import (
	"context"
	"errors"
	"net"
	"slices"
	"sync/atomic"
	"time"

	"culvert.dev/tunnel"
)

const (
	maxPaths    = 4                // of a session; the quietest makes room
	pathQuiet   = 30 * time.Second // of a path that is no longer used, while another one is
	pathWaiting = 64 << 10         // bytes held until its socket is there
)

// A path is an address at which a session's client is reached: a client that moves
// has a second one, until nothing comes from the first any more.
type path struct {
	session *session
	client  client
	moved   atomic.Int64 // as the session's

	// Guarded by the Server's mu.
	sock    tunnel.DatagramConn // nil before the session is carried, and where it is local
	extra   bool                // the socket is counted by the Budget, and not by the session
	closed  bool                // it is not used any more
	refused bool                // the client may not have the service from there
	waiting [][]byte
	size    int // of waiting
}

// hold keeps a datagram until the path has a socket. The caller holds mu.
func (p *path) hold(b []byte) {
	if p.closed || p.refused || p.size+len(b) > pathWaiting || !p.session.mayWait(len(b)) {
		p.session.d.s.dropped.Add(1)
		return
	}
	p.waiting = append(p.waiting, append([]byte(nil), b...))
	p.size += len(b)
	p.session.wait(len(b))
}

// release returns the datagrams that hold has kept. The caller holds mu.
func (p *path) release() [][]byte {
	w := p.waiting
	p.session.wait(-p.size)
	p.waiting, p.size = nil, 0
	return w
}

// forget removes p and closes its socket. The caller holds mu.
func (d *activeListener) forget(p *path) {
	rest := slices.DeleteFunc(d.byAddr[p.client], func(q *path) bool { return q == p })
	if len(rest) == 0 {
		delete(d.byAddr, p.client)
	} else {
		d.byAddr[p.client] = rest
	}
	if d.answers[p.client.addr] == p.client {
		delete(d.answers, p.client.addr)
	}
	p.closed = true
	p.release()
	if p.sock != nil {
		_ = p.sock.Close()
		if p.extra {
			d.s.Budget.Give(1)
			d.s.sockets.n--
		}
		p.sock = nil
	}
}

// move opens a second path for a client that was known by its connection id
// and has another address. The caller holds mu.
func (k *session) move(c client, b []byte) {
	d, s := k.d, k.d.s
	if len(k.paths) == maxPaths {
		k.drop(k.leastRecent())
	}
	p := &path{session: k, client: c}
	p.moved.Store(int64(time.Since(k.start)))
	k.paths = append(k.paths, p)
	d.byAddr[c] = append(d.byAddr[c], p)
	if k.state == local {
		d.answers[c.addr] = c
		return
	}
	p.hold(b)
	s.wg.Add(1)
	go k.follow(p)
}

// leastRecent returns the path that was used least recently.
func (k *session) leastRecent() *path {
	return slices.MinFunc(k.paths, func(a, b *path) int { return int(a.moved.Load() - b.moved.Load()) })
}

// drop closes a path. The caller holds mu.
func (k *session) drop(p *path) {
	k.paths = slices.DeleteFunc(k.paths, func(q *path) bool { return q == p })
	k.d.forget(p)
}

// follow connects p to the endpoint of its session, if the client may use the service
// from its new address. Otherwise p stays refused for a while, so that this is not
// decided for every datagram.
func (k *session) follow(p *path) {
	s := k.d.s
	defer s.wg.Done()
	defer k.recovered()
	req := k.req
	req.Source = p.client.addr
	route, err := s.Router.Decide(k.d.ctx, &req)
	if err == nil && route.Service != k.tun.Route.Service {
		err = tunnel.Refusef(tunnel.NoRoute, "the route of %s has changed", req.Target())
	}
	if err == nil && !s.occupyExtra() {
		err = tunnel.Refusef(tunnel.Overload, "all descriptors for sessions of UDP are taken")
	}
	if err != nil {
		s.mu.Lock()
		p.refused = true
		p.release()
		s.mu.Unlock()
		s.log().Info("rejected a client migration", "proto", req.Proto, "target", req.Target(), "from", k.req.Source, "to", p.client.addr, "reason", string(tunnel.ReasonOf(err)), "err", err)
		return
	}
	var sock tunnel.DatagramConn
	c, err := k.dial(&req)
	if err == nil {
		sock, err = k.d.datagramConn(c)
	}
	s.mu.Lock()
	if err != nil || p.closed {
		s.sockets.n--
		s.mu.Unlock()
		s.Budget.Give(1)
		if c != nil {
			_ = c.Close()
		}
		return
	}
	p.sock, p.extra = sock, true
	for _, b := range p.release() {
		err = errors.Join(err, k.toService(p, sock, b))
	}
	s.mu.Unlock()
	if err != nil {
		k.lost(err)
	}
	s.log().Debug("client migrated", "proto", req.Proto, "target", req.Target(), "from", k.req.Source, "to", p.client.addr)
	k.pump(p, sock)
}

// dial opens another connection to the endpoint of k.
func (k *session) dial(req *tunnel.Request) (net.Conn, error) {
	ep := k.tun.Endpoint
	if ep.Transport == nil {
		return k.d.s.dialer().DialEndpoint(k.d.ctx, ep)
	}
	ctx, cancel := context.WithTimeout(k.d.ctx, tunnel.DefaultConnectTotalTimeout)
	defer cancel()
	return ep.Transport.Dial(ctx, &ep, req)
}

// prune closes paths that the client no longer uses. The caller holds mu.
func (k *session) prune(now time.Time) {
	for len(k.paths) > 1 {
		p := k.leastRecent()
		most := pathQuiet
		if p.sock == nil {
			most = refusalMemory
		}
		if now.Sub(k.start)-time.Duration(p.moved.Load()) < most {
			return
		}
		k.drop(p)
	}
}
