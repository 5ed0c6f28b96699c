package watch

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	apiwatch "k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"
	"k8s.io/utils/clock"

	"culvert.dev/internal/kube/client"
)

// retryBackoff is how a failed list or watch is retried. client-go's own pauses grow to half a
// minute, in which new pods are not found.
var retryBackoff = wait.Backoff{Duration: 500 * time.Millisecond, Factor: 2, Jitter: 0.5, Steps: 6, Cap: 10 * time.Second}

// retryReset is how long a watch must have lasted for the pauses to begin at the shortest again.
const retryReset = 2 * time.Minute

// minDenials is how many answers in a row must deny something for it to be believed: an API server
// that has just started knows no roles for a moment.
const minDenials = 3

// A Config says what a Watch reads. Resource, Object, Source and Store are needed.
type Config struct {
	Name      string // of the watch in client-go's debug log
	Resource  schema.GroupResource
	Namespace string           // "" means all namespaces
	Object    runtime.Object   // an empty object of the resource's type
	Source    *cache.ListWatch // see Source
	Client    any              // the clientset of Source; fake ones cannot stream lists, and say so

	Store Store
	// Transform is applied to objects before they reach the Store, to drop what is not used.
	// Streamed lists pass it twice. It may be nil.
	Transform cache.TransformFunc

	Pulse       *client.Pulse // that the client's transport is wrapped by; nil where nobody knows whether the API server answers
	Definitions *Definitions  // nil: a resource type that is installed late is found within minutes

	// OnChange is called when State has changed; it must not block. It may be nil.
	OnChange func(before, after State)

	Optional bool   // a missing permission or resource type is nothing to warn of
	Without  string // what does not work without the resource, for the log; "" leaves that out
	Log      *slog.Logger
}

// A State says how far the objects in a Watch's Store can be trusted.
type State struct {
	Synced bool // the objects have been listed

	// Denied says why they cannot be listed, as answers have confirmed: a permission or the
	// resource type is missing. "" means that they can, or that this is not known yet.
	Denied  string
	Missing bool // the API server has no such resource type, as the last conclusive answer said

	Err         error // why the last request failed, unless for a reason above
	Unconfirmed error // why it is not believed that all objects are gone, as a watch or a list said
}

// Known reports whether the objects have been listed, or cannot be.
func (s State) Known() bool { return s.Synced || s.Missing || s.Denied != "" }

// Forbidden reports whether they have never been listed for lack of a permission.
func (s State) Forbidden() bool { return s.Denied != "" && !s.Missing && !s.Synced }

// EqualButErr reports whether s and o say the same, apart from Err: for those to whom the Pulse says
// all that they need to know of failures.
func (s State) EqualButErr(o State) bool {
	return s.Synced == o.Synced && s.Denied == o.Denied && s.Missing == o.Missing && text(s.Unconfirmed) == text(o.Unconfirmed)
}

// A Watch keeps a Store up to date with the objects of one resource, in one namespace or in all.
type Watch struct {
	cfg       Config
	reflector *cache.Reflector
	suspect   Signal // all objects have vanished

	storing  sync.Mutex // guards the next two; held while the Store is called
	names    map[types.NamespacedName]struct{}
	vanished bool // all of them, which is not confirmed

	mu          sync.Mutex // guards the rest
	synced      bool
	results     map[string]result // by verb
	unconfirmed error
	logged      client.Once
}

// A result is that of the last requests with one verb.
type result struct {
	err     error
	denials int    // in a row
	denied  string // why, once there were enough of them
	missing bool
}

const (
	list  = "list"
	watch = "watch"
)

// New makes a Watch, which asks nothing before Run.
func New(cfg Config) *Watch {
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if cfg.OnChange == nil {
		cfg.OnChange = func(State, State) {}
	}
	w := &Watch{cfg: cfg, suspect: NewSignal(), names: map[types.NamespacedName]struct{}{}, results: map[string]result{}}
	observed := &cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			l, err := cfg.Source.ListWithContextFunc(ctx, o)
			w.observe(ctx, list, err)
			return l, err
		},
		WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (apiwatch.Interface, error) {
			events, err := cfg.Source.WatchFuncWithContext(ctx, o)
			w.observe(ctx, watch, err)
			return events, err
		},
	}
	backoff := retryBackoff
	w.reflector = cache.NewReflectorWithOptions(
		cache.ToListWatcherWithWatchListSemantics(whenDefined(whenAnswered(cfg.Pulse, observed), cfg.Definitions, cfg.Resource), cfg.Client),
		cfg.Object, store{w}, cache.ReflectorOptions{Name: cfg.Name + "/" + cfg.Resource.Resource, Backoff: &backoff})
	return w
}

// Run watches until ctx is done.
func (w *Watch) Run(ctx context.Context) {
	var running sync.WaitGroup
	defer running.Wait()
	running.Go(func() { w.confirm(ctx) })
	// Reflector.RunWithContext would log each failure, which has been observed already.
	_ = retryBackoff.DelayWithReset(clock.RealClock{}, retryReset).Until(ctx, true, true, func(ctx context.Context) (bool, error) {
		_ = w.reflector.ListAndWatchWithContext(ctx)
		return false, nil
	})
}

// State returns how far the objects in the Store can be trusted.
func (w *Watch) State() State {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.state()
}

// state is State with mu held.
func (w *Watch) state() State {
	s := State{Synced: w.synced, Denied: w.results[list].denied, Missing: w.results[list].missing, Err: w.results[list].err, Unconfirmed: w.unconfirmed}
	if s.Err == nil {
		s.Err = w.results[watch].err
	}
	return s
}

// change changes the state, and calls OnChange if that made a difference.
func (w *Watch) change(f func()) {
	w.mu.Lock()
	before := w.state()
	f()
	after := w.state()
	w.mu.Unlock()
	if !before.EqualButErr(after) || (before.Err == nil) != (after.Err == nil) {
		w.cfg.OnChange(before, after)
	}
}

func text(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

// observe records the answer to a request.
func (w *Watch) observe(ctx context.Context, verb string, err error) {
	if err != nil && (ctx.Err() != nil || errors.Is(err, context.Canceled) || apierrors.IsResourceExpired(err) || apierrors.IsGone(err) || verb == watch && apierrors.IsInvalid(err)) {
		// It says nothing about the server: what has expired is listed again, and so is what an
		// older server cannot stream as a list.
		return
	}
	why, denied := client.Denied(verb, w.cfg.Resource, err)
	denied = denied && !apierrors.IsUnauthorized(err) // a server that does not know us yet may in a moment
	w.change(func() {
		r := w.results[verb]
		switch {
		case err == nil:
			r = result{}
			if verb == watch {
				w.results[list] = result{} // it need not be listed again to see that it can be
			}
			w.logged.New(verb, "")
		case denied:
			r.err, r.missing = nil, apierrors.IsNotFound(err)
			if r.denials++; r.denials >= minDenials {
				// An API server that has just started adds what it could not read of its roles.
				r.denied, _, _ = strings.Cut(why, ": RBAC: ")
				w.logDenial(ctx, verb, r.denied)
			}
		default:
			r.err = fmt.Errorf("%s %s: %w", verb, w, err)
			if r.denials < minDenials {
				r.denials = 0
			}
		}
		w.results[verb] = r
	})
}

// logDenial logs once that something may not be read. mu is held.
func (w *Watch) logDenial(ctx context.Context, verb, why string) {
	if !w.logged.New(verb, why) {
		return
	}
	level := slog.LevelWarn
	if w.cfg.Optional {
		level = slog.LevelInfo
	}
	args := []any{"verb", verb, "resource", w.cfg.Resource.String(), "namespace", namespaceName(w.cfg.Namespace), "reason", why}
	if w.cfg.Without != "" {
		args = append(args, "without", w.cfg.Without)
	}
	w.cfg.Log.Log(ctx, level, "cannot read a Kubernetes resource", args...)
}

func namespaceName(namespace string) string {
	if namespace == metav1.NamespaceAll {
		return "(all)"
	}
	return namespace
}

// String returns the resource, and the namespace if the watch is of one.
func (w *Watch) String() string {
	if w.cfg.Namespace == metav1.NamespaceAll {
		return w.cfg.Resource.String()
	}
	return w.cfg.Resource.String() + " of namespace " + w.cfg.Namespace
}

// Lists is what typed clients have in common.
type Lists[L runtime.Object] interface {
	List(context.Context, metav1.ListOptions) (L, error)
	Watch(context.Context, metav1.ListOptions) (apiwatch.Interface, error)
}

// Source returns what a Watch reads from a typed client. narrow, which may be nil, restricts what
// is asked for.
func Source[L runtime.Object](c Lists[L], narrow func(*metav1.ListOptions)) *cache.ListWatch {
	if narrow == nil {
		narrow = func(*metav1.ListOptions) {}
	}
	return &cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			narrow(&o)
			return c.List(ctx, o)
		},
		WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (apiwatch.Interface, error) {
			narrow(&o)
			return c.Watch(ctx, o)
		},
	}
}
