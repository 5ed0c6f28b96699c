package gatewayapi

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"reflect"
	"sync"
	"sync/atomic"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/rest"
	gwclient "sigs.k8s.io/gateway-api/pkg/client/clientset/versioned"
	"sigs.k8s.io/gateway-api/pkg/consts"
	mcsclient "sigs.k8s.io/mcs-api/pkg/client/clientset/versioned"

	"culvert.dev/internal/background"
	"culvert.dev/internal/kube/client"
	"culvert.dev/internal/kube/endpoints"
	"culvert.dev/internal/kube/watch"
	"culvert.dev/registry"
)

// A Plane opens the listeners of the table.
type Plane interface {
	// ListenerErrors has the listeners that have been tried, by
	// registry.Listener.Name: nil is open, and an error why it is not.
	ListenerErrors() map[string]error
	// Changed is sent to when that has changed.
	Changed() <-chan struct{}
}

// A Config has the settings of a Controller. Only REST is required.
type Config struct {
	Settings

	REST        *rest.Config       // of the API server: see internal/kube/client
	Pulse       *client.Pulse      // that REST is wrapped by; nil makes one, which sends no probes
	Slices      *endpoints.Store   // the EndpointSlices of Namespaces, with those of ServiceImports; whoever makes it runs it. Nil makes one
	Definitions *watch.Definitions // that report when a CRD changes; whoever makes them runs them. Nil: that is noticed within minutes

	Source string // of the registry's; "" means "gateway-api"
	Plane  Plane  // nil means that all listeners open at once

	// UseKeys is called with the certificates of the Secrets that Gateways use, by the names
	// that Snapshots have for them, whenever they change: before a Snapshot has a name that is
	// new. It may be nil.
	UseKeys func(map[string]*tls.Certificate)

	Leads func() bool  // whether this replica is the one that writes: see client.Lease; nil means that it is
	Log   *slog.Logger // nil discards
}

// A Controller is a registry.Source, and writes the status of what it reads.
type Controller struct {
	cfg         Config
	clients     clients
	pulse       *client.Pulse // nil in tests
	bundle      func(context.Context) (string, error)
	memo        *memo
	current     atomic.Pointer[translated] // nil before the first
	unreachable atomic.Pointer[outage]     // nil while the API server answers
	unusable    atomic.Pointer[outage]     // nil while what it answers can be used
}

// New makes a Controller. It sends no request yet.
func New(cfg Config) (*Controller, error) {
	c := &Controller{cfg: cfg, memo: newMemo(), pulse: cfg.Pulse}
	if cfg.REST == nil {
		return nil, errors.New("gatewayapi: no API server")
	}
	rc := rest.CopyConfig(cfg.REST)
	if c.pulse == nil {
		c.pulse = client.NewPulse()
		rc.Wrap(c.pulse.Wrap)
	}
	c.clients.pulse, c.clients.definitions = c.pulse, cfg.Definitions
	var err error
	if c.clients.core, err = kubernetes.NewForConfig(client.Protobuf(rc)); err != nil {
		return nil, fmt.Errorf("gatewayapi: %w", err)
	}
	if c.clients.gw, err = gwclient.NewForConfig(rc); err != nil {
		return nil, fmt.Errorf("gatewayapi: %w", err)
	}
	if c.clients.mcs, err = mcsclient.NewForConfig(rc); err != nil {
		return nil, fmt.Errorf("gatewayapi: %w", err)
	}
	if c.clients.older, err = newOlder(rc); err != nil {
		return nil, err
	}
	c.clients.versions = newVersions()
	crds, err := metadata.NewForConfig(rc)
	if err != nil {
		return nil, fmt.Errorf("gatewayapi: %w", err)
	}
	c.bundle = func(ctx context.Context) (string, error) {
		crd, err := crds.Resource(schema.GroupVersionResource{Group: "apiextensions.k8s.io", Version: "v1", Resource: "customresourcedefinitions"}).
			Get(ctx, "gatewayclasses.gateway.networking.k8s.io", metav1.GetOptions{})
		if err != nil {
			return "", err
		}
		return crd.Annotations[consts.BundleVersionAnnotation], nil
	}
	return c, nil
}

// Intervals and limits.
const (
	debounce          = 10 * time.Millisecond  // from the first change, for others that belong to it
	translateInterval = 100 * time.Millisecond // from one time to the next
	requestTimeout    = 10 * time.Second       // for one request
)

// Run implements registry.Source: it sends an Update at first and at each change, until ctx is done.
func (c *Controller) Run(ctx context.Context, updates chan<- registry.Update) error {
	log := c.cfg.Log
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	r := &run{Controller: c, log: log, updates: updates, changed: watch.NewSignal()}
	clients := c.clients
	clients.versionChanged = r.logVersion
	r.store = newStore(clients, c.cfg.Settings, c.cfg.Slices, log, r.dirty)
	r.writer = newWriter(c.clients, r.store, c.cfg, log)
	r.refusalLog = newRefusalLog(log)
	r.alarm = time.NewTimer(0)
	defer func() { r.alarm.Stop() }()
	ctx, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	wg.Go(func() { r.store.run(ctx) })
	wg.Go(func() { r.writer.run(ctx) })
	if c.pulse != nil {
		wg.Go(func() { watch.Reachability(ctx, c.pulse, func(err error) { r.reachable(ctx, err) }) })
	}
	return r.loop(ctx)
}

// A run is one call of Run.
type run struct {
	*Controller
	log        *slog.Logger
	store      *store
	writer     *writer
	refusalLog *refusalLog
	updates    chan<- registry.Update
	changed    watch.Signal

	version string                      // of the CRDs
	keys    map[string]*tls.Certificate // that UseKeys was told
	alarm   *time.Timer                 // when the time alone is a change

	mu   sync.Mutex         // guards the rest
	last *registry.Snapshot // that was sent
	why  error              // it is not as things are, as was sent; nil if it is

	loggedClasses client.Once       // of what was said of classes
	classes       map[string]string // of which something is wrong
}

// dirty requests a translation.
func (r *run) dirty() { r.changed.Notify() }

func (r *run) source() string {
	if r.cfg.Source != "" {
		return r.cfg.Source
	}
	return "gateway-api"
}

// findVersion asks for the version of the CRDs, which is only reported.
func (r *run) findVersion(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	var err error
	if r.version, err = r.bundle(ctx); err != nil {
		r.log.Debug("unknown version of the Gateway API CRDs", "err", err)
	}
}

// loop translates whenever something has changed.
func (r *run) loop(ctx context.Context) error {
	for !r.store.known() {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-r.changed:
		}
	}
	if r.bundle != nil {
		r.findVersion(ctx)
	}
	var plane <-chan struct{}
	if r.cfg.Plane != nil {
		plane = r.cfg.Plane.Changed()
	}
	redefined := r.redefined()
	r.dirty()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-redefined:
			redefined = r.redefined()
			if r.bundle != nil {
				r.findVersion(ctx)
			}
		case <-plane:
		case <-r.changed:
		}
		if !watch.Sleep(ctx, debounce) {
			return ctx.Err()
		}
		select { // what came meanwhile is in this one
		case <-r.changed:
		default:
		}
		if err := r.rebuild(ctx); err != nil {
			return err
		}
		if !watch.Sleep(ctx, translateInterval-debounce) {
			return ctx.Err()
		}
	}
}

// rebuild translates, sends the snapshot if it has changed, and has status written.
func (r *run) rebuild(ctx context.Context) error {
	if err := r.store.unusable(); err != nil {
		return r.stale(ctx, err)
	}
	r.store.translating.Store(true)
	r.store.ownWrites.translate()
	w := r.store.inputs()
	w.Settings, w.Bundle, w.memo, w.Now = r.cfg.Settings, r.version, r.memo, time.Now()
	w.Versions = r.clients.versions.unusual()
	if r.cfg.Plane != nil {
		if w.Plane = maps.Clone(r.cfg.Plane.ListenerErrors()); w.Plane == nil {
			w.Plane = map[string]error{}
		}
	}
	var res *Result
	background.Do(func() { res = Translate(w) })
	r.logClasses(res)
	r.store.references.Store(&res.References)
	r.store.translating.Store(false)
	conflicting := r.writer.statusConflicts.refusals(cmp.Or(w.Controller, DefaultController))
	r.current.Store(&translated{w, res, conflicting})

	if r.cfg.UseKeys != nil && (r.keys == nil || !maps.Equal(r.keys, res.Keys)) {
		r.keys = res.Keys
		r.cfg.UseKeys(res.Keys)
	}
	if err := r.publish(ctx, &res.Snapshot); err != nil {
		return err
	}
	r.alarm.Stop()
	if !res.Until.IsZero() {
		r.alarm = time.AfterFunc(time.Until(res.Until), r.dirty)
	}
	r.writer.setWanted(res, w)
	r.refusalLog.update(append(suppressed(refusals(res), w.Plane), conflicting...), time.Now())
	return nil
}

// publish sends a snapshot, unless it equals the last one and that was not reported as stale.
func (r *run) publish(ctx context.Context, next *registry.Snapshot) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.last != nil && reflect.DeepEqual(r.last, next) {
		if r.why == nil {
			return nil
		}
	} else {
		r.last = next
	}
	if r.why != nil {
		r.log.Info("Kubernetes state is readable again")
	}
	r.why = nil
	r.unusable.Store(nil)
	return r.send(ctx, registry.Update{Source: r.source(), Snapshot: *r.last})
}

// stale reports once why the store cannot be used. The last snapshot stays in force, and status is
// not written.
func (r *run) stale(ctx context.Context, why error) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.why != nil && r.why.Error() == why.Error() {
		return nil
	}
	if r.why == nil {
		r.unusable.Store(&outage{time.Now().UTC(), why})
	} else {
		r.unusable.Store(&outage{r.unusable.Load().since, why})
	}
	r.why = why
	r.log.Warn("Kubernetes state cannot be used; serving the last known Gateways", "err", why)
	return r.send(ctx, registry.Update{Source: r.source(), Err: why})
}

// resend sends the last Update again.
func (r *run) resend(ctx context.Context) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case r.why != nil:
		return r.send(ctx, registry.Update{Source: r.source(), Err: r.why})
	case r.last == nil:
		return nil // the first one is yet to come
	}
	return r.send(ctx, registry.Update{Source: r.source(), Snapshot: *r.last})
}

func (r *run) send(ctx context.Context, u registry.Update) error {
	select {
	case r.updates <- u:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// reachable reports that the API server does not answer, or with nil that it does again. The last
// snapshot stays in force meanwhile.
func (r *run) reachable(ctx context.Context, err error) {
	if err == nil {
		r.unreachable.Store(nil)
		r.log.Info("API server is reachable again")
		_ = r.resend(ctx) // ctx may be done
		return
	}
	r.unreachable.Store(&outage{time.Now().UTC(), err})
	r.log.Warn("API server is unreachable; serving the last known Gateways", "err", err)
	_ = r.send(ctx, registry.Update{Source: r.source(), Err: fmt.Errorf("the Kubernetes API server does not answer: %w", err)})
}
