package gatewayapi

import (
	"cmp"
	"context"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"

	"culvert.dev/internal/kube/client"
	"culvert.dev/internal/kube/watch"
)

// fieldManager is the name of culvert in managedFields.
const fieldManager = "culvert"

// Limits and intervals of writing.
const (
	maxConcurrentWrites = 8                // objects that are written at once
	maxConflictRetries  = 5                // attempts to write an object that others write, too
	firstRetry          = time.Second      // pause after a failure, doubled each time
	lastRetry           = 30 * time.Second // the longest pause
	leaderInterval      = time.Second      // between checks whether this replica leads
	minRound            = time.Second      // how long a round of writes goes on although there is a newer Result
)

// A writer updates the status of objects to that of the last Result. It writes only the objects whose
// status differs, so that without changes it sends no requests.
type writer struct {
	clients
	store           *store
	cfg             Config
	leads           func() bool
	log             *slog.Logger
	said            client.Once
	events          watch.Events
	statusConflicts statusConflicts

	mu       sync.Mutex // guards the rest
	result   *Result
	inputs   *Inputs
	fresh    chan struct{}                   // closed with the next result
	accounts map[types.NamespacedName]string // those known to exist, by Gateway: see accounts.go
}

func newWriter(c clients, s *store, cfg Config, log *slog.Logger) *writer {
	leads := cfg.Leads
	if leads == nil {
		leads = func() bool { return true }
	}
	return &writer{
		clients: c, store: s, cfg: cfg, leads: leads, log: log, fresh: make(chan struct{}), accounts: map[types.NamespacedName]string{},
		events: watch.Events{Client: c.core, Controller: cmp.Or(cfg.Controller, DefaultController), Log: log},
	}
}

// setWanted sets the status to write.
func (w *writer) setWanted(res *Result, inputs *Inputs) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.result, w.inputs = res, inputs
	close(w.fresh)
	w.fresh = make(chan struct{})
}

func (w *writer) latest() (*Result, *Inputs, <-chan struct{}) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.result, w.inputs, w.fresh
}

// run writes until ctx is done.
func (w *writer) run(ctx context.Context) {
	retry := firstRetry
	for ctx.Err() == nil {
		res, inputs, fresh := w.latest()
		var again <-chan time.Time
		if !w.leads() {
			again = time.After(leaderInterval)
		} else if res != nil {
			w.store.ownWrites.begin()
			tasks, later := w.tasks(res, inputs)
			failed := w.writeAll(ctx, tasks, fresh)
			if !closed(fresh) && w.store.ownWrites.end() {
				w.store.dirty()
			}
			if failed {
				later = earlier(later, time.Now().Add(retry))
				retry = min(2*retry, lastRetry)
			} else {
				retry = firstRetry
			}
			if !later.IsZero() {
				again = time.After(time.Until(later))
			}
		}
		select {
		case <-ctx.Done():
		case <-fresh:
		case <-again:
		}
	}
}

// earlier returns the earlier of two times; zero is none.
func earlier(a, b time.Time) time.Time {
	if a.IsZero() || !b.IsZero() && b.Before(a) {
		return b
	}
	return a
}

// A task writes one object. Its errors are made by client.Asked.
type task struct {
	resource string // of the object
	name     types.NamespacedName
	do       func(context.Context) error
}

// writeAll runs tasks, several at once. After minRound it starts no more of them if there is a newer
// Result. It reports whether any has failed and should be retried.
func (w *writer) writeAll(ctx context.Context, tasks []task, fresh <-chan struct{}) (failed bool) {
	var wg sync.WaitGroup
	var mu sync.Mutex
	todo := make(chan task)
	for range min(maxConcurrentWrites, len(tasks)) {
		wg.Go(func() {
			for t := range todo {
				one, cancel := context.WithTimeout(ctx, requestTimeout)
				err := t.do(one)
				cancel()
				if err == nil || apierrors.IsNotFound(err) || apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause) || ctx.Err() != nil {
					w.clearErrors(t)
					continue
				}
				w.logError(t, err)
				mu.Lock()
				failed = true
				mu.Unlock()
			}
		})
	}
	// To begin again at each change would mean to compare everything after every few writes. The
	// tasks of Gateways are the first, so that none of them waits longer.
	began := time.Now()
	for _, t := range tasks {
		if ctx.Err() != nil || !w.leads() || time.Since(began) > minRound && closed(fresh) {
			break
		}
		select {
		case todo <- t:
		case <-ctx.Done():
		}
	}
	close(todo)
	wg.Wait()
	return failed
}

func closed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// logError logs a failed write: a missing permission once for each verb and resource, and other
// errors for each object.
func (w *writer) logError(t task, err error) {
	if text, ok := client.Denied("write", schema.GroupResource{Resource: t.resource}, err); ok {
		// The answer names the object, and there may be thousands.
		if w.said.New(client.Question(err)+" "+w.scope(t.name.Namespace), "denied") {
			w.log.Warn("missing permission to write", "reason", text)
		}
		return
	}
	if apierrors.IsConflict(err) {
		w.log.Debug("status conflict: another controller writes this object", "kind", t.resource, "name", t.name.String(), "err", err)
		return
	}
	w.log.Warn("cannot write status; retrying", "kind", t.resource, "name", t.name.String(), "err", err)
}

// clearErrors makes logError log a permission again that is missing later.
func (w *writer) clearErrors(t task) {
	group := gwv1.GroupName
	if t.resource == "serviceaccounts" {
		group = ""
	}
	for _, q := range [][2]string{{"get", t.resource}, {"create", t.resource}, {"update", t.resource}, {"update", t.resource + "/status"}} {
		w.said.New(q[0]+" "+schema.GroupResource{Group: group, Resource: q[1]}.String()+" "+w.scope(t.name.Namespace), "")
	}
}

// scope returns where a permission applies: the namespace if only some are watched, or else "" for
// all.
func (w *writer) scope(namespace string) string {
	if len(w.cfg.Namespaces) == 0 {
		return ""
	}
	return namespace
}

// An object has a status.
type object[T any] interface {
	metav1.Object
	DeepCopy() T
}

// A statusClient is a typed client's way to write status.
type statusClient[T any] interface {
	UpdateStatus(context.Context, T, metav1.UpdateOptions) (T, error)
	Get(context.Context, string, metav1.GetOptions) (T, error)
}

// A draft collects the tasks for one Result.
type draft struct {
	w          *writer
	res        *Result
	controller gwv1.GatewayController
	now        metav1.Time
	tasks      []task
	later      time.Time // when to write those that wait now; zero is never
}

// plan adds a task that updates one object by apply, if that changes it. want is all that apply
// depends on.
func plan[T object[T], C statusClient[T]](d *draft, resource string, have T, of func(namespace string) C, want any, apply func(T) (bool, []note)) {
	if changed, _ := apply(have.DeepCopy()); !changed {
		return
	}
	if at := d.w.statusConflicts.notBefore(have.GetUID(), want); at.After(time.Now()) {
		d.later = earlier(d.later, at)
		return
	}
	name := key(have)
	d.tasks = append(d.tasks, task{resource, name, func(ctx context.Context) error {
		c := of(name.Namespace)
		for try := 1; ; try++ {
			next := have.DeepCopy()
			changed, notes := apply(next)
			if !changed {
				return nil
			}
			next.SetManagedFields(nil) // the API server keeps its own; here they are incomplete
			d.w.store.ownWrites.record(next)
			got, err := c.UpdateStatus(ctx, next, metav1.UpdateOptions{FieldManager: fieldManager})
			if err == nil {
				object := kindOf(have) + " " + strings.TrimPrefix(name.String(), "/")
				if d.w.statusConflicts.wrote(have.GetUID(), object, want, time.Now()) {
					notes = append(notes, statusConflictNote(string(d.controller)))
					d.w.store.dirty() // to report it
				}
				d.w.note(ctx, got, notes)
				return nil
			}
			if !apierrors.IsConflict(err) || try == maxConflictRetries {
				return client.Asked("update", schema.GroupResource{Group: gwv1.GroupName, Resource: resource + "/status"}, err)
			}
			live, err := c.Get(ctx, name.Name, metav1.GetOptions{})
			if err != nil {
				return client.Asked("get", schema.GroupResource{Group: gwv1.GroupName, Resource: resource}, err)
			}
			if live.GetUID() != have.GetUID() {
				return nil // another object of the same name, whose event will come
			}
			have = live
		}
	}})
}

// planRoutes plans all routes of one kind.
func planRoutes[T object[T], C statusClient[T]](d *draft, kind, resource string, routes []T, of func(namespace string) C, status func(T) *gwv1.RouteStatus) {
	for _, o := range routes {
		k := RouteKey{kind, key(o)}
		if !written(status(o).Parents, d.res.Routes[k], d.controller) {
			plan(d, resource, o, of, d.res.Routes[k].Parents, func(o T) (bool, []note) { return d.route(status(o), k) })
		}
	}
}

// route updates a route's status to the wanted one.
func (d *draft) route(st *gwv1.RouteStatus, k RouteKey) (changed bool, notes []note) {
	was := *st
	st.Parents = mergeParents(was.Parents, d.res.Routes[k], d.controller, k.Namespace, d.now)
	if len(was.Parents) == 0 && len(st.Parents) == 0 {
		return false, nil
	}
	for _, p := range st.Parents {
		if p.ControllerName != d.controller {
			continue
		}
		var before []metav1.Condition
		i := slices.IndexFunc(was.Parents, func(b gwv1.RouteParentStatus) bool {
			return b.ControllerName == d.controller && sameParent(b.ParentRef, p.ParentRef, k.Namespace)
		})
		if i >= 0 {
			before = was.Parents[i].Conditions
		}
		for _, n := range notesOf(before, p.Conditions) {
			if n, first := d.res.reported(k, n); first && !slices.Contains(notes, n) {
				notes = append(notes, n)
			}
		}
	}
	changed = !equality.Semantic.DeepEqual(was, *st)
	for _, n := range d.res.Notes[k] {
		n, _ := d.res.reported(k, n)
		notes = append(notes, n)
	}
	return changed, notes
}

// ancestors updates a policy's status to the wanted one.
func (d *draft) ancestors(o *gwv1.BackendTLSPolicy) (changed bool, notes []note) {
	was := o.Status
	o.Status.Ancestors = mergeAncestors(was.Ancestors, d.res.Policies[key(o)], d.controller, o.Namespace, d.now)
	if len(was.Ancestors) == 0 && len(o.Status.Ancestors) == 0 {
		return false, nil
	}
	ours := func(all []gwv1.PolicyAncestorStatus) (cs []metav1.Condition) {
		for _, a := range all {
			if a.ControllerName == d.controller {
				cs = append(cs, a.Conditions...)
			}
		}
		return cs
	}
	return !equality.Semantic.DeepEqual(was, o.Status), notesOf(ours(was.Ancestors), ours(o.Status.Ancestors))
}

// tasks returns a task for each object whose status differs, and when there will be more; zero is
// never.
func (w *writer) tasks(res *Result, inputs *Inputs) (all []task, later time.Time) {
	w.statusConflicts.forget(time.Now())
	d := &draft{w: w, res: res, controller: gwv1.GatewayController(cmp.Or(inputs.Controller, DefaultController)), now: metav1.NewTime(time.Now().Truncate(time.Second))}
	classes := func(string) statusClient[*gwv1.GatewayClass] { return w.api("gatewayclasses").GatewayClasses() } // which have no namespaces
	for _, o := range inputs.Classes {
		if want, ok := res.Classes[o.Name]; ok {
			plan(d, "gatewayclasses", o, classes, want, func(o *gwv1.GatewayClass) (bool, []note) {
				was := o.Status
				o.Status = mergeClass(was, want, d.now)
				return !equality.Semantic.DeepEqual(was, o.Status), notesOf(was.Conditions, o.Status.Conditions)
			})
		}
	}
	for _, o := range inputs.Gateways {
		if want, ok := res.Gateways[key(o)]; ok {
			plan(d, "gateways", o, w.api("gateways").Gateways, want, func(o *gwv1.Gateway) (bool, []note) {
				was := o.Status
				o.Status = mergeGateway(was, want, d.now)
				notes := notesOfOwner(was.Conditions, o.Status.Conditions, was.Listeners, o.Status.Listeners)
				return !equality.Semantic.DeepEqual(was, o.Status), append(notes, res.Notes[RouteKey{kindOf(o), key(o)}]...)
			})
		}
	}
	for _, o := range inputs.ListenerSets {
		if want, ok := res.ListenerSets[key(o)]; ok {
			plan(d, "listenersets", o, w.api("listenersets").ListenerSets, want, func(o *gwv1.ListenerSet) (bool, []note) {
				was := o.Status
				o.Status = mergeSet(was, want, d.now)
				notes := notesOfOwner(was.Conditions, o.Status.Conditions, was.Listeners, o.Status.Listeners)
				return !equality.Semantic.DeepEqual(was, o.Status), append(notes, res.Notes[RouteKey{kindOf(o), key(o)}]...)
			})
		}
	}
	planRoutes(d, tlsRoute, "tlsroutes", inputs.TLSRoutes, w.api("tlsroutes").TLSRoutes, func(o *gwv1.TLSRoute) *gwv1.RouteStatus { return &o.Status.RouteStatus })
	planRoutes(d, tcpRoute, "tcproutes", inputs.TCPRoutes, w.api("tcproutes").TCPRoutes, func(o *gwv1.TCPRoute) *gwv1.RouteStatus { return &o.Status.RouteStatus })
	planRoutes(d, udpRoute, "udproutes", inputs.UDPRoutes, w.api("udproutes").UDPRoutes, func(o *gwv1.UDPRoute) *gwv1.RouteStatus { return &o.Status.RouteStatus })
	planRoutes(d, httpRoute, "httproutes", inputs.HTTPRoutes, w.api("httproutes").HTTPRoutes, func(o *gwv1.HTTPRoute) *gwv1.RouteStatus { return &o.Status.RouteStatus })
	planRoutes(d, grpcRoute, "grpcroutes", inputs.GRPCRoutes, w.api("grpcroutes").GRPCRoutes, func(o *gwv1.GRPCRoute) *gwv1.RouteStatus { return &o.Status.RouteStatus })
	for _, o := range inputs.Policies {
		plan(d, "backendtlspolicies", o, w.api("backendtlspolicies").BackendTLSPolicies, res.Policies[key(o)], d.ancestors)
	}
	w.forgetAccounts(res)
	for gateway, want := range res.Accounts {
		w.planAccount(&d.tasks, gateway, want)
	}
	return d.tasks, d.later
}
