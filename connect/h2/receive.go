package h2

import (
	"time"

	"golang.org/x/net/http2"

	"culvert.dev/connect/internal/mux"
)

// keep appends p to the unread bytes of s. The caller holds mu.
func (c *conn) keep(s *Stream, p []byte) {
	c.unread += len(p)
	c.holds -= s.in.held
	s.in.write(p)
	c.holds += s.in.held
	c.holding.Set(c.holds)
}

// maxRun is how many payloads are pushed at once. A full buffer has no more than that in frames of
// a usual size: smaller ones are collected in the stream's buffer.
const maxRun = 8

// arrived takes the payload p of a frame of s: it is pushed, together with those before it that
// were not the last ones, or kept for a Read. The caller holds mu, which may be free meanwhile.
func (c *conn) arrived(s *Stream, p []byte, last bool) {
	if c.payloadsOf != s {
		c.forget()
		c.payloadsOf = s
	}
	if len(p) > 0 {
		c.payloads = append(c.payloads, p)
	}
	if !last && len(c.payloads) < maxRun {
		return
	}
	if last && len(c.payloads) > 0 && s.in.size == 0 && s.push != nil {
		c.pushRun(s)
	}
	if !s.ended && !s.closed {
		for _, p := range c.payloads {
			c.keep(s, p)
		}
		if last && s.in.size > 0 {
			s.canRead()
		}
	}
	c.forget()
}

// forget drops the payloads.
func (c *conn) forget() {
	clear(c.payloads)
	c.payloads, c.payloadsOf = c.payloads[:0], nil
}

// pushRun has the caller of WaitPush take what it can of the run, which comes after all that s
// has, and leaves the rest in it. The caller holds mu, which is free meanwhile.
func (c *conn) pushRun(s *Stream) {
	push := s.push
	taken := func() int {
		c.mu.Unlock()
		defer c.mu.Lock()
		return push(c.payloads)
	}()
	s.kept = true
	c.took(s, taken)
	for i, p := range c.payloads {
		n := min(taken, len(p))
		c.payloads[i], taken = p[n:], taken-n
	}
}

// hand moves unread bytes of s to p. The caller holds mu and has the writer told.
func (c *conn) hand(s *Stream, p []byte) int {
	c.holds -= s.in.held
	n := s.in.read(p)
	c.holds += s.in.held
	c.unread -= n
	c.holding.Set(c.holds)
	c.replenish()
	return n
}

// discard drops the unread bytes of s. The caller holds mu.
func (c *conn) discard(s *Stream) {
	c.unread -= s.in.size
	c.holds -= s.in.held
	s.in.drop()
	c.holding.Set(c.holds)
}

// replenish reopens the connection's window by the bytes that have arrived, read or
// not: a stream that nobody reads must not hold up the others, and its own window
// bounds it. While memory is scarce, unread bytes do not reopen it. The caller
// holds mu and has the writer told.
func (c *conn) replenish() {
	give := c.unacked
	if c.unread > 0 && c.holding.MemoryShort() {
		give -= c.unread
	}
	if give < connWindow/8 {
		return
	}
	c.unacked -= give
	c.credit += give
	_ = c.fw.WriteWindowUpdate(0, uint32(give))
	c.later = true
}

// overfull resets s if memory is scarce, s is not read and its client has more than
// its share of the memory for unread bytes. It reports whether it did. The caller
// holds mu.
func (c *conn) overfull(s *Stream) bool {
	if !c.holding.MemoryShort() || s.in.size < minScarceHold || c.holding.CheckLimit() == nil {
		return false
	}
	c.reset(s, http2.ErrCodeEnhanceYourCalm)
	return true
}

// took notes that n bytes of s were read. The caller holds mu and has the writer told.
func (c *conn) took(s *Stream, n int) {
	if s.ended {
		return
	}
	s.unacked += n
	s.taken += n
	s.moved += int64(n)
	step := s.window / 2
	if s.window > 1<<20 {
		step = s.window / 8 // or a path that half a window fills would wait for the other half
	}
	if s.unacked < step {
		return
	}
	now := mux.Clock()
	more := s.unacked
	if s.taken >= s.window/2 {
		// Half a window was read within two round trips, and at some moment little
		// was unread, whatever came at once since: the window is what holds the
		// sender.
		rtt := c.rtt
		if rtt == 0 {
			rtt = unknownRTT
		}
		took := time.Duration(now - s.began)
		fast, growth := took <= 2*rtt, s.window
		switch {
		case rtt < shortPath && s.window < busyWindow:
			fast, growth = s.moved >= minMovedToGrow, min(growth, busyWindow-s.window)
		case rtt < shortPath:
			fast = took <= rtt && float64(s.window) <= fastest*rtt.Seconds()
		}
		grows := s.kept && fast && s.window < maxWindow && c.grown+s.window <= maxGrowth && !c.holding.MemoryShort() && c.pinged == 0
		s.taken, s.kept, s.began = 0, false, now
		switch {
		case grows:
			c.grown += growth
			more += growth
			s.window += growth
			if c.probes < maxProbes { // what was measured when the connection began may be too long
				c.probes++
				c.sendPing()
			}
		case rtt < shortPath && s.window == streamWindow && s.moved <= streamWindow && more >= streamWindow-restWindow: // the first update
			c.grown -= streamWindow - restWindow
			more -= streamWindow - restWindow
			s.window = restWindow
		}
	}
	s.unacked = 0
	if more == 0 {
		return
	}
	s.credit += more
	_ = c.fw.WriteWindowUpdate(s.id, uint32(more))
	c.later = true
}
