package relay

import (
	"errors"
	"fmt"
	"io"
	"net"
	"time"
)

// What a stream may offer beyond net.Conn. Package tunnel documents each of them.
type (
	aborter       interface{ Abort() error }
	reasonAborter interface{ AbortWithReason(why Reason) error }
	abortDetector interface{ Broken() error }
	halfCloser    interface{ CloseWrite() error }
	waiter        interface {
		WaitRead(wake func()) (ready bool)
	}
	pusher interface {
		WaitPush(wake func(), push func(run [][]byte) (taken int)) (ready bool)
	}
	puller interface {
		WriteFrom(p []byte, source func(run [][]byte) int) (n int, err error)
	}
	holder          interface{ Held() int }
	layer           interface{ NetConn() net.Conn }
	keepAliveSetter interface {
		SetKeepAliveConfig(net.KeepAliveConfig) error
	}
)

// errNoCloseWrite is what a stream answers whose carrier has no half-close.
var errNoCloseWrite = fmt.Errorf("tunnel: the carrier cannot half-close: %w", errors.ErrUnsupported)

// CloseWrite sends the end of c's stream.
func CloseWrite(c net.Conn) error {
	if w, ok := c.(halfCloser); ok {
		return w.CloseWrite()
	}
	return errNoCloseWrite
}

// Abort ends c so that its peer can tell it from an orderly end, where the
// carrier has a way.
func Abort(c io.Closer) error {
	switch c := c.(type) {
	case aborter:
		return c.Abort()
	case interface{ SetLinger(int) error }: // TCP: zero linger turns close into a reset
		_ = c.SetLinger(0)
	}
	return c.Close()
}

// AbortWithReason is Abort, which tells c's peer why where the carrier has words for it.
func AbortWithReason(c net.Conn, why Reason) error {
	if t, ok := c.(reasonAborter); ok {
		return t.AbortWithReason(why)
	}
	return Abort(c)
}

// routine reports whether err is an ending that a tunnel may have in the
// ordinary course: the end of a stream, or our own close. It is the only
// judge of that; each stream turns its carrier's own words into these.
func routine(err error) bool {
	return err == nil || errors.Is(err, io.EOF) || errors.Is(err, net.ErrClosed) || errors.Is(err, io.ErrClosedPipe)
}

// BaseConn returns the connection that c stands on, or c.
func BaseConn(c net.Conn) net.Conn {
	for {
		over, ok := c.(layer)
		if !ok {
			return c
		}
		c = over.NetConn()
	}
}

// keepAlive is that of every tunnel's sockets: a dead peer is found within 75 seconds
// without traffic. It is set where the tunnel begins and not where the socket
// does: most connections are over before it could matter, and it is four system
// calls for each. Where bytes are under way, Linux finds one in 30 seconds: see
// poll.PeerCheck.
var keepAlive = net.KeepAliveConfig{Enable: true, Idle: 30 * time.Second, Interval: 15 * time.Second, Count: 3}

// setKeepAlive sets keepAlive on a tunnel's connection, or on the one below it.
func setKeepAlive(c net.Conn) {
	if c, ok := BaseConn(c).(keepAliveSetter); ok {
		_ = c.SetKeepAliveConfig(keepAlive)
	}
}
