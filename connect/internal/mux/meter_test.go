package mux

import (
	"testing"
	"testing/synctest"
	"time"
)

// A peer may spend 1,000 points at once and 200 a second in the long run.
// Documents promise these numbers, so they are written out here.
func TestMeter(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var m Meter
		spend := func(when string, want int) {
			t.Helper()
			n := 0
			for n <= 2*want && m.Spend(1) {
				n++
			}
			m.GiveBack(1) // what was refused is not held against the count
			if n != want {
				t.Errorf("%s: %d points were spent, want %d", when, n, want)
			}
		}
		spend("at first", 1000)
		time.Sleep(time.Second) // of the bubble
		spend("after a second", 200)
		time.Sleep(500 * time.Millisecond)
		spend("after half a second", 100)
		time.Sleep(time.Hour)
		spend("after an hour", 1000)
	})
}
