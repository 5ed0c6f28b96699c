package kube

import (
	"context"
	"crypto/tls"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/client-go/rest"

	"culvert.dev/registry"
)

// An api is an API server with one Gateway, which can be slow, say nothing, and come
// and go.
type api struct {
	conns chan net.Conn
	gone  chan struct{}

	mu       sync.Mutex // guards the following
	latency  time.Duration
	hangs    bool
	down     bool
	without  bool // Gateway API
	open     []net.Conn
	requests map[string]int
	items    map[string][]item // by resource, the oldest first
	version  int               // of the newest
	oldest   int               // that a watch may begin at
	news     chan struct{}     // closed when there is another item
}

// An item is an object, since a version.
type item struct {
	version int
	text    string
}

func newAPI() *api {
	a := &api{conns: make(chan net.Conn), gone: make(chan struct{}), requests: map[string]int{}, items: map[string][]item{}, news: make(chan struct{})}
	for resource, text := range objects {
		a.add(resource, text)
	}
	return a
}

// add adds an object, whose resourceVersion is "0" in text.
func (a *api) add(resource, text string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.version++
	text = strings.Replace(text, `"resourceVersion":"0"`, fmt.Sprintf(`"resourceVersion":"%d"`, a.version), 1)
	a.items[resource] = append(a.items[resource], item{a.version, text})
	close(a.news)
	a.news = make(chan struct{})
}

// cut breaks every connection; nobody answers any more if down is true.
func (a *api) cut(down bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.down = down
	for _, c := range a.open {
		_ = c.Close()
	}
	a.open = nil
}

// again ends down. Watches of before are expired then, or not.
func (a *api) again(expired bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.down = false
	if expired {
		a.version++
		a.oldest = a.version
	}
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
	a.mu.Lock()
	down := a.down
	if !down {
		a.open = append(a.open, theirs)
	}
	a.mu.Unlock()
	if down {
		return nil, &net.OpError{Op: "dial", Net: "tcp", Err: syscall.ECONNREFUSED}
	}
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
	a.mu.Lock()
	without := a.without
	a.mu.Unlock()
	switch {
	case resource == "livez":
	case resource == "culvert" || r.Method != http.MethodGet:
		refuse(http.StatusForbidden, "Forbidden")
	case without && strings.Contains(r.URL.Path, "/gateway.networking.k8s.io/"):
		refuse(http.StatusNotFound, "NotFound")
	case (resource == "serviceimports" || resource == "serviceexports") && !a.has(resource):
		refuse(http.StatusNotFound, "NotFound")
	case q.Get("sendInitialEvents") == "true":
		refuse(http.StatusUnprocessableEntity, "Invalid")
	case q.Get("watch") != "true" && resource == "customresourcedefinitions": // asked for its metadata
		all, version, _ := a.since(resource, 0)
		w.Header().Set("Content-Type", "application/json")
		fmt.Fprintf(w, `{"kind":"PartialObjectMetadataList","apiVersion":"meta.k8s.io/v1","metadata":{"resourceVersion":"%d"},"items":[%s]}`, version, strings.Join(all, ","))
	case q.Get("watch") != "true":
		all, version, _ := a.since(resource, 0)
		w.Header().Set("Content-Type", "application/json")
		fmt.Fprintf(w, `{"metadata":{"resourceVersion":"%d"},"items":[%s]}`, version, strings.Join(all, ","))
	default:
		w.Header().Set("Content-Type", "application/json")
		w.(http.Flusher).Flush()
		from, _ := strconv.Atoi(q.Get("resourceVersion"))
		a.mu.Lock()
		expired := from < a.oldest
		a.mu.Unlock()
		if expired {
			fmt.Fprintln(w, `{"type":"ERROR","object":{"kind":"Status","apiVersion":"v1","metadata":{},"status":"Failure","message":"too old resource version","reason":"Expired","code":410}}`)
			return
		}
		a.watch(w, r, resource, from)
	}
}

// watch tells of what comes after a version, until the client or the server goes.
func (a *api) watch(w http.ResponseWriter, r *http.Request, resource string, from int) {
	for {
		all, version, news := a.since(resource, from)
		if from = version; len(all) > 0 && !a.pause(r.Context()) {
			return
		}
		for _, text := range all {
			fmt.Fprintf(w, "{\"type\":\"ADDED\",\"object\":%s}\n", text)
		}
		w.(http.Flusher).Flush()
		select {
		case <-news:
		case <-r.Context().Done():
			return
		case <-a.gone:
			return
		}
	}
}

// since are the objects that came after a version, up to which one, and what is closed
// when there are more.
func (a *api) since(resource string, from int) (all []string, version int, news chan struct{}) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, i := range a.items[resource] {
		if i.version > from {
			all = append(all, i.text)
		}
	}
	return all, a.version, a.news
}

// objects are what there is, by resource.
var objects = map[string]string{
	"gatewayclasses": `{"metadata":{"name":"culvert","uid":"c","resourceVersion":"0"},"spec":{"controllerName":"culvert.dev/gateway"}}`,
	"gateways":       `{"metadata":{"namespace":"a","name":"edge","uid":"g","resourceVersion":"0"},"spec":{"gatewayClassName":"culvert","listeners":[{"name":"tls","port":443,"protocol":"TLS","tls":{"mode":"Passthrough"}}]}}`,
}

// route is a TLSRoute.
func route(name string) string {
	return fmt.Sprintf(`{"apiVersion":"gateway.networking.k8s.io/v1","kind":"TLSRoute","metadata":{"namespace":"a","name":%[1]q,"uid":%[1]q,"resourceVersion":"0"},`+
		`"spec":{"parentRefs":[{"name":"edge"}],"hostnames":["%[1]s.test"],"rules":[{"backendRefs":[{"name":"web","port":443}]}]}}`, name)
}

// service is a Service that is exposed.
func service(name string) string {
	return fmt.Sprintf(`{"apiVersion":"v1","kind":"Service","metadata":{"namespace":"a","name":%[1]q,"uid":%[1]q,"resourceVersion":"0","annotations":{"culvert.dev/expose":"true"}},`+
		`"spec":{"ports":[{"port":443,"protocol":"TCP"}]}}`, name)
}

// opened is a Gateway whose listeners are all open.
type opened struct{ Gateway }

func (opened) ListenersChanged() <-chan struct{} { return nil }
func (opened) ListenerErrors() map[string]error  { return nil }

func (opened) ClusterSetAddresses(string, string) []netip.Addr { return nil }
func (opened) UseKeys(map[string]*tls.Certificate)             {}
func (opened) PolicyUses() map[string]registry.PolicyUse       { return nil }

// has reports whether a kind is there: its definition is.
func (a *api) has(resource string) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return slices.ContainsFunc(a.items["customresourcedefinitions"], func(i item) bool { return strings.Contains(i.text, `"`+resource+".") })
}

func (a *api) set(hangs bool, latency time.Duration) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.hangs, a.latency = hangs, latency
}

// missing says whether the kinds of Gateway API are not installed.
func (a *api) missing(without bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.without = without
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
// returns the last words of each source. Each of them is told to every one of hear.
func (a *api) begin(t *testing.T, lease Object, log *slog.Logger, hear ...func(registry.Update)) func(source string) registry.Update {
	t.Helper()
	return a.beginOf(t, Config{Cluster: "west", Discovery: &Discovery{Network: "west"}, GatewayAPI: &GatewayAPI{Controller: "culvert.dev/gateway"}, Lease: lease, Log: log}, hear...)
}

// beginOf is begin of a configuration.
func (a *api) beginOf(t *testing.T, cfg Config, hear ...func(registry.Update)) func(source string) registry.Update {
	t.Helper()
	k, err := newOf(cfg, &rest.Config{Host: "http://api.test", Dial: a.dial, QPS: 1000, Burst: 1000})
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
				for _, f := range hear {
					f(u)
				}
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
