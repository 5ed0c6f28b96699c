package watch

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"culvert.dev/internal/testnet"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	apiwatch "k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/tools/cache"
)

func TestMain(m *testing.M) { testnet.GoroutinesEnd(m) }

// A rig is a Watch of Services that runs in a bubble of synctest.
type rig struct {
	t     *testing.T
	w     *Watch
	cache *Cache
	log   *bytes.Buffer // to be read when all wait

	mu      sync.Mutex // guards the rest
	listed  []corev1.Service
	err     error // of all requests
	some    bool  // a list of at most one object finds one, whatever is listed else
	asked   int   // lists of at most one object
	events  *apiwatch.FakeWatcher
	changes int // of the state
}

func run(t *testing.T, test func(r *rig)) {
	runFailing(t, nil, test)
}

// runFailing is run with an API server that answers all requests with err, the first one too.
func runFailing(t *testing.T, err error, test func(r *rig)) {
	synctest.Test(t, func(t *testing.T) {
		r := &rig{t: t, cache: NewCache(nil), log: &bytes.Buffer{}, err: err, listed: []corev1.Service{service("web"), service("db")}}
		r.w = New(Config{
			Name: "test", Resource: corev1.Resource("services"), Object: &corev1.Service{}, Source: &cache.ListWatch{ListWithContextFunc: r.list, WatchFuncWithContext: r.watch}, Client: fake.NewClientset(),
			Store: r.cache, Log: slog.New(slog.NewTextHandler(r.log, nil)),
			OnChange: func(_, _ State) { r.set(func() { r.changes++ }) },
		})
		ctx, cancel := context.WithCancel(t.Context())
		var running sync.WaitGroup
		running.Go(func() { r.w.Run(ctx) })
		test(r)
		cancel()
		running.Wait()
	})
}

func service(name string) corev1.Service {
	return corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: name}}
}

func (r *rig) list(_ context.Context, o metav1.ListOptions) (runtime.Object, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	all := slices.Clone(r.listed)
	if o.Limit == 1 {
		if r.asked++; r.some {
			all = []corev1.Service{service("web")}
		}
	}
	return &corev1.ServiceList{Items: all}, r.err
}

func (r *rig) watch(context.Context, metav1.ListOptions) (apiwatch.Interface, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.events = apiwatch.NewFake()
	return r.events, r.err
}

func (r *rig) set(f func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	f()
}

// relist has the objects listed again, as when a watch was away for too long.
func (r *rig) relist() {
	expired := apierrors.NewResourceExpired("too old").Status()
	r.events.Error(&expired)
}

// wants lets time pass, and compares the names in the cache and the state.
func (r *rig) wants(after time.Duration, names string, want func(State) bool) {
	r.t.Helper()
	time.Sleep(after)
	synctest.Wait()
	var got []string
	for _, o := range r.cache.All() {
		got = append(got, o.(*corev1.Service).Name)
	}
	slices.Sort(got)
	if s := strings.Join(got, " "); s != names {
		r.t.Errorf("got objects %q, want %q", s, names)
	}
	if s := r.w.State(); !want(s) {
		r.t.Errorf("got state %+v", s)
	}
}

func synced(s State) bool { return s == State{Synced: true} }

func TestChangesReachTheStore(t *testing.T) {
	run(t, func(r *rig) {
		r.wants(time.Second, "db web", synced)
		more := service("more")
		r.events.Add(&more)
		web := service("web")
		r.events.Delete(&web)
		r.wants(time.Second, "db more", synced)
		if got := r.cache.Get(types.NamespacedName{Namespace: "shop", Name: "more"}); got == nil {
			t.Error("the new object is not found by its name")
		}
		r.set(func() { r.listed = []corev1.Service{service("web")} })
		r.relist()
		r.wants(time.Minute, "web", synced)
	})
}

// Objects that vanish all at once stay until the API server confirms that there are none.
func TestVanishedObjectsStay(t *testing.T) {
	byList := func(r *rig) {
		r.set(func() { r.listed = nil })
		r.relist()
	}
	byEvents := func(r *rig) {
		r.set(func() { r.listed = nil })
		for _, name := range []string{"web", "db"} {
			o := service(name)
			r.events.Delete(&o)
		}
	}
	unconfirmed := func(what string) func(State) bool {
		return func(s State) bool {
			return s.Synced && s.Unconfirmed != nil && strings.Contains(s.Unconfirmed.Error(), what)
		}
	}
	for _, tt := range []struct {
		name   string
		vanish func(*rig)
		kept   string
	}{{"by a list", byList, "db web"}, {"by events", byEvents, "db"}} {
		t.Run(tt.name, func(t *testing.T) {
			run(t, func(r *rig) {
				r.wants(time.Second, "db web", synced)
				r.set(func() { r.some = true })
				tt.vanish(r)
				r.wants(time.Minute, tt.kept, unconfirmed("all services were reported gone, but the API server lists some"))
				r.set(func() {
					if r.asked < 2 || r.asked > 10 {
						t.Errorf("asked %d times in a minute, want some and few", r.asked)
					}
					r.err = errors.New("etcdserver: no leader")
				})
				r.wants(time.Minute, tt.kept, unconfirmed("no leader"))
				r.set(func() { r.some, r.err = false, nil })
				r.wants(time.Minute, "", synced)
				if n := strings.Count(r.log.String(), "all objects of a Kubernetes resource vanished"); n != 2 {
					t.Errorf("logged %d times, want once for each reason:\n%s", n, r.log)
				}
			})
		})
	}
	t.Run("and one is back", func(t *testing.T) {
		run(t, func(r *rig) {
			r.wants(time.Second, "db web", synced)
			r.set(func() { r.some = true })
			byList(r)
			r.wants(time.Minute, "db web", unconfirmed("lists some"))
			more := service("more")
			r.events.Add(&more)
			r.wants(time.Millisecond, "more", synced)
			r.set(func() { r.asked = 0 })
			r.wants(time.Hour, "more", synced)
			if r.asked != 0 {
				t.Errorf("asked %d times after that", r.asked)
			}
		})
	})
	t.Run("with their type", func(t *testing.T) {
		run(t, func(r *rig) {
			r.wants(time.Second, "db web", synced)
			byEvents(r)
			r.wants(time.Second, "", synced)
		})
	})
}

// What is denied is believed after three answers in a row, logged once, and forgotten when a request
// succeeds.
func TestDenials(t *testing.T) {
	services := schema.GroupResource{Resource: "services"}
	for _, tt := range []struct {
		name   string
		err    error
		moment func(State) bool // at the first answer
		want   func(State) bool // later
		lines  int
	}{
		{"forbidden", apierrors.NewForbidden(services, "", errors.New("RBAC says no: RBAC: role not found")),
			func(s State) bool { return s == State{} && !s.Known() },
			func(s State) bool {
				return strings.HasPrefix(s.Denied, "may not list services: ") && !strings.Contains(s.Denied, "role not found") && !s.Missing && s.Forbidden() && s.Known()
			}, 1},
		{"no such type", apierrors.NewGenericServerResponse(404, "list", services, "", "", 0, true),
			func(s State) bool { return s.Missing && s.Denied == "" && s.Known() },
			func(s State) bool { return s.Missing && s.Denied != "" && !s.Forbidden() }, 1},
		{"unknown to the server", apierrors.NewUnauthorized("who are you"),
			func(s State) bool { return s.Err != nil && !s.Known() },
			func(s State) bool { return s.Err != nil && s.Denied == "" && !s.Known() }, 0},
		{"unreachable", errors.New("connection refused"),
			func(s State) bool { return s.Err != nil && !s.Known() },
			func(s State) bool { return s.Err != nil && s.Denied == "" && !s.Known() }, 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			runFailing(t, tt.err, func(r *rig) {
				r.wants(time.Millisecond, "", tt.moment)
				r.wants(time.Hour, "", tt.want)
				r.set(func() {
					if r.changes == 0 || r.changes > 3 {
						t.Errorf("the state has changed %d times", r.changes)
					}
					r.err = nil
				})
				r.wants(10*time.Minute, "db web", synced)
				if n := strings.Count(r.log.String(), "cannot read a Kubernetes resource"); n != tt.lines {
					t.Errorf("logged %d times, want %d:\n%s", n, tt.lines, r.log)
				}
				r.set(func() { r.err = tt.err })
				r.events.Stop()
				r.wants(time.Hour, "db web", func(s State) bool { return s.Synced && !s.Forbidden() })
			})
		})
	}
}
