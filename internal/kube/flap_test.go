package kube

import (
	"fmt"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	"culvert.dev/registry"
)

// An API server that goes down and comes back for a minute, whatever becomes of the
// watches, takes nothing away: each table has what the one before it had. What was
// made meanwhile is there soon after the last time: client-go leaves an API server alone
// for a minute at the most.
func TestAnAPIServerThatFlaps(t *testing.T) {
	for _, tt := range []struct {
		name           string
		down, up, soon time.Duration
	}{
		{"every ten seconds", 4 * time.Second, 6 * time.Second, 15 * time.Second},
		{"every two seconds", time.Second, time.Second, time.Minute},
		{"ten times a second", 50 * time.Millisecond, 50 * time.Millisecond, time.Minute},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				a := newAPI()
				a.add("tlsroutes", route("first"))
				a.add("services", service("first"))
				size := func(u registry.Update) (n int) {
					n = len(u.Services)
					for _, l := range u.Listeners {
						n += len(l.Sections[0].Rules)
					}
					return n
				}
				most := map[string]int{}
				last := a.begin(t, Object{"culvert-system", "culvert"}, slog.New(slog.DiscardHandler), func(u registry.Update) {
					if u.Err != nil {
						return // what was said stands
					}
					if n := size(u); n < most[u.Source] {
						t.Errorf("source %s has %d left of %d", u.Source, n, most[u.Source])
					} else {
						most[u.Source] = n
					}
				})
				time.Sleep(time.Minute)
				_, before := a.asked()
				made := 1
				began := time.Now()
				for i := 0; time.Since(began) < time.Minute; i++ {
					a.cut(true)
					time.Sleep(tt.down)
					a.again(i%3 == 1)
					time.Sleep(tt.up / 2)
					a.add("tlsroutes", route(fmt.Sprintf("r%d", i)))
					a.add("services", service(fmt.Sprintf("s%d", i)))
					made++
					if i%3 == 2 {
						a.cut(false)
					}
					time.Sleep(tt.up - tt.up/2)
				}
				_, after := a.asked()
				if most := 1000; after-before > most {
					t.Errorf("%d requests in a minute, want %d at most", after-before, most)
				}
				time.Sleep(tt.soon)
				for _, src := range []string{"cluster/west", "gateway-api"} {
					if u := last(src); u.Err != nil || size(u) != made {
						t.Errorf("source %s %v after the last time: %d of %d, %v", src, tt.soon, size(u), made, u.Err)
					}
				}
				t.Logf("%d requests in a minute", after-before)
			})
		})
	}
}
