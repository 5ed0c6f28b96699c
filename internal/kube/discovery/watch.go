package discovery

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"culvert.dev/internal/background"
	"culvert.dev/internal/kube/endpoints"
	"culvert.dev/internal/kube/watch"
	"culvert.dev/registry"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/tools/cache"
)

// A scope is the watch of one resource in one namespace, or in all of them.
type scope struct {
	*watch.Watch
	resource string
	optional bool // discovery works without it, with less
}

func (s *Source) gatewayNamespaces() []string {
	if len(s.GatewayNamespaces) == 0 {
		return []string{DefaultGatewayNamespace}
	}
	return s.GatewayNamespaces
}

// watch starts the watches. They end with ctx.
func (r *run) watch(ctx context.Context) {
	c := r.src.Client.CoreV1()
	namespaces := r.src.Namespaces
	if len(namespaces) == 0 {
		namespaces = []string{metav1.NamespaceAll}
	}
	// without says, for the log, what is missing if the resource may not be read.
	add := func(k kind, resource schema.GroupResource, namespace string, object runtime.Object, source *cache.ListWatch, optional bool, without string) {
		r.scopes = append(r.scopes, &scope{resource: resource.Resource, optional: optional, Watch: watch.New(watch.Config{
			Name: r.src.name(), Resource: resource, Namespace: namespace, Object: object, Source: source, Client: r.src.Client,
			Store: store{r, k}, Pulse: r.src.Pulse, OnChange: r.onState, Without: without, Log: r.log,
		})})
	}
	r.mu.Lock()
	for _, ns := range namespaces {
		add(serviceKind, corev1.Resource("services"), ns, &corev1.Service{}, watch.Source(c.Services(ns), nil), false, "services")
		itself := func(o *metav1.ListOptions) {
			if ns != metav1.NamespaceAll { // RBAC can allow this with resourceNames
				o.FieldSelector = metav1.ObjectNameField + "=" + ns
			}
		}
		add(namespaceKind, corev1.Resource("namespaces"), ns, &corev1.Namespace{}, watch.Source(c.Namespaces(), itself), true, "what annotations of namespaces say")
	}
	if !r.src.NoNetwork || r.src.Rules.ExternalNames {
		add(nodeKind, corev1.Resource("nodes"), metav1.NamespaceAll, &corev1.Node{}, watch.Source(c.Nodes(), nil), true, "gateways at the ports of nodes")
	}
	own := r.scopes
	for _, sc := range r.slices.Scopes() {
		r.scopes = append(r.scopes, &scope{resource: "endpointslices", Watch: sc.Watch})
	}
	r.mu.Unlock()
	end := r.slices.Use(&endpoints.User{Changed: r.slicesChanged, StateChanged: func(_, _ watch.State) { r.changed.Notify() }})
	r.running.Go(func() {
		<-ctx.Done()
		end()
	})
	// They start once all are in scopes, because state looks at all of them.
	for _, sc := range own {
		r.running.Go(func() { sc.Run(ctx) })
	}
	if r.slices != r.src.Slices {
		r.running.Go(func() { r.slices.Run(ctx) })
	}
	if r.src.Pulse != nil {
		r.running.Go(func() { watch.Reachability(ctx, r.src.Pulse, r.reachable) })
	}
	r.running.Go(func() { r.writeEvents(ctx) })
}

// reachable records that the API server does not answer. A nil error records that it does again.
func (r *run) reachable(err error) {
	if err != nil {
		err = fmt.Errorf("the API server does not answer: %w", err)
	}
	r.mu.Lock()
	r.silent = err
	r.mu.Unlock()
	r.changed.Notify()
}

// onState is called when the state of a watch has changed.
func (r *run) onState(_, _ watch.State) {
	r.mu.Lock()
	if namespacesUnknown := r.namespacesUnread(); namespacesUnknown != r.namespacesUnknown {
		r.namespacesUnknown = namespacesUnknown
		r.touchAll()
	}
	r.mu.Unlock()
	r.changed.Notify()
}

// namespacesUnread reports whether the annotations of any namespace are unknown.
func (r *run) namespacesUnread() bool {
	for _, sc := range r.scopes {
		if s := sc.State(); sc.resource == "namespaces" && s.Denied != "" && !s.Synced {
			return true
		}
	}
	return false
}

// state returns whether all that can be listed has been listed, and why it may be out of date.
func (r *run) state() (complete bool, lost error) {
	complete, lost = true, r.silent
	readable := map[string]bool{} // resources, in at least one namespace
	denied := map[string]string{}
	for _, sc := range r.scopes {
		s := sc.State()
		complete = complete && (s.Synced || s.Denied != "")
		if lost == nil {
			lost = cmp.Or(s.Err, s.Unconfirmed)
		}
		readable[sc.resource] = readable[sc.resource] || s.Denied == ""
		denied[sc.resource] = s.Denied
	}
	for _, sc := range r.scopes {
		if !sc.optional && !readable[sc.resource] {
			complete = complete && sc.State().Synced
			if lost == nil {
				lost = errors.New(denied[sc.resource])
			}
		}
	}
	return complete, lost
}

// loop sends updates until ctx is done.
func (r *run) loop(ctx context.Context, updates chan<- registry.Update) error {
	pause := time.NewTimer(updateInterval)
	defer pause.Stop()
	var (
		last  registry.Snapshot
		begun bool  // an Update without an Err was sent
		lost  error // was sent
	)
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-r.changed:
		case <-r.src.changed:
		}
		complete, modified, why := r.settle()
		r.logProblems()
		u := registry.Update{Source: r.src.name()}
		switch {
		case why != nil && lost == nil:
			lost, u.Err = why, why
			r.log.Warn("API server is unreachable; keeping the last snapshot", "err", why)
		case why != nil || !complete:
			continue
		case modified || !begun || lost != nil:
			if modified || !begun {
				last = r.take()
			}
			if lost != nil {
				r.log.Info("API server is reachable again")
			}
			begun, lost = true, nil
			u.Snapshot = last
		default:
			continue
		}
		select {
		case updates <- u:
		case <-ctx.Done():
			return ctx.Err()
		}
		r.src.setLost(u.Err)
		pause.Reset(updateInterval)
		select {
		case <-pause.C:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// settle converts everything that has changed.
func (r *run) settle() (complete, modified bool, lost error) {
	s := r.src
	s.mu.Lock()
	exports, set, stale := s.exports, s.clusterSet(), s.stale
	waits := s.AwaitExports && !s.exportsKnown
	addresses, readdressed := s.addresses, s.readdressed
	s.stale, s.readdressed = false, false
	s.mu.Unlock()

	r.mu.Lock()
	defer r.mu.Unlock()
	if readdressed {
		r.addresses, r.modified = addresses, true
	}
	if stale {
		r.exports, r.clusterSet = exports, set
		r.touchAll()
	}
	complete, lost = r.state()
	complete = complete && !waits
	if complete {
		background.Do(r.convert)
	}
	return complete, r.modified, lost
}

// take returns the snapshot to send.
func (r *run) take() registry.Snapshot {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.modified = false
	return r.snapshot()
}

// logProblems logs the new problems.
func (r *run) logProblems() {
	r.mu.Lock()
	problems := r.unlogged
	r.unlogged = nil
	r.mu.Unlock()
	for _, p := range problems {
		args := []any{slog.String("object", p.object())}
		if p.Key != "" {
			args = append(args, slog.String("annotation", prefix+p.Key), slog.String("value", p.Value))
		}
		r.log.Warn("Kubernetes object refused", append(args, "why", p.Text)...)
		r.queueEvent(p)
	}
}

func (p Problem) object() string {
	if p.Name == "" {
		return p.Kind
	}
	if p.Namespace == "" {
		return p.Kind + " " + p.Name
	}
	return p.Kind + " " + p.Namespace + "/" + p.Name
}
