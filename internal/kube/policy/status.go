package policy

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"

	"culvert.dev/internal/kube/client"
	"culvert.dev/internal/kube/watch"
	"culvert.dev/registry"
)

// Conditions and reasons of a policy.
const (
	accepted           = string(gwv1.PolicyConditionAccepted)
	partiallyEnforced  = "PartiallyEnforced"
	reasonUnidentified = "UnidentifiedCallers"
	reasonEnforced     = "Enforced"
)

// maxAncestors is the limit of the API.
const maxAncestors = 16

// Intervals of writing.
const (
	retryInterval  = 10 * time.Second // after a failure
	leaderInterval = time.Second      // between checks whether this replica leads
	usesInterval   = 2 * time.Second  // between checks whether the policies are about something else
)

// A writer updates the status of policies.
type writer struct {
	*Source
	log    *slog.Logger
	leads  func() bool
	latest func(*object) *object // the object as it was seen last, of the same generation
	wake   watch.Signal
	logged client.Once
	events watch.Events

	mu  sync.Mutex // guards all
	all []*translated

	warned map[types.UID]string // what the last Event of each object said; run's own
}

func newWriter(s *Source, latest func(*object) *object, log *slog.Logger) *writer {
	w := &writer{Source: s, log: log, leads: s.cfg.Leads, latest: latest, wake: watch.NewSignal(), warned: map[types.UID]string{}}
	if w.leads == nil {
		w.leads = func() bool { return true }
	}
	w.events = watch.Events{Client: s.core, Controller: w.controller(), Log: log}
	return w
}

func (w *writer) controller() string { return cmp.Or(w.cfg.Controller, DefaultController) }

// want sets the objects whose status is to be written.
func (w *writer) want(all []*translated) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.all = all
	w.wake.Notify()
}

// run writes until ctx is done.
func (w *writer) run(ctx context.Context) {
	for {
		var again <-chan time.Time
		switch {
		case !w.leads():
			again = time.After(leaderInterval)
		case !w.write(ctx):
			again = time.After(retryInterval)
		case w.cfg.Uses != nil:
			again = time.After(usesInterval)
		}
		select {
		case <-ctx.Done():
			return
		case <-again:
		case <-w.wake:
			if !watch.Sleep(ctx, translateInterval) {
				return
			}
		}
	}
}

// write writes all status that differs, and reports whether it succeeded.
func (w *writer) write(ctx context.Context) bool {
	w.mu.Lock()
	all := w.all
	w.mu.Unlock()
	var uses map[string]registry.PolicyUse
	if w.cfg.Uses != nil {
		uses = w.cfg.Uses()
	}
	good := true
	for _, t := range all {
		if ctx.Err() != nil || !w.leads() {
			return true
		}
		var at *registry.PolicyUse
		if use, ok := uses[t.String()]; ok {
			at = &use
		}
		good = w.writeOne(ctx, t, at) && good
	}
	return good
}

// writeOne writes the status of one object, as it is now, if it differs.
func (w *writer) writeOne(ctx context.Context, t *translated, at *registry.PolicyUse) bool {
	want := w.status(t, at)
	w.warn(ctx, t, want)
	have := w.latest(t.object).Status
	if equality.Semantic.DeepEqual(w.merge(have, want), have) {
		return true
	}
	if at == nil && w.cfg.Uses != nil && w.isWritten(have, want) {
		return true // the table of a replica that has just begun does not have it yet
	}
	res := resource
	if t.isOfCluster() {
		res = clusterResource
	}
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	c := w.dynamic.Resource(res).Namespace(t.Namespace)
	err := func() error {
		now, err := c.Get(ctx, t.Name, metav1.GetOptions{})
		if err != nil {
			return client.Asked("get", res.GroupResource(), err)
		}
		have, err := objectOf(now)
		if err != nil || have.UID != t.UID || have.Generation != t.Generation {
			return nil // it is another by now, which will be translated
		}
		merged := w.merge(have.Status, want)
		if equality.Semantic.DeepEqual(merged, have.Status) {
			return nil
		}
		if err := setStatus(now, &merged); err != nil {
			return err
		}
		_, err = c.UpdateStatus(ctx, now, metav1.UpdateOptions{FieldManager: "culvert"})
		return client.Asked("update", schema.GroupResource{Group: res.Group, Resource: res.Resource + "/status"}, err)
	}()
	switch {
	case err == nil, apierrors.IsNotFound(err), apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause), ctx.Err() != nil && err == nil:
		w.logged.New("denied", "")
		return true
	case apierrors.IsConflict(err):
		return false
	}
	if why, denied := client.Denied("update", res.GroupResource(), err); denied {
		if w.logged.New("denied", why) {
			w.log.Warn("missing permission to write", "reason", why)
		}
		return false
	}
	w.log.Warn("cannot write status; retrying", "kind", res.Resource, "name", key(t.object).String(), "err", err)
	return false
}

// status returns what our part of the status of t should be.
func (w *writer) status(t *translated, at *registry.PolicyUse) []gwv1.PolicyAncestorStatus {
	conditions := []metav1.Condition{{Type: accepted, Status: metav1.ConditionTrue, Reason: string(gwv1.PolicyReasonAccepted), Message: "accepted"}}
	c := &conditions[0]
	switch {
	case t.err != nil:
		c.Status, c.Reason, c.Message = metav1.ConditionFalse, string(gwv1.PolicyReasonInvalid), clip("it denies what it selects, because it is not valid: "+strings.ReplaceAll(t.err.Error(), "\n", "; "))
	case at != nil && at.Services == 0:
		c.Status, c.Reason, c.Message = metav1.ConditionFalse, string(gwv1.PolicyReasonTargetNotFound), "it selects no service of the gateway"
	}
	if t.err == nil && at != nil && at.Unidentified > 0 {
		conditions = append(conditions, metav1.Condition{
			Type: partiallyEnforced, Status: metav1.ConditionTrue, Reason: reasonUnidentified,
			Message: fmt.Sprintf("%d of %d services are also reached by ways on which TLS passes through and the caller's identity is not known: there, what asks for an identity matches nobody", at.Unidentified, at.Services),
		})
	}
	var all []gwv1.PolicyAncestorStatus
	for _, ref := range ancestors(t.object) {
		one := gwv1.PolicyAncestorStatus{AncestorRef: ref, ControllerName: gwv1.GatewayController(w.controller())}
		for _, c := range conditions {
			c.ObservedGeneration = t.Generation
			one.Conditions = append(one.Conditions, c)
		}
		all = append(all, one)
	}
	return all
}

// ancestors returns the objects that o is about: those that it names, its Namespace for Pods, and
// itself if it is of the cluster.
func ancestors(o *object) (all []gwv1.ParentReference) {
	add := func(group, kind, namespace, name, section string) {
		ref := gwv1.ParentReference{Group: new(gwv1.Group(group)), Kind: new(gwv1.Kind(kind)), Name: gwv1.ObjectName(name)}
		if namespace != "" {
			ref.Namespace = new(gwv1.Namespace(namespace))
		}
		if section != "" {
			ref.SectionName = new(gwv1.SectionName(section))
		}
		if !slices.ContainsFunc(all, func(a gwv1.ParentReference) bool { return sameRef(a, ref) }) && len(all) < maxAncestors {
			all = append(all, ref)
		}
	}
	if o.isOfCluster() {
		add(group, clusterKind, "", o.Name, "")
		return all
	}
	for _, ref := range o.Spec.TargetRefs {
		if ref.Group == "core" {
			ref.Group = ""
		}
		if ref.Group == "" && (ref.Kind == kindPod || ref.Kind == kindNamespace) || ref.Name == "" {
			add("", kindNamespace, "", o.Namespace, "")
			continue
		}
		add(ref.Group, ref.Kind, o.Namespace, ref.Name, ref.SectionName)
	}
	if len(all) == 0 {
		add("", kindNamespace, "", o.Namespace, "")
	}
	return all
}

func sameRef(a, b gwv1.ParentReference) bool { return equality.Semantic.DeepEqual(a, b) }

// merge returns have with our part replaced by want. Times of transition are kept, and so is what
// other controllers wrote.
func (w *writer) merge(have gwv1.PolicyStatus, want []gwv1.PolicyAncestorStatus) gwv1.PolicyStatus {
	now := metav1.NewTime(time.Now().Truncate(time.Second))
	out := gwv1.PolicyStatus{Ancestors: []gwv1.PolicyAncestorStatus{}}
	for _, h := range have.Ancestors {
		if string(h.ControllerName) != w.controller() {
			out.Ancestors = append(out.Ancestors, h)
		}
	}
	for _, one := range want {
		if len(out.Ancestors) == maxAncestors {
			break
		}
		one.Conditions = slices.Clone(one.Conditions)
		i := slices.IndexFunc(have.Ancestors, func(h gwv1.PolicyAncestorStatus) bool {
			return string(h.ControllerName) == w.controller() && sameRef(h.AncestorRef, one.AncestorRef)
		})
		for j := range one.Conditions {
			c := &one.Conditions[j]
			c.LastTransitionTime = now
			if i < 0 {
				continue
			}
			if before := meta.FindStatusCondition(have.Ancestors[i].Conditions, c.Type); before != nil && before.Status == c.Status {
				c.LastTransitionTime = before.LastTransitionTime
			}
		}
		out.Ancestors = append(out.Ancestors, one)
	}
	return out
}

// isWritten reports whether have says of the same generation what else want does.
func (w *writer) isWritten(have gwv1.PolicyStatus, want []gwv1.PolicyAncestorStatus) bool {
	for _, one := range want {
		i := slices.IndexFunc(have.Ancestors, func(h gwv1.PolicyAncestorStatus) bool {
			return string(h.ControllerName) == w.controller() && sameRef(h.AncestorRef, one.AncestorRef)
		})
		if i < 0 {
			return false
		}
		c, before := meta.FindStatusCondition(one.Conditions, accepted), meta.FindStatusCondition(have.Ancestors[i].Conditions, accepted)
		if before == nil || before.ObservedGeneration != c.ObservedGeneration || c.Reason == string(gwv1.PolicyReasonInvalid) || before.Reason == string(gwv1.PolicyReasonInvalid) {
			return false
		}
	}
	return true
}

// warn writes an Event for a policy that is not accepted, once for each text.
func (w *writer) warn(ctx context.Context, t *translated, want []gwv1.PolicyAncestorStatus) {
	text := ""
	if c := meta.FindStatusCondition(want[0].Conditions, accepted); c.Status == metav1.ConditionFalse && c.Reason == string(gwv1.PolicyReasonInvalid) {
		text = c.Message
	}
	if w.warned[t.UID] == text {
		return
	}
	if w.warned[t.UID] = text; text == "" {
		delete(w.warned, t.UID)
		return
	}
	w.log.Warn("policy is not valid and denies what it selects", "policy", t.String(), "err", t.err)
	ref := corev1.ObjectReference{APIVersion: group + "/" + version, Kind: t.Kind, Namespace: t.Namespace, Name: t.Name, UID: t.UID}
	_ = w.events.Warn(ctx, ref, string(gwv1.PolicyReasonInvalid), text, "") // it is in the log, too
}

// setStatus replaces the status of an object.
func setStatus(u *unstructured.Unstructured, s *gwv1.PolicyStatus) error {
	text, err := json.Marshal(s)
	if err != nil {
		return err
	}
	var fields map[string]any
	if err := json.Unmarshal(text, &fields); err != nil {
		return err
	}
	return unstructured.SetNestedMap(u.Object, runtime.DeepCopyJSON(fields), "status")
}

// clip keeps messages far below the limit of the API: they are for people.
func clip(s string) string {
	const most = 1024
	if len(s) <= most {
		return s
	}
	return s[:most-3] + "..."
}
