package h3

import (
	"time"

	"github.com/quic-go/quic-go"

	"culvert.dev/tunnel"
)

// A path may come to take smaller packets than before and say nothing of it: what
// the connection has found out about it is wrong then, and quic-go does not find
// out again. Its packets are lost for ever, while small ones arrive, which say that
// the peer is there: a black hole, RFC 8899 section 4.3. A connection that is
// stuck there is ended, as one is whose peer is gone; a new one begins with small
// packets.
const (
	// stuckAfter is for how long packets are sent, again and again and ever more
	// seldom, of which none is acknowledged. The search for the largest packets
	// that the path takes is over sooner.
	stuckAfter = 15 * time.Second
	forgotten  = 45 * time.Second // without such a packet, as they were of that search

	fullPacket = 1000 // bytes that are sent between two looks; fewer are signs of life and acknowledgements
)

// A pathWatch finds it out, by looks now and then.
type pathWatch struct {
	then        quic.ConnectionStats // when packets were last known to arrive
	sent        uint64               // at the last look
	first, last int64                // when packets were found sent since then; 0 for not yet
	certain     bool                 // the last look has found all of this
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
	case w.certain: // what was under way then has had the time to arrive
		return true
	case !more:
		if w.last > 0 && time.Duration(now-w.last) >= forgotten {
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

// lookAtPath ends the connection where it is stuck. Its ticks call it.
func (c *conn) lookAtPath(now int64) {
	if c.path.stuck(c.qc.ConnectionStats(), now) {
		c.background(func() {
			c.fail(refuse(tunnel.Reset, "little of what was sent for %v arrived, and the peer is there: the path takes smaller packets than before", stuckAfter))
		})
	}
}
