package client

import (
	"context"
	"errors"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/client-go/rest"
)

// An API server that does not answer is noticed within 20 seconds; a slow one is not unreachable; and
// while other requests are answered it is not probed.
func TestProbe(t *testing.T) {
	for _, tt := range []struct {
		name    string
		latency time.Duration // of answers
		others  time.Duration // how often others ask, and are answered at once; 0 is never
		asked   int           // in the first ten minutes, at most
	}{
		{"at rest", 0, 0, 60},
		{"slow", 5 * time.Second, 0, 40},
		{"with a Lease", 0, 4 * time.Second, 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ctx, cancel := context.WithCancel(t.Context())
				var asked atomic.Int64
				var hangs atomic.Bool
				p := NewPulse()
				lost := func() error { _, err := p.State(); return err }
				request := func(ctx context.Context, latency time.Duration) error {
					req, _ := http.NewRequestWithContext(ctx, http.MethodGet, "http://api/livez", nil)
					_, err := p.Wrap(trip(func() (*http.Response, error) {
						for since := time.Now(); hangs.Load() || time.Since(since) < latency; {
							select {
							case <-ctx.Done():
								return nil, ctx.Err()
							case <-time.After(time.Second):
							}
						}
						return &http.Response{StatusCode: http.StatusOK}, nil
					})).RoundTrip(req)
					return err
				}
				var running sync.WaitGroup
				running.Go(func() {
					p.Probe(ctx, func(ctx context.Context) error { asked.Add(1); return request(ctx, tt.latency) })
				})
				running.Go(func() {
					for tt.others > 0 && ctx.Err() == nil {
						_ = request(ctx, 0)
						select {
						case <-ctx.Done():
						case <-time.After(tt.others):
						}
					}
				})
				time.Sleep(10 * time.Minute)
				if n := int(asked.Load()); n > tt.asked || n < tt.asked*9/10 {
					t.Errorf("asked %d times in ten minutes, want %d", n, tt.asked)
				}
				if err := lost(); err != nil {
					t.Fatalf("lost while it answers: %v", err)
				}
				hangs.Store(true)
				time.Sleep(probeAfter + probeTimeout + time.Second)
				if l := lost(); l == nil || !strings.Contains(l.Error(), "no answer within") {
					t.Fatalf("after %v of silence: %v", probeAfter+probeTimeout+time.Second, l)
				}
				time.Sleep(time.Hour)
				if n := asked.Load(); n > 700 {
					t.Errorf("asked %d times in an hour of silence", n)
				}
				hangs.Store(false)
				time.Sleep(tt.latency + probeRetry + 2*time.Second)
				if err := lost(); err != nil {
					t.Errorf("still lost once it answers: %v", err)
				}
				cancel()
				running.Wait()
			})
		})
	}
}

// A request that fails for another reason is cleared up at once.
func TestProbeWhileUnreachable(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		p := NewPulse()
		done := make(chan struct{})
		go func() {
			defer close(done)
			p.Probe(ctx, func(context.Context) error { p.set(nil); return nil })
		}()
		time.Sleep(time.Second)
		p.set(errors.New("reset"))
		time.Sleep(probeRetry)
		synctest.Wait()
		if _, err := p.State(); err != nil {
			t.Errorf("got %v %v later", err, probeRetry)
		}
		cancel()
		<-done
	})
}

func TestLivez(t *testing.T) {
	var got atomic.Value
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		got.Store(r.Method + " " + r.URL.Path + " " + r.UserAgent())
		http.Error(w, "etcd failed", http.StatusInternalServerError)
	}))
	defer s.Close()
	ask, err := Livez(&rest.Config{Host: s.URL + "/clusters/a", UserAgent: "culvert/dev"})
	if err != nil {
		t.Fatal(err)
	}
	if err := ask(t.Context()); err != nil {
		t.Errorf("got %v of a server that answers", err)
	}
	if want := "GET /clusters/a/livez culvert/dev"; got.Load() != want {
		t.Errorf("got %q, want %q", got.Load(), want)
	}
	s.Close()
	if err := ask(t.Context()); err == nil {
		t.Error("got no error of a server that is gone")
	}
	if _, err := Livez(&rest.Config{Host: "::bad::"}); err == nil {
		t.Error("got no error of a host that is none")
	}
}
