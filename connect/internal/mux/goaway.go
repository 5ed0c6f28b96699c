package mux

import "time"

// Clock is a monotonic clock, in nanoseconds, for timestamps that fit a word.
func Clock() int64 { return int64(time.Since(epoch)) }

var epoch = time.Now()

// goAwayDelay is the time between the first GOAWAY and the last: a round trip.
const goAwayDelay = 500 * time.Millisecond

// A GoAway is the orderly end of a server's connection. Its first GOAWAY announces the
// last one, and rejects nothing: requests that the client has sent meanwhile are still
// served (RFC 9113 section 6.8, RFC 9114 section 5.2). It is not safe for concurrent use.
type GoAway struct {
	started, finished bool
	startedAt         int64 // by Clock
}

// Start notes that the first GOAWAY is sent now. It reports false if it was sent before.
func (g *GoAway) Start(now int64) bool {
	if g.started {
		return false
	}
	g.started, g.startedAt = true, now
	return true
}

// Started reports whether the first GOAWAY was sent.
func (g *GoAway) Started() bool { return g.started }

// Age returns the time since the first GOAWAY.
func (g *GoAway) Age(now int64) time.Duration { return time.Duration(now - g.startedAt) }

// Left returns the time until the last GOAWAY is due, at most 0 from then on.
func (g *GoAway) Left(now int64) time.Duration { return goAwayDelay - g.Age(now) }

// Finish notes that the last GOAWAY is sent.
func (g *GoAway) Finish() { g.finished = true }

// Finished reports whether the last GOAWAY was sent: later requests are refused.
func (g *GoAway) Finished() bool { return g.finished }
