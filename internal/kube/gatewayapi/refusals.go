package gatewayapi

import (
	"cmp"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"
)

// A Refusal is a condition that an operator should know of.
type Refusal struct {
	Object  string `json:"object"` // "TLSRoute shop/db", "GatewayClass edge"
	Reason  string `json:"reason"`
	Message string `json:"message"`
	Others  int    `json:"others,omitempty"` // routes of the kind and namespace that it is refused for, too
}

// refusals returns everything that res refuses, sorted by object, without duplicates.
func refusals(res *Result) []Refusal {
	var all []Refusal
	say := func(kind string, o types.NamespacedName, ns []note) {
		name := o.Name
		if o.Namespace != "" {
			name = o.Namespace + "/" + name
		}
		for _, n := range ns {
			all = append(all, Refusal{Object: kind + " " + name, Reason: n.reason, Message: n.message})
		}
	}
	refuse := func(kind string, o types.NamespacedName, cs []metav1.Condition) { say(kind, o, notesOf(nil, cs)) }
	for name, st := range res.Classes {
		refuse("GatewayClass", types.NamespacedName{Name: name}, st.Conditions)
	}
	for k, st := range res.Gateways {
		say("Gateway", k, notesOfOwner(nil, st.Conditions, nil, st.Listeners))
	}
	for k, st := range res.ListenerSets {
		say("ListenerSet", k, notesOfOwner(nil, st.Conditions, nil, st.Listeners))
	}
	for k, st := range res.Routes {
		for i := range st.Parents {
			for _, n := range notesOf(nil, st.Parents[i].Conditions) {
				if c := res.Causes[causeKey{k.Kind, k.Namespace, n}]; c == nil {
					say(k.Kind, k.NamespacedName, []note{n})
				} else if c.first == k {
					say(k.Kind, k.NamespacedName, []note{n})
					all[len(all)-1].Others = c.others
				}
			}
		}
	}
	for k, ns := range res.Notes {
		for _, n := range ns {
			say(k.Kind, k.NamespacedName, []note{n})
			if c := res.Causes[causeKey{k.Kind, k.Namespace, n}]; c != nil {
				all[len(all)-1].Others = c.others
			}
		}
	}
	for k, ancestors := range res.Policies {
		for _, a := range ancestors {
			refuse("BackendTLSPolicy", k, a.Conditions)
		}
	}
	slices.SortFunc(all, func(a, b Refusal) int {
		return cmp.Or(strings.Compare(a.Object, b.Object), strings.Compare(a.Reason, b.Reason), strings.Compare(a.Message, b.Message))
	})
	return slices.Compact(all)
}

// suppressed returns all but those that the data plane logs itself: why a listener cannot be opened,
// and which certificates expire soon.
func suppressed(all []Refusal, plane map[string]error) []Refusal {
	return slices.DeleteFunc(all, func(r Refusal) bool {
		if r.Reason == reasonCertificateExpiresSoon {
			return true
		}
		if r.Reason != string(gwv1.ListenerReasonPortUnavailable) && r.Reason != string(gwv1.GatewayReasonAddressNotUsable) {
			return false
		}
		for _, err := range plane {
			if err != nil && strings.HasSuffix(r.Message, ": "+err.Error()) {
				return true
			}
		}
		return false
	})
}

// A causeKey is a reason for which several routes of one kind and namespace are refused, such as a
// backend that they have in common.
type causeKey struct {
	kind, namespace string
	note            note
}

// A cause is reported at the first route that has it, and at no others.
type cause struct {
	first  RouteKey
	others int
}

// addCause records why the backends of a route are refused.
func (res *Result) addCause(k RouteKey, resolved metav1.Condition) {
	if resolved.Status != metav1.ConditionFalse {
		return
	}
	res.addNoteCause(k, note{resolved.Reason, resolved.Type + ": " + resolved.Message})
}

// addNoteCause does so with any note, and reports whether the route is the first that has it.
func (res *Result) addNoteCause(k RouteKey, n note) bool {
	of := causeKey{k.Kind, k.Namespace, n}
	if c := res.Causes[of]; c != nil {
		c.others++
		return false
	}
	res.Causes[of] = &cause{first: k}
	return true
}

// reasonNoEndpoints is of routes to a Service without an endpoint. It is no reason of a
// condition: the reference is resolved.
const reasonNoEndpoints = "NoEndpoints"

// reasonAnnotationIgnored is of routes to a Service with an annotation that is malformed. It is no
// reason of a condition.
const reasonAnnotationIgnored = "AnnotationIgnored"

// reported returns a note of a route as it is reported, and whether it is.
func (res *Result) reported(k RouteKey, n note) (note, bool) {
	c := res.Causes[causeKey{k.Kind, k.Namespace, n}]
	switch {
	case c == nil:
		return n, true
	case c.first != k:
		return n, false
	case c.others > 0:
		n.message = truncate(fmt.Sprintf("%s (so for %d more %ss of the namespace)", n.message, c.others, k.Kind))
	}
	return n, true
}

// If there are more refusals than refusalBurst at once, or afterwards more than one in
// refusalInterval, only their number is logged, at most once in suppressedInterval: a bad template
// must not fill the log. A refusal that comes back within suppressedInterval is not logged again.
const (
	refusalBurst       = 32
	refusalInterval    = time.Second
	suppressedInterval = time.Minute
)

// A refusalLog logs each refusal once, as long as it lasts.
type refusalLog struct {
	log *slog.Logger

	known      map[Refusal]time.Time // without Others: since when it is no more, or zero while it is
	room       time.Duration         // for lines, each of tellEvery
	last       time.Time             // that room was looked at
	suppressed int
	more       time.Time // that unsaid was last told
}

func newRefusalLog(log *slog.Logger) *refusalLog {
	return &refusalLog{log: log, known: map[Refusal]time.Time{}, room: refusalBurst * refusalInterval}
}

// update logs those of the present refusals that are new.
func (t *refusalLog) update(all []Refusal, now time.Time) {
	if !t.last.IsZero() {
		t.room = min(t.room+now.Sub(t.last), refusalBurst*refusalInterval)
	}
	t.last = now
	there := make(map[Refusal]bool, len(all))
	for _, r := range all {
		others := r.Others
		r.Others = 0
		there[r] = true
		_, known := t.known[r]
		t.known[r] = time.Time{}
		switch {
		case known:
		case t.room < refusalInterval:
			t.suppressed++
		default:
			t.room -= refusalInterval
			what := "Kubernetes object refused"
			if r.Reason == reasonStatusContested {
				what = "another controller writes the same status"
			}
			more := []any{"object", r.Object, "reason", r.Reason, "why", r.Message}
			if others > 0 {
				more = append(more, "others", others)
			}
			t.log.Warn(what, more...)
		}
	}
	for r, gone := range t.known {
		switch {
		case there[r]:
		case gone.IsZero():
			t.known[r] = now
		case now.Sub(gone) >= suppressedInterval:
			delete(t.known, r)
		}
	}
	if t.suppressed > 0 && (t.more.IsZero() || now.Sub(t.more) >= suppressedInterval) {
		t.log.Warn("refused Kubernetes objects suppressed in the log; see their conditions", "suppressed", t.suppressed)
		t.suppressed, t.more = 0, now
	}
}
