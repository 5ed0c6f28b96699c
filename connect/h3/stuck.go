package h3

import (
	"time"

	"github.com/quic-go/quic-go"

	"culvert.dev/tunnel"
)

// A path may begin to take only smaller packets than before, without a word. Then the
// packet size that the connection has found is wrong, and quic-go does not search
// again. Its large packets are all lost, while small ones arrive and keep the
// connection alive: a black hole, RFC 8899 section 4.3. Such a connection is ended,
// like one whose peer is gone; a new one begins with small packets.
const (
	// stuckAfter is how long packets may be sent of which none is acknowledged. The
	// search for the largest packets that the path takes is over sooner.
	stuckAfter  = 15 * time.Second
	forgetAfter = 45 * time.Second // without such a packet, as they were of that search

	// repeatedFor is how long such packets are repeated before the connection counts as
	// stuck without one more, where packets of the peer arrive. The search is over by then.
	repeatedFor = 9 * time.Second

	fullPacket = 1000 // bytes sent between two ticks; fewer are PINGs and acknowledgements
)

// A pathWatch detects a stuck connection. Each tick updates it.
type pathWatch struct {
	then        quic.ConnectionStats // when packets were last known to arrive
	sent        uint64               // bytes sent at the last tick
	first, last int64                // the first and last ticks since then that found packets sent; 0 for none
	certain     bool                 // the last tick has found the connection stuck
}

// stuck reports whether for stuckAfter nothing that was sent was acknowledged, or
// most of it was lost.
func (w *pathWatch) stuck(s quic.ConnectionStats, now int64) bool {
	sent, lost := int64(s.BytesSent-w.then.BytesSent), int64(s.BytesLost-w.then.BytesLost)
	more := s.BytesSent-w.sent >= fullPacket
	w.sent = s.BytesSent
	switch {
	case s.LatestRTT != w.then.LatestRTT && lost <= sent*3/4: // each acknowledgement measures it anew
		*w = pathWatch{then: s, sent: s.BytesSent}
	case w.certain: // packets that were under way then have had the time to arrive
		return true
	case !more && time.Duration(w.last-w.first) >= repeatedFor && s.PacketsReceived > w.then.PacketsReceived:
		w.certain = time.Duration(now-w.first) >= stuckAfter // the next repetition may be a minute away
	case !more:
		if w.last > 0 && time.Duration(now-w.last) >= forgetAfter {
			w.first, w.last = 0, 0
		}
	case w.first == 0:
		w.first, w.last = now, now
	default:
		w.last = now
		w.certain = time.Duration(now-w.first) >= stuckAfter
	}
	return false
}

// checkPath ends the connection if it is stuck. Each tick calls it.
func (c *conn) checkPath(now int64) {
	if c.path.stuck(c.qc.ConnectionStats(), now) {
		c.background(func() {
			c.fail(refuse(tunnel.Reset, "little of what was sent for %v arrived, and the peer is there: the path takes smaller packets than before", stuckAfter))
		})
	}
}
