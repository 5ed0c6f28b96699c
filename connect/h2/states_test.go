package h2

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/net/http2"

	"culvert.dev/connect/connecttest"
	"culvert.dev/internal/testnet"
	"culvert.dev/tunnel"
)

// FuzzServerStates and FuzzClientStates read their input as a sequence of
// frames of the peer's, of things that our own side does with its streams, and
// of time that passes. After each, when everything has come to rest:
//   - nothing has panicked,
//   - no frame broke the peer's windows, its limit of frames, or came behind the
//     end of its stream,
//   - what may be sent was sent,
//   - windows add up, and have grown no further than they may.
//
// At the end nothing is left of the connection, and the one beside it works.
func FuzzServerStates(f *testing.F) { fuzzStates(f, false) }

// FuzzClientStates is FuzzServerStates with a server that misbehaves.
func FuzzClientStates(f *testing.F) { fuzzStates(f, true) }

func fuzzStates(f *testing.F, client bool) {
	// The operations, by their numbers, are those of machine.do.
	open := func(port byte) []byte { return []byte{6, port << 4, 0} }
	for _, seed := range [][]byte{
		{},
		// The window falls below zero, and then the stream ends.
		join(open(3), []byte{12, 0x13, 0, 0, 0, 0, 12, 0x00, 0}),
		join(open(5), []byte{0, 1, 0, 3, 0, 2, 0, 5, 0, 7, 0, 0x80}),
		join(open(2), []byte{0, 1, 0, 0, 0, 0, 3, 0, 3}),
		// The connection's window is used up by several streams.
		join(open(5), []byte{6, 0x51, 0, 6, 0x52, 0, 4, 0, 4, 3, 0, 4, 3, 1, 4, 11, 5, 0}),
		// Resets, ends and aborts of either side.
		join(open(1), []byte{7, 0, 3, 5, 0, 0, 6, 0x31, 0, 12, 2, 1, 6, 0x12, 1, 7, 2, 0x82}),
		join(open(3), []byte{7, 0, 4, 12, 0x30, 0, 12, 0, 0, 7, 0, 0x81, 12, 1, 0}),
		join(open(4), open(6), []byte{9, 0, 0, 10, 0, 0, 6, 0x11, 0, 14, 0, 0, 11, 3, 0}),
		// A head in several frames, with another between.
		{8, 0, 0, 8, 1, 1, 8, 2, 2, 7, 1, 1},
		// A peer that does not read.
		join([]byte{16, 0, 0}, open(5), []byte{9, 0, 0, 11, 4, 0, 16, 0, 0, 4, 0, 4}),
		join(open(3), []byte{7, 0, 4, 7, 0, 4, 7, 0, 4, 7, 0, 4, 12, 0x43, 0, 12, 0x43, 0, 7, 0, 4, 13, 1, 0}),
	} {
		f.Add(seed)
	}
	testnet.FuzzStates(f, func(t *testing.T, input []byte) {
		m := &machine{t: t, client: client, windows: map[uint32]int{}, ended: map[uint32]bool{}, initial: 65535, conn: 65535, mostFrame: maxFrame}
		m.resume.L = &m.mu
		m.start()
		defer m.finish()
		testnet.EachOperation(t, input, func(op, a, b byte) {
			m.do(op, a, b)
			synctest.Wait()
			m.check()
		})
	})
}

func join(parts ...[]byte) []byte {
	var all []byte
	for _, p := range parts {
		all = append(all, p...)
	}
	return all
}

// A machine is a peer that does what its input says, and keeps the account of
// what our side may send to it.
type machine struct {
	t      *testing.T
	client bool // our side is a Dialer
	near   net.Conn
	fr     *http2.Framer // writes
	p      *Protocol
	d      *Dialer
	served chan error
	read   chan struct{} // closed when nothing comes any more
	work   sync.WaitGroup
	cancel context.CancelFunc

	by      *Dialer // of the connection beside
	byServe chan error
	beside  net.Conn

	mu        sync.Mutex // guards what follows
	resume    sync.Cond
	paused    bool
	windows   map[uint32]int
	ended     map[uint32]bool
	conn      int
	initial   int
	mostFrame int
	unacked   []http2.Setting // that our side has not acknowledged; ID 0 for SETTINGS without one that matters
	streams   []*Stream       // the first one is the other end of beside
	blind     bool            // nobody knows what was sent
}

// ServeTunnel implements tunnel.Handler.
func (m *machine) ServeTunnel(ctx context.Context, req *tunnel.Request) {
	if s := connecttest.ServeByPort(ctx, req); s != nil {
		m.use(s.(*Stream), req.Port)
	}
}

func (m *machine) use(s *Stream, port uint16) {
	switch port {
	case 1:
		m.work.Go(func() { _, _ = io.Copy(s, s); _ = s.CloseWrite() })
	case 5:
		m.work.Go(func() { _, _ = s.Write(make([]byte, 100<<10)); _ = s.CloseWrite() })
	case 6:
		_ = s.Abort()
	}
	m.mu.Lock()
	m.streams = append(m.streams, s)
	m.mu.Unlock()
}

// Refused and Panicked implement tunnel.Refuser.
func (m *machine) Refused(*tunnel.Request, error) {}

func (m *machine) Panicked(_ *tunnel.Request, v any) {
	if p := tunnel.Caught(v); p.Value != (connecttest.PlannedPanic{}) {
		m.t.Error(p)
	}
}

func (m *machine) start() {
	m.p = &Protocol{Streams: 8}
	ctx, cancel := context.WithCancel(context.Background())
	m.cancel = cancel
	byNear, byFar := net.Pipe()
	m.byServe = make(chan error, 1)
	go func() { m.byServe <- m.p.ServeConn(ctx, tunnel.NewConn(byFar), m) }()
	m.by = &Dialer{Proxy: "proxy:1", Dialer: testnet.DialOnce(byNear)}
	var err error
	if m.beside, err = m.by.DialContext(ctx, "tcp", "svc:1"); err != nil {
		m.t.Fatal(err)
	}
	pipe, far := net.Pipe()
	near := &turns{Conn: pipe, turn: make(chan struct{}, 1)}
	m.near, m.read = near, make(chan struct{})
	m.fr = http2.NewFramer(near, nil)
	m.fr.AllowIllegalWrites = true
	go m.reader()
	if m.client {
		m.d = &Dialer{Proxy: "proxy:1", Dialer: testnet.DialOnce(far), Idle: time.Hour}
		m.work.Go(func() { m.dial(ctx, 3) })
		m.settings()
		synctest.Wait()
		m.answer(1, "200")
	} else {
		m.served = make(chan error, 1)
		go func() { m.served <- m.p.ServeConn(ctx, tunnel.NewConn(far), m) }()
		_, _ = io.WriteString(near, preface)
		m.settings()
	}
	synctest.Wait()
}

// A turns has one Write at a time wait for its peer. Those behind it wait in a
// way that lets time pass, as they would not in a pipe's own lock.
type turns struct {
	net.Conn
	turn chan struct{}
}

func (c *turns) Write(p []byte) (int, error) {
	c.turn <- struct{}{}
	defer func() { <-c.turn }()
	return c.Conn.Write(p)
}

func (m *machine) dial(ctx context.Context, port uint16) {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	c, err := m.d.DialContext(ctx, "tcp", fmt.Sprintf("svc:%d", port))
	if err == nil {
		m.use(c.(*Stream), port)
	}
}

func (m *machine) answer(id uint32, status string) {
	_ = m.fr.WriteHeaders(http2.HeadersFrameParam{StreamID: id, BlockFragment: fieldList(":status", status), EndHeaders: true})
}

// settings sends SETTINGS. What they change holds from the acknowledgement on.
func (m *machine) settings(all ...http2.Setting) {
	m.mu.Lock()
	if len(all) == 0 {
		m.unacked = append(m.unacked, http2.Setting{})
	}
	m.unacked = append(m.unacked, all...)
	m.mu.Unlock()
	_ = m.fr.WriteSettings(all...)
}

// reader takes what comes, and looks whether it may.
func (m *machine) reader() {
	defer close(m.read)
	if m.client {
		_, _ = io.ReadFull(m.near, make([]byte, len(preface)))
	}
	own := http2.NewFramer(m.near, m.near)
	own.SetMaxReadFrameSize(1<<24 - 1)
	for {
		m.mu.Lock()
		for m.paused {
			m.resume.Wait()
		}
		m.mu.Unlock()
		f, err := own.ReadFrame()
		if err != nil {
			if !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrClosedPipe) && !errors.Is(err, io.ErrUnexpectedEOF) {
				m.t.Errorf("our side sent what is no frame: %v", err)
			}
			return
		}
		switch f := f.(type) {
		case *http2.SettingsFrame:
			if !f.IsAck() {
				_ = own.WriteSettingsAck()
				continue
			}
			m.acknowledged()
		case *http2.PingFrame:
			if !f.IsAck() {
				_ = own.WritePing(true, f.Data)
			}
		case *http2.DataFrame:
			m.data(f)
		case *http2.RSTStreamFrame:
			m.mu.Lock()
			m.ended[f.StreamID] = true
			m.mu.Unlock()
		}
	}
}

func (m *machine) acknowledged() {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.blind {
		return
	}
	if len(m.unacked) == 0 {
		m.t.Error("an acknowledgement of no SETTINGS")
		return
	}
	s := m.unacked[0]
	m.unacked = m.unacked[1:]
	switch s.ID {
	case http2.SettingInitialWindowSize:
		for id := range m.windows {
			m.windows[id] += int(s.Val) - m.initial
		}
		m.initial = int(s.Val)
	case http2.SettingMaxFrameSize:
		m.mostFrame = int(s.Val)
	}
}

// window returns the account of stream id. The caller holds mu.
func (m *machine) window(id uint32) int {
	if _, ok := m.windows[id]; !ok {
		m.windows[id] = m.initial
	}
	return m.windows[id]
}

func (m *machine) data(f *http2.DataFrame) {
	m.mu.Lock()
	defer m.mu.Unlock()
	n := int(f.Length)
	m.windows[f.StreamID] = m.window(f.StreamID) - n
	m.conn -= n
	switch {
	case m.blind:
	case n > 0 && m.windows[f.StreamID] < 0:
		m.t.Errorf("%d bytes on stream %d, %d beyond its window", n, f.StreamID, -m.windows[f.StreamID])
	case m.conn < 0:
		m.t.Errorf("%d bytes on stream %d, %d beyond the connection's window", n, f.StreamID, -m.conn)
	case n > m.mostFrame:
		m.t.Errorf("a frame of %d bytes, limit %d", n, m.mostFrame)
	case m.ended[f.StreamID]:
		m.t.Errorf("%d bytes on stream %d, which has ended", n, f.StreamID)
	}
	m.ended[f.StreamID] = f.StreamEnded()
}

// do is one operation. Its arguments choose a stream and a value.
func (m *machine) do(op, a, b byte) {
	id := 2*uint32(a&7) + 1
	if a&0xf == 15 {
		id = testnet.Pick(b, uint32(0), 2, 1<<31-1)
	}
	flag := b&0x80 != 0
	if op %= 18; op == 6 || op == 8 || op == 13 || op == 17 {
		m.mu.Lock()
		m.ended[id] = false // a PRIORITY frame that is wrong has the stream reset before it begins
		m.mu.Unlock()
	}
	switch op {
	case 0:
		m.settings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: testnet.Pick(a, uint32(0), 5, 1, 100, 65535, 1<<20, 1<<31-1)})
	case 1:
		m.settings(http2.Setting{ID: http2.SettingMaxFrameSize, Val: testnet.Pick(a, uint32(16<<10), 1<<24-1)})
	case 2:
		switch a % 3 {
		case 0:
			m.settings()
		case 1:
			_ = m.fr.WriteSettingsAck()
		case 2:
			_ = m.fr.WriteSettings(http2.Setting{ID: http2.SettingMaxFrameSize, Val: 1}) // ends the connection
		}
	case 3:
		n := testnet.Pick(b, uint32(0), 1, 5, 1000, 65535, 1<<31-1)
		m.mu.Lock()
		if id == 0 {
			m.conn += int(n)
		} else {
			m.windows[id] = m.window(id) + int(n)
		}
		m.mu.Unlock()
		_ = m.fr.WriteWindowUpdate(id, n)
	case 4:
		n := testnet.Pick(b, uint32(0), 1, 5, 1000, 65535, 1<<31-1)
		m.mu.Lock()
		m.conn += int(n)
		m.mu.Unlock()
		_ = m.fr.WriteWindowUpdate(0, n)
	case 5:
		_ = m.fr.WriteRSTStream(id, http2.ErrCode(b&0xf))
	case 6:
		port := uint16(a >> 4 & 7)
		if m.client {
			if flag {
				m.answer(id, testnet.Pick(b, "200", "404", "103", "20"))
				return
			}
			m.work.Go(func() { m.dial(context.Background(), port) })
			synctest.Wait()
			m.answer(id, "200")
			return
		}
		_ = m.fr.WriteHeaders(http2.HeadersFrameParam{StreamID: id, EndHeaders: true, EndStream: b&1 != 0,
			BlockFragment: fieldList(":method", "CONNECT", ":authority", fmt.Sprintf("svc:%d", port))})
	case 7:
		n := testnet.Pick(b&0x7f, 0, 1, 100, 5000, 16<<10)
		if a&0x40 != 0 {
			_ = m.fr.WriteDataPadded(id, flag, make([]byte, max(n-200, 0)), make([]byte, b))
			return
		}
		_ = m.fr.WriteData(id, flag, make([]byte, n))
	case 8: // parts of a header block, in any order
		list := fieldList(":method", "CONNECT", ":authority", "svc:1")
		switch b % 3 {
		case 0:
			_ = m.fr.WriteHeaders(http2.HeadersFrameParam{StreamID: id, BlockFragment: list[:3]})
		case 1:
			_ = m.fr.WriteContinuation(id, false, list[3:5])
		case 2:
			_ = m.fr.WriteContinuation(id, true, list[5:])
		}
	case 9:
		_ = m.fr.WritePing(flag, [8]byte{a, b})
	case 10:
		_ = m.fr.WriteGoAway(testnet.Pick(a, uint32(0), 1, 5, 1<<31-1), http2.ErrCode(b&0xf), nil)
	case 11:
		time.Sleep(testnet.Pick(a, 10*time.Millisecond, time.Second, 6*time.Second, 16*time.Second, 40*time.Second, 2*time.Minute))
	case 12:
		m.own(a, b)
	case 13:
		switch b % 4 {
		case 0:
			_ = m.fr.WritePriority(id, http2.PriorityParam{StreamDep: uint32(b >> 2)})
		case 1:
			_ = m.fr.WriteRawFrame(http2.FrameType(a|0x80), http2.Flags(b), id, []byte{a, b})
		case 2:
			_ = m.fr.WritePushPromise(http2.PushPromiseParam{StreamID: id, PromiseID: 2, BlockFragment: fieldList(connectSvc...), EndHeaders: true})
		case 3:
			_ = m.fr.WriteHeaders(http2.HeadersFrameParam{StreamID: id, BlockFragment: fieldList("a", "b"), EndHeaders: true, EndStream: flag})
		}
	case 14:
		if !m.client {
			m.drain()
		}
	case 15:
		m.mu.Lock()
		m.blind = true // it may be part of any frame
		m.mu.Unlock()
		_, _ = m.near.Write([]byte{a, b})
	case 16:
		m.mu.Lock()
		m.paused = !m.paused
		m.resume.Broadcast()
		m.mu.Unlock()
	case 17: // a request that is none
		_ = m.fr.WriteHeaders(http2.HeadersFrameParam{StreamID: id, EndHeaders: true, EndStream: flag,
			BlockFragment: testnet.Pick(b, fieldList(":method", "GET", ":scheme", "http", ":path", "/"), fieldList(":method", "POST", ":scheme", "http", ":path", "/", "content-length", "3"),
				fieldList(":status", "200"), fieldList(":method", "CONNECT"), []byte{0xff, 0xff, 0xff})})
	}
}

// drain is Protocol.Drain for the one connection.
func (m *machine) drain() {
	for _, c := range m.conns() {
		if k, ok := c.side.(*server); ok {
			k.drain()
		}
	}
}

// conns returns the connection, if it is still there, and not the one beside.
func (m *machine) conns() (all []*conn) {
	if m.client {
		m.mu.Lock()
		defer m.mu.Unlock()
		if len(m.streams) > 1 {
			all = append(all, m.streams[1].c)
		}
		return all
	}
	m.p.mu.Lock()
	defer m.p.mu.Unlock()
	for s := range m.p.conns {
		if s.c != m.streams[0].c {
			all = append(all, s.c)
		}
	}
	return all
}

// own is something that our side does with a stream.
func (m *machine) own(a, b byte) {
	m.mu.Lock()
	first := 1 // the one beside is not to be touched
	if len(m.streams) <= first {
		m.mu.Unlock()
		return
	}
	s := m.streams[first+int(b&7)%(len(m.streams)-first)]
	m.mu.Unlock()
	n := testnet.Pick(a>>4, 0, 5, 1000, 20_000, 70_000)
	switch a & 7 {
	case 0:
		_ = s.CloseWrite()
	case 1:
		_ = s.Close()
	case 2:
		_ = s.Abort()
	case 3:
		m.work.Go(func() { _, _ = s.Write(make([]byte, n)) })
	case 4:
		m.work.Go(func() { _, _ = s.Read(make([]byte, n)) })
	case 5:
		_ = s.SetDeadline(time.Now().Add(time.Second))
	case 6:
		_ = s.SetDeadline(time.Time{})
	case 7:
		s.WaitRead(func() {})
		_ = s.Broken()
	}
}

// check looks at the connection at rest.
func (m *machine) check() {
	m.mu.Lock()
	paused := m.paused
	m.mu.Unlock()
	for _, c := range m.conns() {
		c.mu.Lock()
		grown := 0
		for _, s := range c.streams {
			grown += s.window - streamWindow
			if !s.ended && !s.closed && s.discardedBody == nil && s.credit+s.unacked+s.lent+s.in.size != s.window {
				m.t.Errorf("stream %d: credit of %d, %d unread and %d not told of make no window of %d", s.id, s.credit, s.in.size, s.unacked+s.lent, s.window)
			}
			if len(s.pending) > 0 && s.allowed > 0 && c.allowed > 0 && !paused && c.err == nil {
				m.t.Errorf("stream %d has %d bytes to send, and windows of %d and %d, and does not", s.id, len(s.pending), s.allowed, c.allowed)
			}
			if s.finish && !s.finished && len(s.pending) == 0 && !paused && c.err == nil {
				m.t.Errorf("stream %d has an end to send and does not", s.id)
			}
		}
		if grown != c.grown || grown > maxGrowth {
			m.t.Errorf("windows have grown by %d, noted are %d", grown, c.grown)
		}
		if c.err == nil && c.credit+c.unacked != connWindow {
			m.t.Errorf("the connection: credit of %d and %d not told of", c.credit, c.unacked)
		}
		if ce, ok := errors.AsType[*connError](c.err); ok && ce.err.Reason == tunnel.Internal {
			m.t.Error(c.err)
		}
		c.mu.Unlock()
	}
}

func (m *machine) finish() {
	m.mu.Lock()
	m.paused = false
	m.resume.Broadcast()
	m.mu.Unlock()
	_ = m.beside.SetDeadline(time.Now().Add(time.Second))
	testnet.Ping(m.t, m.beside, "the connection beside works")
	_ = m.near.Close()
	<-m.read
	if m.client {
		_ = m.d.Close()
	} else if err := <-m.served; err != nil && tunnel.ReasonOf(err) == tunnel.Internal {
		m.t.Error(err)
	}
	m.mu.Lock()
	streams := m.streams
	m.mu.Unlock()
	for i, s := range streams {
		if i == 0 {
			continue
		}
		testnet.CheckEnds(m.t, s)
		_ = s.Close()
	}
	_ = m.by.Close()
	<-m.byServe
	m.cancel()
	m.work.Wait()
	m.p.mu.Lock()
	defer m.p.mu.Unlock()
	if n := len(m.p.conns); n != 0 {
		m.t.Errorf("%d connections are still listed", n)
	}
}
