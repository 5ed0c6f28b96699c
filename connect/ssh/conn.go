package ssh

import (
	"net"
	"sync/atomic"
	"time"

	"culvert.dev/connect/internal/mux"
	"culvert.dev/tunnel"
)

// A conn is the connection below SSH. It counts the bytes that come.
type conn struct {
	net.Conn
	c      *tunnel.Conn
	s      *session
	remote net.Addr
	timer  *time.Timer // guarded by the session's mu

	greeted bool  // the version was sent before the library sends it; of the goroutine that logs in
	first   bool  // no byte was read yet; of the goroutine that reads
	counted int64 // what had arrived at the last call of account; of the same goroutine
	account tunnel.BufferAccount
	arrived atomic.Int64 // bytes
	left    atomic.Int64 // bytes that were sent
	last    atomic.Int64 // when the last ones came, by mux.Clock
	letIn   atomic.Bool  // the client has logged in
	failed  atomic.Bool  // a read has failed: nothing comes any more
	asked   atomic.Bool  // the client was asked for a sign of life
}

// countEvery is how many bytes may come between two calls of account.
const countEvery = 256 << 10

// Read implements net.Conn.
func (c *conn) Read(p []byte) (n int, err error) {
	defer func() {
		if err != nil {
			c.failed.Store(true)
		}
	}()
	if c.first {
		c.first = false
		if len(c.c.Buffered()) == 0 {
			if err := c.c.Fill(maxVersion); err != nil {
				return 0, err
			}
		}
	}
	if n, err = c.c.Read(p); n > 0 {
		c.last.Store(mux.Clock())
		arrived := c.arrived.Add(int64(n))
		if !c.letIn.Load() {
			if arrived > maxBeforeLogin {
				return 0, tunnel.Refusef(tunnel.TooLarge, "ssh: the client has sent %d bytes and is not let in, limit %d", arrived, maxBeforeLogin)
			}
		} else if arrived-c.counted >= countEvery {
			c.counted = arrived
			if err := c.s.account(arrived); err != nil {
				c.s.end(err)
				return 0, err
			}
		}
	}
	return n, err
}

// account counts the bytes that the library holds for channels that are not read, and returns an
// error if those are more than the client may have.
func (s *session) account(arrived int64) error {
	s.mu.Lock()
	total, oldest := 0, arrived
	for st := range s.streams {
		st.mu.Lock()
		if n := st.unread(); n > 0 {
			total += n
			oldest = min(oldest, st.backlog.since)
		}
		st.mu.Unlock()
	}
	s.mu.Unlock()
	s.conn.account.Set(int(min(int64(total), arrived-oldest)))
	return s.conn.account.CheckLimit()
}

// RemoteAddr returns the address of the client, which a proxy in front may have named.
func (c *conn) RemoteAddr() net.Addr { return c.remote }

// greet sends the version of the server, which the library sends first.
func (c *conn) greet() error {
	_, err := c.Write([]byte(version + "\r\n"))
	c.greeted = err == nil
	return err
}

// Write implements net.Conn.
func (c *conn) Write(p []byte) (int, error) {
	if c.greeted { // p is the version
		c.greeted = false
		return len(p), nil
	}
	n, err := c.Conn.Write(p)
	c.left.Add(int64(n))
	return n, err
}
