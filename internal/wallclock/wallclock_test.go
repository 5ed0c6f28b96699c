package wallclock

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"culvert.dev/internal/testnet"
)

func TestMain(m *testing.M) { testnet.GoroutinesEnd(m) }

func TestEitherClock(t *testing.T) {
	start := time.Now()
	end := start.Add(time.Hour)
	for _, c := range []struct {
		mono, jump, since time.Duration
		passed            bool
	}{
		{0, 0, 0, false},
		{time.Hour - 1, 0, time.Hour - 1, false},
		{time.Hour, 0, time.Hour, true},
		{time.Minute, 12 * time.Hour, 12*time.Hour + time.Minute, true}, // suspended, or set
		{time.Minute, 59 * time.Minute, time.Hour, true},
		{time.Minute, 58 * time.Minute, 59 * time.Minute, false},
		{time.Minute, -12 * time.Hour, time.Minute, false}, // set back
		{time.Hour, -12 * time.Hour, time.Hour, true},
		{-time.Minute, -time.Hour, 0, false},
	} {
		now := testnet.JumpClock(start.Add(c.mono), c.jump)
		if got := Since(now, start); got != c.since {
			t.Errorf("%+v: %v have passed, want %v", c, got, c.since)
		}
		if got := Passed(now, end); got != c.passed {
			t.Errorf("%+v: the hour is over: %t, want %t", c, got, c.passed)
		}
	}
	// Times that have come from elsewhere have no reading of the monotonic clock.
	if now := start.Add(time.Hour); !Passed(now, end.Round(0)) || Passed(now.Add(-1), end.Round(0)) {
		t.Error("a time of the wall clock alone is compared otherwise")
	}
}

func TestWait(t *testing.T) {
	for _, c := range []struct{ wait, jumpAfter, jump, want time.Duration }{
		{wait: 10 * time.Second, want: 10 * time.Second},
		{wait: time.Hour, want: time.Hour},
		{time.Hour, 10 * time.Minute, 12 * time.Hour, 10*time.Minute + lookEvery},
		{time.Hour, 10*time.Minute + time.Second, 12 * time.Hour, 10*time.Minute + lookEvery},
		{time.Hour, 10 * time.Minute, -12 * time.Hour, time.Hour},
		{wait: 0}, {wait: -time.Hour},
	} {
		synctest.Test(t, func(t *testing.T) {
			var clock testnet.Clock
			timer := time.AfterFunc(c.jumpAfter, func() { clock.Jump(c.jump) })
			defer timer.Stop()
			begun := time.Now()
			if err := Wait(t.Context(), clock.Now, c.wait); err != nil {
				t.Error(err)
			}
			if got := time.Since(begun); got != c.want && !(c.jump > 0 && got == c.want-lookEvery) { // both at the same moment
				t.Errorf("%+v: waited for %v", c, got)
			}
		})
	}
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute+1)
		defer cancel()
		begun := time.Now()
		if err := Wait(ctx, new(testnet.Clock).Now, time.Hour); !errors.Is(err, context.DeadlineExceeded) || time.Since(begun) != time.Minute+1 {
			t.Errorf("%v after %v", err, time.Since(begun))
		}
	})
}
