package tunnel

import (
	"io"
	"net"
	"sync"
	"syscall"
)

// scratch holds the buffers that reads go to before their length is known.
var scratch = sync.Pool{New: func() any { return new([16 << 10]byte) }}

// fill waits in the poller without a buffer and reads once, so a connection
// holds no more memory than the bytes it has sent.
func (c *Conn) fill(limit int) error {
	tc, ok := c.Conn.(*net.TCPConn)
	if !ok {
		return c.fillRead(limit)
	}
	rc, err := tc.SyscallConn()
	if err != nil {
		return err
	}
	var result error
	if err := rc.Read(func(fd uintptr) bool {
		p := scratch.Get().(*[16 << 10]byte)
		defer scratch.Put(p)
		n, err := syscall.Read(int(fd), p[:min(len(p), limit-len(c.buf))])
		for err == syscall.EINTR {
			n, err = syscall.Read(int(fd), p[:min(len(p), limit-len(c.buf))])
		}
		switch {
		case err == syscall.EAGAIN:
			return false
		case err != nil:
			result = err
		case n == 0:
			result = io.EOF
		default:
			c.buf = append(c.buf, p[:n]...)
		}
		return true
	}); err != nil {
		return err
	}
	return result
}
