package gatewayapi

import (
	"cmp"
	"log/slog"
	"slices"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// A Refusal is a condition that is worth an operator's eye.
type Refusal struct {
	Object  string `json:"object"` // "TLSRoute shop/db", "GatewayClass edge"
	Reason  string `json:"reason"`
	Message string `json:"message"`
}

// refusals are all that res refuses, by object, and none of them twice.
func refusals(res *Result) []Refusal {
	var all []Refusal
	say := func(kind string, o types.NamespacedName, ns []note) {
		name := o.Name
		if o.Namespace != "" {
			name = o.Namespace + "/" + name
		}
		for _, n := range ns {
			all = append(all, Refusal{kind + " " + name, n.reason, n.message})
		}
	}
	refuse := func(kind string, o types.NamespacedName, cs []metav1.Condition) { say(kind, o, notesOf(nil, cs)) }
	for name, st := range res.Classes {
		refuse("GatewayClass", types.NamespacedName{Name: name}, st.Conditions)
	}
	for k, st := range res.Gateways {
		refuse("Gateway", k, st.Conditions)
		say("Gateway", k, notesOfListeners(nil, st.Listeners))
	}
	for k, st := range res.ListenerSets {
		refuse("ListenerSet", k, st.Conditions)
		say("ListenerSet", k, notesOfListeners(nil, st.Listeners))
	}
	for k, st := range res.Routes {
		for i := range st.Parents {
			refuse(k.Kind, k.NamespacedName, st.Parents[i].Conditions)
		}
	}
	for k, ns := range res.Notes {
		say(k.Kind, k.NamespacedName, ns)
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

// Of more lines than tellAtOnce, and than one in tellEvery after that, only the
// number is told, at most once in tellMore: a bad template must not fill the log.
// Who is refused again within tellMore has been told of already.
const (
	tellAtOnce = 32
	tellEvery  = time.Second
	tellMore   = time.Minute
)

// A teller logs what is refused, once as long as it is.
type teller struct {
	log *slog.Logger

	known  map[Refusal]time.Time // since when it is no more, or zero while it is
	room   time.Duration         // for lines, each of tellEvery
	last   time.Time             // that room was looked at
	unsaid int
	more   time.Time // that unsaid was last told
}

func newTeller(log *slog.Logger) *teller {
	return &teller{log: log, known: map[Refusal]time.Time{}, room: tellAtOnce * tellEvery}
}

// tell takes all that is refused now.
func (t *teller) tell(all []Refusal, now time.Time) {
	if !t.last.IsZero() {
		t.room = min(t.room+now.Sub(t.last), tellAtOnce*tellEvery)
	}
	t.last = now
	there := make(map[Refusal]bool, len(all))
	for _, r := range all {
		there[r] = true
		_, known := t.known[r]
		t.known[r] = time.Time{}
		switch {
		case known:
		case t.room < tellEvery:
			t.unsaid++
		default:
			t.room -= tellEvery
			what := "kubernetes: refused"
			if r.Reason == reasonContested {
				what = "kubernetes: contested"
			}
			t.log.Warn(what, "object", r.Object, "reason", r.Reason, "why", r.Message)
		}
	}
	for r, gone := range t.known {
		switch {
		case there[r]:
		case gone.IsZero():
			t.known[r] = now
		case now.Sub(gone) >= tellMore:
			delete(t.known, r)
		}
	}
	if t.unsaid > 0 && (t.more.IsZero() || now.Sub(t.more) >= tellMore) {
		t.log.Warn("kubernetes: more is refused than the log is to have: see their conditions", "more", t.unsaid)
		t.unsaid, t.more = 0, now
	}
}
