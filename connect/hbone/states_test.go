package hbone

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"

	"culvert.dev/connect/connecttest"
	"culvert.dev/connect/h2"
	"culvert.dev/identity"
	"culvert.dev/internal/testca"
	"culvert.dev/internal/testnet"
	"culvert.dev/tunnel"
)

// FuzzServerStates and FuzzClientStates read their input as a sequence of
// frames of a peer on two connections, one inside of a tunnel of the other: a
// tunnel in a tunnel, as between ambient clusters. Each operation is for one of
// the two. The server serves both; the client is a Dialer or a Double, whose
// peer is both of its servers. What must hold:
//   - nothing panics, and nothing has panicked and was caught,
//   - what the machine breaks on one stream ends no other one, and what it
//     breaks on the inner connection does not end the outer one: an honest
//     tunnel of each works while its connection stands, and so does the
//     connection beside,
//   - nothing is left of what has ended.
//
// connect/h2 has such targets of its own, which keep the account of windows.
func FuzzServerStates(f *testing.F) { fuzzStates(f, false) }

// FuzzClientStates is FuzzServerStates with servers that misbehave.
func FuzzClientStates(f *testing.F) { fuzzStates(f, true) }

func fuzzStates(f *testing.F, client bool) {
	serverKeys() // by the clock of this world
	// The operations, by their numbers, are those of machine.do.
	for _, ops := range [][]byte{
		{},
		{0, 0x10, 0, 1, 2, 3, 1, 0x0a, 3, 2, 2, 0, 9, 0, 0},
		{0, 0x30, 0, 0x80, 0x30, 0, 10, 3, 3, 0x8a, 3, 3, 4, 0, 0, 0x84, 0, 0, 1, 2, 0x83},
		{0x80, 0x10, 0, 0x81, 2, 3, 3, 2, 0, 0x83, 2, 0, 0x81, 2, 0x81},
		{0, 0x50, 0, 0x80, 0x50, 0, 4, 1, 0, 5, 2, 3, 0x85, 2, 3, 11, 2, 0},
		{7, 0, 0, 0x87, 0, 0, 0, 0x10, 0, 0x80, 0x10, 0}, {7, 1, 0, 11, 1, 0, 0x87, 1, 3},
		{0x88, 1, 2, 11, 0, 0}, {8, 1, 2, 11, 0, 0}, {3, 0, 8, 0x80, 0x10, 0}, {2, 0, 0, 11, 2, 0},
		{12, 1, 0, 12, 0x81, 0, 12, 2, 1, 6, 1, 0, 0x86, 2, 1}, {0, 0x10, 3, 0x80, 0x20, 3, 0x80, 0x40, 1},
		{13, 0, 0, 0x80, 0x10, 0, 11, 1, 0, 0x8d, 0, 0, 11, 3, 0}, {11, 4, 0, 0x81, 0, 3}, {14, 0, 0, 0x8e, 0, 1},
	} {
		f.Add(append([]byte{0}, ops...))
		f.Add(append([]byte{1}, ops...))
	}
	testnet.FuzzStates(f, func(t *testing.T, input []byte) {
		m := &machine{t: t, client: client, double: input[0]&1 != 0}
		m.start()
		defer m.finish()
		testnet.EachOperation(t, input[1:], func(op, a, b byte) {
			m.do(op, a, b)
			synctest.Wait()
			m.check()
		})
	})
}

// serverKeys are of a server for any name here, and the TLS of its clients:
// whatever the time is, as the clock of synctest begins in the year 2000.
var serverKeys = sync.OnceValue(func() (k struct {
	server, client *tls.Config
	known          *identity.Verifier
}) {
	ca, err := testca.New("cluster.local", nil)
	if err != nil {
		panic(err)
	}
	pair, err := ca.Issue(testca.Options{SPIFFEID: id("server"), DNSNames: []string{"gw.test", "svc.test"}})
	if err != nil {
		panic(err)
	}
	now := time.Now()
	k.server = &tls.Config{Certificates: []tls.Certificate{pair.TLS}, NextProtos: []string{"h2"}, MinVersion: tls.VersionTLS13, SessionTicketsDisabled: true, CurvePreferences: []tls.CurveID{tls.X25519}}
	k.client = &tls.Config{CurvePreferences: []tls.CurveID{tls.X25519}}
	k.known = verifier([]string{"spiffe://cluster.local"}, identity.NewTrust("cluster.local", ca.Root()))
	k.known.Time = func() time.Time { return now }
	return k
})

// A machine is a peer that does what its input says.
type machine struct {
	t      *testing.T
	client bool // our side is a Dialer
	double bool // and a Double
	work   sync.WaitGroup
	cancel context.CancelFunc
	p      *Protocol
	d      tunnel.Dialer
	by     *h2.Dialer
	beside net.Conn
	outer  *level
	inner  *level // nil where there is no tunnel in a tunnel

	mu   sync.Mutex // guards what follows
	ours []*h2.Stream
}

// A level is the machine's end of one connection.
type level struct {
	m  *machine
	c  net.Conn
	mu sync.Mutex // guards what follows, and what is written
	fr *http2.Framer

	asked []uint32 // requests of our side that nobody has answered
	got   map[uint32][]byte
	pipes map[uint32]*testnet.Memory // streams that carry a connection
	gone  bool
	wrong bool // our side has found an error
	bad   bool // the machine has spoilt the honest stream, or the stream below
}

// Streams of each connection.
const (
	honestStream = 1
	innerStream  = 3 // of the outer one, on the server: the one that carries
)

// ServeTunnel implements tunnel.Handler. A request for DefaultPort carries a
// tunnel in its tunnel.
func (m *machine) ServeTunnel(ctx context.Context, req *tunnel.Request) {
	switch s := connecttest.ServeByPort(ctx, req); {
	case s == nil:
	case req.Port == DefaultPort:
		m.work.Go(func() { m.serve(ctx, s) })
	default:
		m.use(s.(*h2.Stream), req.Port)
	}
}

// Refused and Panicked implement tunnel.Refuser.
func (m *machine) Refused(*tunnel.Request, error) {}

func (m *machine) Panicked(_ *tunnel.Request, v any) {
	if p := tunnel.Caught(v); p.Value != (connecttest.PlannedPanic{}) {
		m.t.Error(p, string(p.Stack))
	}
}

func (m *machine) use(s *h2.Stream, port uint16) {
	switch port {
	case 1, 9:
		m.work.Go(func() { _, _ = io.Copy(s, s); _ = s.CloseWrite() })
	case 5:
		m.work.Go(func() { _, _ = s.Write(make([]byte, 100<<10)); _ = s.CloseWrite() })
	case 6:
		_ = s.Abort()
	}
	if port != 9 {
		m.mu.Lock()
		m.ours = append(m.ours, s)
		m.mu.Unlock()
	}
}

// serve has the Protocol serve a connection, as a Server does.
func (m *machine) serve(ctx context.Context, c net.Conn) {
	defer c.Close()
	defer func() {
		if v := recover(); v != nil {
			m.t.Error(tunnel.Caught(v), string(tunnel.Caught(v).Stack))
		}
	}()
	conn := tunnel.NewConn(c)
	conn.Peer = tunnel.Peer{ID: id("alice"), Method: "mtls"}
	if err := m.p.ServeConn(ctx, conn, m); err != nil && tunnel.ReasonOf(err) == tunnel.Internal {
		m.t.Error(err)
	}
}

func (m *machine) start() {
	ctx, cancel := context.WithCancel(context.Background())
	m.cancel = cancel
	m.p = &Protocol{Streams: 8}
	one, two := testnet.Pipe()
	m.work.Go(func() { m.serve(ctx, two) })
	m.by = &h2.Dialer{Proxy: "proxy:1", Dialer: testnet.DialOnce(one)}
	var err error
	if m.beside, err = m.by.DialContext(ctx, "tcp", "svc.test:9"); err != nil {
		m.t.Fatal(err)
	}
	near, far := testnet.Pipe()
	if m.client {
		m.startClient(near, far)
	} else {
		m.work.Go(func() { m.serve(ctx, far) })
		m.outer = m.newLevel(near)
		m.outer.request(honestStream, 9)
		m.outer.request(innerStream, DefaultPort)
		synctest.Wait()
		m.inner = m.newLevel(m.outer.carry(innerStream))
		m.inner.request(honestStream, 9)
	}
	synctest.Wait()
}

func (m *machine) startClient(near, far net.Conn) {
	keys := serverKeys()
	dialer := &Dialer{Gateway: "gw.test:15008", Dialer: testnet.DialOnce(far), TLS: keys.client, Verifier: keys.known}
	m.d = dialer
	if m.double {
		m.d = &Double{Outer: dialer, TLS: keys.client, Verifier: keys.known}
	}
	m.work.Go(func() { m.dial(9) })
	m.outer = m.newLevel(tls.Server(near, keys.server))
	synctest.Wait()
	m.outer.answer(honestStream, "200")
	synctest.Wait()
	if m.double { // the outer tunnel carries the inner connection
		m.inner = m.newLevel(tls.Server(m.outer.carry(honestStream), keys.server))
		synctest.Wait()
		m.inner.answer(honestStream, "200")
	}
}

func (m *machine) dial(port uint16) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	c, err := m.d.DialContext(ctx, "tcp", fmt.Sprintf("svc.test:%d", port))
	if err == nil {
		m.use(c.(*h2.Stream), port)
	}
}

// newLevel begins to speak HTTP/2 on c.
func (m *machine) newLevel(c net.Conn) *level {
	l := &level{m: m, c: c, got: map[uint32][]byte{}, pipes: map[uint32]*testnet.Memory{}}
	l.fr = http2.NewFramer(c, c)
	l.fr.AllowIllegalWrites = true
	if !m.client {
		_, _ = io.WriteString(c, http2.ClientPreface)
	}
	m.work.Go(l.read)
	if !m.client {
		l.mu.Lock()
		defer l.mu.Unlock()
		_ = l.fr.WriteSettings()
	}
	return l
}

// read takes what comes, and answers what an honest peer answers.
func (l *level) read() {
	if t, ok := l.c.(*tls.Conn); ok {
		if err := t.Handshake(); err != nil {
			l.m.t.Errorf("handshake: %v", err)
		}
		_, _ = io.ReadFull(l.c, make([]byte, len(http2.ClientPreface)))
		l.mu.Lock()
		_ = l.fr.WriteSettings()
		l.mu.Unlock()
	}
	own := http2.NewFramer(io.Discard, l.c)
	own.SetMaxReadFrameSize(1<<24 - 1)
	for {
		f, err := own.ReadFrame()
		l.mu.Lock()
		if err != nil {
			l.gone = true
			for _, p := range l.pipes {
				_ = p.Abort()
			}
			l.mu.Unlock()
			return
		}
		switch f := f.(type) {
		case *http2.SettingsFrame:
			if !f.IsAck() {
				_ = l.fr.WriteSettingsAck()
			}
		case *http2.PingFrame:
			if !f.IsAck() {
				_ = l.fr.WritePing(true, f.Data)
			}
		case *http2.GoAwayFrame:
			l.wrong = l.wrong || f.ErrCode != http2.ErrCodeNo
		case *http2.HeadersFrame:
			if l.m.client {
				l.asked = append(l.asked, f.StreamID)
			}
		case *http2.RSTStreamFrame:
			if p := l.pipes[f.StreamID]; p != nil {
				_ = p.Abort()
			}
		case *http2.DataFrame:
			l.data(f)
		}
		l.mu.Unlock()
	}
}

// data takes what came on a stream. The caller holds mu.
func (l *level) data(f *http2.DataFrame) {
	if n := f.Length; n > 0 {
		_ = l.fr.WriteWindowUpdate(0, n)
		if !f.StreamEnded() {
			_ = l.fr.WriteWindowUpdate(f.StreamID, n)
		}
	}
	p := l.pipes[f.StreamID]
	if p == nil {
		l.got[f.StreamID] = append(l.got[f.StreamID], f.Data()...)
		return
	}
	_, _ = p.Write(f.Data())
	if f.StreamEnded() {
		_ = p.CloseWrite()
	}
}

// carry makes a connection of a stream.
func (l *level) carry(id uint32) net.Conn {
	near, far := testnet.Pipe()
	l.mu.Lock()
	defer l.mu.Unlock()
	l.pipes[id] = far
	if early := l.got[id]; len(early) > 0 {
		_, _ = far.Write(early)
	}
	l.m.work.Go(func() {
		for b := make([]byte, 8<<10); ; {
			n, err := far.Read(b)
			l.mu.Lock()
			switch {
			case n > 0:
				_ = l.fr.WriteData(id, false, b[:n])
			case err == io.EOF:
				_ = l.fr.WriteData(id, true, nil)
			}
			l.mu.Unlock()
			if err != nil {
				return
			}
		}
	})
	return near
}

func fieldList(pairs ...string) []byte {
	var b bytes.Buffer
	enc := hpack.NewEncoder(&b)
	enc.SetMaxDynamicTableSize(0)
	for i := 0; i < len(pairs); i += 2 {
		_ = enc.WriteField(hpack.HeaderField{Name: pairs[i], Value: pairs[i+1]})
	}
	return b.Bytes()
}

func (l *level) request(id uint32, port int, more ...string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	_ = l.fr.WriteHeaders(http2.HeadersFrameParam{StreamID: id, EndHeaders: true,
		BlockFragment: fieldList(append([]string{":method", "CONNECT", ":authority", fmt.Sprintf("svc.test:%d", port)}, more...)...)})
}

func (l *level) answer(id uint32, status string, more ...string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	_ = l.fr.WriteHeaders(http2.HeadersFrameParam{StreamID: id, EndHeaders: true, BlockFragment: fieldList(append([]string{":status", status}, more...)...)})
}

// extra is what a request or an answer says besides.
func extra(b byte) []string {
	return testnet.Pick(b, nil, []string{"baggage", "k8s.cluster.name=west", "traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"},
		[]string{"forwarded", `for="192.0.2.7:999";host=svc`, "forwarded", "for=_x"}, []string{"baggage", strings.Repeat("a", 9<<10), "baggage", "\x7f"},
		[]string{"via", "2 a, 2 b", "traceparent", "00"}, []string{"connection", "close"})
}

// do is one operation, on one of the two connections. Its arguments choose a
// stream and a value.
func (m *machine) do(op, a, b byte) {
	l := m.outer
	if op&0x80 != 0 && m.inner != nil {
		l = m.inner
	}
	id := 2*uint32(a&7) + 1
	if a&0xf == 15 {
		id = testnet.Pick(b, uint32(0), 2, 1<<31-1)
	}
	end := b&0x80 != 0
	// What the machine does to the honest stream, and to the one that carries
	// the inner connection, is its own fault.
	if op &= 0x7f; op%15 <= 3 || op%15 == 6 || op%15 == 12 || op%15 == 14 || op%15 == 5 {
		l.mu.Lock()
		l.bad = l.bad || id == honestStream
		l.mu.Unlock()
		if l == m.outer && m.inner != nil && (id == innerStream && !m.client || id == honestStream && m.client) {
			m.inner.mu.Lock()
			m.inner.bad = true
			m.inner.mu.Unlock()
		}
	}
	switch op % 15 {
	case 0:
		port := int(a >> 4 & 7)
		if !m.client {
			l.request(id, port, extra(b)...)
			return
		}
		if end {
			l.answer(id, testnet.Pick(b, "200", "404", "103", "20", "503"), extra(b>>3)...)
			return
		}
		if port == 0 {
			port = 1
		}
		m.work.Go(func() { m.dial(uint16(port)) })
		synctest.Wait()
		for _, l := range []*level{m.outer, m.inner} {
			if l == nil {
				continue
			}
			l.mu.Lock()
			asked := l.asked
			l.asked = nil
			l.mu.Unlock()
			for _, id := range asked {
				if id != honestStream {
					l.answer(id, "200")
				}
			}
		}
		return
	case 9:
		m.own(a, b)
		return
	case 11:
		time.Sleep(testnet.Pick(a, 10*time.Millisecond, time.Second, 6*time.Second, 16*time.Second, 40*time.Second, 2*time.Minute))
		return
	case 13:
		if !m.client {
			m.p.Drain()
		}
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	switch op % 15 {
	case 1:
		if l == m.outer && m.double && m.client && id == honestStream {
			return // a record of TLS that can't be read: whoever says so may wait for the lock of a writer, and synctest for both
		}
		_ = l.fr.WriteData(id, end, make([]byte, testnet.Pick(b&0x7f, 0, 1, 100, 1000, 8<<10)))
	case 2:
		_ = l.fr.WriteData(id, true, nil)
	case 3:
		_ = l.fr.WriteRSTStream(id, http2.ErrCode(b&0xf))
	case 4:
		_ = l.fr.WriteSettings(http2.Setting{ID: testnet.Pick(b, http2.SettingInitialWindowSize, http2.SettingMaxConcurrentStreams, http2.SettingHeaderTableSize, http2.SettingMaxFrameSize),
			Val: testnet.Pick(a, uint32(0), 1, 100, 65535, 1<<20, 16<<10)})
	case 5:
		_ = l.fr.WriteWindowUpdate(id, testnet.Pick(b, uint32(1), 5, 1000, 65535, 1<<20))
	case 6: // parts of a header block, in any order
		list := fieldList(":method", "CONNECT", ":authority", "svc.test:1")
		switch b % 3 {
		case 0:
			_ = l.fr.WriteHeaders(http2.HeadersFrameParam{StreamID: id, BlockFragment: list[:3]})
		case 1:
			_ = l.fr.WriteContinuation(id, false, list[3:5])
		case 2:
			_ = l.fr.WriteContinuation(id, true, list[5:])
		}
	case 7:
		l.bad = l.bad || m.client && a%4 == 0 // says that it was not seen
		_ = l.fr.WriteGoAway(testnet.Pick(a, uint32(0), 1, 5, 1<<31-1), http2.ErrCode(b&0xf), nil)
	case 8:
		l.bad = true // it may be part of any frame
		_, _ = l.c.Write([]byte{a, b})
	case 10:
		_ = l.fr.WriteWindowUpdate(0, testnet.Pick(b, uint32(1), 5, 1000, 65535, 1<<20))
	case 12:
		switch b % 3 {
		case 0:
			_ = l.fr.WriteRawFrame(http2.FrameType(a|0x80), http2.Flags(b), id, []byte{a, b})
		case 1:
			_ = l.fr.WriteHeaders(http2.HeadersFrameParam{StreamID: id, BlockFragment: fieldList("a", "b"), EndHeaders: true, EndStream: end})
		case 2:
			_ = l.fr.WritePing(end, [8]byte{a, b})
		}
	case 14: // a request that is none
		_ = l.fr.WriteHeaders(http2.HeadersFrameParam{StreamID: id, EndHeaders: true, EndStream: end,
			BlockFragment: testnet.Pick(b, fieldList(":method", "GET", ":scheme", "http", ":path", "/"), fieldList(":status", "200"), fieldList(":method", "CONNECT"), []byte{0xff, 0xff, 0xff})})
	}
}

// own is something that our side does with a stream.
func (m *machine) own(a, b byte) {
	m.mu.Lock()
	if len(m.ours) == 0 {
		m.mu.Unlock()
		return
	}
	s := m.ours[int(b&7)%len(m.ours)]
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
		_ = s.Broken()
	}
}

// check looks whether a panic ended a stream.
func (m *machine) check() {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, s := range m.ours {
		if p, ok := errors.AsType[*tunnel.Panic](s.Broken()); ok {
			m.t.Error(p, string(p.Stack))
		}
	}
}

func (m *machine) finish() {
	_ = m.beside.SetDeadline(time.Now().Add(time.Second))
	testnet.Ping(m.t, m.beside, "the connection beside works")
	if !m.t.Failed() {
		if !m.client || !m.double {
			m.outer.ping()
		}
		if m.inner != nil {
			m.inner.ping()
		}
	}
	for _, l := range []*level{m.inner, m.outer} {
		if l != nil {
			_ = l.c.Close()
			synctest.Wait()
		}
	}
	switch d := m.d.(type) {
	case *Dialer:
		_ = d.Close()
	case *Double:
		_ = d.Close()
	}
	m.mu.Lock()
	ours := m.ours
	m.mu.Unlock()
	for _, s := range ours {
		testnet.CheckEnds(m.t, s)
		_ = s.Close()
	}
	_ = m.by.Close()
	m.cancel()
	m.work.Wait()
}

// ping uses the honest tunnel of a connection that stands.
func (l *level) ping() {
	over := func() bool {
		return l.gone || l.wrong || l.bad || l.m.inner == l && (l.m.outer.gone || l.m.outer.wrong || l.m.outer.bad)
	}
	l.mu.Lock()
	if l.m.inner == l {
		l.m.outer.mu.Lock()
		_ = l.m.outer.fr.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: 1 << 20}, http2.Setting{ID: http2.SettingMaxFrameSize, Val: 16 << 10})
		_ = l.m.outer.fr.WriteWindowUpdate(0, 1<<20)
		l.m.outer.mu.Unlock()
	}
	_ = l.fr.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: 1 << 20}, http2.Setting{ID: http2.SettingMaxFrameSize, Val: 16 << 10})
	_ = l.fr.WriteWindowUpdate(0, 1<<20)
	l.got[honestStream] = nil
	l.mu.Unlock()
	synctest.Wait()
	want := make([]byte, 1000)
	for i := range want {
		want[i] = byte(i * 31)
	}
	l.mu.Lock()
	stands := !over()
	if stands {
		_ = l.fr.WriteData(honestStream, false, want)
	}
	l.mu.Unlock()
	time.Sleep(time.Second)
	synctest.Wait()
	l.mu.Lock()
	defer l.mu.Unlock()
	if got := l.got[honestStream]; stands && !over() && !bytes.Equal(got, want) {
		l.m.t.Errorf("the honest tunnel carried %d bytes of %d back (inner connection: %v)", len(got), len(want), l.m.inner == l)
	}
}
