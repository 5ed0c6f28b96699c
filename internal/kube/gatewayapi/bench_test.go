package gatewayapi

import (
	"bytes"
	"context"
	"errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"log/slog"
	"net/http"
	"reflect"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	ktesting "k8s.io/client-go/testing"
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"
	gwfake "sigs.k8s.io/gateway-api/pkg/client/clientset/versioned/fake"
	mcsfake "sigs.k8s.io/mcs-api/pkg/client/clientset/versioned/fake"

	"culvert.dev/internal/kube/client"
	"culvert.dev/registry"
)

// A bench is a controller with fake API servers, in a synctest bubble.
type bench struct {
	t       *testing.T
	core    *fake.Clientset
	gw      *gwfake.Clientset
	mcs     *mcsfake.Clientset
	c       *Controller
	updates chan registry.Update
	log     *lockedBuffer
}

type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

func newBench(t *testing.T, docs ...string) *bench {
	w := inputsOf(t, append([]string{base}, docs...)...)
	f := w.Objects.(*fixture)
	var core, gw, mcs []runtime.Object
	for _, o := range f.namespaces {
		core = append(core, o)
	}
	for _, o := range f.services {
		core = append(core, o)
	}
	for _, o := range f.secrets {
		core = append(core, o)
	}
	for _, o := range f.configMaps {
		core = append(core, o)
	}
	for _, o := range f.slices {
		core = append(core, o)
	}
	for _, o := range f.imports {
		mcs = append(mcs, o)
	}
	for _, o := range w.Classes {
		gw = append(gw, o)
	}
	for _, o := range w.Gateways {
		gw = append(gw, o)
	}
	for _, o := range w.ListenerSets {
		gw = append(gw, o)
	}
	for _, o := range w.TLSRoutes {
		gw = append(gw, o)
	}
	for _, o := range w.TCPRoutes {
		gw = append(gw, o)
	}
	for _, o := range w.UDPRoutes {
		gw = append(gw, o)
	}
	for _, o := range w.HTTPRoutes {
		gw = append(gw, o)
	}
	for _, o := range w.GRPCRoutes {
		gw = append(gw, o)
	}
	for _, o := range w.Grants {
		gw = append(gw, o)
	}
	for _, o := range w.Policies {
		gw = append(gw, o)
	}
	b := &bench{t: t, core: fake.NewClientset(core...), gw: gwfake.NewSimpleClientset(), mcs: mcsfake.NewSimpleClientset(mcs...), updates: make(chan registry.Update, 100), log: &lockedBuffer{}}
	for _, o := range gw {
		// The tracker's own guess at the plural of Gateway is "gatewaies".
		m := o.(metav1.Object)
		kind := reflect.TypeOf(o).Elem().Name()
		plural := strings.ToLower(kind) + "s"
		switch kind {
		case "GatewayClass":
			plural = "gatewayclasses"
		case "BackendTLSPolicy":
			plural = "backendtlspolicies"
		}
		if err := b.gw.Tracker().Create(schema.GroupVersionResource{Group: gwv1.GroupVersion.Group, Version: gwv1.GroupVersion.Version, Resource: plural}, o, m.GetNamespace()); err != nil {
			t.Fatal(err)
		}
	}
	b.gw.PrependReactor("update", "*", func(a ktesting.Action) (bool, runtime.Object, error) {
		if o := a.(ktesting.UpdateAction).GetObject().(metav1.Object); a.GetSubresource() == "" { // as an API server does
			o.SetGeneration(o.GetGeneration() + 1)
		}
		return false, nil, nil
	})
	log := slog.New(slog.NewTextHandler(b.log, &slog.HandlerOptions{Level: slog.LevelDebug}))
	b.c = &Controller{
		cfg:     Config{Settings: Settings{PublicAddresses: addrs("192.0.2.1")}, Log: log},
		clients: clients{core: b.core, gw: b.gw, mcs: b.mcs}, memo: newMemo(),
	}
	return b
}

// start runs the controller until the end of the test, or stop.
func (b *bench) start() (stop func()) {
	ctx, cancel := context.WithCancel(b.t.Context())
	done := make(chan error, 1)
	go func() { done <- b.c.Run(ctx, b.updates) }()
	return sync.OnceFunc(func() {
		cancel()
		if err := <-done; !errors.Is(err, context.Canceled) {
			b.t.Errorf("got %v from Run, want that the context is done", err)
		}
	})
}

// calm lets everything happen that will.
func calm() {
	time.Sleep(5 * time.Second) // of the bubble's clock
	synctest.Wait()
}

// last is the newest update; nil if there is none.
func (b *bench) last() *registry.Update {
	var u *registry.Update
	for {
		select {
		case got := <-b.updates:
			u = &got
		default:
			return u
		}
	}
}

func (b *bench) gateway(name string) *gwv1.Gateway {
	b.t.Helper()
	g, err := b.gw.GatewayV1().Gateways("a").Get(b.t.Context(), name, metav1.GetOptions{})
	if err != nil {
		b.t.Fatal(err)
	}
	return g
}

func (b *bench) route(name string) *gwv1.TLSRoute {
	b.t.Helper()
	r, err := b.gw.GatewayV1().TLSRoutes("a").Get(b.t.Context(), name, metav1.GetOptions{})
	if err != nil {
		b.t.Fatal(err)
	}
	return r
}

func has(cs []metav1.Condition, kind, status, reason string) bool {
	for _, c := range cs {
		if c.Type == kind {
			return string(c.Status) == status && c.Reason == reason && !c.LastTransitionTime.IsZero()
		}
	}
	return false
}

// requests counts what was asked for, without watches; writes are those that write.
func (b *bench) requests() (all, writes int) {
	for _, f := range []*ktesting.Fake{&b.core.Fake, &b.gw.Fake, &b.mcs.Fake} {
		for _, a := range f.Actions() {
			switch a.GetVerb() {
			case "watch":
			case "get", "list":
				all++
			default:
				all++
				writes++
			}
		}
	}
	return all, writes
}

// plane is a Plane whose sockets open when they are told to.
type plane struct {
	asked atomic.Int32 // once for each translation

	mu   sync.Mutex
	errs map[string]error
	news chan struct{}
}

func (p *plane) ListenerErrors() map[string]error {
	p.asked.Add(1)
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.errs
}
func (p *plane) Changed() <-chan struct{} { return p.news }
func (p *plane) set(errs map[string]error) {
	p.mu.Lock()
	p.errs = errs
	p.mu.Unlock()
	p.news <- struct{}{}
}

// pulseBeater makes requests that end as told.
func pulseBeater(p *client.Pulse) func(error) {
	return func(err error) {
		rt := p.Wrap(roundTrip(func(*http.Request) (*http.Response, error) {
			if err != nil {
				return nil, err
			}
			return &http.Response{StatusCode: 200}, nil
		}))
		req, _ := http.NewRequest("GET", "http://api/", nil)
		if res, _ := rt.RoundTrip(req); res != nil && res.Body != nil {
			res.Body.Close()
		}
	}
}

type roundTrip func(*http.Request) (*http.Response, error)

func (f roundTrip) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }
