// Package wallclock measures time that passes for others, too: how long a DNS answer holds,
// or a mapping of a router.
//
//	if wallclock.Passed(now, expires) { // ask again
//
// Times of time.Now are compared by their readings of the monotonic clock, and timers run by
// it. That clock stands still while the machine is suspended, so what expires in an hour
// expires hours late after a night. The wall clock goes on, and may be set. Here a time has
// passed when either clock says so: what is asked anew too early does no harm.
package wallclock

import (
	"context"
	"time"
)

// lookEvery is how often Wait looks at the wall clock.
const lookEvery = 30 * time.Second

// Since returns the time from t to now: the longer one of the two clocks, and 0 where both
// go back.
func Since(now, t time.Time) time.Duration {
	return max(now.Sub(t), now.Round(0).Sub(t.Round(0)), 0)
}

// Passed reports whether t has come at now by one of the two clocks.
func Passed(now, t time.Time) bool {
	return !now.Before(t) || !now.Round(0).Before(t.Round(0))
}

// Wait returns when d has passed by one of the two clocks, at most half a minute late by the
// wall clock, or with the error of ctx when that is done. now is time.Now.
func Wait(ctx context.Context, now func() time.Time, d time.Duration) error {
	end := now().Add(d)
	timer := time.NewTimer(min(d, lookEvery))
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-timer.C:
		}
		at := now()
		if Passed(at, end) {
			return nil
		}
		timer.Reset(min(end.Sub(at), lookEvery))
	}
}
