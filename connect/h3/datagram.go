package h3

import (
	"context"
	"errors"
	"net"
	"sync"
	"time"

	"github.com/quic-go/quic-go"
	"github.com/quic-go/quic-go/quicvarint"

	"culvert.dev/connect"
	"culvert.dev/connect/internal/mux"
)

// A DATAGRAM frame of QUIC is, RFC 9297 section 2.1,
//
//	quarter stream id (i), HTTP Datagram
//
// where the id is that of a request's stream, divided by four. It is not flow-controlled,
// and is lost where QUIC's own queue of 128 frames is full.
const (
	maxQueuedDatagrams = 256 // of a connection, that wait to be sent; more are lost
	maxEarlyDatagrams  = 16  // of a stream, that came before HandleDatagrams; more are lost
	maxQuarterID       = 1<<60 - 1
)

// datagrams are the DATAGRAM frames of a connection. They take no memory and no goroutine
// before its first stream of an extended CONNECT.
type datagrams struct {
	start sync.Once
	queue chan outDatagram // to be sent

	mu      sync.Mutex        // guards inboxes
	inboxes map[uint64]*inbox // by quarter stream id
}

// An outDatagram is an encoded one, to be sent.
type outDatagram struct {
	inbox *inbox // of its stream
	b     []byte
	head  int // bytes of the quarter stream id
}

// An inbox has the datagrams of one stream.
type inbox struct {
	mu                sync.Mutex // guards what follows
	deliver, tooLarge func(b []byte)
	early             [][]byte // before there is a deliver
}

var _ connect.DatagramStream = (*Stream)(nil)

// expectDatagrams gives s an inbox. It is called before the stream's peer can have an
// answer, as datagrams may come from then on.
func (c *conn) expectDatagrams(s *Stream) {
	d := &c.datagrams
	d.start.Do(func() {
		d.queue, d.inboxes = make(chan outDatagram, maxQueuedDatagrams), make(map[uint64]*inbox)
		c.background(c.sendDatagrams)
		c.background(c.receiveDatagrams)
	})
	s.inbox = new(inbox)
	d.mu.Lock()
	defer d.mu.Unlock()
	d.inboxes[s.quarterID()] = s.inbox
}

// forgetDatagrams undoes expectDatagrams for a stream that is closed.
func (s *Stream) forgetDatagrams() {
	if s.inbox == nil {
		return
	}
	d := &s.c.datagrams
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.inboxes, s.quarterID())
}

func (s *Stream) quarterID() uint64 { return uint64(s.qs.StreamID()) / 4 }

// SendDatagram implements connect.DatagramStream.
func (s *Stream) SendDatagram(head, payload []byte) error {
	switch {
	case s.isClosed():
		return net.ErrClosed
	case s.inbox == nil || !s.c.peerDatagrams.Load():
		return errors.ErrUnsupported
	}
	id := s.quarterID()
	d := outDatagram{inbox: s.inbox, head: quicvarint.Len(id)}
	d.b = quicvarint.Append(make([]byte, 0, d.head+len(head)+len(payload)), id)
	d.b = append(append(d.b, head...), payload...)
	select {
	case s.c.datagrams.queue <- d:
		return nil
	default:
		return connect.ErrDatagramLost
	}
}

// HandleDatagrams implements connect.DatagramStream.
func (s *Stream) HandleDatagrams(deliver, tooLarge func(b []byte)) {
	if s.inbox == nil {
		return
	}
	s.inbox.mu.Lock()
	defer s.inbox.mu.Unlock()
	s.inbox.deliver, s.inbox.tooLarge = deliver, tooLarge
	for _, b := range s.inbox.early {
		deliver(b)
	}
	s.inbox.early = nil
}

// take delivers b, or keeps it for HandleDatagrams.
func (i *inbox) take(b []byte) {
	i.mu.Lock()
	deliver := i.deliver
	if deliver == nil && len(i.early) < maxEarlyDatagrams {
		i.early = append(i.early, b)
	}
	i.mu.Unlock()
	if deliver != nil {
		deliver(b)
	}
}

// returned tells the sender of b that no packet can hold it.
func (i *inbox) returned(b []byte) {
	i.mu.Lock()
	tooLarge := i.tooLarge
	i.mu.Unlock()
	if tooLarge != nil {
		tooLarge(b)
	}
}

// sendDatagrams sends what is queued, until the connection ends. QUIC has it wait while
// its congestion window is full.
func (c *conn) sendDatagrams() {
	for {
		select {
		case <-c.qc.Context().Done():
			return
		case d := <-c.datagrams.queue:
			if _, large := errors.AsType[*quic.DatagramTooLargeError](c.qc.SendDatagram(d.b)); large {
				d.inbox.returned(d.b[d.head:])
			}
		}
	}
}

// receiveDatagrams hands on what comes, until the connection ends.
func (c *conn) receiveDatagrams() {
	for {
		b, err := c.qc.ReceiveDatagram(c.qc.Context())
		if err != nil {
			return
		}
		id, n, err := quicvarint.Parse(b)
		if err != nil || id > maxQuarterID {
			c.fail(wrong(DatagramError, "a DATAGRAM frame without the number of a stream"))
			return
		}
		c.datagrams.mu.Lock()
		to := c.datagrams.inboxes[id]
		c.datagrams.mu.Unlock()
		if to != nil { // or its stream is closed, or not open yet
			to.take(b[n:])
		}
	}
}

// peerSettings are those of the peer that matter.
type peerSettings struct{ extended, datagrams bool }

// applySettings notes what the peer has said in its SETTINGS.
func (c *conn) applySettings(p peerSettings) *connError {
	if p.datagrams && !c.qc.ConnectionState().SupportsDatagrams.Remote {
		return wrong(SettingsError, "SETTINGS_H3_DATAGRAM without DATAGRAM frames in QUIC") // RFC 9297 section 2.1.1
	}
	c.peerDatagrams.Store(p.datagrams && c.qc.ConnectionState().SupportsDatagrams.Local)
	c.peerExtended.Store(p.extended)
	close(c.settingsArrived())
	return nil
}

// settingsArrived returns a channel that is closed when the peer's settings have come.
func (c *conn) settingsArrived() chan struct{} {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.settings == nil {
		c.settings = make(chan struct{})
	}
	return c.settings
}

// extended waits until it is known whether the proxy takes extended CONNECT, RFC 9220
// section 3.
func (k *client) extended(ctx context.Context) error {
	late := time.NewTimer(mux.OrDefault(k.d.Wait, DefaultWait))
	defer late.Stop()
	select {
	case <-k.c.settingsArrived():
	case <-k.c.qc.Context().Done():
		return connect.Unusable(k.d.Proxy, "is not to be used", errors.Join(mux.ErrUnprocessed, context.Cause(k.c.qc.Context())))
	case <-ctx.Done():
		return k.d.pool.GivenUp(ctx)
	case <-late.C:
		return connect.Unusable(k.d.Proxy, "sent no settings", context.DeadlineExceeded)
	}
	if !k.c.peerExtended.Load() {
		return connect.Unusable(k.d.Proxy, "has no extended CONNECT", errors.ErrUnsupported)
	}
	return nil
}
