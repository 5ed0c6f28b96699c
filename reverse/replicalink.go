package reverse

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/netip"
	"slices"
	"sync"
	"time"

	"culvert.dev/tunnel"
)

// A replicaLine is a line of the stream between two replicas. The one that opens it sends one,
// with its id; the other one answers with its id, and then sends changes and pings.
type replicaLine struct {
	Version int    `json:"version,omitzero"` // of the first line of each side
	Replica string `json:"replica,omitempty"`

	Generation uint64           `json:"generation,omitzero"` // of a change: the number of the changes on this stream
	Names      []replicaName    `json:"names,omitempty"`
	Removed    []tunnel.Pattern `json:"removed,omitempty"`
	Draining   bool             `json:"draining,omitempty"`

	// Others are the other replicas that have a stream, in a line without a Generation; nil says
	// nothing.
	Others []replicaAddress `json:"others,omitzero"`
}

// serve sends the other side the names of r, and each change, until the stream ends.
func (s *replicaServing) serve(ctx context.Context, r *Replicas) error {
	in, err := s.begin(r)
	if err != nil || in == nil {
		return err
	}
	var reading sync.WaitGroup
	defer reading.Wait()
	defer s.conn.Close()
	gone := make(chan struct{})
	reading.Go(func() {
		defer r.recovered()
		defer close(gone)
		_, _ = in.Discard(1) // the other side has nothing more to say
	})
	ping := time.NewTicker(replicaPing)
	defer ping.Stop()
	sender := replicaSender{serving: s, sent: map[tunnel.Pattern]*replicaName{}}
	for {
		began := time.Now()
		changed, err := sender.send(r)
		if err != nil {
			return err
		}
		pause := time.After(max(replicaNews, 4*time.Since(began))) // a change is never most of the work
		var news, wake <-chan struct{}                             // nil until the pause is over
		for waiting := true; waiting; {
			select {
			case <-ctx.Done():
				return ctx.Err()
			case <-gone:
				return nil
			case <-ping.C:
				if err := s.write(&replicaLine{}); err != nil {
					return err
				}
			case <-pause:
				news, wake = changed, s.wake
			case <-news:
				waiting = false
			case <-wake:
				waiting = false
			}
		}
	}
}

// begin exchanges the first lines and lists the other side. It returns nil without an error for a
// stream that comes from this process itself.
func (s *replicaServing) begin(r *Replicas) (*bufio.Reader, error) {
	_ = s.conn.SetDeadline(time.Now().Add(replicaOpening))
	in := bufio.NewReader(s.conn)
	var first replicaLine
	if err := readJSON(in, &first); err != nil {
		return nil, err
	}
	if err := writeJSON(s.conn, replicaLine{Version: version, Replica: r.Server.Replica()}); err != nil || first.Replica == r.Server.Replica() {
		return nil, err
	}
	if first.Version != version {
		return nil, tunnel.Refusef(tunnel.Unsupported, "reverse: the replica speaks version %d of the protocol, want %d", first.Version, version)
	}
	r.mu.Lock()
	s.replica = clip(first.Replica)
	r.wakeFollow()
	r.wakeOthers(s)
	r.mu.Unlock()
	_ = s.conn.SetReadDeadline(time.Time{})
	return in, nil
}

// A replicaSender sends the other side what has changed since it was called last.
type replicaSender struct {
	serving    *replicaServing
	sent       map[tunnel.Pattern]*replicaName
	next       uint64 // for Groups.local
	generation uint64
	drained    bool
	others     []replicaAddress
}

// send sends the changes. The channel that it returns is closed with the next change of names.
func (x *replicaSender) send(r *Replicas) (changed <-chan struct{}, err error) {
	if others := r.others(x.serving); !slices.Equal(others, x.others) {
		x.others = others
		if err := x.serving.write(&replicaLine{Others: others}); err != nil {
			return nil, err
		}
	}
	now := r.Server.Groups.local(x.next)
	r.mu.Lock()
	draining := r.draining
	r.mu.Unlock()
	lines := changesOf(x.sent, &now)
	if draining && !x.drained {
		lines, x.drained = append(lines, replicaLine{Draining: true}), true
	}
	for i := range lines {
		x.generation++
		lines[i].Generation = x.generation
		if err := x.serving.write(&lines[i]); err != nil {
			return nil, err
		}
	}
	x.next = now.next
	return now.news, nil
}

func (s *replicaServing) write(l *replicaLine) error {
	b, err := json.Marshal(l)
	if err != nil {
		return err
	}
	_ = s.conn.SetWriteDeadline(time.Now().Add(writeTimeout))
	_, err = s.conn.Write(append(b, '\n'))
	return err
}

// changesOf updates sent to now, and returns the lines by which the other side does the same.
func changesOf(sent map[tunnel.Pattern]*replicaName, now *localNames) (lines []replicaLine) {
	var line replicaLine
	size := 0
	add := func(n int) {
		if size += n; size >= maxReplicaBatch {
			lines = append(lines, line)
			line, size = replicaLine{}, 0
		}
	}
	remove := func(name tunnel.Pattern) {
		if sent[name] != nil {
			delete(sent, name)
			line.Removed = append(line.Removed, name)
			add(len(name.String()) + 3)
		}
	}
	if now.all {
		for name := range sent {
			if now.names[name] == nil {
				remove(name)
			}
		}
	}
	for name, n := range now.names {
		if n == nil {
			remove(name)
			continue
		}
		if old := sent[name]; old != nil && old.equal(n) {
			continue
		}
		sent[name] = n
		line.Names = append(line.Names, *n)
		b, _ := json.Marshal(n) // write returns the error
		add(len(b) + 1)
	}
	if size > 0 {
		lines = append(lines, line)
	}
	return lines
}

// A replicaLink is the stream to an address of another replica.
type replicaLink struct {
	replicas  *Replicas
	config    *ReplicaConfig
	address   string
	name      string           // of ReplicaConfig.To which has the address; "" for none
	transport tunnel.Transport // set by keep before the first stream

	mu         sync.Mutex // guards what follows
	replica    string     // "" before its first line
	connected  bool
	self       bool
	since      time.Time
	err        error
	names      map[tunnel.Pattern]struct{}
	generation uint64
	draining   bool
	others     []replicaAddress // that have a stream there
}

func (l *replicaLink) replicaID() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.replica
}

func (l *replicaLink) status() ReplicaStatus {
	l.mu.Lock()
	defer l.mu.Unlock()
	s := ReplicaStatus{
		Address: l.address, Replica: l.replica, Connected: l.connected, Self: l.self, Since: l.since,
		Names: len(l.names), Generation: l.generation, Draining: l.draining,
	}
	if l.err != nil {
		s.Error = l.err.Error()
	}
	return s
}

// errSelf is the error for an address that leads to this process, and errTwice for one that leads to
// a replica which has a stream by another address.
var (
	errSelf  = errors.New("reverse: the address leads to this replica itself")
	errTwice = errors.New("reverse: the address leads to a replica that another address leads to, too")
)

// keep has a stream to the address until ctx is done.
func (l *replicaLink) keep(ctx context.Context) {
	for failures := 0; ctx.Err() == nil; {
		err := l.run(ctx, &failures)
		if ctx.Err() != nil {
			return
		}
		wait := min(firstRetry<<min(failures, 7), replicaLastRetry)
		self := errors.Is(err, errSelf) || tunnel.ReasonOf(err) == tunnel.Loop
		if self || errors.Is(err, errTwice) {
			wait = replicaSame
		}
		l.mu.Lock()
		was, before := l.connected, l.err
		l.connected, l.self, l.err = false, self, err
		if self {
			l.err = nil
		}
		if was || before == nil {
			l.since = time.Now()
		}
		l.mu.Unlock()
		if was || !self && before == nil {
			l.replicas.log().Warn("no stream to a replica; trying again", "address", l.address, "replica", l.replicaID(), "error", err.Error())
		}
		failures++
		if !sleep(ctx, wait) {
			return
		}
	}
}

// run opens a stream and takes what comes until it ends.
func (l *replicaLink) run(ctx context.Context, failures *int) (err error) {
	defer func() {
		if v := recover(); v != nil {
			err = tunnel.Caught(v)
		}
	}()
	if l.transport == nil {
		t, err := l.replicas.NewTransport(l.config, l.address, l.name)
		if err != nil {
			return err
		}
		l.transport = t
	}
	opening, cancel := context.WithTimeout(ctx, replicaOpening)
	defer cancel()
	ep := &tunnel.Endpoint{Host: ReplicasName.String(), Addr: netip.AddrPortFrom(netip.Addr{}, 443)}
	if err := l.transport.Check(ep); err != nil {
		return err
	}
	conn, err := l.transport.Dial(opening, ep, &tunnel.Request{Proto: "replica", Name: ReplicasName, Port: 443, Start: time.Now()})
	if err != nil {
		return err
	}
	defer conn.Close()
	stop := context.AfterFunc(ctx, func() {
		defer l.replicas.recovered()
		_ = conn.Close()
	})
	defer stop()
	_ = conn.SetDeadline(time.Now().Add(replicaOpening))
	own := l.replicas.Server.Replica()
	if err := writeJSON(conn, replicaLine{Version: version, Replica: own}); err != nil {
		return err
	}
	in := bufio.NewReader(conn)
	var first replicaLine
	if err := readLine(in, &first, maxReplicaLine); err != nil {
		return fmt.Errorf("reverse: the replica gave no answer: %w", err)
	}
	switch {
	case first.Version != version:
		return fmt.Errorf("reverse: the replica speaks version %d of the protocol, want %d", first.Version, version)
	case first.Replica == own:
		return errSelf
	case first.Replica == "" || !l.join(first.Replica):
		return errTwice
	}
	*failures = 0
	l.replicas.log().Info("stream to a replica is open", "address", l.address, "replica", clip(first.Replica))
	defer l.leave()
	return l.read(conn, in)
}

// join makes l the stream to a replica, unless there is one.
func (l *replicaLink) join(replica string) bool {
	r := l.replicas
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, o := range r.links {
		if o == l {
			continue
		}
		o.mu.Lock()
		taken := o.connected && o.replica == clip(replica)
		o.mu.Unlock()
		if taken {
			return false
		}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.replica, l.connected, l.self, l.err, l.since = clip(replica), true, false, nil, time.Now()
	l.names, l.generation, l.draining = map[tunnel.Pattern]struct{}{}, 0, false
	return true
}

// leave drops what the replica has sent: the stream to it has ended.
func (l *replicaLink) leave() {
	l.mu.Lock()
	names := slices.Collect(maps.Keys(l.names))
	l.names, l.others = nil, nil
	l.mu.Unlock()
	l.replicas.Server.Groups.dropRemote(l, names)
}

// read takes the lines that come, until the stream ends.
func (l *replicaLink) read(conn net.Conn, in *bufio.Reader) error {
	for {
		_ = conn.SetReadDeadline(time.Now().Add(replicaDead))
		var line replicaLine
		if err := readLine(in, &line, maxReplicaLine); err != nil {
			if ne, ok := errors.AsType[net.Error](err); ok && ne.Timeout() {
				return errSilentReplica
			}
			if errors.Is(err, io.EOF) {
				return errors.New("reverse: the replica has ended the stream")
			}
			return err
		}
		if err := l.take(&line); err != nil {
			return err
		}
	}
}

// take handles one line.
func (l *replicaLink) take(line *replicaLine) error {
	if line.Others != nil {
		l.setOthers(line.Others)
	}
	if line.Generation == 0 {
		return nil // no change: a ping, or what later versions send
	}
	l.mu.Lock()
	if line.Generation != l.generation+1 {
		defer l.mu.Unlock()
		return fmt.Errorf("reverse: change %d of the replica has come after change %d", line.Generation, l.generation)
	}
	l.generation = line.Generation
	l.draining = l.draining || line.Draining
	for _, name := range line.Removed {
		delete(l.names, name)
	}
	draining := l.draining
	l.mu.Unlock()
	groups := l.replicas.Server.Groups
	if len(line.Removed) > 0 {
		groups.dropRemote(l, line.Removed)
	}
	lost := false
	for i := range line.Names {
		n := &line.Names[i]
		if err := n.check(); err != nil {
			return err
		}
		for j := range n.Serves {
			n.Serves[j].Draining = n.Serves[j].Draining || draining
		}
		l.mu.Lock()
		l.names[n.Name] = struct{}{}
		many := len(l.names)
		l.mu.Unlock()
		if many > maxNames {
			return tunnel.Refusef(tunnel.TooLarge, "reverse: the replica has more than %d names", maxNames)
		}
		lost = groups.setRemote(l, n) || lost
	}
	if line.Draining {
		groups.drainRemote(l)
	}
	if lost {
		l.replicas.Server.recheck()
	}
	return nil
}
