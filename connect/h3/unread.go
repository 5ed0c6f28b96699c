package h3

import (
	"math"

	"culvert.dev/tunnel"
)

// QUIC keeps what has come and was not read, also what came out of order, which
// no Stream can be asked for: of frames of one byte about 180 times their size,
// up to the windows. It does not say how much that is. What a connection has
// received and nobody has read is an estimate from above.
const (
	packetCost = 32       // bytes of a packet that are no payload, at least: header, connection id, tag
	ackCost    = 20       // bytes of an acknowledgement, of which there is one at most for each packet that was sent
	leastEnded = 64 << 10 // estimated bytes of a connection that is ended to free memory, at least
)

// A streamReader is a Stream as the reader of its bytes, which it counts.
type streamReader Stream

func (r *streamReader) Read(p []byte) (int, error) {
	n, err := r.qs.Read(p)
	r.c.read.Add(uint64(n))
	return n, err
}

// unread estimates what the connection keeps, in bytes of what was received.
func (c *conn) unread() int64 {
	s := c.qc.ConnectionStats()
	spent := s.PacketsReceived*packetCost + min(s.PacketsReceived, s.PacketsSent)*ackCost + c.read.Load()
	if s.BytesReceived <= spent {
		return 0
	}
	return int64(min(s.BytesReceived-spent, math.MaxInt64))
}

// An Unread is a connection with what it is estimated to keep.
type Unread struct {
	Bytes  int64  // not read, of what was received; 0 where no connection keeps much
	Client string // its address
	k      *serverConn
}

// MostUnread returns the connection that keeps most, of the client whose
// connections do: for memory that is full where no tunnel keeps bytes. Those of
// proxies in front count by themselves.
func (s *Server) MostUnread() (most Unread) {
	s.mu.Lock()
	conns := make(map[*serverConn]int64, len(s.conns)) // and its window
	for _, k := range s.conns {
		conns[k] = connWindow + k.grown
	}
	s.mu.Unlock()
	type client struct {
		sum     int64
		largest Unread
	}
	clients := make(map[any]*client)
	for k, window := range conns {
		n := min(k.c.unread(), window)
		if n < leastEnded || k.c.cause() != nil { // or it has ended
			continue
		}
		var key any = k.a.client
		if k.a.client == nil {
			key = k.a.addr.Addr()
		}
		c := clients[key]
		if c == nil {
			c = &client{}
			clients[key] = c
		}
		c.sum += n
		if n > c.largest.Bytes {
			c.largest = Unread{n, k.a.addr.Addr().String(), k}
		}
	}
	sum := int64(0)
	for _, c := range clients {
		if c.sum > sum {
			sum, most = c.sum, c.largest
		}
	}
	return most
}

// End ends the connection, and its tunnels with it.
func (u Unread) End() {
	if u.k != nil {
		u.k.c.fail(&connError{ExcessiveLoad, refuse(tunnel.Overload, "memory is full, and the connection kept about %d bytes that were not read", u.Bytes)})
	}
}
