package dns

import (
	"bufio"
	"context"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"net/netip"
	"sync"
	"time"

	"culvert.dev/tunnel"
)

// ServeTCP answers on connections to ln, RFC 7766, until Shutdown, Close or
// the end of ctx, and returns ErrServerClosed, or the error of a listener that
// is of no use any more. It owns ln. The view is that of all who ask here; ""
// means by Views.
func (s *Server) ServeTCP(ctx context.Context, ln net.Listener, view string) error {
	return s.serveStreams(ctx, ln, nil, TCP, view)
}

// ServeTLS is ServeTCP by TLS, RFC 7858. The configuration has the
// certificate; "dot" is added to its protocols if it has none.
func (s *Server) ServeTLS(ctx context.Context, ln net.Listener, conf *tls.Config, view string) error {
	if len(conf.NextProtos) == 0 {
		conf = conf.Clone()
		conf.NextProtos = []string{"dot"}
	}
	return s.serveStreams(ctx, ln, conf, TLS, view)
}

func (s *Server) serveStreams(ctx context.Context, ln net.Listener, conf *tls.Config, t Transport, view string) error {
	defer ln.Close()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	k := s.track(ctx, ln, func() { _ = ln.Close() }, closers{cancel, ln})
	if k == nil {
		return ErrServerClosed
	}
	defer s.untrack(k)
	defer context.AfterFunc(ctx, func() { _ = ln.Close() })()
	var wg sync.WaitGroup
	defer wg.Wait()
	for delay := time.Duration(0); ; {
		c, err := ln.Accept()
		if err != nil {
			if s.isClosing() || k.ended.Load() || ctx.Err() != nil {
				return ErrServerClosed
			}
			if errors.Is(err, net.ErrClosed) {
				return err
			}
			// No descriptors, most likely: they come back.
			delay = min(max(2*delay, 5*time.Millisecond), time.Second)
			select {
			case <-time.After(delay):
			case <-ctx.Done():
			}
			continue
		}
		delay = 0
		from := addrPort(c.RemoteAddr())
		if !s.conns.take(from.Addr()) {
			_ = c.Close()
			s.refusedConn(t, from, view, tunnel.Overload)
			continue
		}
		wg.Go(func() {
			defer s.conns.give(from.Addr())
			s.serveStream(ctx, c, conf, t, from, view)
		})
	}
}

func addrPort(a net.Addr) netip.AddrPort {
	if t, ok := a.(*net.TCPAddr); ok {
		ap := t.AddrPort()
		return netip.AddrPortFrom(ap.Addr().Unmap(), ap.Port())
	}
	ap, _ := netip.ParseAddrPort(a.String())
	return ap
}

// refusedConn tells of a connection that there was no place for, or that was
// ended.
func (s *Server) refusedConn(t Transport, from netip.AddrPort, view string, why tunnel.Reason) {
	r := Result{Transport: t, From: from, View: view, Rcode: rcodeDrop, Reason: why}
	s.refusals.add(s.Log, &r, s.clock())
	if s.Observe != nil {
		s.Observe(&r)
	}
}

// A stream is one client's connection.
type stream struct {
	s    *Server
	c    net.Conn
	r    *bufio.Reader
	t    Transport
	from netip.AddrPort
	view string

	mu       sync.Mutex // guards writes, and what follows
	draining bool
	reading  bool // a question has begun to come
}

func (s *Server) serveStream(ctx context.Context, c net.Conn, conf *tls.Config, t Transport, from netip.AddrPort, view string) {
	defer c.Close()
	defer func() {
		if v := recover(); v != nil {
			_ = recovered(s.Log, "a connection", v)
		}
	}()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	st := &stream{s: s, t: t, from: from, view: view, c: c}
	if conf != nil {
		tc := tls.Server(c, conf)
		_ = c.SetDeadline(time.Now().Add(tcpRead))
		if err := tc.HandshakeContext(ctx); err != nil {
			return
		}
		_ = c.SetDeadline(time.Time{})
		st.c = tc
	}
	k := s.track(ctx, nil, st.drain, closers{cancel, c})
	if k == nil {
		return
	}
	defer s.untrack(k)
	defer context.AfterFunc(ctx, func() { _ = c.Close() })()
	st.r = bufio.NewReaderSize(st.c, 2+512)
	var late sync.WaitGroup
	places := make(chan struct{}, pipelined)
	for st.next(ctx, &late, places) {
	}
	late.Wait()
}

// drain ends the wait for a further question.
func (st *stream) drain() {
	st.mu.Lock()
	defer st.mu.Unlock()
	st.draining = true
	if !st.reading {
		_ = st.c.SetReadDeadline(time.Unix(1, 0))
	}
}

// await sets the time for the next bytes; it is false when there shall be none.
func (st *stream) await(reading bool, d time.Duration) bool {
	st.mu.Lock()
	defer st.mu.Unlock()
	if st.draining && !reading {
		return false
	}
	st.reading = reading
	return st.c.SetReadDeadline(time.Now().Add(d)) == nil
}

// next reads one question and answers it, or has it answered when others have
// been asked. It is false at the end of the connection.
func (st *stream) next(ctx context.Context, late *sync.WaitGroup, places chan struct{}) bool {
	idle := tcpIdle
	if st.s.conns.crowded() {
		idle = tcpCrowded
	}
	if st.r.Buffered() == 0 && !st.await(false, idle) {
		return false
	}
	if _, err := st.r.Peek(1); err != nil {
		return false
	}
	// From here on the whole question has one deadline, whoever sends bytes
	// how slowly.
	if !st.await(true, tcpRead) {
		return false
	}
	var size [2]byte
	if _, err := io.ReadFull(st.r, size[:]); err != nil {
		return false
	}
	x := st.s.take(st.t, st.view)
	n := int(binary.BigEndian.Uint16(size[:]))
	if n > maxQuery {
		x.out, x.from = x.out[:0], st.from
		x.result = Result{Transport: st.t, From: st.from, View: st.view, Rcode: rcodeDrop, Reason: tunnel.TooLarge}
		x.done()
		st.s.give(x)
		return false // no question is that long, and where the next begins is of no interest
	}
	x.in = x.in[:n]
	if _, err := io.ReadFull(st.r, x.in); err != nil {
		x.in = x.in[:cap(x.in)]
		st.s.give(x)
		return false
	}
	if x.begin(st.from) {
		return st.write(x)
	}
	// More waits than one connection should have, and the rest is read when
	// there is room: TCP tells the client.
	select {
	case places <- struct{}{}:
	case <-ctx.Done():
		x.releaseSlot()
		return false
	}
	late.Go(func() {
		defer func() { <-places }()
		x.finish(ctx)
		if !st.write(x) {
			_ = st.c.Close()
		}
	})
	return true
}

// write sends the answer and gives x back. It returns false if the connection
// must be closed, also because the message was not a question.
func (st *stream) write(x *exchange) bool {
	ok := true
	if len(x.out) > 0 {
		st.mu.Lock()
		_ = st.c.SetWriteDeadline(time.Now().Add(tcpWrite))
		x.out = append(x.out, 0, 0)
		copy(x.out[2:], x.out)
		n := len(x.out) - 2
		binary.BigEndian.PutUint16(x.out, uint16(n))
		_, err := st.c.Write(x.out) // in one piece, or some clients take the length for all
		st.mu.Unlock()
		x.out = x.out[:n]
		ok = err == nil
	}
	rcode := x.result.Rcode
	x.done()
	x.in = x.in[:cap(x.in)]
	st.s.give(x)
	return ok && rcode != rcodeDrop
}
