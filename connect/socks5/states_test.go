package socks5

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"slices"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"culvert.dev/internal/testnet"
	"culvert.dev/tunnel"
)

// FuzzServerStates and FuzzClientStates read their input as a sequence of
// messages of a peer's, right and wrong ones in any order, cut and glued
// together anywhere, of data before it is asked for, half-closes and resets, of
// things that our own side does, and of time that passes. After each, when
// everything has come to rest:
//   - nothing has panicked,
//   - our side has said what a model says of the same bytes, however they were
//     cut, and nothing else,
//   - the bytes behind the preamble are the tunnel's, in both directions.
//
// At the end nothing is left of the connection, and the one beside it works.
func FuzzServerStates(f *testing.F) { fuzzStates(f, false) }

// FuzzClientStates is FuzzServerStates with a proxy that misbehaves.
func FuzzClientStates(f *testing.F) { fuzzStates(f, true) }

// What the first byte of an input says.
const (
	modePassword = 1 << iota // a user name and a password are asked for
	modeManual               // our side does what its operations say; otherwise it is an echo
)

func fuzzStates(f *testing.F, client bool) {
	// The operations, by their numbers, are those of machine.do.
	for _, ops := range [][]byte{
		{},
		{0, 0, 0, 2, 0, 0, 3, 3, 0, 4, 0, 0, 9, 0, 0, 9, 3, 4, 7, 0, 0},
		{0, 0, 0x80, 1, 0, 0x80, 2, 2, 0x80, 3, 3, 0x80, 5, 3, 0, 8, 1, 0, 5, 9, 0, 8, 3, 0, 4, 0, 0},
		{0, 2, 0, 1, 0, 0, 2, 1, 0, 9, 3, 4, 9, 0, 0, 7, 0, 0}, {0, 2, 0, 1, 1, 0, 8, 3, 0, 2, 0, 0},
		{0, 3, 0, 2, 0, 0}, {0, 4, 0}, {0, 0, 0, 2, 5, 0, 3, 3, 0}, {0, 0, 0, 2, 3, 0, 8, 2, 0},
		{0, 0, 0x80, 5, 1, 0, 8, 4, 0, 4, 0, 0}, {0, 0, 0, 8, 5, 0, 2, 0, 0}, {6, 5, 1, 6, 0, 5, 7, 0, 0},
		{0, 0, 0, 2, 0, 0, 9, 2, 0, 3, 1, 0}, {0, 0, 0, 2, 0, 0, 9, 1, 0, 3, 1, 0}, {10, 0, 0, 0, 0, 0, 2, 0, 0, 10, 0, 0},
		{0, 1, 0, 1, 0, 0, 2, 0, 0, 3, 3, 0, 7, 1, 0}, {0, 1, 0, 2, 6, 0}, {11, 0, 0, 0, 0, 0},
		{0, 0, 0, 10, 0, 0, 2, 0, 0}, {0, 0, 0, 10, 3, 0, 2, 3, 0},
	} {
		for mode := range byte(4) {
			f.Add(append([]byte{mode}, ops...))
		}
	}
	testnet.FuzzStates(f, func(t *testing.T, input []byte) {
		m := &machine{t: t, client: client, mode: input[0]}
		m.start()
		defer m.finish()
		testnet.EachOperation(t, input[1:], func(op, a, b byte) {
			m.do(op, a, b)
			synctest.Wait()
			m.check()
		})
	})
}

// A machine is a peer that does what its input says.
type machine struct {
	t      *testing.T
	client bool // our side is a Dialer
	mode   byte
	near   *testnet.Memory
	far    *testnet.Memory
	work   sync.WaitGroup
	cancel context.CancelFunc
	began  time.Time
	give   context.CancelFunc // ends the dial
	beside net.Conn

	in      []byte // all that was sent
	glue    []byte // and what is to be sent together with the next message
	ended   bool   // the machine sends no more
	reset   bool   // it has reset the connection
	touched bool   // our side has ended the tunnel
	late    bool   // our side may have given up: for the time that has passed, or because it could not write

	mu     sync.Mutex // guards what follows
	out    []byte     // all that came
	outErr error
	ours   net.Conn // our side of the tunnel
	got    []byte
	sent   int
	done   bool // our side is done with the preamble
	err    error
	busy   map[string]chan struct{} // one Read and one Write at a time
}

// ServeTunnel implements tunnel.Handler: the port says what becomes of a request.
func (m *machine) ServeTunnel(_ context.Context, req *tunnel.Request) {
	if req.Port == 2 {
		req.Refuse(tunnel.Refusef(tunnel.NoRoute, "no"))
		return
	}
	beside := m.near == nil // that is there first
	s, err := req.Accept()
	if err != nil {
		return
	}
	if beside {
		m.work.Go(func() { _, _ = io.Copy(s, struct{ io.Reader }{s}); _ = s.Close() })
		return
	}
	m.use(s)
}

// use has our side use the tunnel.
func (m *machine) use(c net.Conn) {
	m.mu.Lock()
	m.ours = c
	m.mu.Unlock()
	if m.mode&modeManual != 0 {
		return
	}
	m.turn("read", func() {
		m.turn("write", func() {
			for b := make([]byte, 8<<10); ; {
				n, err := c.Read(b)
				m.read(b[:n])
				if err == nil {
					n, err = c.Write(b[:n])
					m.wrote(n)
				}
				if err != nil {
					break
				}
			}
			_ = c.(interface{ CloseWrite() error }).CloseWrite()
		})
	})
}

// turn has do be the only one of its kind.
func (m *machine) turn(kind string, do func()) {
	m.mu.Lock()
	ch := m.busy[kind]
	m.mu.Unlock()
	m.work.Go(func() {
		ch <- struct{}{}
		defer func() { <-ch }()
		do()
	})
}

func (m *machine) read(b []byte) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.got = append(m.got, b...)
}

func (m *machine) wrote(n int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.sent += n
}

const preamble = 10 * time.Second // that a Server gives a client, and a Dialer here its proxy

// serve has a Protocol serve a connection. As a Server does, it closes the
// connection unless the request was accepted: the answer may have failed after
// the request was read.
func (m *machine) serve(ctx context.Context, p *Protocol, c net.Conn) (err error) {
	defer func() {
		if v := recover(); v != nil {
			m.t.Error(tunnel.Caught(v), string(tunnel.Caught(v).Stack))
		}
	}()
	accepted := false
	h := tunnel.HandlerFunc(func(ctx context.Context, req *tunnel.Request) {
		accept := req.Accept
		req.Accept = func() (tunnel.Stream, error) {
			s, err := accept()
			accepted = err == nil
			return s, err
		}
		m.ServeTunnel(ctx, req)
	})
	_ = c.SetReadDeadline(time.Now().Add(preamble))
	if err = p.ServeConn(ctx, tunnel.NewConn(c), h); !accepted {
		_ = c.Close()
	}
	return err
}

func (m *machine) start() {
	ctx, cancel := context.WithCancel(context.Background())
	m.cancel = cancel
	m.began = time.Now()
	m.busy = map[string]chan struct{}{"read": make(chan struct{}, 1), "write": make(chan struct{}, 1)}
	one, two := testnet.Pipe()
	m.work.Go(func() { _ = m.serve(ctx, &Protocol{}, one) })
	var err error
	if m.beside, err = (&Dialer{Proxy: "proxy:1", Dialer: testnet.DialOnce(two)}).DialContext(ctx, "tcp", "svc.test:9"); err != nil {
		m.t.Fatal(err)
	}
	m.near, m.far = testnet.Pipe()
	m.work.Go(func() {
		for b := make([]byte, 8<<10); ; {
			n, err := m.near.Read(b)
			m.mu.Lock()
			m.out = append(m.out, b[:n]...)
			m.outErr = err
			m.mu.Unlock()
			if err != nil {
				return
			}
		}
	})
	m.work.Go(func() {
		var err error
		if m.client {
			d := &Dialer{Proxy: "proxy:1", Dialer: testnet.DialOnce(m.far), Wait: preamble}
			if m.mode&modePassword != 0 {
				d.User, d.Password = "alice", "secret"
			}
			ctx, cancel := context.WithCancel(ctx)
			defer cancel()
			m.mu.Lock()
			m.give = cancel
			m.mu.Unlock()
			var c net.Conn
			if c, err = d.DialContext(ctx, "tcp", "svc.test:443"); err == nil {
				m.use(c)
			}
		} else {
			p := &Protocol{}
			if m.mode&modePassword != 0 {
				p.Verify = func(_ context.Context, _ netip.Addr, user, password string) error {
					if user != "alice" || password != "secret" {
						return errors.New("wrong")
					}
					return nil
				}
			}
			err = m.serve(ctx, p, m.far)
		}
		m.mu.Lock()
		m.done, m.err = true, err
		m.mu.Unlock()
	})
	synctest.Wait()
}

// do is one operation.
func (m *machine) do(op, a, b byte) {
	if b&0x80 == 0 || op%12 == 5 {
		defer func() { m.send(len(m.glue)) }()
	}
	add := func(b ...byte) { m.glue = append(m.glue, b...) }
	switch op % 12 {
	case 0: // the first message
		if m.client {
			add(testnet.Pick(a, []byte{5, 0}, []byte{5, 2}, []byte{5, 0xff}, []byte{5, 1}, []byte{4, 0})...)
			return
		}
		add(testnet.Pick(a, []byte{5, 1, 0}, []byte{5, 1, 2}, []byte{5, 2, 0, 2}, []byte{5, 0}, []byte{4, 1, 0, 80, 1, 2, 3, 4, 0}, append([]byte{5, 255}, make([]byte, 255)...))...)
	case 1: // of the password
		if m.client {
			add(testnet.Pick(a, []byte{1, 0}, []byte{5, 0}, []byte{1, 1})...)
			return
		}
		add(testnet.Pick(a, password("alice", "secret"), password("alice", "wrong"), password("", ""), password("a\x00", "b"), []byte{5, 1, 'a', 1, 'b'})...)
	case 2: // the request or its answer
		if m.client {
			add(testnet.Pick(a, answer(Succeeded), answer(NotAllowed), []byte{5, 0, 0, 3, 1, 'a', 0, 80}, append([]byte{5, 0, 0, 4}, make([]byte, 18)...), []byte{5, 0, 0, 9, 0}, []byte{4, 0, 0, 1, 0}, []byte{5, 99, 0, 1, 0})...)
			return
		}
		add(testnet.Pick(a, requestOf("svc.test:443"), requestOf("192.0.2.1:443"), requestOf("[2001:db8::1]:443"), requestOf("svc.test:2"), []byte{5, 2, 0, 1, 1, 2, 3, 4, 0, 80}, []byte{5, 1, 0, 9}, []byte{5, 1, 0, 3, 0, 0, 80},
			[]byte{5, 1, 0, 3, 3, 'a', 0, 'b', 0, 80}, []byte{1, 1, 0}, []byte{5, 1, 0, 1, 1, 2, 3, 4, 0, 0})...)
	case 3:
		add(testnet.Pattern(len(m.in)+len(m.glue), testnet.Pick(a, 1, 100, 2000, 5000))...)
	case 4: // what is glued together goes
	case 5: // and here a part of it, the rest some time later
		m.send(int(a))
		time.Sleep(testnet.Pick(b, 0, time.Millisecond, time.Second))
		m.passed()
	case 6:
		add(a, b)
	case 7:
		m.send(len(m.glue))
		if !m.ended {
			m.ended = true
			if a&1 == 0 {
				_ = m.near.CloseWrite()
			} else {
				m.reset = true
				_ = m.near.Abort()
			}
		}
	case 8:
		time.Sleep(testnet.Pick(a, 10*time.Millisecond, time.Second, 2*time.Second, 4*time.Second, 11*time.Second))
		m.passed()
	case 9:
		m.own(a, b)
	case 10:
		if m.client {
			m.far.Hold(a&1 == 0)
			m.late = m.late || a&1 == 0 // a Dialer that cannot write gives up
		} else {
			m.far.Cut(int(a)) // the next message of the server does not leave
			m.late = true
		}
	case 11:
		m.mu.Lock()
		defer m.mu.Unlock()
		if m.give != nil {
			m.late = true
			m.give()
		}
	}
}

// passed notes that our side has waited for too long, or nearly so.
func (m *machine) passed() {
	m.late = m.late || time.Since(m.began) > preamble-time.Second && m.model().waits
}

func requestOf(addr string) []byte {
	to, err := parseAddr(addr)
	if err != nil {
		panic(err)
	}
	return appendRequest(nil, to)
}

func (m *machine) send(n int) {
	n = min(n, len(m.glue))
	if n == 0 || m.ended {
		return
	}
	if _, err := m.near.Write(m.glue[:n]); err == nil {
		m.in = append(m.in, m.glue[:n]...)
	}
	m.glue = m.glue[n:]
}

// own is something that our side does with the tunnel.
func (m *machine) own(a, b byte) {
	m.mu.Lock()
	c := m.ours
	m.mu.Unlock()
	if c == nil {
		return
	}
	n := testnet.Pick(b, 0, 1, 5, 1000, 40_000)
	switch a % 6 {
	case 0:
		m.turn("write", func() { _ = c.(interface{ CloseWrite() error }).CloseWrite() })
	case 1:
		m.touched = true
		_ = c.Close()
	case 2:
		m.touched = true
		_ = c.(tunnel.Aborter).Abort()
	case 3:
		if m.mode&modeManual != 0 {
			m.turn("write", func() {
				m.mu.Lock()
				off := m.sent
				m.mu.Unlock()
				sent, _ := c.Write(testnet.Pattern(off, n))
				m.wrote(sent)
			})
		}
	case 4:
		if m.mode&modeManual != 0 {
			m.turn("read", func() {
				p := make([]byte, n)
				got, _ := c.Read(p)
				m.read(p[:got])
			})
		}
	case 5:
		m.touched = true
		_ = c.SetDeadline(time.Now().Add(time.Second))
	}
}

// A verdict is what a model makes of all that the peer has sent.
type verdict struct {
	out   []byte // our side says this
	yes   bool   // and there is a tunnel
	rest  []byte // of which this is the beginning
	over  bool   // or there is none, and the connection ends
	waits bool   // for the peer
	slow  bool   // the last of out comes with a delay
}

func (m *machine) model() verdict {
	if m.client {
		return answered(m.in, m.mode&modePassword != 0)
	}
	return asked(m.in, m.mode&modePassword != 0)
}

// asked is the model of a server.
func asked(in []byte, verify bool) (v verdict) {
	if len(in) > 0 && in[0] == 4 {
		return verdict{out: []byte{0, 0x5b, 0, 0, 0, 0, 0, 0}, over: true}
	}
	if len(in) > 0 && in[0] != 5 {
		return verdict{over: true}
	}
	if len(in) < 2 || len(in) < 2+int(in[1]) {
		return verdict{waits: true}
	}
	methods := in[2 : 2+int(in[1])]
	in = in[2+len(methods):]
	want := byte(0)
	if verify {
		want = 2
	}
	if !slices.Contains(methods, want) {
		return verdict{out: []byte{5, 0xff}, over: true}
	}
	v.out = []byte{5, want}
	if verify {
		if len(in) > 0 && in[0] != 1 {
			return verdict{out: append(v.out, 1, 1), over: true, slow: true}
		}
		if len(in) < 2 || len(in) < 3+int(in[1]) || len(in) < 3+int(in[1])+int(in[2+in[1]]) {
			v.waits = true
			return v
		}
		user, rest := string(in[2:2+int(in[1])]), in[2+int(in[1]):]
		word := string(rest[1 : 1+int(rest[0])])
		in = rest[1+int(rest[0]):]
		if user != "alice" || word != "secret" {
			return verdict{out: append(v.out, 1, 1), over: true, slow: true}
		}
		v.out = append(v.out, 1, 0)
	}
	to, n, err := parseRequest(in)
	var bad *requestError
	switch {
	case err == errMore:
		v.waits = true
		return v
	case errors.As(err, &bad):
		return verdict{out: append(v.out, answer(bad.reply)...), over: true}
	case to.port == 2:
		return verdict{out: append(v.out, answer(NotAllowed)...), over: true}
	}
	return verdict{out: append(v.out, answer(Succeeded)...), yes: true, rest: in[n:]}
}

// answered is the model of a Dialer that asks for svc.test:443.
func answered(in []byte, password bool) (v verdict) {
	v.out = []byte{5, 1, 0}
	if password {
		v.out = []byte{5, 2, 0, 2}
	}
	v.waits = true
	if len(in) < 2 {
		return v
	}
	method := in[1]
	if in[0] != 5 || method != 0 && !(password && method == 2) {
		return verdict{out: v.out, over: true}
	}
	in = in[2:]
	if method == 2 {
		v.out = append(v.out, 1, 5, 'a', 'l', 'i', 'c', 'e', 6, 's', 'e', 'c', 'r', 'e', 't')
		if len(in) < 2 {
			return v
		}
		if in[1] != 0 {
			return verdict{out: v.out, over: true}
		}
		in = in[2:]
	}
	v.out = append(v.out, 5, 1, 0, 3, 8)
	v.out = binary.BigEndian.AppendUint16(append(v.out, "svc.test"...), 443)
	if len(in) < 5 {
		return v
	}
	need := map[byte]int{1: 10, 4: 22, 3: 5 + int(in[4]) + 2}[in[3]]
	if in[0] != 5 || in[1] != 0 || need == 0 {
		return verdict{out: v.out, over: true}
	}
	if len(in) < need {
		return v
	}
	return verdict{out: v.out, yes: true, rest: in[need:]}
}

// check compares our side, at rest, with the model.
func (m *machine) check() {
	v := m.model()
	m.mu.Lock()
	defer m.mu.Unlock()
	out := m.out
	said := min(len(out), len(v.out))
	if !bytes.Equal(out[:said], v.out[:said]) || !v.yes && len(out) > len(v.out) {
		m.t.Errorf("%x: our side says %x, want %x", m.in, out, v.out)
	}
	settled := !m.late && !m.reset && !v.slow && !errors.Is(m.outErr, syscall.ECONNRESET)
	if settled && len(out) < len(v.out) {
		m.t.Errorf("%x: our side says %x, want %x", m.in, out, v.out)
	}
	if m.ours != nil && !v.yes {
		m.t.Errorf("%x: a tunnel, and the model has none", m.in)
	}
	if settled && v.yes && m.ours == nil {
		m.t.Errorf("%x: no tunnel, and the model has one: %v", m.in, m.err)
	}
	if settled && v.over && !m.done && !m.client && m.outErr == nil {
		m.t.Errorf("%x: the refused connection has no end", m.in)
	}
	if settled && v.waits && !m.ended && m.done {
		m.t.Errorf("%x: our side gave up early: %v", m.in, m.err)
	}
	if !bytes.HasPrefix(v.rest, m.got) {
		m.t.Errorf("%x: got %x of the tunnel, want %x", m.in, m.got, v.rest)
	}
	carried := out[said:]
	if m.mode&modeManual != 0 {
		if !bytes.Equal(carried, testnet.Pattern(0, len(carried))) || len(carried) > m.sent && len(m.busy["write"]) == 0 {
			m.t.Errorf("%d bytes have come of %d that were written, or others", len(carried), m.sent)
		}
	} else if !bytes.HasPrefix(v.rest, carried) {
		m.t.Errorf("%x: our side sent back %x, want %x", m.in, carried, v.rest)
	}
	if m.mode&modeManual == 0 && settled && v.yes && !m.touched && len(carried) != len(v.rest) {
		m.t.Errorf("%x: our side sent back %d bytes, want %d", m.in, len(carried), len(v.rest))
	}
}

func (m *machine) finish() {
	m.far.Hold(false)
	_ = m.beside.SetDeadline(time.Now().Add(time.Second))
	testnet.Ping(m.t, m.beside, "the connection beside works")
	if !m.ended {
		_ = m.near.CloseWrite()
	}
	time.Sleep(preamble + 2*time.Second)
	m.mu.Lock()
	c, done, err := m.ours, m.done, m.err
	m.mu.Unlock()
	if !done {
		m.t.Errorf("%x: our side is not done with the preamble", m.in)
	}
	if !m.client && c == nil && err != nil && tunnel.ReasonOf(err) == tunnel.Internal {
		m.t.Error(err)
	}
	if c != nil {
		_ = c.SetDeadline(time.Now().Add(time.Second))
		m.busy["read"] <- struct{}{} // of an echo: when it has ended
		if _, err := io.Copy(io.Discard, struct{ io.Reader }{c}); errors.Is(err, os.ErrDeadlineExceeded) {
			m.t.Errorf("%x: the tunnel has no end", m.in)
		}
		_ = c.Close()
	}
	if _, err := m.far.Read(nil); !errors.Is(err, net.ErrClosed) {
		m.t.Errorf("%x: the connection is left open: %v", m.in, fmt.Sprint(err))
	}
	_ = m.near.Close()
	_ = m.beside.Close()
	m.cancel()
	m.work.Wait()
}
