//go:build linux

package main

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"syscall"
	"time"
)

const (
	fewRoutes = 10
	askedFor  = 10_000 // of many routes; each was asked for once before anything is measured
)

// routesStep measures new connections with a few routes and with many. The two
// take turns, in short slices, so that what disturbs one disturbs the other.
func routesStep(ctx context.Context, s *suite, _ *running) (map[string]float64, error) {
	const turns = 6
	ids := []string{"few", "many"}
	routes := []int{fewRoutes, s.routes}
	var live [2]*running
	for i := range live {
		run, err := s.withRoutes(ctx, routes[i])
		if err != nil {
			return nil, err
		}
		defer run.stop()
		live[i] = run
	}
	var count [2]int
	var took [2]time.Duration
	for turn := range turns {
		for k := range live {
			i := (turn + k) % len(live)
			r, err := s.load.do(ctx, live[i].asking(s.slice/2))
			if err != nil {
				return nil, err
			}
			if r.Errors > 0 {
				s.trouble = append(s.trouble, fmt.Sprintf("%d routes: %d connections failed, the first with: %s", routes[i], r.Errors, r.Err))
			}
			count[i] += r.Count
			took[i] += r.Took
		}
	}
	values := make(map[string]float64)
	for i, id := range ids {
		values[id] = float64(count[i]) / took[i].Seconds()
	}
	return values, nil
}

// withRoutes starts a culvert with so many routes and warms it up.
func (s *suite) withRoutes(ctx context.Context, n int) (*running, error) {
	r := s.rig
	r.routes = n
	run, err := peers(s.rig.culvert)[0].start(ctx, r)
	if err != nil {
		return nil, fmt.Errorf("with %d routes: %w", n, err)
	}
	for asked := 0; asked < min(n, askedFor); {
		r, err := s.load.do(ctx, run.asking(s.slice/4))
		if err != nil {
			run.stop()
			return nil, err
		}
		asked += r.Count
	}
	return run, nil
}

// asking is a job of new connections, to names from all over the table.
func (r *running) asking(d time.Duration) job {
	names := min(r.rig.routes, askedFor)
	return job{Op: "conns", To: r.addr, N: 64, Time: d, Names: names, Apart: r.rig.routes / names}
}

// reloadStep measures round trips with many routes, first in peace and then
// while the routes are reloaded again and again, and how long a reload takes.
func reloadStep(ctx context.Context, s *suite, _ *running) (map[string]float64, error) {
	run, err := s.withRoutes(ctx, s.routes)
	if err != nil {
		return nil, err
	}
	defer run.stop()
	trips := job{Op: "trips", To: run.addr, N: 64, Time: s.slice}
	calm, err := s.load.do(ctx, trips)
	if err != nil {
		return nil, err
	}
	storm, stop := context.WithCancel(ctx)
	defer stop()
	type reloaded struct {
		took []time.Duration
		err  error
	}
	done := make(chan reloaded, 1)
	go func() {
		var r reloaded
		for n := 1; storm.Err() == nil && r.err == nil; n++ {
			var d time.Duration
			if d, r.err = run.reload(ctx, s.routes+n%2); r.err == nil {
				r.took = append(r.took, d)
			}
		}
		done <- r
	}()
	busy, err := s.load.do(ctx, trips)
	stop()
	r := <-done
	if err != nil {
		return nil, err
	}
	if r.err != nil {
		return nil, r.err
	}
	slices.Sort(r.took)
	return map[string]float64{
		"reload":     r.took[len(r.took)/2].Seconds(),
		"p99calm":    micros(calm.P99),
		"p99reload":  micros(busy.P99),
		"mostcalm":   micros(calm.Max) / 1e3,
		"mostreload": micros(busy.Max) / 1e3,
	}, nil
}

// reload gives culvert another table and returns the time from the signal to
// the table's being served.
func (r *running) reload(ctx context.Context, routes int) (time.Duration, error) {
	before, err := r.generation(ctx)
	if err != nil {
		return 0, err
	}
	if _, err := culvertConfig(r.rig, routes); err != nil {
		return 0, err
	}
	begin := time.Now()
	if err := r.cmd.Process.Signal(syscall.SIGHUP); err != nil {
		return 0, err
	}
	for time.Since(begin) < patience {
		now, err := r.generation(ctx)
		if err != nil {
			return 0, err
		}
		if now > before {
			return time.Since(begin), nil
		}
		if err := pause(ctx, 2*time.Millisecond); err != nil {
			return 0, err
		}
	}
	return 0, fmt.Errorf("a reload of %d routes had no effect within %v", routes, patience)
}

// generation asks culvert which table it serves.
func (r *running) generation(ctx context.Context) (uint64, error) {
	body, err := fetch(ctx, "http://"+r.rig.admin+"/status")
	if err != nil {
		return 0, err
	}
	var status struct{ Generation uint64 }
	if err := json.Unmarshal(body, &status); err != nil {
		return 0, fmt.Errorf("/status: %w", err)
	}
	return status.Generation, nil
}
