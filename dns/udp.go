package dns

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"runtime"
	"sync"
	"time"

	"golang.org/x/net/ipv4"
	"golang.org/x/net/ipv6"
)

// ServeUDP answers the queries that arrive at c until Shutdown, Close or the
// end of ctx, and returns ErrServerClosed, or the error of a socket that no
// longer works. It owns c. The view is that of all who ask here; "" means by
// Views.
func (s *Server) ServeUDP(ctx context.Context, c *net.UDPConn, view string) error {
	defer c.Close()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	// Readers stop at once; the socket is closed when the last answer is out.
	k := s.track(ctx, c, func() { _ = c.SetReadDeadline(time.Unix(1, 0)) }, closers{cancel, c})
	if k == nil {
		return ErrServerClosed
	}
	defer s.untrack(k)
	defer context.AfterFunc(ctx, func() { _ = c.Close() })()

	u := &udpServer{s: s, c: c, view: view, listener: k}
	u.own, _ = netip.ParseAddrPort(c.LocalAddr().String())
	u.own = netip.AddrPortFrom(u.own.Addr().Unmap(), u.own.Port())
	if u.own.Addr().IsUnspecified() {
		u.pinned = pinReplies(c)
	}
	var wg sync.WaitGroup
	defer wg.Wait() // questions that others are asked for
	var readers sync.WaitGroup
	errs := make(chan error, runtime.GOMAXPROCS(0))
	for range cap(errs) {
		readers.Go(func() { errs <- u.read(ctx, &wg) })
	}
	readers.Wait()
	return <-errs
}

// closers closes what belongs to a Serve call.
type closers struct {
	cancel context.CancelFunc
	c      interface{ Close() error }
}

func (c closers) Close() error {
	c.cancel()
	return c.c.Close()
}

type udpServer struct {
	s        *Server
	c        *net.UDPConn
	view     string
	listener *stopper
	own      netip.AddrPort
	pinned   bool // the socket is of all addresses: an answer leaves from the one that was asked
}

// read answers one message after the other. Questions that the table or the
// cache answers are answered here, without a goroutine and in the reader's
// memory.
func (u *udpServer) read(ctx context.Context, wg *sync.WaitGroup) error {
	s := u.s
	var oob []byte
	if u.pinned {
		oob = make([]byte, 128)
	}
	x := s.take(UDP, u.view)
	defer func() { s.give(x) }()
	fails := 0
	for {
		x.view = u.view
		n, noob, _, from, err := u.c.ReadMsgUDPAddrPort(x.in[:maxQuery], oob)
		if err != nil {
			if s.isClosing() || u.listener.ended.Load() || ctx.Err() != nil || errors.Is(err, net.ErrClosed) {
				return ErrServerClosed
			}
			// Windows reports here that an answer did not arrive.
			if fails++; fails > 100 {
				return err
			}
			select {
			case <-time.After(time.Duration(fails) * time.Millisecond):
			case <-ctx.Done():
			}
			continue
		}
		fails = 0
		if from.Port() == u.own.Port() && from.Addr().Unmap() == u.own.Addr() {
			continue // ourselves
		}
		x.in = x.in[:n]
		var back []byte
		if u.pinned {
			back = replyFrom(oob[:noob])
		}
		if x.begin(from) {
			u.write(x, from, back)
			x.in = x.in[:cap(x.in)]
			continue
		}
		late := x
		wg.Go(func() {
			late.finish(ctx)
			u.write(late, from, back)
			late.in = late.in[:cap(late.in)]
			s.give(late)
		})
		x = s.take(UDP, u.view)
	}
}

func (u *udpServer) write(x *exchange, to netip.AddrPort, oob []byte) {
	if len(x.out) > 0 {
		_, _, _ = u.c.WriteMsgUDPAddrPort(x.out, oob, to)
	}
	x.done()
}

// pinReplies asks the system to tell with each message which of the host's
// addresses it was sent to. It is false where there is no such thing.
func pinReplies(c *net.UDPConn) bool {
	err4 := ipv4.NewPacketConn(c).SetControlMessage(ipv4.FlagDst|ipv4.FlagInterface, true)
	err6 := ipv6.NewPacketConn(c).SetControlMessage(ipv6.FlagDst|ipv6.FlagInterface, true)
	return err4 == nil || err6 == nil
}

// replyFrom turns the control data of a received message into the control data
// of its answer, so that the answer is sent from the address that the question
// was sent to.
func replyFrom(oob []byte) []byte {
	var m6 ipv6.ControlMessage
	if m6.Parse(oob) == nil && m6.Dst != nil && m6.Dst.To4() == nil {
		back := ipv6.ControlMessage{Src: m6.Dst}
		if m6.Dst.IsLinkLocalUnicast() {
			back.IfIndex = m6.IfIndex
		}
		return back.Marshal()
	}
	var m4 ipv4.ControlMessage
	if m4.Parse(oob) == nil && m4.Dst != nil {
		return (&ipv4.ControlMessage{Src: m4.Dst}).Marshal()
	}
	return nil
}
