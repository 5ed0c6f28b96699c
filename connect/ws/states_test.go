package ws

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"

	"culvert.dev/connect/h2"
	"culvert.dev/internal/testnet"
	"culvert.dev/tunnel"
)

// FuzzServerStates and FuzzClientStates read their input as a sequence of
// frames of the peer's, whole and in pieces and in any order, of half-closes,
// resets and a peer that does not read, of things that our own side does with
// its stream, and of time that passes. The first byte says what the WebSocket
// is carried by: a connection, or a stream of HTTP/2. What must hold:
//   - nothing panics, and nothing has panicked and was caught,
//   - what is read is what a reference reads of the same bytes, and the end is
//     orderly where the reference says so and nowhere else,
//   - what our side sends is frames, with all the bytes that were written, and
//     nothing behind a close frame,
//   - the tunnel beside it works: on a connection of its own, or on the same
//     one of HTTP/2,
//   - nothing is left of what has ended.
func FuzzServerStates(f *testing.F) { fuzzStates(f, Server) }

// FuzzClientStates is FuzzServerStates with a server that misbehaves.
func FuzzClientStates(f *testing.F) { fuzzStates(f, Client) }

// What the first byte of an input says.
const (
	modeHTTP2  = 1 << iota // the carrier
	modePlain              // no subprotocol: only over a connection
	modeManual             // our side does what its operations say; otherwise it is an echo
	modePieces             // the handshake comes byte by byte
)

func fuzzStates(f *testing.F, side Side) {
	// The operations, by their numbers, are those of machine.do.
	for _, ops := range [][]byte{
		{},
		{0, 3, 0, 1, 2, 0, 3, 1, 1, 2, 2, 0x80, 15, 0, 0},
		{1, 2, 0, 4, 0, 0, 2, 1, 0x80, 0, 1, 0},
		{5, 4, 3, 12, 1, 0, 6, 2, 0, 3, 0, 0, 6, 9, 0, 12, 2, 0, 9, 0, 0},
		{0, 2, 0, 15, 0, 0, 11, 3, 4, 11, 0, 0, 4, 0, 0},
		{11, 3, 4, 11, 0, 0, 15, 0, 0, 11, 1, 0, 12, 1, 0, 4, 0, 0},
		{13, 0, 0, 3, 0, 0, 3, 1, 0, 11, 3, 4, 11, 0, 0, 13, 0, 0, 12, 0, 0},
		{13, 0, 0, 0, 4, 0, 4, 0, 0, 11, 1, 0, 12, 3, 0},
		{13, 1, 3, 11, 3, 3, 11, 3, 1, 13, 1, 1, 3, 0, 0, 11, 0, 0},
		{13, 1, 0, 4, 0, 0, 9, 0, 0}, {4, 3, 0, 4, 0, 0, 12, 2, 0},
		{7, 0, 0, 0, 1, 0, 12, 1, 0}, {7, 3, 0, 11, 2, 0}, {8, 0x82, 0x7f, 8, 1, 2, 10, 0, 0},
		{11, 5, 0, 11, 4, 2, 12, 1, 0, 11, 6, 0, 0, 2, 0, 11, 4, 2}, {12, 4, 0, 12, 4, 0, 0, 1, 0},
		{11, 2, 0, 0, 1, 0, 9, 0, 0}, {10, 0, 0, 11, 3, 2, 11, 1, 0}, {14, 0, 0, 14, 1, 0, 0, 1, 0},
	} {
		for mode := range byte(16) {
			if mode&(modeHTTP2|modePlain) != modeHTTP2|modePlain {
				f.Add(append([]byte{mode}, ops...))
			}
		}
	}
	testnet.FuzzStates(f, func(t *testing.T, input []byte) {
		m := &machine{t: t, side: side, mode: input[0]}
		m.start()
		defer m.finish()
		testnet.EachOperation(t, input[1:], func(op, a, b byte) {
			m.do(op, a, b)
			m.rest()
			m.check()
		})
	})
}

// A machine is a peer that does what its input says.
type machine struct {
	t      *testing.T
	side   Side // ours
	mode   byte
	near   *testnet.Memory // the machine's end of the connection
	far    *testnet.Memory // ours
	work   sync.WaitGroup
	cancel context.CancelFunc
	pool   *h2.Dialer
	beside net.Conn // by a connection of its own
	other  *our     // its other end

	in      []byte      // all that was sent of the WebSocket
	left    []byte      // of a frame, that is still to be sent
	stuck   bool        // our side's Writes wait
	narrow  bool        // for a window of HTTP/2
	ended   bool        // the machine sends no more
	reset   bool        // and has said so by a reset
	touched bool        // our side has ended the stream, or had a deadline
	over    atomic.Bool // our side has ended the stream
	cut     bool        // a Write was

	mu      sync.Mutex // guards what follows, and what is written to near
	ours    *our       // our side of the WebSocket
	honest  *our       // of the one beside it on the same connection
	out     []byte     // all that came of the WebSocket
	outEnd  bool       // and its end
	broken  bool       // by a reset, which may have overtaken something
	fr      *http2.Framer
	credit  int    // what may be sent on the stream
	replies []byte // of the honest WebSocket
	gone    bool   // the connection of HTTP/2
}

// A our is our side of a WebSocket, of which one Read and one Write at a time
// may wait: those behind them would wait for a lock, and synctest for them.
type our struct {
	s             *Stream
	reads, writes chan struct{}

	mu   sync.Mutex // guards what follows
	got  []byte
	err  error // of a Read, the first one that is no deadline's
	sent int
}

// ServeTunnel implements tunnel.Handler.
func (m *machine) ServeTunnel(_ context.Context, req *tunnel.Request) {
	s, err := req.Accept()
	if err != nil {
		return
	}
	m.use(s.(*Stream), req.Port)
}

// use has a WebSocket do what its port says.
func (m *machine) use(s *Stream, port uint16) {
	o := &our{s: s, reads: make(chan struct{}, 1), writes: make(chan struct{}, 1)}
	m.mu.Lock()
	switch port {
	case 7:
		m.other = o
	case 9:
		m.honest = o
	default:
		m.ours = o
	}
	m.mu.Unlock()
	if port == 3 {
		return
	}
	o.reads <- struct{}{}
	o.writes <- struct{}{}
	m.work.Go(func() {
		defer func() { <-o.reads; <-o.writes }()
		b := make([]byte, 8<<10)
		for {
			n, err := s.Read(b)
			o.read(b[:n], err)
			if err != nil {
				break
			}
			n, err = s.Write(b[:n])
			o.wrote(n)
			if err != nil {
				break
			}
		}
		_ = s.CloseWrite()
	})
}

func (o *our) read(b []byte, err error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.got = append(o.got, b...)
	var ne net.Error
	if o.err == nil && !(errors.As(err, &ne) && ne.Timeout()) {
		o.err = err
	}
}

func (o *our) wrote(n int) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.sent += n
}

func (m *machine) subprotocol() string {
	if m.mode&modePlain != 0 && m.mode&modeHTTP2 == 0 {
		return ""
	}
	return Subprotocol
}

// serve has a Protocol serve a connection, as a Server does.
func (m *machine) serve(ctx context.Context, p tunnel.Protocol, c net.Conn) {
	m.work.Go(func() {
		defer func() {
			if v := recover(); v != nil {
				m.t.Error(tunnel.Caught(v), string(tunnel.Caught(v).Stack))
			}
		}()
		if err := p.ServeConn(ctx, tunnel.NewConn(c), m); err != nil && tunnel.ReasonOf(err) == tunnel.Internal {
			m.t.Error(err)
		}
	})
}

func (m *machine) start() {
	ctx, cancel := context.WithCancel(context.Background())
	m.cancel = cancel
	one, two := testnet.Pipe()
	m.serve(ctx, &Protocol{}, one)
	var err error
	if m.beside, err = (&Dialer{URL: "ws://gw.test", Dialer: testnet.DialOnce(two)}).DialContext(ctx, "tcp", "svc.test:7"); err != nil {
		m.t.Fatal(err)
	}
	m.near, m.far = testnet.Pipe()
	m.credit = 60_000
	port := uint16(1)
	if m.mode&modeManual != 0 {
		port = 3
	}
	if m.mode&modeHTTP2 != 0 {
		m.startHTTP2(ctx, port)
	} else {
		m.startPlain(ctx, port)
	}
	synctest.Wait()
	if m.ours == nil {
		m.t.Fatal("there is no WebSocket")
	}
}

// startPlain makes the handshake of RFC 6455.
func (m *machine) startPlain(ctx context.Context, port uint16) {
	said := make(chan string, 1)
	m.work.Go(func() { // reads the other side's head, and then its frames
		var head []byte
		for b := make([]byte, 1); !bytes.HasSuffix(head, []byte("\r\n\r\n")); head = append(head, b...) {
			if _, err := io.ReadFull(m.near, b); err != nil {
				m.t.Errorf("after %q: %v", head, err)
				break
			}
		}
		said <- string(head)
		for b := make([]byte, 8<<10); ; {
			n, err := m.near.Read(b)
			m.mu.Lock()
			m.out = append(m.out, b[:n]...)
			m.outEnd = err != nil
			m.broken = errors.Is(err, syscall.ECONNRESET)
			m.mu.Unlock()
			if err != nil {
				return
			}
		}
	})
	var fields []string
	if m.subprotocol() != "" {
		fields = append(fields, "Sec-WebSocket-Protocol: "+m.subprotocol())
	}
	if m.side == Server {
		m.serve(ctx, &Protocol{}, m.far)
		m.pieces(handshake(fmt.Sprintf("/.culvert/tunnel/svc.test:%d", port), fields...))
		<-said
		return
	}
	m.work.Go(func() {
		c, err := (&Dialer{URL: "ws://gw.test", Dialer: testnet.DialOnce(m.far)}).DialContext(ctx, "tcp", fmt.Sprintf("svc.test:%d", port))
		if err != nil {
			m.t.Error(err)
			return
		}
		m.use(c.(*Stream), port)
	})
	_, key, _ := strings.Cut(<-said, "Sec-WebSocket-Key: ")
	key, _, _ = strings.Cut(key, "\r\n")
	m.pieces((&upgrade{key: key, subprotocol: m.subprotocol()}).answer())
}

// pieces sends a handshake, at once or byte by byte.
func (m *machine) pieces(s string) {
	if m.mode&modePieces == 0 {
		_, _ = io.WriteString(m.near, s)
		return
	}
	for i := range len(s) {
		_, _ = io.WriteString(m.near, s[i:i+1])
		if i%16 == 0 {
			synctest.Wait()
		}
	}
}

// The streams of a connection of HTTP/2.
const (
	honestStream = 1
	wildStream   = 3
)

// startHTTP2 makes the handshakes of RFC 8441, on two streams.
func (m *machine) startHTTP2(ctx context.Context, port uint16) {
	m.fr = http2.NewFramer(m.near, nil)
	ports := map[uint32]uint16{honestStream: 9, wildStream: port}
	if m.side == Server {
		m.serve(ctx, extended(), m.far)
		_, _ = io.WriteString(m.near, http2.ClientPreface)
	}
	_ = m.fr.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: 1 << 30}, http2.Setting{ID: http2.SettingEnableConnectProtocol, Val: 1})
	_ = m.fr.WriteWindowUpdate(0, 1<<30)
	m.work.Go(m.readHTTP2)
	if m.side == Client {
		m.pool = &h2.Dialer{Proxy: "gw.test:80", Dialer: testnet.DialOnce(m.far), Idle: time.Hour}
		d := &Dialer{URL: "ws://gw.test", Dialer: testnet.DialOnce(nil), Extended: m.pool.Open}
		for _, id := range []uint32{honestStream, wildStream} {
			m.work.Go(func() {
				c, err := d.DialContext(ctx, "tcp", fmt.Sprintf("svc.test:%d", ports[id]))
				if err != nil {
					m.t.Error(err)
					return
				}
				m.use(c.(*Stream), ports[id])
			})
			synctest.Wait()
			m.mu.Lock()
			_ = m.fr.WriteHeaders(http2.HeadersFrameParam{StreamID: id, EndHeaders: true, BlockFragment: fieldList(":status", "200", "sec-websocket-protocol", Subprotocol)})
			m.mu.Unlock()
			synctest.Wait()
		}
		return
	}
	for _, id := range []uint32{honestStream, wildStream} {
		m.mu.Lock()
		_ = m.fr.WriteHeaders(http2.HeadersFrameParam{StreamID: id, EndHeaders: true, BlockFragment: fieldList(":method", "CONNECT", ":protocol", "websocket", ":scheme", "https",
			":authority", "gw.test", ":path", fmt.Sprintf("/.culvert/tunnel/svc.test:%d", ports[id]), "sec-websocket-version", "13", "sec-websocket-protocol", Subprotocol)})
		m.mu.Unlock()
		synctest.Wait()
	}
}

func fieldList(pairs ...string) []byte {
	var b bytes.Buffer
	enc := hpack.NewEncoder(&b)
	for i := 0; i < len(pairs); i += 2 {
		_ = enc.WriteField(hpack.HeaderField{Name: pairs[i], Value: pairs[i+1]})
	}
	return b.Bytes()
}

// readHTTP2 reads the frames of HTTP/2, of which the WebSockets' are a part.
func (m *machine) readHTTP2() {
	if m.side == Client {
		_, _ = io.ReadFull(m.near, make([]byte, len(http2.ClientPreface)))
	}
	fr := http2.NewFramer(nil, m.near)
	for {
		f, err := fr.ReadFrame()
		m.mu.Lock()
		switch f := f.(type) {
		case nil:
			m.gone = true
			m.outEnd = true
			m.mu.Unlock()
			if !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) && !errors.Is(err, net.ErrClosed) && tunnel.ReasonOf(err) != tunnel.Reset {
				m.t.Errorf("our side sent what is no frame of HTTP/2: %v", err)
			}
			return
		case *http2.SettingsFrame:
			if !f.IsAck() {
				_ = m.fr.WriteSettingsAck()
			}
		case *http2.PingFrame:
			if !f.IsAck() {
				_ = m.fr.WritePing(true, f.Data)
			}
		case *http2.WindowUpdateFrame:
			if f.StreamID == wildStream {
				m.credit += int(f.Increment)
			}
		case *http2.RSTStreamFrame:
			m.outEnd = m.outEnd || f.StreamID == wildStream
		case *http2.GoAwayFrame:
			if f.ErrCode != http2.ErrCodeNo {
				m.t.Errorf("our side ended the connection of HTTP/2 with %v, %q", f.ErrCode, f.DebugData())
			}
		case *http2.DataFrame:
			if f.StreamID == wildStream {
				m.out = append(m.out, f.Data()...)
				m.outEnd = m.outEnd || f.StreamEnded()
			} else {
				m.replies = append(m.replies, f.Data()...)
				m.answerPings()
			}
		}
		m.mu.Unlock()
	}
}

// answerPings is the honest peer of the honest WebSocket. The caller holds mu.
func (m *machine) answerPings() {
	for len(m.replies) > 0 && m.replies[0] == 0x80|opPing {
		h, err := parseHeader(m.replies, m.side == Client)
		if err != nil || len(m.replies) < h.size+int(h.length) {
			return
		}
		m.replies = m.replies[h.size+int(h.length):]
		_ = m.fr.WriteData(honestStream, false, frame(0x80|opPong, m.side == Server, nil))
	}
}

// send sends bytes of the WebSocket.
func (m *machine) send(b []byte) {
	m.mu.Lock()
	defer m.mu.Unlock()
	switch {
	case m.ended || len(b) == 0 || m.mode&modeHTTP2 != 0 && (m.outEnd || len(b) > m.credit):
		return
	case m.mode&modeHTTP2 != 0:
		m.credit -= len(b)
		for p := range slices.Chunk(b, 16<<10) {
			_ = m.fr.WriteData(wildStream, false, p)
		}
	default:
		if _, err := m.near.Write(b); err != nil {
			return
		}
	}
	m.in = append(m.in, b...)
}

// do is one operation.
func (m *machine) do(op, a, b byte) {
	masked := m.side == Server
	data := testnet.Pattern(int(b), testnet.Pick(a, 0, 1, 5, 125, 126, 3000))
	next := func(f []byte) {
		m.send(append(m.left, f...))
		m.left = nil
	}
	switch op % 16 {
	case 0:
		next(frame(0x82, masked, data))
	case 1:
		next(frame(0x02, masked, data))
	case 2:
		next(frame(b&0x80, masked, data))
	case 3:
		next(frame(testnet.Pick(a, byte(0x89), 0x8a), masked, testnet.Pattern(int(b), testnet.Pick(b, 0, 4, 125))))
	case 4:
		next(testnet.Pick(a, closeFrame(1000, masked, "bye"), frame(0x88, masked, nil), closeFrame(1001, masked, ""), closeFrame(1011, masked, "x"), closeFrame(4000, masked, "")))
	case 5: // the beginning of a frame
		f := append(m.left, frame(testnet.Pick(b, byte(0x82), 0x02, 0x00, 0x80, 0x89, 0x88), masked, data)...)
		n := min(int(b), len(f))
		m.left = nil
		m.send(f[:n])
		m.left = f[n:]
	case 6: // and some more of it
		n := min(int(a), len(m.left))
		m.send(m.left[:n])
		m.left = m.left[n:]
	case 7:
		next(testnet.Pick(a, frame(0x81, masked, data), frame(0xc2, masked, data), frame(0x82, !masked, data), frame(0x83, masked, nil), frame(0x09, masked, nil), frame(0x89, masked, make([]byte, 126)),
			closeFrame(1005, masked, ""), closeFrame(1000, masked, "\xff"), frame(0x88, masked, []byte{1}), []byte{0x82, 0xfe, 0, 5, 0, 0, 0, 0}, []byte{0x82, 0xff, 0x80, 0, 0, 0, 0, 0, 0, 0}))
	case 8:
		next([]byte{a, b})
	case 9:
		m.end(false)
	case 10:
		m.end(true)
	case 11:
		m.own(a, b)
	case 12:
		m.hold(false) // time passes only where nobody waits for a lock
		time.Sleep(testnet.Pick(a, 10*time.Millisecond, time.Second, 3*time.Second, 25*time.Second, 2*time.Minute))
	case 13:
		if a&1 == 0 {
			m.hold(!m.stuck)
		} else if m.mode&modeHTTP2 == 0 { // where it would end the connection
			m.far.Cut(int(b))
			m.cut = true
		}
	case 14: // of HTTP/2
		m.mu.Lock()
		defer m.mu.Unlock()
		if m.mode&modeHTTP2 == 0 {
			return
		}
		switch a % 4 {
		case 0:
			m.stuck, m.narrow = true, true
			_ = m.fr.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: testnet.Pick(b, uint32(0), 1, 100)})
		case 1:
			_ = m.fr.WritePing(false, [8]byte{a, b})
		case 2:
			if !m.outEnd && !m.ended {
				_ = m.fr.WriteData(wildStream, false, nil)
			}
		case 3:
			_ = m.fr.WriteWindowUpdate(wildStream, testnet.Pick(b, uint32(1), 100, 1000))
		}
	case 15:
		next(frame(0x82, masked, nil))
	}
}

// hold has our side's Writes wait, or go on.
func (m *machine) hold(held bool) {
	m.stuck = held
	m.far.Hold(held)
	if m.narrow && !held {
		m.narrow = false
		m.mu.Lock()
		_ = m.fr.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: 1 << 30})
		m.mu.Unlock()
	}
}

// end is the end of what the machine sends.
func (m *machine) end(reset bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	switch {
	case m.mode&modeHTTP2 == 0 && reset:
		_ = m.near.Abort()
	case m.mode&modeHTTP2 == 0:
		_ = m.near.CloseWrite()
	case m.outEnd || m.ended && !reset:
	case reset:
		_ = m.fr.WriteRSTStream(wildStream, http2.ErrCodeCancel)
	default:
		_ = m.fr.WriteData(wildStream, true, nil)
	}
	m.ended, m.reset = true, m.reset || reset
}

// own is something that our side does with the stream.
func (m *machine) own(a, b byte) {
	o := m.ours
	n := testnet.Pick(b, 0, 1, 5, 1000, 40_000)
	switch a % 8 {
	case 0:
		m.work.Go(func() {
			o.writes <- struct{}{}
			defer func() { <-o.writes }()
			_ = o.s.CloseWrite()
		})
	case 1:
		m.touched = true
		m.over.Store(true)
		m.aside(func() { _ = o.s.Close() })
	case 2:
		m.touched = true
		m.over.Store(true)
		m.aside(func() { _ = o.s.AbortWithReason(testnet.Pick(b, "", tunnel.Drain, tunnel.Idle)) })
	case 3:
		if m.mode&modeManual == 0 {
			return
		}
		m.work.Go(func() {
			o.writes <- struct{}{}
			defer func() { <-o.writes }()
			if !m.over.Load() {
				n, _ := o.s.Write(testnet.Pattern(o.sent, n))
				o.wrote(n)
			}
		})
	case 4:
		if m.mode&modeManual == 0 {
			return
		}
		m.work.Go(func() {
			o.reads <- struct{}{}
			defer func() { <-o.reads }()
			if !m.over.Load() { // what says farewell reads by itself
				p := make([]byte, n)
				n, err := o.s.Read(p)
				o.read(p[:n], err)
			}
		})
	case 5:
		m.touched = true
		_ = o.s.SetDeadline(time.Now().Add(time.Second))
	case 6:
		_ = o.s.SetDeadline(time.Time{})
	case 7:
		if m.mode&modeManual != 0 {
			m.work.Go(func() {
				o.reads <- struct{}{}
				defer func() { <-o.reads }()
				if !m.over.Load() {
					o.s.WaitRead(func() {})
				}
			})
		}
	}
}

// aside does what may wait for a moment, which does not pass where our side is
// stuck.
func (m *machine) aside(do func()) {
	if m.stuck {
		m.work.Go(do)
	} else {
		do()
	}
}

// rest waits until all that was sent has arrived, and been answered.
func (m *machine) rest() {
	if m.stuck { // somebody may wait for a lock, which synctest does not know
		for range 20 {
			runtime.Gosched()
		}
		return
	}
	synctest.Wait()
}

// check looks at both sides, at rest.
func (m *machine) check() {
	m.mu.Lock()
	out, broken := bytes.Clone(m.out), m.broken
	m.mu.Unlock()
	o := m.ours
	if p := o.s.panicked.Load(); p != nil {
		m.t.Error(p, string(p.Stack))
	}
	o.mu.Lock()
	got, err, sent := bytes.Clone(o.got), o.err, o.sent
	o.mu.Unlock()
	want, orderly := referenceOf(m.in, m.side, m.subprotocol() != "")
	if !bytes.HasPrefix(want, got) {
		m.t.Errorf("%x: got %x, want %x", m.in, got, want)
	}
	if err == io.EOF && (!orderly || len(got) != len(want)) {
		m.t.Errorf("%x: an orderly end after %d bytes, want %d and orderly: %v", m.in, len(got), len(want), orderly)
	}
	carried := m.frames(out)
	if m.mode&modeManual != 0 {
		if !bytes.Equal(carried, testnet.Pattern(0, len(carried))) {
			m.t.Errorf("%x: our side has sent what was not written", out)
		}
	} else if !bytes.HasPrefix(want, carried) {
		m.t.Errorf("%x: our side sent back %x, want %x", out, carried, want)
	}
	if len(carried) > sent && m.mode&modeManual != 0 && len(o.writes) == 0 {
		m.t.Errorf("our side has sent %d bytes, and %d were written", len(carried), sent)
	}
	if !m.stuck && !m.touched && !m.reset && !m.cut && !broken && !o.s.pingTimedOut.Load() && len(carried) < sent {
		m.t.Errorf("%d bytes were written and %d have come", sent, len(carried))
	}
}

// frames looks at what our side has sent, and returns the bytes that it carries.
func (m *machine) frames(b []byte) (data []byte) {
	closed := false
	for len(b) > 0 {
		h, err := parseHeader(b, m.side == Client)
		if err == errMore {
			return data
		}
		if err != nil || closed {
			m.t.Errorf("our side sends %x, behind a close frame: %v, %v", b[:min(len(b), 20)], closed, err)
			return data
		}
		payload := bytes.Clone(b[h.size:min(h.size+int(h.length), len(b))])
		mask(payload, h.key, 0)
		if h.opcode == opBinary || h.opcode == opContinuation {
			data = append(data, payload...)
		}
		closed = h.opcode == opClose
		b = b[h.size+len(payload):]
	}
	return data
}

func (m *machine) finish() {
	m.hold(false)
	m.rest()
	_ = m.beside.SetDeadline(time.Now().Add(time.Second))
	testnet.Ping(m.t, m.beside, "the tunnel beside works")
	if m.honest != nil && !m.t.Failed() {
		m.pingHonest()
	}
	// The stream comes to an end by what the peer has sent.
	m.end(false)
	m.rest()
	o := m.ours
	if m.over.Load() {
		time.Sleep(10 * time.Second) // the closing handshake
	}
	_ = o.s.SetDeadline(time.Now().Add(5 * time.Second))
	o.reads <- struct{}{} // of an echo: when it has ended
	for b := make([]byte, 8<<10); ; {
		n, err := o.s.Read(b)
		o.read(b[:n], err)
		var ne net.Error
		if errors.As(err, &ne) && ne.Timeout() && !o.s.pingTimedOut.Load() {
			m.t.Errorf("%x: the stream has no end: %v", m.in, err)
		}
		if err != nil {
			break
		}
	}
	if _, orderly := referenceOf(m.in, m.side, m.subprotocol() != ""); orderly && !m.touched && !m.reset && !o.s.pingTimedOut.Load() && o.err != io.EOF {
		m.t.Errorf("%x: the end is %v, want EOF", m.in, o.err)
	}
	m.check()
	_ = o.s.Close()
	if m.honest != nil {
		_ = m.honest.s.Close()
	}
	_ = m.beside.Close()
	time.Sleep(10 * time.Second) // the closing handshakes
	if m.pool != nil {
		_ = m.pool.Close()
	}
	m.cancel()
	_ = m.near.Close()
	if m.other != nil {
		_ = m.other.s.Close()
	}
	m.work.Wait()
}

// pingHonest uses the honest WebSocket on the same connection.
func (m *machine) pingHonest() {
	m.mu.Lock()
	if m.gone {
		m.t.Error("the connection of HTTP/2 has ended")
	}
	m.replies = nil
	want := testnet.Pattern(7, 1000)
	_ = m.fr.WriteData(honestStream, false, frame(0x82, m.side == Server, want))
	m.mu.Unlock()
	synctest.Wait()
	m.mu.Lock()
	defer m.mu.Unlock()
	if got := m.frames(m.replies); !bytes.Equal(got, want) {
		m.t.Errorf("the honest WebSocket on the same connection carried %d bytes of %d back", len(got), len(want))
	}
}
