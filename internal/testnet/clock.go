package testnet

import (
	"sync"
	"time"
	"unsafe"
)

// A Clock is time.Now of a machine that is suspended and whose wall clock is set. It follows
// the time of a bubble of synctest, too, where times of time.Now have one reading only. The
// zero Clock is ready; its methods may be called at the same time.
type Clock struct {
	mu    sync.Mutex // guards all
	begun time.Time
	jump  time.Duration
}

// origin has a reading of the monotonic clock.
var origin = time.Now()

// Now returns the time by both clocks.
func (c *Clock) Now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.begun.IsZero() {
		c.begun = time.Now()
	}
	there := c.begun.Round(0).Sub(origin.Round(0)).Truncate(time.Second) // to within a second
	return JumpClock(origin.Add(time.Since(c.begun)), there+c.jump)
}

// Jump moves the wall clock by whole seconds, forward or back.
func (c *Clock) Jump(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.jump += d
}

// JumpClock returns t, of time.Now, as it is after the wall clock was set by d, in whole
// seconds, or after the machine was suspended for d: its reading of the monotonic clock stays.
func JumpClock(t time.Time, d time.Duration) time.Time {
	out := t
	// The layout of time.Time with such a reading: the seconds begin at bit 30.
	of := (*struct {
		wall uint64
		ext  int64
		loc  *time.Location
	})(unsafe.Pointer(&out))
	of.wall += uint64(d/time.Second) << 30
	if out.Sub(t) != 0 || out.Round(0).Sub(t.Round(0)) != d {
		panic("testnet: time.Time has another layout, or no reading of the monotonic clock, or its clock cannot jump by " + d.String())
	}
	return out
}
