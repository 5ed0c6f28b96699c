package ssh

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"strconv"
	"sync"
	"time"

	"golang.org/x/crypto/ssh"

	"culvert.dev/connect"
	"culvert.dev/connect/internal/mux"
	"culvert.dev/identity/sshkeys"
	"culvert.dev/tunnel"
)

// A session is one connection whose client has logged in.
type session struct {
	p    *Protocol
	h    tunnel.Handler
	c    *tunnel.Conn
	conn *conn
	ssh  *ssh.ServerConn

	over     chan struct{} // closed once the connection has ended
	stopping chan struct{} // closed once it drains
	running  sync.WaitGroup
	served   served

	mu        sync.Mutex // guards what follows
	grant     *sshkeys.Grant
	under     *sshkeys.Authority // by which the key was last looked up
	streams   map[*stream]struct{}
	channels  int  // open, or closed by this side alone
	forwarded int  // of channels, those that this side has opened
	misses    int  // calls of checkAlive in a row for which the client owed a sign of life
	ended     bool // no goroutine is added to running any more
	meter     mux.Meter
	drained   bool
	why       error // why this side has ended the connection; nil if it has not
}

// serve serves the requests and channels of the client until the connection has ended.
func (s *session) serve(ctx context.Context, channels <-chan ssh.NewChannel, requests <-chan *ssh.Request) {
	timer := time.AfterFunc(s.p.keepalive(), func() {
		defer s.recovered()
		s.checkAlive()
	})
	s.mu.Lock()
	s.conn.timer = timer
	s.mu.Unlock()
	defer timer.Stop()
	for channels != nil || requests != nil {
		select {
		case nc, ok := <-channels:
			if !ok {
				channels = nil
				continue
			}
			s.open(ctx, nc)
		case r, ok := <-requests:
			if !ok {
				requests = nil
				continue
			}
			s.request(r)
		}
	}
}

// end ends the connection because of why.
func (s *session) end(why error) {
	s.mu.Lock()
	if s.why == nil {
		s.why = why
	}
	s.mu.Unlock()
	_ = s.conn.Close()
}

// caught ends the connection whose goroutine panicked.
func (s *session) caught(v any) {
	s.end(&tunnel.Error{Reason: tunnel.Internal, Err: tunnel.Caught(v)})
}

func (s *session) recovered() {
	if v := recover(); v != nil {
		s.caught(v)
	}
}

// endsWithin reports whether the connection ends before d is over.
func (s *session) endsWithin(d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-s.over:
		return true
	case <-t.C:
		return false
	}
}

// spend charges the client for a request that carries no data, and ends the connection of a client
// that sends little else.
func (s *session) spend(cost float64) bool {
	s.mu.Lock()
	ok := s.meter.Spend(cost)
	s.mu.Unlock()
	if !ok {
		s.end(tunnel.Refusef(tunnel.Flood, "ssh: far more requests that are refused than streams"))
	}
	return ok
}

// request answers a global request.
func (s *session) request(r *ssh.Request) {
	if !s.spend(mux.CostFrame) {
		return
	}
	switch r.Type {
	case "tcpip-forward":
		s.served.register(r)
	case "cancel-tcpip-forward":
		s.served.cancel(r)
	default:
		// Other requests are refused. For keepalive@openssh.com that is an answer like any other.
		_ = r.Reply(false, nil)
	}
}

// open answers the open of a channel.
func (s *session) open(ctx context.Context, nc ssh.NewChannel) {
	if !s.spend(mux.CostRequest) {
		return
	}
	s.mu.Lock()
	full, drained := s.channels-s.forwarded >= s.p.streams(), s.drained
	if !full && !drained {
		s.channels++
	}
	s.mu.Unlock()
	kind := nc.ChannelType()
	switch {
	case drained:
		_ = nc.Reject(ssh.ResourceShortage, "the gateway is stopping, try again")
	case full:
		_ = nc.Reject(ssh.ResourceShortage, fmt.Sprintf("this connection has %d channels, the limit", s.p.streams()))
	case kind == "direct-tcpip":
		s.running.Go(func() {
			defer s.recovered()
			s.direct(ctx, nc)
		})
	case kind == "session":
		s.running.Go(func() {
			defer s.recovered()
			s.console(nc)
		})
	default:
		s.closed()
		_ = nc.Reject(ssh.UnknownChannelType, "this gateway carries TCP streams and nothing else")
	}
}

// closed ends the count of a channel.
func (s *session) closed() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.channels--
	s.finishDrain()
}

// direct makes a request of a channel of the type direct-tcpip, RFC 4254 section 7.2.
func (s *session) direct(ctx context.Context, nc ssh.NewChannel) {
	req := s.c.NewRequest(Name)
	req.Start = time.Now()
	req.Peer = s.peer()
	err := s.target(req, nc.ExtraData())
	var grant *sshkeys.Grant
	if err == nil {
		grant, err = s.current()
	}
	told := "" // the text for the client, in place of that of err
	if err == nil && !grant.Limits.MayOpen(req.Host(), req.Port) {
		err = tunnel.Refusef(tunnel.Denied, "ssh: the key %q is not for %s: see its permitopen", grant.Peer.ID, req.Target())
		told = "your key is not for it: see its permitopen"
	}
	if err != nil {
		s.refuse(nc, req, err, told)
		if r, ok := s.h.(tunnel.Refuser); ok {
			r.Refused(req, err)
		}
		return
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	answered := false
	var st *stream
	req.Accept = func() (tunnel.Stream, error) {
		ch, requests, err := nc.Accept()
		answered = true
		if err != nil {
			s.closed()
			return nil, tunnel.Refusef(tunnel.Gone, "the client left before it was answered: %w", err)
		}
		st = newStream(s, ch)
		st.backlog.since = s.conn.arrived.Load()
		s.mu.Lock()
		s.meter.GiveBack(mux.CostRequest)
		s.streams[st] = struct{}{}
		s.mu.Unlock()
		s.running.Go(func() {
			defer s.recovered()
			s.watch(st, requests)
		})
		return st, nil
	}
	req.Refuse = func(err error) {
		answered = true
		s.refuse(nc, req, err, "")
	}
	defer func() {
		if v := recover(); v != nil {
			if st != nil {
				_ = st.Abort()
			}
			if r, ok := s.h.(tunnel.Refuser); ok {
				if !answered {
					s.refuse(nc, req, &tunnel.Error{Reason: tunnel.Internal, Err: errors.New("a fault")}, "")
				}
				r.Panicked(req, v)
				return
			}
			s.caught(v)
		}
	}()
	s.h.ServeTunnel(ctx, req)
}

// watch reads the requests of a channel, of which there should be none, until it is closed.
func (s *session) watch(st *stream, requests <-chan *ssh.Request) {
	for r := range requests {
		if !s.spend(mux.CostFrame) {
			break
		}
		_ = r.Reply(false, nil)
	}
	for range requests { // the library closes it with the connection
	}
	st.peerClosed()
	s.mu.Lock()
	delete(s.streams, st)
	s.mu.Unlock()
	s.closed()
}

// peer returns the identity of the client.
func (s *session) peer() tunnel.Peer {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.grant.Peer.WithActor(s.c.Peer)
}

// current returns what the client's key gives it now: the files may have changed, and keys and
// certificates expire.
func (s *session) current() (*sshkeys.Grant, error) {
	a := s.p.config.Load().Authority
	s.mu.Lock()
	grant, under := s.grant, s.under
	s.mu.Unlock()
	if expires := grant.Peer.Auth.Expires; a == under && (expires.IsZero() || time.Now().Before(expires)) {
		return grant, nil
	}
	now, err := a.Recheck(grant, time.Now())
	if err == nil && now.Peer.ID != grant.Peer.ID {
		err = fmt.Errorf("the key is that of %q now, and was that of %q", now.Peer.ID, grant.Peer.ID)
	}
	if err != nil {
		return nil, tunnel.Refusef(tunnel.NoAuth, "ssh: the client's key is no longer accepted: %w", err)
	}
	s.mu.Lock()
	s.grant, s.under = now, a
	s.mu.Unlock()
	return now, nil
}

// refuse refuses a channel with the text told, or, if that is empty, with the text for err.
func (s *session) refuse(nc ssh.NewChannel, req *tunnel.Request, err error, told string) {
	r := connect.Answer(req, err)
	why := ssh.Prohibited
	switch r.Reason {
	case tunnel.NoEndpoint, tunnel.LookupError, tunnel.LookupTime, tunnel.DialFailed, tunnel.DialTimeout, tunnel.Internal, tunnel.Gone:
		why = ssh.ConnectionFailed
	case tunnel.Overload, tunnel.Drain:
		why = ssh.ResourceShortage
	}
	text := cmp.Or(told, r.Text)
	if r.Reason == tunnel.NoAuth {
		text = "your key is no longer accepted"
	}
	s.closed()
	_ = nc.Reject(why, string(r.Reason)+": "+text)
}

// A directTCPIP is the message that opens a channel of the type direct-tcpip.
type directTCPIP struct {
	Host       string
	Port       uint32
	Originator string // the origin of the connection that the client forwards, by its own word
	OriginPort uint32
}

// target sets the destination of req.
func (s *session) target(req *tunnel.Request, data []byte) error {
	var to directTCPIP
	if err := ssh.Unmarshal(data, &to); err != nil {
		return tunnel.Refusef(tunnel.BadRequest, "ssh: the open of a channel is malformed")
	}
	a, err := connect.ParseAuthority(net.JoinHostPort(to.Host, strconv.FormatUint(uint64(to.Port), 10)))
	if err != nil {
		return &tunnel.Error{Reason: tunnel.BadRequest, Err: err}
	}
	req.Name, req.Addr, req.Port = a.Name, a.Addr, a.Port
	return nil
}

// drain refuses new channels, and ends the connection with the last one.
func (s *session) drain() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.drained {
		s.drained = true
		close(s.stopping)
	}
	s.finishDrain()
}

// finishDrain ends the connection of a session that has drained. The caller holds mu.
func (s *session) finishDrain() {
	if s.drained && s.channels == 0 && s.why == nil {
		s.why = errDrained
		go func() {
			defer s.recovered()
			_ = s.conn.Close()
		}()
	}
}

// endUnused ends a connection that has no channel.
func (s *session) endUnused(why error) {
	s.mu.Lock()
	unused := s.channels == 0
	s.mu.Unlock()
	if unused {
		s.end(why)
	}
}

var (
	errDrained = errors.New("ssh: the gateway is stopping")
	errDead    = errors.New("ssh: the client has closed the connection")
	errKilled  = errors.New("ssh: the session of the client's names was ended")
)

// quiet returns how long the client may send nothing until it is asked for a sign of life, and until
// the connection is ended.
func (s *session) quiet() (ask, dead time.Duration) {
	ask = s.p.keepalive()
	dead = ask + ask/2
	if s.served.isServing() {
		ask, dead = min(ask, servingQuiet), min(dead, servingDead)
	}
	return ask, dead
}

// leastMisses is how often in a row checkAlive must find no sign of life. One call is not enough: this
// process itself may have been suspended.
const leastMisses = 2

// hurry has the next checkAlive come sooner.
func (s *session) hurry() {
	ask, _ := s.quiet()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.conn.timer.Reset(ask / 4)
}

// checkAlive asks a client that has sent nothing for a while for a sign of life, and ends the
// connection if none comes.
func (s *session) checkAlive() {
	s.served.recheck()
	ask, dead := s.quiet()
	quiet := time.Duration(mux.Clock() - s.conn.last.Load())
	s.mu.Lock()
	switch {
	case quiet < ask:
		s.misses = 0
	case s.conn.asked.Load():
		s.misses++
	}
	misses := s.misses
	s.mu.Unlock()
	switch {
	case quiet >= dead && misses >= leastMisses:
		s.end(errDead)
		return
	case quiet >= ask && !s.conn.asked.Load() && s.begin():
		s.conn.asked.Store(true)
		go func() { // SendRequest waits as long as the client does not read
			defer s.running.Done()
			defer s.recovered()
			_, _, _ = s.ssh.SendRequest("keepalive@openssh.com", true, nil)
			s.conn.asked.Store(false)
		}()
	}
	select {
	case <-s.over:
	default:
		s.mu.Lock()
		defer s.mu.Unlock()
		s.conn.timer.Reset(ask / 4)
	}
}

// begin adds a goroutine to running. It returns false once the connection ends.
func (s *session) begin() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ended {
		return false
	}
	s.running.Add(1)
	return true
}
