package h3

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/quic-go/quic-go"
	"github.com/quic-go/quic-go/quicvarint"

	"culvert.dev/connect/connecttest"
	"culvert.dev/internal/testnet"
	"culvert.dev/tunnel"
)

// FuzzServerStates and FuzzClientStates read their input as a sequence of what
// a peer does on a QUIC connection, of things that our own side does with its
// streams, and of time that passes. The peer opens streams of any kind, sends
// frames in any order and in pieces, resets, ends and stops streams, does not
// read, loses packets, and leaves. What must hold:
//   - nothing panics, and nothing has panicked and was caught,
//   - every byte of a tunnel arrives at its place, and no other byte,
//   - a tunnel that obeys the rules works for as long as its connection stands,
//     and so does the connection beside it,
//   - nothing is left of a connection that has ended.
//
// The network is in memory and the clock is that of synctest.
func FuzzServerStates(f *testing.F) { fuzzStates(f, false) }

// FuzzClientStates is FuzzServerStates with a server that misbehaves.
func FuzzClientStates(f *testing.F) { fuzzStates(f, true) }

func fuzzStates(f *testing.F, client bool) {
	// The first byte is the peer's mode, then the operations follow, by their
	// numbers in machine.do.
	_, _ = credentials() // by the clock of this world
	seed := func(mode byte, ops ...[]byte) { f.Add(append([]byte{mode}, bytes.Join(ops, nil)...)) }
	open := func(port byte) []byte { return []byte{0, port << 4, 0} }
	seed(0)
	seed(0, open(1), []byte{1, 1, 3, 1, 1, 0x82, 13, 0, 0})
	// Frames in pieces, with deadlines between.
	seed(0, open(3), []byte{3, 1, 0x43, 12, 5, 0, 12, 4, 0x20, 13, 1, 0, 12, 6, 0, 1, 1, 2, 12, 4, 0x20, 1, 1, 3, 1, 1, 1, 12, 4, 0x20})
	seed(0, open(1), []byte{2, 1, 4, 13, 1, 0, 1, 1, 2, 7, 1, 0})
	// Ends, resets and aborts of either side.
	seed(0, open(1), []byte{5, 1, 12, 6, 1, 12, 7, 1, 0}, open(3), []byte{12, 2, 0, 12, 1, 0})
	seed(0, open(5), []byte{17, 0, 0, 12, 3, 4, 12, 5, 0, 13, 2, 0, 17, 0, 0, 12, 3, 2, 12, 0, 0})
	seed(2, open(5), open(6), open(4), open(7), []byte{6, 1, 0, 14, 0, 0, 13, 3, 0})
	// The control stream: nothing, other frames first, twice, its end.
	seed(1, open(1), []byte{9, 0, 0, 9, 0, 0})
	seed(0, []byte{10, 0, 0, 10, 1, 4, 10, 1, 0, 10, 4, 0, 11, 0, 0})
	seed(0, []byte{9, 2, 0, 9, 3, 0, 9, 4, 1, 11, 1, 0x80, 10, 0, 0})
	// GOAWAY, and requests behind it.
	seed(0, open(1), []byte{10, 1, 8}, open(3), []byte{10, 1, 0}, open(1), []byte{13, 4, 0})
	seed(0, []byte{14, 0, 0}, open(1), []byte{13, 1, 0}, open(1), []byte{13, 3, 0}, open(1))
	// What is no request, and what no frame.
	seed(0, []byte{18, 0, 0, 18, 1, 0, 18, 2, 0, 18, 3, 1, 4, 1, 1, 8, 1, 2})
	// A path that is gone for a while, and for good.
	seed(0, open(5), []byte{15, 0, 0, 12, 3, 3, 13, 2, 0, 15, 0, 0, 13, 1, 0})
	seed(0, open(3), []byte{15, 0, 0, 13, 5, 0, 16, 0, 0})
	testnet.FuzzStates(f, func(t *testing.T, input []byte) {
		m := &machine{t: t, client: client, mode: input[0], wire: &wire{ends: map[string]*wireEnd{}}}
		m.resume.L = &m.mu
		m.start()
		defer m.finish()
		testnet.EachOperation(t, input[1:], func(op, a, b byte) {
			m.do(op, a, b)
			m.rest()
			m.check()
		})
	})
}

// A wire carries datagrams between the sockets that it has.
type wire struct {
	mu   sync.Mutex // guards what follows, and what is in the ends
	ends map[string]*wireEnd
	gone bool // the path between the machine and our side
}

type datagram struct {
	b    []byte
	from net.Addr
}

// A wireEnd is a socket.
type wireEnd struct {
	w      *wire
	addr   *net.UDPAddr
	sick   bool // what the path loses is from here, or to here
	come   sync.Cond
	queue  []datagram
	past   bool // the read deadline is over
	closed bool
}

func (w *wire) socket(addr string, sick bool) *wireEnd {
	e := &wireEnd{w: w, addr: net.UDPAddrFromAddrPort(netip.MustParseAddrPort(addr)), sick: sick}
	e.come.L = &w.mu
	w.mu.Lock()
	defer w.mu.Unlock()
	w.ends[e.addr.String()] = e
	return e
}

func (e *wireEnd) WriteTo(p []byte, to net.Addr) (int, error) {
	e.w.mu.Lock()
	defer e.w.mu.Unlock()
	if e.closed {
		return 0, net.ErrClosed
	}
	if far := e.w.ends[to.String()]; far != nil && !far.closed && (!e.w.gone || !e.sick && !far.sick) && len(far.queue) < 1000 {
		far.queue = append(far.queue, datagram{bytes.Clone(p), e.addr})
		far.come.Signal()
	}
	return len(p), nil
}

func (e *wireEnd) ReadFrom(p []byte) (int, net.Addr, error) {
	e.w.mu.Lock()
	defer e.w.mu.Unlock()
	for len(e.queue) == 0 || e.past || e.closed {
		switch {
		case e.closed:
			return 0, nil, net.ErrClosed
		case e.past:
			return 0, nil, os.ErrDeadlineExceeded
		}
		e.come.Wait()
	}
	d := e.queue[0]
	e.queue = e.queue[1:]
	return copy(p, d.b), d.from, nil
}

func (e *wireEnd) Close() error {
	e.w.mu.Lock()
	defer e.w.mu.Unlock()
	e.closed = true
	e.come.Broadcast()
	return nil
}

// SetReadDeadline knows what quic-go asks for: now, and never.
func (e *wireEnd) SetReadDeadline(t time.Time) error {
	e.w.mu.Lock()
	defer e.w.mu.Unlock()
	e.past = !t.IsZero()
	e.come.Broadcast()
	return nil
}

func (e *wireEnd) LocalAddr() net.Addr              { return e.addr }
func (e *wireEnd) SetDeadline(t time.Time) error    { return e.SetReadDeadline(t) }
func (e *wireEnd) SetWriteDeadline(time.Time) error { return nil }
func (e *wireEnd) SetReadBuffer(int) error          { return nil }
func (e *wireEnd) SetWriteBuffer(int) error         { return nil }

// Addresses on a wire. The machine is at machineAddr, whichever side it is.
const (
	machineAddr = "192.0.2.1:443"
	ourAddr     = "192.0.2.2:443"
	dialerAddr  = "192.0.2.3:%d" // each socket of a Dialer's has a port
)

// A machine is a peer that does what its input says.
type machine struct {
	t      *testing.T
	client bool // our side is a Dialer
	mode   byte
	wire   *wire
	s      *Server // which serves the connection beside, too
	served chan error
	d      *Dialer
	by     *Dialer // of the connection beside
	beside *Stream
	tr     *quic.Transport
	ln     *quic.Listener
	qc     *quic.Conn // the machine's side
	honest *far
	unis   []*quic.SendStream // the first one is the control stream
	lossy  bool               // packets were lost
	cut    bool               // the honest tunnel may be
	work   sync.WaitGroup
	cancel context.CancelFunc

	mu     sync.Mutex // guards what follows
	resume sync.Cond
	paused bool
	dialed int
	fars   []*far // the first one is honest
	ours   []*our // the first one is the other end of that
}

// A our is our side of a tunnel, of which one Read and one Write at a time may
// wait: those behind them would wait for a lock, and synctest for them.
type our struct {
	s         *Stream
	port      uint16
	reads     chan struct{}
	writes    chan struct{}
	got, sent int
}

// A far is the machine's side of a request stream.
type far struct {
	m        *machine
	qs       *quic.Stream
	todo     chan func()
	off      int // of what was sent of the tunnel
	owed     int // bytes of a DATA frame that was announced
	skip     int // of a frame of an unknown type
	answered bool
	blind    bool // it was sent what is no frame; guarded by m.mu
	mu       sync.Mutex
	got      int // of what came
}

// ServeTunnel implements tunnel.Handler.
func (m *machine) ServeTunnel(ctx context.Context, req *tunnel.Request) {
	if s := connecttest.ServeByPort(ctx, req); s != nil {
		m.use(s.(*Stream), req.Port)
	}
}

func (m *machine) use(s *Stream, port uint16) {
	o := &our{s: s, port: port, reads: make(chan struct{}, 1), writes: make(chan struct{}, 1)}
	m.mu.Lock()
	m.ours = append(m.ours, o)
	m.mu.Unlock()
	switch port {
	case 1, 9:
		o.reads <- struct{}{}
		o.writes <- struct{}{}
		m.work.Go(func() {
			defer func() { <-o.reads; <-o.writes }()
			b := make([]byte, 8<<10)
			for {
				n, err := s.Read(b)
				m.arrived(o, b[:n])
				if err != nil {
					break
				}
				if _, err := s.Write(b[:n]); err != nil {
					break
				}
			}
			_ = s.CloseWrite()
		})
	case 5:
		m.write(o, 100<<10, true)
	case 6:
		_ = s.Abort()
	}
}

// arrived looks whether b is what is to come next.
func (m *machine) arrived(o *our, b []byte) {
	if o.port == 9 {
		return // has bytes of its own
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, f := range m.fars {
		if f.qs.StreamID() == o.s.qs.StreamID() && f.blind {
			return
		}
	}
	if want := testnet.Pattern(o.got, len(b)); !bytes.Equal(b, want) {
		m.t.Errorf("stream %d: from byte %d on the tunnel carried %x, want %x", o.s.qs.StreamID(), o.got, b, want)
	}
	o.got += len(b)
}

func (m *machine) write(o *our, n int, end bool) {
	m.work.Go(func() {
		o.writes <- struct{}{}
		defer func() { <-o.writes }()
		sent, err := o.s.Write(testnet.Pattern(o.sent, n))
		o.sent += sent
		if err == nil && sent < n {
			m.t.Errorf("a Write of %d of %d bytes without an error", sent, n)
		}
		if end {
			_ = o.s.CloseWrite()
		}
	})
}

// Handle implements slog.Handler: what is logged is of panics.
func (m *machine) Handle(_ context.Context, r slog.Record) error {
	r.Attrs(func(a slog.Attr) bool {
		if a.Key == "panic" && a.Value.Any() != (connecttest.PlannedPanic{}) {
			m.t.Errorf("%s: %v", r.Message, a.Value)
		}
		if a.Key == "stack" && testing.Verbose() {
			m.t.Log(a.Value)
		}
		return true
	})
	return nil
}

func (m *machine) Enabled(context.Context, slog.Level) bool { return true }
func (m *machine) WithAttrs([]slog.Attr) slog.Handler       { return m }
func (m *machine) WithGroup(string) slog.Handler            { return m }

func (m *machine) start() {
	ctx, cancel := context.WithCancel(context.Background())
	m.cancel = cancel
	m.s = &Server{TLS: timeless(serverTLS()), Streams: 8, Idle: time.Minute, Log: slog.New(m), Limits: tunnel.Limits{ConnectionRatePerClient: -1}}
	m.served = make(chan error, 1)
	go func() { m.served <- m.s.Serve(ctx, m.wire.socket(ourAddr, false), m) }()
	m.by = m.dialer(ourAddr, false)
	c, err := m.by.DialContext(ctx, "tcp", "svc:9")
	if err != nil {
		m.t.Fatal(err)
	}
	m.beside = c.(*Stream)

	m.tr = &quic.Transport{Conn: m.wire.socket(machineAddr, true)}
	cfg := &quic.Config{MaxIdleTimeout: time.Minute, MaxIncomingStreams: 8, DisablePathMTUDiscovery: true}
	if m.mode&2 != 0 {
		cfg.InitialStreamReceiveWindow, cfg.MaxStreamReceiveWindow = 2000, 2000
		cfg.InitialConnectionReceiveWindow, cfg.MaxConnectionReceiveWindow = 5000, 5000
	}
	if m.client {
		if m.ln, err = m.tr.Listen(tlsConfig(timeless(serverTLS())), cfg); err != nil {
			m.t.Fatal(err)
		}
		m.d = m.dialer(machineAddr, true)
		m.d.Idle = time.Minute
		m.work.Go(func() { m.dial(1) })
		if m.qc, err = m.ln.Accept(ctx); err != nil {
			m.t.Fatal(err)
		}
		m.work.Go(m.accept)
	} else {
		tc := timeless(clientTLS())
		tc.NextProtos = []string{"h3"}
		if m.qc, err = m.tr.Dial(ctx, net.UDPAddrFromAddrPort(netip.MustParseAddrPort(ourAddr)), tc, cfg); err != nil {
			m.t.Fatal(err)
		}
	}
	m.work.Go(m.ignoreUnis)
	if m.mode&1 == 0 {
		m.uni(appendSettings(varints(streamControl)))
	}
	if !m.client {
		m.request(1, false)
	}
	m.rest()
	m.honest = m.fars[0]
	if m.client {
		m.answer(m.honest, "200")
	}
	m.rest()
}

var testsBegan = time.Now()

// timeless verifies certificates whatever the time: the clock of synctest
// begins in the year 2000.
func timeless(cfg *tls.Config) *tls.Config {
	cfg = cfg.Clone()
	cfg.Time = func() time.Time { return testsBegan }
	cfg.CurvePreferences = []tls.CurveID{tls.X25519}
	return cfg
}

func (m *machine) dialer(to string, sick bool) *Dialer {
	return &Dialer{Proxy: to, TLS: timeless(clientTLS()), Streams: 8, Listen: func(context.Context, string, netip.AddrPort) (net.PacketConn, error) {
		m.mu.Lock()
		m.dialed++
		from := fmt.Sprintf(dialerAddr, m.dialed)
		m.mu.Unlock()
		return m.wire.socket(from, sick), nil
	}}
}

func (m *machine) dial(port uint16) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	c, err := m.d.DialContext(ctx, "tcp", fmt.Sprintf("svc:%d", port))
	if err == nil {
		m.use(c.(*Stream), port)
	}
}

// accept takes the streams that our Dialer opens, for as long as it does.
func (m *machine) accept() {
	for {
		qs, err := m.qc.AcceptStream(context.Background())
		if err != nil {
			return
		}
		m.take(qs)
	}
}

func (m *machine) ignoreUnis() {
	for {
		s, err := m.qc.AcceptUniStream(context.Background())
		if err != nil {
			return
		}
		m.work.Go(func() { _, _ = io.Copy(io.Discard, s) })
	}
}

// take has a request stream read, and makes a far of it.
func (m *machine) take(qs *quic.Stream) *far {
	f := &far{m: m, qs: qs, todo: make(chan func(), 300)}
	m.mu.Lock()
	m.fars = append(m.fars, f)
	m.mu.Unlock()
	m.work.Go(func() {
		for do := range f.todo {
			do()
		}
	})
	m.work.Go(f.read)
	return f
}

// read looks at what our side sends on a stream.
func (f *far) read() {
	r := &frameReader{r: &pausing{f.m, f.qs}}
	heads, tunnel := 0, false
	for {
		kind, err := r.next()
		if err == io.ErrUnexpectedEOF {
			f.m.t.Errorf("stream %d ended in the head of a frame", f.qs.StreamID())
		}
		if err != nil {
			return
		}
		switch {
		case kind == frameHeaders && heads == 0:
			heads++
			b, err := r.payload()
			if err != nil {
				return
			}
			list, err := decodeHead(b)
			if err != nil {
				f.m.t.Errorf("stream %d: a head that can't be read: %v", f.qs.StreamID(), err)
				return
			}
			tunnel = f.m.client || list.IsAnswer() && list.List.Status == 200
		case kind == frameData && heads == 1:
			for b := make([]byte, 4<<10); r.left > 0; {
				n, err := r.read(b)
				if tunnel {
					f.arrived(b[:n])
				}
				if err == io.ErrUnexpectedEOF {
					f.m.t.Errorf("stream %d ended in the middle of a frame", f.qs.StreamID())
				}
				if err != nil {
					return
				}
			}
		default:
			f.m.t.Errorf("stream %d: a frame of type %#x behind %d heads", f.qs.StreamID(), kind, heads)
			return
		}
	}
}

func (f *far) arrived(b []byte) {
	f.m.mu.Lock()
	blind := f.blind
	f.m.mu.Unlock()
	f.mu.Lock()
	defer f.mu.Unlock()
	if want := testnet.Pattern(f.got, len(b)); !blind && !bytes.Equal(b, want) {
		f.m.t.Errorf("stream %d: from byte %d on our side sent %x, want %x", f.qs.StreamID(), f.got, b, want)
	}
	f.got += len(b)
}

// A pausing reads when the machine does.
type pausing struct {
	m *machine
	r io.Reader
}

func (p *pausing) Read(b []byte) (int, error) {
	p.m.mu.Lock()
	for p.m.paused {
		p.m.resume.Wait()
	}
	p.m.mu.Unlock()
	return p.r.Read(b)
}

// send writes to a stream, after what was sent before.
func (f *far) send(b []byte) {
	f.then(func() { _, _ = f.qs.Write(b) })
}

func (f *far) then(do func()) {
	select {
	case f.todo <- do:
	default: // more than any input has operations
		f.m.t.Error("too much to do")
	}
}

// data sends n bytes of the tunnel, of which the frame announces more.
func (f *far) data(n, more int) {
	var b []byte
	switch {
	case f.skip > 0: // the machine keeps to the frame that it began
		n = min(n, f.skip)
		f.skip -= n
		f.send(bytes.Repeat([]byte{0xee}, n))
		return
	case f.owed > 0:
		n = min(n, f.owed)
		f.owed -= n
	default:
		b = appendFrameHead(nil, frameData, uint64(n+more))
		f.owed = more
	}
	b = append(b, testnet.Pattern(f.off, n)...)
	f.off += n
	f.send(b)
}

func (f *far) spoil() {
	f.m.mu.Lock()
	f.blind = true
	f.m.mu.Unlock()
}

func (m *machine) uni(b []byte) {
	s, err := m.qc.OpenUniStream()
	if err != nil {
		return
	}
	_ = s.SetWriteDeadline(time.Now().Add(time.Second))
	_, _ = s.Write(b)
	m.unis = append(m.unis, s)
}

func (m *machine) openStream(b []byte, end bool) {
	qs, err := m.qc.OpenStream()
	if err != nil {
		return
	}
	f := m.take(qs)
	f.send(b)
	if end {
		f.then(func() { _ = qs.Close() })
	}
}

func (m *machine) request(port int, end bool) {
	m.openStream(headOf(":method", "CONNECT", ":authority", fmt.Sprintf("svc:%d", port)), end)
}

func (m *machine) answer(f *far, status string) {
	if f.answered || f.owed > 0 || f.skip > 0 {
		f.spoil()
	}
	f.answered = f.answered || status != "103"
	f.send(headOf(":status", status))
}

// far returns the stream of an operation. The honest one is left in peace.
func (m *machine) far(a byte) *far {
	m.mu.Lock()
	defer m.mu.Unlock()
	if len(m.fars) < 2 {
		return nil
	}
	return m.fars[1+int(a&7)%(len(m.fars)-1)]
}

// do is one operation. Its arguments choose a stream and a value.
func (m *machine) do(op, a, b byte) {
	f := m.far(a)
	flag := b&0x80 != 0
	op %= 19
	if f == nil && (op >= 1 && op <= 8) {
		return
	}
	code := quic.StreamErrorCode(testnet.Pick(b, uint64(RequestCancelled), 0, uint64(RequestRejected), uint64(ConnectError), 1<<60))
	switch op {
	case 0:
		port := int(a >> 4 & 7)
		if !m.client {
			m.request(port|b2i(port == 0), b&1 != 0)
			return
		}
		if flag {
			if f != nil {
				m.answer(f, testnet.Pick(b, "200", "404", "103", "20"))
			}
			return
		}
		m.mu.Lock()
		n := len(m.fars)
		m.mu.Unlock()
		m.work.Go(func() { m.dial(uint16(port | b2i(port == 0))) })
		m.rest()
		m.mu.Lock()
		if len(m.fars) > n {
			f = m.fars[n]
		} else {
			f = nil
		}
		m.mu.Unlock()
		if f != nil && b&1 == 0 {
			m.answer(f, "200")
		}
	case 1:
		f.data(testnet.Pick(b&0x7f, 0, 1, 100, 5000, 16<<10), 0)
		if flag {
			f.then(func() { _ = f.qs.Close() })
		}
	case 2:
		f.data(testnet.Pick(b, 0, 1, 100), testnet.Pick(b>>4, 1, 7, 3000))
	case 3: // a frame of an extension, of which the rest may come later
		if f.owed > 0 || f.skip > 0 {
			return
		}
		n := testnet.Pick(b, 0, 1, 70, 3000)
		now := n
		if b&0x40 != 0 {
			now /= 2
		}
		f.skip = n - now
		f.send(append(appendFrameHead(nil, testnet.Pick(a>>4, uint64(0x21), 0x40, 1<<40), uint64(n)), bytes.Repeat([]byte{0xee}, now)...))
	case 4:
		f.spoil()
		f.send(testnet.Pick(b, headOf("a", "b"), appendSettings(nil), varints(frameGoAway, 1, 0), varints(0x6, 0), varints(frameMaxPushID, 1, 0), varints(framePushPromise, 1, 0), varints(frameHeaders, 3, 0, 0, 0x80), varints(frameHeaders, 1<<40)))
	case 5:
		f.qs.CancelWrite(code)
	case 6:
		f.qs.CancelRead(code)
	case 7:
		f.then(func() { _ = f.qs.Close() })
	case 8:
		f.spoil()
		f.send([]byte{a, b})
	case 9:
		kind := testnet.Pick(a, uint64(streamControl), streamPush, streamEncoder, streamDecoder, 0x21, 1<<50)
		m.uni(append(varints(kind), testnet.Pick(b, appendSettings(nil), nil, []byte{0x20}, []byte{0x20, 0x41, 'a'}, varints(frameSettings, 2, 8, 2), varints(0x21, 3, 1, 2, 3))...))
	case 10:
		if len(m.unis) == 0 {
			return
		}
		s := m.unis[0]
		id := testnet.Pick(b, uint64(0), 4, 8, 5, 40, lastID, 1<<62-1)
		if n := a % 10; m.client && (n == 9 || n == 1 && id == 0) {
			m.cut = true // the honest tunnel may be what it says
		}
		_ = s.SetWriteDeadline(time.Now().Add(time.Second))
		_, _ = s.Write(testnet.Pick(a, appendSettings(nil), frameOf(frameGoAway, id), frameOf(frameCancelPush, id), frameOf(frameMaxPushID, id),
			frameOf(framePriorityUpdate, id), frameOf(framePriorityPush, id), varints(0x21, 2, 1, 1), varints(frameData, 0), varints(0x21, 5000), []byte{b}))
	case 11:
		if len(m.unis) == 0 {
			return
		}
		s := m.unis[int(a)%len(m.unis)]
		if flag {
			s.CancelWrite(code)
		} else {
			_ = s.Close()
		}
	case 12:
		m.own(a, b)
	case 13:
		time.Sleep(testnet.Pick(a, 10*time.Millisecond, time.Second, 6*time.Second, 16*time.Second, 40*time.Second, 2*time.Minute))
	case 14:
		if !m.client && a&0xf == 0 {
			m.drain()
		} else if f != nil {
			f.spoil()
			f.send(headOf(connectSvc...)) // a second head
		}
	case 15:
		m.wire.mu.Lock()
		m.wire.gone = !m.wire.gone
		m.wire.mu.Unlock()
		m.lossy = true
	case 16:
		_ = m.qc.CloseWithError(quic.ApplicationErrorCode(code), "")
	case 17:
		m.mu.Lock()
		m.paused = !m.paused
		m.resume.Broadcast()
		m.mu.Unlock()
	case 18: // a request that is none
		if m.client { // a server opens no streams, but may try
			if qs, err := m.qc.OpenStream(); err == nil {
				_, _ = qs.Write([]byte{a, b})
			}
			return
		}
		m.openStream(testnet.Pick(b&0x7f, headOf(":method", "GET", ":scheme", "https", ":path", "/", ":authority", "svc"), headOf(with(":path", "/")...), headOf(":method", "CONNECT"),
			headOf(":status", "200"), nil, headOf(connectSvc...)[:5], varints(frameHeaders, 3, 0, 0, 0x80), headOf(with(":protocol", "websocket", ":scheme", "https", ":path", "/")...)), flag)
	}
}

func b2i(b bool) int {
	if b {
		return 1
	}
	return 0
}

func frameOf(kind, id uint64) []byte {
	return append(varints(kind, uint64(quicvarint.Len(id))), varints(id)...)
}

// drain is Server.Drain for the one connection.
func (m *machine) drain() {
	for _, k := range m.conns() {
		k.drain()
	}
}

// conns returns the server's connection with the machine, if it is still there.
func (m *machine) conns() (all []*serverConn) {
	for _, k := range m.s.connsOf(nil) {
		if k.c != m.other() {
			all = append(all, k)
		}
	}
	return all
}

// other is the server's connection beside.
func (m *machine) other() *conn {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, o := range m.ours {
		if o.port == 9 {
			return o.s.c
		}
	}
	return nil
}

// own is something that our side does with a stream.
func (m *machine) own(a, b byte) {
	m.mu.Lock()
	var mine []*our
	for _, o := range m.ours {
		if o.port != 9 && o.s.qs.StreamID() != m.honest.qs.StreamID() {
			mine = append(mine, o)
		}
	}
	m.mu.Unlock()
	if len(mine) == 0 {
		return
	}
	o := mine[int(b&7)%len(mine)]
	n := testnet.Pick(b>>4, 0, 5, 1000, 20_000, 70_000)
	switch a & 7 {
	case 0:
		m.work.Go(func() {
			o.writes <- struct{}{}
			defer func() { <-o.writes }()
			_ = o.s.CloseWrite()
		})
	case 1:
		_ = o.s.Close()
	case 2:
		_ = o.s.Abort()
	case 3:
		if o.port != 1 {
			m.write(o, n, false)
		}
	case 4:
		if o.port == 1 {
			return
		}
		m.work.Go(func() {
			o.reads <- struct{}{}
			defer func() { <-o.reads }()
			p := make([]byte, n)
			got, _ := o.s.Read(p)
			m.arrived(o, p[:got])
		})
	case 5:
		_ = o.s.SetDeadline(time.Now().Add(time.Second))
	case 6:
		_ = o.s.SetDeadline(time.Time{})
	case 7:
		_ = o.s.Broken()
		if o.port != 1 {
			m.work.Go(func() {
				o.reads <- struct{}{}
				defer func() { <-o.reads }()
				woken := make(chan struct{})
				if !o.s.WaitRead(func() { close(woken) }) {
					<-woken
				}
			})
		}
	}
}

// rest waits until all that was sent has arrived, and been answered.
func (m *machine) rest() {
	time.Sleep(30 * time.Millisecond)
	synctest.Wait()
}

// check looks at the connection at rest.
func (m *machine) check() {
	for _, k := range m.conns() {
		k.mu.Lock()
		if k.streams < 0 {
			m.t.Errorf("%d streams on a connection", k.streams)
		}
		k.mu.Unlock()
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, o := range m.ours {
		o.s.c.mu.Lock()
		if ce, ok := errors.AsType[*connError](o.s.c.err); ok && ce.err.Reason == tunnel.Internal {
			m.t.Error(ce)
		}
		o.s.c.mu.Unlock()
	}
}

func (m *machine) finish() {
	m.mu.Lock()
	m.paused = false
	m.resume.Broadcast()
	m.mu.Unlock()
	m.wire.mu.Lock()
	m.wire.gone = false
	m.wire.mu.Unlock()
	if !m.t.Failed() && !m.cut {
		m.pingHonest()
	}
	_ = m.beside.SetDeadline(time.Now().Add(time.Second))
	testnet.Ping(m.t, m.beside, "the connection beside works")
	_ = m.qc.CloseWithError(0, "")
	if m.lossy {
		time.Sleep(2*idleTimeout + 10*time.Second) // as the end may have been lost, and a PING may have gone out
	}
	if m.d != nil {
		_ = m.d.Close()
	}
	m.rest()
	m.mu.Lock()
	ours := m.ours
	for _, f := range m.fars {
		close(f.todo)
	}
	m.mu.Unlock()
	for _, o := range ours {
		if o.port == 9 {
			continue
		}
		_ = o.s.SetDeadline(time.Now().Add(time.Second))
		o.reads <- struct{}{} // of port 1: when the echo has ended, which it has
		for b := make([]byte, 64<<10); ; {
			n, err := o.s.Read(b)
			m.arrived(o, b[:n])
			if errors.Is(err, os.ErrDeadlineExceeded) {
				m.t.Error("a stream has no end")
			}
			if err != nil {
				break
			}
		}
		_ = o.s.Close()
	}
	_ = m.by.Close()
	_ = m.s.Close()
	if err := <-m.served; err != tunnel.ErrServerClosed {
		m.t.Errorf("Serve returned %v", err)
	}
	m.cancel()
	_ = m.tr.Close()
	_ = m.tr.Conn.Close()
	m.work.Wait()
	m.s.mu.Lock()
	defer m.s.mu.Unlock()
	if n := len(m.s.conns); n != 0 || m.s.grown != 0 || m.s.handshakes != 0 {
		m.t.Errorf("%d connections are still listed, windows have grown by %d, %d handshakes are under way", n, m.s.grown, m.s.handshakes)
	}
}

// pingHonest uses the honest tunnel, if its connection still stands.
func (m *machine) pingHonest() {
	before := m.honest.received()
	m.honest.data(1000, 0)
	for range 100 { // a path that was gone is tried again after a while
		time.Sleep(300 * time.Millisecond)
		if m.qc.Context().Err() != nil || m.honest.received() == before+1000 {
			return
		}
	}
	m.t.Errorf("the honest tunnel on the same connection carried %d bytes of 1000 back", m.honest.received()-before)
}

func (f *far) received() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.got
}
