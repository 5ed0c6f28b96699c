package race

import (
	"context"
	"errors"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"culvert.dev/tunnel"
)

var errRefused = errors.New("refused")

// A dial answers with err after a time, or when its context ends if the time is negative.
type answer struct {
	after time.Duration
	err   error
}

func (a answer) wait(ctx context.Context) error {
	if a.after < 0 {
		<-ctx.Done()
		return a.err
	}
	select {
	case <-time.After(a.after):
		return a.err
	case <-ctx.Done():
		return ctx.Err()
	}
}

// TestFirst checks which dial wins, when each starts, and that the results of the others are
// discarded before First returns.
func TestFirst(t *testing.T) {
	const ms = time.Millisecond
	for name, row := range map[string]struct {
		answers   []answer
		want      int // the winner; -1 for none
		took      time.Duration
		starts    []time.Duration
		discarded []int
		err       error
	}{
		"one":                     {answers: []answer{{10 * ms, nil}}, want: 0, took: 10 * ms, starts: []time.Duration{0}},
		"one fails":               {answers: []answer{{10 * ms, errRefused}}, want: -1, took: 10 * ms, starts: []time.Duration{0}, err: errRefused},
		"the first is in time":    {answers: []answer{{299 * ms, nil}, {0, nil}}, want: 0, took: 299 * ms, starts: []time.Duration{0}},
		"the first is silent":     {answers: []answer{{-1, errRefused}, {10 * ms, nil}, {0, nil}}, want: 1, took: 310 * ms, starts: []time.Duration{0, 300 * ms}},
		"two are silent":          {answers: []answer{{-1, errRefused}, {-1, errRefused}, {10 * ms, nil}}, want: 2, took: 610 * ms, starts: []time.Duration{0, 300 * ms, 600 * ms}},
		"the first fails at once": {answers: []answer{{ms, errRefused}, {ms, nil}}, want: 1, took: 2 * ms, starts: []time.Duration{0, ms}},
		"the second starts anew":  {answers: []answer{{100 * ms, errRefused}, {-1, errRefused}, {0, nil}}, want: 2, took: 400 * ms, starts: []time.Duration{0, 100 * ms, 400 * ms}},
		"the first is late":       {answers: []answer{{400 * ms, nil}, {-1, errRefused}}, want: 0, took: 400 * ms, starts: []time.Duration{0, 300 * ms}},
		"a loser connects":        {answers: []answer{{-1, nil}, {-1, nil}, {ms, nil}}, want: 2, took: 601 * ms, starts: []time.Duration{0, 300 * ms, 600 * ms}, discarded: []int{0, 1}},
		"all fail":                {answers: []answer{{0, errors.New("gone")}, {0, errors.New("gone")}, {ms, errRefused}}, want: -1, took: ms, starts: []time.Duration{0, 0, 0}, err: errRefused},
		"all are silent":          {answers: []answer{{-1, context.DeadlineExceeded}, {-1, context.DeadlineExceeded}}, want: -1, took: 3 * time.Second, starts: []time.Duration{0, 300 * ms}, err: context.DeadlineExceeded},
		"the last one is silent":  {answers: []answer{{2900 * ms, errRefused}, {-1, errRefused}}, want: -1, took: 3 * time.Second, starts: []time.Duration{0, 300 * ms}, err: errRefused},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
				defer cancel()
				begin := time.Now()
				var mu sync.Mutex // guards starts
				var starts []time.Duration
				running := 0
				discarded := map[int]bool{}
				got, err := First(ctx, len(row.answers), func(ctx context.Context, i int) (int, error) {
					mu.Lock()
					starts = append(starts, time.Since(begin))
					running++
					mu.Unlock()
					defer func() {
						mu.Lock()
						running--
						mu.Unlock()
					}()
					return i, row.answers[i].wait(ctx)
				}, func(i int) { discarded[i] = true })
				if running != 0 {
					t.Errorf("%d dials are running, want none", running)
				}
				if took := time.Since(begin); took != row.took {
					t.Errorf("First took %v, want %v", took, row.took)
				}
				if len(starts) != len(row.starts) {
					t.Fatalf("dials started at %v, want %v", starts, row.starts)
				}
				for i := range starts {
					if starts[i] != row.starts[i] {
						t.Fatalf("dials started at %v, want %v", starts, row.starts)
					}
				}
				if len(discarded) != len(row.discarded) {
					t.Errorf("discarded %v, want %v", discarded, row.discarded)
				}
				for _, i := range row.discarded {
					if !discarded[i] {
						t.Errorf("discarded %v, want %v", discarded, row.discarded)
					}
				}
				if row.want >= 0 && (err != nil || got != row.want) {
					t.Errorf("got %d, %v, want %d", got, err, row.want)
				}
				if row.want < 0 && !errors.Is(err, row.err) {
					t.Errorf("got error %v, want %v", err, row.err)
				}
			})
		})
	}
}

// TestFirstPanic checks that a panic of a dial is its error, and ends no other dial.
func TestFirstPanic(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		got, err := First(t.Context(), 2, func(_ context.Context, i int) (int, error) {
			if i == 0 {
				panic("dial")
			}
			return i, nil
		}, func(int) {})
		if got != 1 || err != nil {
			t.Errorf("got %d, %v, want 1", got, err)
		}
		_, err = First(t.Context(), 2, func(context.Context, int) (int, error) { panic("dial") }, func(int) {})
		if p := (*tunnel.Panic)(nil); !errors.As(err, &p) {
			t.Errorf("got error %v, want a panic", err)
		}
	})
}
