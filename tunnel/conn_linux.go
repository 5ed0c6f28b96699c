//go:build amd64 || arm64

package tunnel

import "sync"

// scratch holds the buffers that reads go to before their length is known.
var scratch = sync.Pool{New: func() any { return new([scratchSize]byte) }}

// fill waits without a buffer and reads once, so a connection holds no more
// memory than the bytes it has sent.
func (c *Conn) fill(limit int) (err error) {
	if s, ok := c.Conn.(*sock); ok {
		c.buf, err = s.fill(c.buf, limit)
		return err
	}
	return c.fillRead(limit)
}
