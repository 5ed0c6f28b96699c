package kube

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/client-go/rest"

	"culvert.dev/registry"
)

// An api is an API server with one Gateway, which can be slow, and say nothing.
type api struct {
	conns chan net.Conn
	gone  chan struct{}

	mu       sync.Mutex // guards the following
	latency  time.Duration
	hangs    bool
	requests map[string]int
	watches  map[string]chan string // by resource
}

func newAPI() *api {
	return &api{conns: make(chan net.Conn), gone: make(chan struct{}), requests: map[string]int{}, watches: map[string]chan string{}}
}

// It is a net.Listener, so that a bubble of synctest can have it.
func (a *api) Accept() (net.Conn, error) {
	select {
	case c := <-a.conns:
		return c, nil
	case <-a.gone:
		return nil, net.ErrClosed
	}
}
func (a *api) Close() error   { return nil }
func (a *api) Addr() net.Addr { return &net.TCPAddr{} }

func (a *api) dial(ctx context.Context, _, _ string) (net.Conn, error) {
	ours, theirs := net.Pipe()
	select {
	case a.conns <- theirs:
		return ours, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	case <-a.gone:
		return nil, net.ErrClosed
	}
}

// pause waits until the API server says anything; it is false if the client went.
func (a *api) pause(ctx context.Context) bool {
	for since := time.Now(); ; {
		a.mu.Lock()
		ready := !a.hangs && time.Since(since) >= a.latency
		a.mu.Unlock()
		if ready {
			return true
		}
		select {
		case <-ctx.Done():
			return false
		case <-a.gone:
			return false
		case <-time.After(100 * time.Millisecond):
		}
	}
}

func (a *api) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	parts := strings.Split(r.URL.Path, "/")
	resource := parts[len(parts)-1]
	a.mu.Lock()
	a.requests[resource]++
	a.mu.Unlock()
	if !a.pause(r.Context()) {
		return
	}
	refuse := func(code int, reason string) {
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(code)
		fmt.Fprintf(w, `{"kind":"Status","apiVersion":"v1","status":"Failure","reason":%q,"code":%d}`, reason, code)
	}
	q := r.URL.Query()
	switch {
	case resource == "livez":
	case resource == "culvert" || r.Method != http.MethodGet:
		refuse(http.StatusForbidden, "Forbidden")
	case resource == "serviceimports":
		refuse(http.StatusNotFound, "NotFound")
	case q.Get("sendInitialEvents") == "true":
		refuse(http.StatusUnprocessableEntity, "Invalid")
	case q.Get("watch") != "true":
		w.Header().Set("Content-Type", "application/json")
		fmt.Fprintf(w, `{"metadata":{"resourceVersion":"1"},"items":[%s]}`, objects[resource])
	default:
		w.Header().Set("Content-Type", "application/json")
		w.(http.Flusher).Flush()
		a.mu.Lock()
		events := a.watches[resource]
		if events == nil {
			events = make(chan string)
			a.watches[resource] = events
		}
		a.mu.Unlock()
		for {
			select {
			case e := <-events:
				if !a.pause(r.Context()) {
					return
				}
				fmt.Fprintln(w, e)
				w.(http.Flusher).Flush()
			case <-r.Context().Done():
				return
			case <-a.gone:
				return
			}
		}
	}
}

// objects are what there is, by resource.
var objects = map[string]string{
	"gatewayclasses": `{"metadata":{"name":"culvert","uid":"c","resourceVersion":"1"},"spec":{"controllerName":"culvert.dev/gateway"}}`,
	"gateways":       `{"metadata":{"namespace":"a","name":"edge","uid":"g","resourceVersion":"1"},"spec":{"gatewayClassName":"culvert","listeners":[{"name":"tls","port":443,"protocol":"TLS","tls":{"mode":"Passthrough"}}]}}`,
}

// route is the event of a new TLSRoute.
func route(name string) string {
	o := map[string]any{
		"apiVersion": "gateway.networking.k8s.io/v1", "kind": "TLSRoute",
		"metadata": map[string]any{"namespace": "a", "name": name, "uid": name, "resourceVersion": "2"},
		"spec":     map[string]any{"parentRefs": []any{map[string]any{"name": "edge"}}, "hostnames": []any{name + ".test"}, "rules": []any{map[string]any{"backendRefs": []any{map[string]any{"name": "web", "port": 443}}}}},
	}
	text, err := json.Marshal(map[string]any{"type": "ADDED", "object": o})
	if err != nil {
		panic(err)
	}
	return string(text)
}

// opened is a Gateway whose listeners are all open.
type opened struct{ Gateway }

func (opened) ListenersChanged() <-chan struct{} { return nil }
func (opened) ListenerErrors() map[string]error  { return nil }

func (a *api) set(hangs bool, latency time.Duration) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.hangs, a.latency = hangs, latency
}

func (a *api) asked() (all map[string]int, n int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	all = map[string]int{}
	for r, k := range a.requests {
		all[r] = k
		n += k
	}
	return all, n
}

// begin runs what a process has to do with an API server until the test's end, and
// returns the last words of each source.
func (a *api) begin(t *testing.T, lease Object, log *slog.Logger) func(source string) registry.Update {
	t.Helper()
	k, err := newOf(Config{Cluster: "west", Discovery: &Discovery{Network: "west"}, GatewayAPI: &GatewayAPI{Controller: "culvert.dev/gateway"}, Lease: lease, Log: log}, &rest.Config{Host: "http://api.test", Dial: a.dial, QPS: 1000, Burst: 1000})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	server := &http.Server{Handler: a}
	running.Go(func() { _ = server.Serve(a) })
	var mu sync.Mutex
	last := map[string]registry.Update{}
	updates := make(chan registry.Update)
	running.Go(func() {
		for {
			select {
			case u := <-updates:
				mu.Lock()
				last[u.Source] = u
				mu.Unlock()
			case <-ctx.Done():
				return
			}
		}
	})
	stop := k.Start(ctx, opened{})
	for _, src := range k.Sources() {
		running.Go(func() { _ = src.Run(ctx, updates) })
	}
	t.Cleanup(func() {
		cancel()
		stop()
		close(a.gone)
		_ = server.Close()
		running.Wait()
	})
	return func(source string) registry.Update {
		synctest.Wait()
		mu.Lock()
		defer mu.Unlock()
		return last[source]
	}
}

// An API server that takes connections and says nothing is noticed within 25
// seconds by every source, although nothing of theirs fails; what they had said
// stands. Nobody asks more than 15 times a minute for that, at rest.
func TestAnAPIServerThatSaysNothing(t *testing.T) {
	for name, lease := range map[string]Object{"with a lease": {"culvert-system", "culvert"}, "without": {}} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				a := newAPI()
				var said lines
				last := a.begin(t, lease, slog.New(slog.NewTextHandler(&said, nil)))
				time.Sleep(20 * time.Minute)
				sources := []string{"cluster/west", "gateway-api"}
				for _, src := range sources {
					if u := last(src); u.Source == "" || u.Err != nil {
						t.Fatalf("source %s at first: %+v", src, u)
					}
				}
				first, before := a.asked()
				time.Sleep(10 * time.Minute)
				all, after := a.asked()
				if after-before > 150 {
					t.Errorf("%d requests in ten minutes at rest, want 150 at most: %v", after-before, all)
				}
				if n := all["serviceimports"] - first["serviceimports"]; n > 6 {
					t.Errorf("%d of them are for a kind that is not there, want 6 at most", n)
				}
				a.set(true, 0)
				time.Sleep(25 * time.Second)
				for _, src := range sources {
					if u := last(src); u.Err == nil || !strings.Contains(u.Err.Error(), "does not answer") {
						t.Errorf("source %s after 25 s of silence: %v", src, u.Err)
					}
				}
				for _, want := range []string{"the API server does not answer; Gateways", "discovery: out of touch"} {
					if n := strings.Count(said.String(), want); n != 1 {
						t.Errorf("%q is in the log %d times", want, n)
					}
				}
				time.Sleep(10 * time.Minute)
				a.set(false, 0)
				time.Sleep(5 * time.Second)
				for _, src := range sources {
					if u := last(src); u.Err != nil || src == "gateway-api" && len(u.Listeners) != 1 {
						t.Errorf("source %s when it answers again: %+v", src, u)
					}
				}
			})
		})
	}
}

// An API server that takes 5 seconds for everything is not lost, and no change is.
func TestASlowAPIServerLosesNoChange(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newAPI()
		a.set(false, 5*time.Second)
		last := a.begin(t, Object{"culvert-system", "culvert"}, slog.New(slog.DiscardHandler))
		time.Sleep(5 * time.Minute)
		if u := last("gateway-api"); u.Err != nil || len(u.Listeners) != 1 {
			t.Fatalf("at first: %+v", u)
		}
		a.mu.Lock()
		events := a.watches["tlsroutes"]
		a.mu.Unlock()
		const n = 20
		for i := range n {
			events <- route(fmt.Sprintf("r%d", i))
		}
		time.Sleep(6 * time.Second)
		if u := last("gateway-api"); u.Err != nil || len(u.Listeners[0].Sections[0].Rules) != n {
			t.Errorf("after %d routes: %+v", n, u)
		}
		time.Sleep(10 * time.Minute)
		for _, src := range []string{"cluster/west", "gateway-api"} {
			if u := last(src); u.Err != nil {
				t.Errorf("source %s is lost: %v", src, u.Err)
			}
		}
	})
}
