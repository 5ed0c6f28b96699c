package tunnel

import (
	"errors"
	"fmt"
	"io"
	"net"
)

// errNoCloseWrite is what a stream answers whose carrier has no half-close.
var errNoCloseWrite = fmt.Errorf("tunnel: the carrier cannot half-close: %w", errors.ErrUnsupported)

// closeWrite sends the end of the stream.
func closeWrite(c net.Conn) error {
	if w, ok := c.(interface{ CloseWrite() error }); ok {
		return w.CloseWrite()
	}
	return errNoCloseWrite
}

// abort ends c so that its peer can tell it from an orderly end, where the
// carrier has a way.
func abort(c net.Conn) error {
	switch c := c.(type) {
	case Aborter:
		return c.Abort()
	case interface{ SetLinger(int) error }: // TCP: zero linger turns close into a reset
		_ = c.SetLinger(0)
	}
	return c.Close()
}

// abortWithReason is abort, which tells c's peer why where the carrier has words for it.
func abortWithReason(c net.Conn, why Reason) error {
	if t, ok := c.(ReasonAborter); ok {
		return t.AbortWithReason(why)
	}
	return abort(c)
}

// routine reports whether err is an ending that a tunnel may have in the
// ordinary course: the end of a stream, or our own close. It is the only
// judge of that; each Stream turns its carrier's own words into these.
func routine(err error) bool {
	return err == nil || errors.Is(err, io.EOF) || errors.Is(err, net.ErrClosed) || errors.Is(err, io.ErrClosedPipe)
}
