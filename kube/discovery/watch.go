package discovery

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"culvert.dev/kube/client"
	"culvert.dev/registry"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/wait"
	apiwatch "k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"
	"k8s.io/utils/clock"
)

// again is how a reflector that failed tries again. client-go's own wait grows to
// half a minute, in which new pods are not found.
var again = wait.Backoff{Duration: 500 * time.Millisecond, Factor: 2, Jitter: 0.5, Steps: 6, Cap: 10 * time.Second}

// doubt is how long a cluster that has suddenly nothing is doubted before it is
// asked again.
const doubt = 2 * time.Second

// patience is how long a Pulse must be without an answer for that to be said.
const patience = 2 * time.Second

// A scope is one resource in one namespace, or in all of them.
type scope struct {
	kind      kind
	resource  schema.GroupResource
	namespace string // "" means all
	optional  bool   // much can be done without it

	narrow func(*metav1.ListOptions) // to what is asked for; nil for everything
	list   lister

	// What run.mu guards.
	synced bool
	failed [2]failure // of list and watch
}

// A failure is why the last request with one verb failed, if it did.
type failure struct {
	err     error
	refused int  // times in a row, for lack of permission
	denied  bool // often enough to be believed
}

// believe is how often in a row a permission must be lacking: an API server that
// has just started knows of no roles for a moment.
const believe = 3

const (
	list  = 0
	watch = 1
)

var verbs = [...]string{"list", "watch"}

func (s *Source) gatewayNamespaces() []string {
	if len(s.GatewayNamespaces) == 0 {
		return []string{DefaultGatewayNamespace}
	}
	return s.GatewayNamespaces
}

// watch starts the reflectors. They end with ctx.
func (r *run) watch(ctx context.Context) {
	c := r.src.Client
	namespaces := r.src.Namespaces
	if len(namespaces) == 0 {
		namespaces = []string{""}
	}
	var all []*cache.Reflector
	add := func(sc *scope, example runtime.Object, lists lister, watches watcher) {
		r.scopes = append(r.scopes, sc)
		all = append(all, r.reflector(sc, example, lists, watches))
	}
	for _, ns := range namespaces {
		services, slices, spaces := c.CoreV1().Services(ns), c.DiscoveryV1().EndpointSlices(ns), c.CoreV1().Namespaces()
		add(&scope{kind: serviceKind, resource: corev1.Resource("services"), namespace: ns}, &corev1.Service{}, anyList(services.List), services.Watch)
		add(&scope{kind: sliceKind, resource: discoveryv1.Resource("endpointslices"), namespace: ns, narrow: func(o *metav1.ListOptions) {
			o.LabelSelector = discoveryv1.LabelServiceName
		}}, &discoveryv1.EndpointSlice{}, anyList(slices.List), slices.Watch)
		add(&scope{kind: namespaceKind, resource: corev1.Resource("namespaces"), namespace: ns, optional: true, narrow: func(o *metav1.ListOptions) {
			if ns != "" { // RBAC can allow that by resourceNames
				o.FieldSelector = metav1.ObjectNameField + "=" + ns
			}
		}}, &corev1.Namespace{}, anyList(spaces.List), spaces.Watch)
	}
	if !r.src.NoNetwork || r.src.Rules.ExternalNames {
		nodes := c.CoreV1().Nodes()
		add(&scope{kind: nodeKind, resource: corev1.Resource("nodes"), optional: true}, &corev1.Node{}, anyList(nodes.List), nodes.Watch)
	}
	for _, reflector := range all { // when all scopes are there: what is complete depends on them
		r.running.Go(func() { keepUp(ctx, reflector) })
	}
	r.running.Go(func() { r.writeEvents(ctx) })
}

type (
	lister  = func(context.Context, metav1.ListOptions) (runtime.Object, error)
	watcher = func(context.Context, metav1.ListOptions) (apiwatch.Interface, error)
)

// anyList gives all lists one type.
func anyList[T runtime.Object](list func(context.Context, metav1.ListOptions) (T, error)) lister {
	return func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) { return list(ctx, o) }
}

// reflector makes the reflector of one scope. What List and Watch return is
// looked at on the way: reflectors try again for as long as it takes, and tell
// nobody.
func (r *run) reflector(sc *scope, example runtime.Object, lists lister, watches watcher) *cache.Reflector {
	sc.list = func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
		if sc.narrow != nil {
			sc.narrow(&o)
		}
		return lists(ctx, o)
	}
	both := cache.ToListWatcherWithWatchListSemantics(&cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			l, err := sc.list(ctx, o)
			r.heard(ctx, sc, list, err)
			return l, err
		},
		WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (apiwatch.Interface, error) {
			if sc.narrow != nil {
				sc.narrow(&o)
			}
			w, err := watches(ctx, o)
			r.heard(ctx, sc, watch, err)
			return w, err
		},
	}, r.src.Client)
	return newReflector(both, example, store{r, sc}, r.src.name()+"/"+sc.resource.Resource)
}

func newReflector(lw cache.ListerWatcher, example runtime.Object, to cache.ReflectorStore, name string) *cache.Reflector {
	backoff := again
	return cache.NewReflectorWithOptions(lw, example, to, cache.ReflectorOptions{Name: name, Backoff: &backoff})
}

// keepUp is Reflector.RunWithContext, but that errors, which have been heard
// already, are not logged by client-go each time, too.
func keepUp(ctx context.Context, r *cache.Reflector) {
	_ = again.DelayWithReset(clock.RealClock{}, 2*time.Minute).Until(ctx, true, true, func(ctx context.Context) (bool, error) {
		_ = r.ListAndWatchWithContext(ctx)
		return false, nil
	})
}

// heard notes how a request went.
func (r *run) heard(ctx context.Context, sc *scope, verb int, err error) {
	if ctx.Err() != nil || err != nil && (errors.Is(err, context.Canceled) || apierrors.IsResourceExpired(err) || apierrors.IsGone(err) || verb == watch && apierrors.IsInvalid(err)) {
		// It says nothing about the server: what has expired is listed again, and so is
		// what an older one can't stream as a list.
		return
	}
	var f failure
	denial := ""
	if err != nil {
		f.err = fmt.Errorf("%s %s: %w", verbs[verb], sc, err)
	}
	r.mu.Lock()
	before := sc.failed
	if text, denied := client.Denied(verbs[verb], sc.resource, err); denied {
		f.refused = before[verb].refused + 1
		f.denied = f.refused >= believe
		denial = text
	}
	sc.failed[verb] = f
	if err == nil && verb == watch {
		sc.failed[list] = f // all is well: it need not be listed again, to see that
	}
	changed := (before[verb].err == nil) != (err == nil) || before[verb].denied != f.denied || before[verb].refused == 0 && f.refused > 0 || before[list].err != nil && sc.failed[list].err == nil
	if blind := r.blindNow(); blind != r.blind {
		r.blind = blind
		r.touchAll()
	}
	r.mu.Unlock()
	if f.denied && !before[verb].denied {
		r.log.Error("discovery: "+denial, "verb", verbs[verb], "resource", sc.resource.String(), "namespace", orAll(sc.namespace), "without", sc.loss())
	}
	if changed {
		r.kick()
	}
}

func orAll(namespace string) string {
	if namespace == "" {
		return "(all)"
	}
	return namespace
}

func (sc *scope) String() string {
	if sc.namespace == "" {
		return sc.resource.String()
	}
	return sc.resource.String() + " in namespace " + sc.namespace
}

// loss says what is not found out without a permission.
func (sc *scope) loss() string {
	switch sc.resource.Resource {
	case "nodes":
		return "gateways at the ports of nodes"
	case "namespaces":
		return "what annotations of namespaces say"
	}
	return "services"
}

// blindNow reports whether what is said of a namespace is not known.
func (r *run) blindNow() bool {
	for _, sc := range r.scopes {
		if sc.resource.Resource == "namespaces" && sc.failed[list].denied && !sc.synced {
			return true
		}
	}
	return false
}

// state returns whether everything has been listed that can be, and why what is
// known may be old.
func (r *run) state() (complete bool, lost error) {
	complete, lost = true, r.silent
	could := map[schema.GroupResource]bool{} // those that can be had in a namespace at least
	for _, sc := range r.scopes {
		denied := sc.failed[list].denied
		complete = complete && (sc.synced || denied)
		for _, f := range sc.failed {
			if f.err != nil && f.refused == 0 && lost == nil {
				lost = f.err
			}
		}
		could[sc.resource] = could[sc.resource] || !denied
	}
	for _, sc := range r.scopes {
		if !sc.optional && !could[sc.resource] {
			complete = complete && sc.synced
			if lost == nil {
				lost = sc.failed[list].err
			}
		}
	}
	return complete, lost
}

// feel notes whether the API server answers at all, until ctx is done.
func (r *run) feel(ctx context.Context) {
	for {
		turn, err := r.src.Pulse.State()
		if err != nil {
			select {
			case <-ctx.Done():
				return
			case <-turn:
				continue
			case <-time.After(patience):
				err = fmt.Errorf("the API server does not answer: %w", err)
			}
		}
		r.mu.Lock()
		r.silent = err
		r.mu.Unlock()
		r.kick()
		select {
		case <-ctx.Done():
			return
		case <-turn:
		}
	}
}

// loop sends updates until ctx is done.
func (r *run) loop(ctx context.Context, updates chan<- registry.Update) error {
	pause := time.NewTimer(atMost)
	defer pause.Stop()
	var (
		last   registry.Snapshot
		begun  bool  // an Update without an Err was sent
		lost   error // was sent
		before [2]int
	)
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-r.signal:
		case <-r.src.changed:
		}
		complete, modified, count, why := r.settle()
		r.say()
		if begun && modified && ((before[0] > 0 && count[0] == 0) || (before[1] > 0 && count[1] == 0)) && why == nil {
			if err := r.reallyEmpty(ctx, count); err != nil {
				r.log.Warn("API server returned empty lists; keeping the last snapshot until they are confirmed", "err", err)
				time.AfterFunc(doubt, r.kick)
				modified = false
				why = err
			}
		}
		u := registry.Update{Source: r.src.name()}
		switch {
		case why != nil && lost == nil:
			lost, u.Err = why, why
			r.log.Warn("API server is unreachable; keeping the last snapshot", "err", why)
		case why != nil || !complete:
			continue
		case modified || !begun || lost != nil:
			if modified || !begun {
				last, before = r.take(), count
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
		r.src.became(u.Err)
		pause.Reset(atMost)
		select {
		case <-pause.C:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// settle takes in all that has changed.
func (r *run) settle() (complete, modified bool, count [2]int, lost error) {
	s := r.src
	s.mu.Lock()
	exports, set, stale := s.exports, s.clusterSet(), s.stale
	waits := s.AwaitExports && !s.told
	s.stale = false
	s.mu.Unlock()

	r.mu.Lock()
	defer r.mu.Unlock()
	if stale {
		r.exports, r.clusterSet = exports, set
		r.touchAll()
	}
	complete, lost = r.state()
	complete = complete && !waits
	if complete {
		r.convert()
	}
	return complete, r.modified, [2]int{len(r.services), len(r.owners)}, lost
}

// take returns what is to be sent.
func (r *run) take() registry.Snapshot {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.modified = false
	return r.snapshot()
}

// reallyEmpty asks again whether there are no Services, or no EndpointSlices.
func (r *run) reallyEmpty(ctx context.Context, count [2]int) error {
	for _, sc := range r.scopes {
		if sc.resource.Resource == "services" && count[0] > 0 || sc.resource.Resource == "endpointslices" && count[1] > 0 || sc.optional {
			continue
		}
		ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
		l, err := sc.list(ctx, metav1.ListOptions{Limit: 1})
		cancel()
		if err != nil {
			return fmt.Errorf("list %s: %w", sc, err)
		}
		if meta.LenList(l) > 0 {
			return fmt.Errorf("list %s: there are some after all", sc)
		}
	}
	return nil
}

// say logs what is new among what is refused.
func (r *run) say() {
	r.mu.Lock()
	problems := r.toSay
	r.toSay = nil
	r.mu.Unlock()
	for _, p := range problems {
		args := []any{slog.String("object", p.object())}
		if p.Key != "" {
			args = append(args, slog.String("annotation", prefix+p.Key), slog.String("value", p.Value))
		}
		r.log.Warn("discovery: "+p.Text, args...)
		r.eventOf(p)
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
