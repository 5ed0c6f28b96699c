package peer

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"reflect"
	"sync"
	"sync/atomic"
	"time"

	"culvert.dev/internal/background"
	"culvert.dev/tunnel"
)

const (
	// HeartbeatInterval is the time between two heartbeats. A stream on which no message comes for
	// HeartbeatTimeout counts as dead.
	HeartbeatInterval = 5 * time.Second
	HeartbeatTimeout  = 15 * time.Second
)

// A session is one stream to a gateway of a peer.
type session struct {
	peer    *peer
	conn    net.Conn
	gateway tunnel.Peer // the other end, for policies
	from    netip.Addr  // its address; invalid for one that was dialed
	dialed  bool        // we have opened the stream
	by      string      // for people: the gateway and the transport, or the address
	trusted uint64      // the generation of the trust by which the other end was verified
	offers  *catalog
	network string        // of a subscriber: the one that from is in
	timeout *time.Timer   // closes conn after HeartbeatTimeout
	wake    chan struct{} // of the writer; has room for one

	// Of the reader alone.
	hello    bool // the other side has sent its hello
	site     string
	instance string
	gateways []Gateway // of the other side, as it names them
	building *assembly

	in, out, last atomic.Int64 // bytes, and the time of the last line

	named []Gateway // ours that were sent; of the writer alone

	mu         sync.Mutex // guards what follows
	subscribed bool       // the other side wants our catalog
	sent       uint64     // the generation that it has
	confirm    bool       // a heartbeat has to confirm that it has everything
	ready      bool       // the hello has come
	wants      bool       // we want its catalog
	asked      bool       // and have asked for it
	sentBundle uint64     // the generation of our bundle that was sent
	draining   bool
	why        string // the error that is sent before conn is closed
}

// errDrained is the error of a session that has ended because one side is about to stop.
var errDrained = errors.New("the gateway there is about to stop")

// run serves the session until ctx or the stream ends, and closes conn.
func (s *session) run(ctx context.Context) error {
	defer context.AfterFunc(ctx, s.end)()
	defer s.end()
	s.timeout = time.AfterFunc(HeartbeatTimeout, s.end)
	writing, stop := context.WithCancel(ctx)
	defer stop()
	written := make(chan error, 1)
	go func() {
		var err error
		defer func() {
			if v := recover(); v != nil {
				err = tunnel.Caught(v)
			}
			written <- err
			s.end()
		}()
		err = s.write(writing)
	}()
	err := s.read()
	silent := !s.timeout.Stop()
	s.mu.Lock()
	if !isRoutine(err) {
		s.why = err.Error()
	}
	tell := s.why != ""
	s.mu.Unlock()
	if !tell {
		s.end()
	}
	stop()
	failed := <-written
	switch {
	case !isRoutine(err) || ctx.Err() != nil:
	case silent:
		err = fmt.Errorf("nothing has come for %v", HeartbeatTimeout)
	case failed != nil && !isRoutine(failed):
		err = failed
	}
	return err
}

// isRoutine reports whether err is the end of a stream, and no fault of the messages on it.
func isRoutine(err error) bool {
	var ne net.Error
	return errors.Is(err, errEnded) || errors.As(err, &ne) || errors.Is(err, errDrained)
}

var errEnded = errors.New("the stream has ended")

// end closes the stream.
func (s *session) end() { _ = s.conn.Close() }

// poke wakes the writer.
func (s *session) poke() {
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// subscribe asks for the catalog of the other side, or, if wants is false, for the end of it.
func (s *session) subscribe(wants bool) {
	s.mu.Lock()
	s.wants = wants
	s.mu.Unlock()
	s.poke()
}

// drain tells the other side that this gateway is about to stop, and ends the session.
func (s *session) drain() {
	s.mu.Lock()
	s.draining = true
	s.mu.Unlock()
	s.poke()
}

// read handles the messages that come, until the stream ends.
func (s *session) read() (err error) {
	defer func() {
		if v := recover(); v != nil {
			err = tunnel.Caught(v)
		}
	}()
	r := bufio.NewReaderSize(s.conn, 4<<10)
	var buf []byte
	for {
		line, err := readLine(r, buf)
		if errors.Is(err, errLineTooLong) {
			return err
		}
		if err != nil {
			return fmt.Errorf("%w: %w", errEnded, err)
		}
		buf = line
		s.timeout.Reset(HeartbeatTimeout)
		s.in.Add(int64(len(line)) + 1)
		s.last.Store(time.Now().UnixNano())
		m, err := ParseMessage(line)
		if err != nil {
			return err
		}
		if err := s.receive(m, len(line)); err != nil {
			return err
		}
		if cap(buf) > 8<<10 {
			buf = nil // an idle stream keeps no large buffer
		}
	}
}

// receive handles one message, a line of size bytes.
func (s *session) receive(m *Message, size int) error {
	if !s.hello != (m.Kind == KindHello) && m.Kind != KindError {
		return fmt.Errorf("a %s has come where a hello is due, or a second hello", m.Kind)
	}
	s.peer.contacted()
	if s.building != nil && m.Kind != s.building.kind && (m.Kind == KindSnapshot || m.Kind == KindChange) {
		return fmt.Errorf("a %s has come within a %s", m.Kind, s.building.kind)
	}
	switch m.Kind {
	case KindHello:
		s.hello, s.site, s.instance = true, m.Site, m.Instance
		if own := s.peer.owner.Site; own != "" && m.Site == own && !s.peer.oneWay() {
			return fmt.Errorf("the peer calls itself %q, as this site does", clip(m.Site))
		}
		if s.peer.subscriber && !m.Reads {
			return fmt.Errorf("%q is not the id of a peer's gateway", s.peer.Name)
		}
		if m.Instance == "" {
			return errors.New("a hello has no instance")
		}
		if !s.peer.oneWay() {
			s.gateways = m.Gateways
		}
		s.mu.Lock()
		s.ready = true
		s.mu.Unlock()
		s.poke()
		s.peer.activate()
	case KindSubscribe, KindUnsubscribe:
		if s.peer.Network != "" {
			return errors.New("the peer asks for a catalog, and there is none here")
		}
		s.mu.Lock()
		s.subscribed, s.sent, s.confirm = m.Kind == KindSubscribe, 0, true
		if m.Instance == s.offers.instance {
			s.sent = m.Generation
		}
		s.mu.Unlock()
		s.poke()
	case KindSnapshot, KindChange:
		if s.peer.subscriber {
			return errors.New("the caller is no peer, and may offer nothing")
		}
		return s.collect(m, size)
	case KindHeartbeat:
		if m.Moved && !s.peer.oneWay() {
			s.gateways = m.Gateways
			s.peer.moved(s)
		}
		if m.Generation > 0 && s.building == nil {
			return s.peer.confirmed(s, m.Generation)
		}
	case KindBundle:
		s.peer.bundle(s, m.Bundle)
	case KindDrain:
		return errDrained
	case KindError:
		return fmt.Errorf("the peer ends the stream: %q", clip(readable(m.Error)))
	}
	return nil
}

// collect handles a line of a snapshot or a change.
func (s *session) collect(m *Message, size int) (err error) {
	if !s.peer.isActive(s) {
		s.building = nil
		return nil // it was sent before the other side got our unsubscribe
	}
	im := s.peer.importer()
	if s.building == nil {
		if s.building, err = begin(m, s.instance, s.peer.received()); err != nil {
			return err
		}
	}
	a := s.building
	if err := a.add(im, m, size, s.site); err != nil {
		return err
	}
	if m.More {
		return nil
	}
	s.building = nil
	s.peer.deliver(s, a.next)
	return nil
}

// write sends what is due, until ctx is done or a write fails.
func (s *session) write(ctx context.Context) error {
	tick := time.NewTicker(HeartbeatInterval)
	defer tick.Stop()
	hello := &Message{Kind: KindHello, Site: s.peer.owner.Site, Instance: s.offers.instance}
	if !s.peer.oneWay() {
		s.named = s.peer.owner.gateways()
		hello.Gateways = s.named
	}
	if s.peer.Network != "" {
		hello.Site, hello.Reads = "", true
	}
	if err := s.send(hello); err != nil {
		return err
	}
	beat := false
	for {
		if err := s.sendDue(beat); err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			s.mu.Lock()
			why := s.why
			s.mu.Unlock()
			if why != "" {
				_ = s.send(&Message{Kind: KindError, Error: clip(why)})
			}
			return nil
		case <-s.wake:
			beat = false
		case <-tick.C:
			beat = true
		}
	}
}

// sendDue sends all that the other side does not have yet, and a heartbeat if that is due.
func (s *session) sendDue(beat bool) error {
	s.mu.Lock()
	draining, subscribed, sent, confirm := s.draining, s.subscribed, s.sent, s.confirm
	ask := s.ready && s.wants && !s.asked
	leave := s.asked && !s.wants
	s.asked, s.confirm = s.ready && s.wants, false
	s.mu.Unlock()
	if draining {
		_ = s.send(&Message{Kind: KindDrain})
		return errDrained
	}
	if !s.peer.oneWay() {
		if err := s.sendOwn(); err != nil {
			return err
		}
	}
	if ask {
		m := &Message{Kind: KindSubscribe}
		if have := s.peer.received(); have != nil {
			m.Instance, m.Generation = have.instance, have.generation
		}
		if err := s.send(m); err != nil {
			return err
		}
	}
	if leave {
		if err := s.send(&Message{Kind: KindUnsubscribe}); err != nil {
			return err
		}
	}
	generation := uint64(0)
	if subscribed {
		var err error
		if generation, err = s.sendCatalog(sent); err != nil {
			return err
		}
		s.mu.Lock()
		if s.subscribed && s.sent == sent { // else it has subscribed again meanwhile
			s.sent = generation
		}
		s.mu.Unlock()
	}
	if beat || confirm && subscribed && generation == sent {
		return s.send(&Message{Kind: KindHeartbeat, Generation: generation})
	}
	return nil
}

// sendOwn sends our bundle and our gateways if they have changed.
func (s *session) sendOwn() error {
	if raw, generation := s.peer.owner.ownBundle(); generation > s.sentBundle && len(raw) > 0 {
		s.sentBundle = generation
		if err := s.send(&Message{Kind: KindBundle, Bundle: raw}); err != nil {
			return err
		}
	}
	if now := s.peer.owner.gateways(); !reflect.DeepEqual(now, s.named) {
		s.named = now
		return s.send(&Message{Kind: KindHeartbeat, Gateways: now, Moved: true})
	}
	return nil
}

// lineSize is about how many bytes of services a line has.
const lineSize = MaxLine / 2

// sendCatalog sends what has changed after a generation, and returns the current one.
func (s *session) sendCatalog(sent uint64) (uint64, error) {
	if s.peer.subscriber && !s.inNetwork() {
		_ = s.send(&Message{Kind: KindDrain})
		return 0, errDrained
	}
	s.peer.owner.refresh(s)
	var services []json.RawMessage
	var removed []string
	var now uint64
	ok := true
	background.Do(func() { services, removed, now, ok = s.offers.since(sent) })
	if now == 0 {
		return 0, nil // there is no table yet
	}
	kind := KindChange
	if !ok || sent == 0 {
		kind, removed = KindSnapshot, nil
		background.Do(func() { services, _, now, _ = s.offers.since(0) })
	} else if now == sent {
		return now, nil
	}
	for first := true; first || len(services)+len(removed) > 0; first = false {
		l := catalogLine{Version: Version, Kind: kind, Generation: now}
		size := 0
		for len(removed) > 0 && size < lineSize {
			size += 2*len(removed[0]) + 3 // with escapes
			l.Removed, removed = append(l.Removed, removed[0]), removed[1:]
		}
		for len(services) > 0 && (size == 0 || size+len(services[0]) < lineSize) {
			size += len(services[0]) + 1
			l.Services, services = append(l.Services, services[0]), services[1:]
		}
		l.More = len(services)+len(removed) > 0
		if err := s.send(&l); err != nil {
			return 0, err
		}
	}
	return now, nil
}

// A catalogLine is a Message with services that are encoded already.
type catalogLine struct {
	Version    int               `json:"version"`
	Kind       string            `json:"kind"`
	Generation uint64            `json:"generation"`
	More       bool              `json:"more,omitempty"`
	Services   []json.RawMessage `json:"services,omitempty"`
	Removed    []string          `json:"removed,omitempty"`
}

// send writes one line. If the other side does not read it within HeartbeatTimeout, the stream is
// closed.
func (s *session) send(m any) error {
	if m, ok := m.(*Message); ok {
		m.Version = Version
	}
	line, err := json.Marshal(m)
	if err != nil {
		return err
	}
	if len(line) >= MaxLine {
		return errLineTooLong
	}
	late := time.AfterFunc(HeartbeatTimeout, s.end)
	defer late.Stop()
	n, err := s.conn.Write(append(line, '\n'))
	s.peer.sentBytes(n)
	s.out.Add(int64(n))
	return err
}
