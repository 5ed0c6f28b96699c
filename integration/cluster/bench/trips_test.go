package bench

import (
	"context"
	"io"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"
)

const (
	tunnels = 8
	beat    = 5 * time.Millisecond   // from one round trip on a tunnel to the next
	between = 100 * time.Millisecond // from change to change
)

// trips measures round trips on tunnels that stay, for a time; changes go on
// meanwhile if changing.
func (r *rig) trips(d time.Duration, changing bool) (trips []time.Duration, changes int, cpu time.Duration) {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(r.t.Context(), d)
	defer cancel()
	var wg sync.WaitGroup
	var mu sync.Mutex
	before := r.cpu()
	for i := range tunnels {
		conn, _, err := r.tls.dial(r.t.Context(), r.gateway(), "one.bench.test")
		if err != nil {
			r.t.Fatal(err)
		}
		wg.Go(func() {
			defer conn.Close()
			var mine []time.Duration
			buf := make([]byte, 64)
			tick := time.NewTicker(beat)
			defer tick.Stop()
			for ctx.Err() == nil {
				<-tick.C
				began := time.Now()
				if _, err := conn.Write(buf); err != nil {
					r.t.Errorf("tunnel %d: %v", i, err)
					return
				}
				if _, err := io.ReadFull(conn, buf); err != nil {
					r.t.Errorf("tunnel %d: %v", i, err)
					return
				}
				mine = append(mine, time.Since(began))
			}
			mu.Lock()
			trips = append(trips, mine...)
			mu.Unlock()
		})
	}
	if changing {
		profile := r.profile(d)
		tick := time.NewTicker(between)
		for ctx.Err() == nil {
			if changes++; changes%2 == 0 {
				r.turn("moves", changes/2) // never the route of the tunnels
			} else {
				r.move("two", r.server(changes/2))
			}
			<-tick.C
		}
		tick.Stop()
		<-profile
	}
	wg.Wait()
	return trips, changes, r.cpu() - before
}

// profile takes a profile of the time if $CULVERT_BENCH_PROFILE names a folder.
func (r *rig) profile(d time.Duration) <-chan struct{} {
	done := make(chan struct{})
	dir := os.Getenv("CULVERT_BENCH_PROFILE")
	if dir == "" {
		close(done)
		return done
	}
	go func() {
		defer close(done)
		for name, path := range map[string]string{"cpu": "/debug/pprof/profile?seconds=" + seconds(d), "heap": "/debug/pprof/heap", "allocs": "/debug/pprof/allocs"} {
			page, err := r.ask(r.t.Context(), path)
			if err == nil {
				err = os.WriteFile(filepath.Join(dir, name+".pprof"), page, 0o644)
			}
			if err != nil {
				r.t.Error(err)
			}
		}
	}()
	return done
}

// percentile is the value that p of all are not above.
func percentile(of []time.Duration, p float64) time.Duration {
	if len(of) == 0 {
		return 0
	}
	of = slices.Sorted(slices.Values(of))
	return of[min(len(of)-1, int(p*float64(len(of))))]
}
