package gateway

import (
	"context"
	"errors"
	"io"
	"net"
	"net/netip"
	"os"
	"sync/atomic"
	"time"

	"culvert.dev/connect"
	"culvert.dev/tunnel"
)

// Dial asks for target, HOST:PORT, for this process itself, by no listener. It is decided,
// limited, listed, logged and counted as a client's request is. The ctx limits the dial and
// nothing after. The gateway must run; a Gateway that serves nobody else has Config.DialOnly.
//
// The stream is the caller's to close. A refusal is a *tunnel.Error.
func (g *Gateway) Dial(ctx context.Context, target string) (tunnel.Stream, error) {
	to, err := connect.ParseAuthority(target)
	if err != nil {
		return nil, &tunnel.Error{Reason: tunnel.BadRequest, Err: err}
	}
	req := &tunnel.Request{Proto: dialProto, Name: to.Name, Addr: to.Addr, Port: to.Port, Source: netip.AddrPortFrom(netip.IPv6Loopback(), 0), Start: time.Now()}
	s, err := g.router.Open(ctx, req)
	if err != nil {
		return nil, err
	}
	server, ok := s.Conn.(tunnel.Stream)
	if !ok {
		err = tunnel.Refusef(tunnel.Internal, "gateway: a %T has no CloseWrite", s.Conn)
		_ = tunnel.Abort(s.Conn)
		s.End(tunnel.End{Reason: tunnel.ReasonOf(err), Err: err})
		return nil, err
	}
	return newOwnStream(server, s, false), nil
}

// dialProto is the protocol of requests of Dial.
const dialProto = "dial"

// An ownStream is a stream of this process itself: to a service, by Dial, or of a client that
// it serves. It is a tunnel whose other end is the process, and implements tunnel.Carrier.
type ownStream struct {
	tunnel.Stream
	session  *tunnel.Session
	toClient bool  // what is written goes to a client
	tlsOnly  error // why the stream must begin as TLS of this side; nil where it may be anything

	read, written atomic.Int64
	opened        time.Time
	moved         atomic.Int64 // how long after opened the last byte came or went, in nanoseconds
	failed        atomic.Pointer[error]
	begun         atomic.Bool // something was written
}

func newOwnStream(c tunnel.Stream, s *tunnel.Session, toClient bool) *ownStream {
	o := &ownStream{Stream: c, session: s, toClient: toClient, tlsOnly: s.Endpoint.TLSOnly, opened: time.Now()}
	s.Carry(o)
	s.Recheck()
	return o
}

// Read implements net.Conn.
func (o *ownStream) Read(p []byte) (int, error) {
	n, err := o.Stream.Read(p)
	if n > 0 && o.tlsOnly != nil && !o.begun.Load() { // in TLS the client speaks first
		return 0, o.refuse()
	}
	return o.did(&o.read, n, err)
}

// Write implements net.Conn.
func (o *ownStream) Write(p []byte) (int, error) {
	if o.tlsOnly != nil && len(p) > 0 && !o.begun.Load() {
		if p[0] != tlsHandshake {
			return 0, o.refuse()
		}
		o.begun.Store(true)
	}
	n, err := o.Stream.Write(p)
	return o.did(&o.written, n, err)
}

// tlsHandshake is the first byte of TLS: the type of a record, RFC 8446 section 5.1.
const tlsHandshake = 0x16

// refuse ends a stream that had to begin as TLS.
func (o *ownStream) refuse() error {
	err := tunnel.Refusef(tunnel.Insecure, "gateway: the stream does not begin as TLS: %w", o.tlsOnly)
	_ = tunnel.Abort(o.Stream)
	o.end(err.Reason, err)
	return err
}

func (o *ownStream) did(count *atomic.Int64, n int, err error) (int, error) {
	if n > 0 {
		count.Add(int64(n))
		o.moved.Store(int64(time.Since(o.opened)))
	}
	if err != nil && err != io.EOF && !errors.Is(err, net.ErrClosed) && !errors.Is(err, os.ErrDeadlineExceeded) {
		o.failed.CompareAndSwap(nil, &err)
	}
	return n, err
}

// Close implements net.Conn. Close ends the tunnel.
func (o *ownStream) Close() error {
	err := o.Stream.Close()
	if why := o.failed.Load(); why != nil {
		o.end(tunnel.Reset, *why)
	} else {
		o.end(tunnel.Done, nil)
	}
	return err
}

// Abort implements tunnel.Aborter.
func (o *ownStream) Abort() error {
	err := tunnel.Abort(o.Stream)
	o.end(tunnel.Reset, nil)
	return err
}

// Kill implements tunnel.Carrier.
func (o *ownStream) Kill(why tunnel.Reason) {
	_ = tunnel.Abort(o.Stream)
	o.end(why, nil)
}

// Progress implements tunnel.Carrier.
func (o *ownStream) Progress() (in, out int64, moved time.Time) {
	in, out = o.written.Load(), o.read.Load()
	if o.toClient {
		in, out = out, in
	}
	return in, out, o.opened.Add(time.Duration(o.moved.Load()))
}

// end ends the session, once.
func (o *ownStream) end(why tunnel.Reason, err error) {
	in, out, _ := o.Progress()
	o.session.End(tunnel.End{Reason: why, Err: err, In: in, Out: out})
}
