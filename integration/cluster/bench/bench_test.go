package bench

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"
)

// A plan is how much is measured.
type plan struct {
	full    size
	changes int           // of each kind
	idle    time.Duration // that nothing happens
	trips   time.Duration
}

// The small one is there so that the large one runs when it is wanted.
func TestSmall(t *testing.T) {
	page := measure(t, plan{full: size{services: 100, routes: 50}, changes: 2, idle: time.Second, trips: 500 * time.Millisecond})
	for _, title := range []string{"a new TLSRoute", "another backend of a TLSRoute", "another endpoint, by TLSRoute", "another endpoint, by name", "a new Gateway", "Programmed", "first connection", "resident", "requests"} {
		if !strings.Contains(page, title) {
			t.Errorf("the page has no %q:\n%s", title, page)
		}
	}
}

// The full size: 100,000 endpoints. It measures once, whatever b.N is.
func BenchmarkKubernetes(b *testing.B) {
	p := plan{full: size{services: 10_000, routes: 5_000}, changes: 100, idle: time.Minute, trips: 20 * time.Second}
	if n, err := strconv.Atoi(os.Getenv("CULVERT_BENCH_CHANGES")); err == nil {
		p.changes = n
	}
	if d, err := time.ParseDuration(os.Getenv("CULVERT_BENCH_IDLE")); err == nil {
		p.idle = d
	}
	page := measure(b, p)
	if file := os.Getenv("CULVERT_BENCH_REPORT"); file != "" {
		if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
			b.Fatal(err)
		}
		if err := os.WriteFile(file, []byte(page), 0o644); err != nil {
			b.Fatal(err)
		}
	}
	b.Log("\n" + page)
}

// measure does it all, and returns the page.
func measure(t testing.TB, p plan) string {
	say := func(format string, args ...any) {
		if p.changes > 10 { // a large one takes minutes
			fmt.Fprintf(os.Stderr, "bench: "+format+"\n", args...)
		}
	}
	r := newRig(t)
	pg := &page{plan: p, load: busy()}
	r.furnish()
	r.start()
	r.wait(time.Minute, r.ready)
	pg.quiet = r.changes(p)
	r.stop()

	pg.loading = r.load(p.full)
	say("loaded in %v", pg.loading)
	pg.start = r.startUp(p)
	say("ready after %v, status after %v", pg.start.ready, pg.start.status)
	time.Sleep(5 * time.Second) // what begins with the start ends
	pg.after = r.usage()
	pg.idle = r.rest(p.idle)
	pg.busy = r.changes(p)
	say("changed")
	calm, _, calmCPU := r.trips(p.trips, false)
	disturbed, n, cpu := r.trips(p.trips, true)
	pg.calm, pg.disturbed = calm, disturbed
	pg.perChange = max(0, cpu-calmCPU) / time.Duration(max(n, 1))
	pg.end = r.usage()
	r.stop()

	var b bytes.Buffer
	pg.write(&b)
	return b.String()
}

// ready is nil when culvert says so, and serves.
func (r *rig) ready(ctx context.Context) error {
	_, err := r.ask(ctx, "/readyz")
	return errors.Join(err, r.reaches(r.gateway(), "moves.bench.test", r.server(0))(ctx), r.reaches(r.listener(), r.meshName("moves"), r.server(0))(ctx))
}

// Changes are the times from change to connection.
type changes struct{ route, backend, endpoint, named, gateway, programmed []time.Duration }

func (r *rig) changes(p plan) (c changes) {
	c.route = r.newRoute(p.changes)
	c.backend = r.newBackend(p.changes)
	c.endpoint, c.named = r.newEndpoint(p.changes)
	c.gateway, c.programmed = r.newGateway(p.changes)
	return c
}

// A start is what one took.
type start struct {
	ready, route, name, status time.Duration
	cpu                        time.Duration
	requests                   []request
	most                       usage
}

// startUp starts culvert with all there is, and waits until it has written the
// status of each route.
func (r *rig) startUp(p plan) (s start) {
	before := time.Now()
	began := r.start()
	at := r.waitAll(2*time.Minute,
		func(ctx context.Context) error { _, err := r.ask(ctx, "/readyz"); return err },
		r.reaches(r.gateway(), "one.bench.test", r.server(0)),
		r.reaches(r.listener(), r.meshName("one"), r.server(0)),
	)
	s.ready, s.route, s.name = at[0].Sub(began), at[1].Sub(began), at[2].Sub(began)
	deadline := time.Now().Add(3 * time.Minute)
	for {
		n := 0
		var last time.Time
		s.requests = r.requests(before)
		for _, q := range s.requests {
			if q.what() == "update tlsroutes/status" || q.what() == "patch tlsroutes/status" {
				n, last = n+1, q.At
			}
		}
		if n >= p.full.routes {
			s.status = last.Sub(began)
			s.cpu = r.cpu()
			s.most = r.usage()
			return s
		}
		if time.Now().After(deadline) {
			r.t.Fatalf("the status of %d of %d routes is written after %v\n%s", n, p.full.routes, time.Since(began), r.culvert.Tail(40))
		}
		time.Sleep(250 * time.Millisecond)
	}
}

// An idle time is what happens while nothing does.
type idle struct {
	d        time.Duration
	cpu      time.Duration
	requests []request
}

func (r *rig) rest(d time.Duration) idle {
	began, before := time.Now(), r.cpu()
	time.Sleep(d)
	return idle{d, r.cpu() - before, r.requests(began)}
}

func seconds(d time.Duration) string { return fmt.Sprint(max(1, int(d.Seconds()))) }
