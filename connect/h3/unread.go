package h3

import (
	"math"

	"culvert.dev/tunnel"
)

// QUIC keeps the bytes that were received and not read, also those that came out of
// order, which no Stream knows of: frames of one byte take about 180 times their
// size, up to the windows. QUIC does not tell how much that is. Its unread bytes are
// estimated from above.
const (
	packetCost    = 32       // bytes of a packet that are no payload, at least: header, connection id and tag
	ackCost       = 20       // bytes of an acknowledgement, of which there is one at most for each packet that was sent
	minEndedBytes = 64 << 10 // estimated bytes of a connection that is ended to free memory, at least
)

// A streamReader reads the bytes of a Stream and counts them.
type streamReader Stream

func (r *streamReader) Read(p []byte) (int, error) {
	n, err := r.qs.Read(p)
	r.c.read.Add(uint64(n))
	return n, err
}

// unread estimates how many received bytes of the connection were not read.
func (c *conn) unread() int64 {
	s := c.qc.ConnectionStats()
	spent := s.PacketsReceived*packetCost + min(s.PacketsReceived, s.PacketsSent)*ackCost + c.read.Load()
	if s.BytesReceived <= spent {
		return 0
	}
	return int64(min(s.BytesReceived-spent, math.MaxInt64))
}

// An Unread is a connection with an estimate of its unread bytes.
type Unread struct {
	Bytes  int64  // received and not read; 0 where no connection has many
	Client string // the client's address
	k      *serverConn
}

// MostUnread returns the connection with the most unread bytes, of the client whose
// connections have most together. It is for memory that is full while no tunnel
// holds bytes. Each connection of a proxy in front counts by itself.
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
		if n < minEndedBytes || k.c.cause() != nil { // or it has ended
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
