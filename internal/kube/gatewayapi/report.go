package gatewayapi

import (
	"slices"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"
)

// A Report is the state of a Controller, for people and for JSON.
type Report struct {
	Known    bool            `json:"known"`           // all objects have been listed
	Lost     *time.Time      `json:"lost,omitempty"`  // since when the API server does not answer, or its answers cannot be used
	Error    string          `json:"error,omitempty"` // why
	Gateways []GatewayReport `json:"gateways"`        // that are ours, by namespace and name
	Routes   int             `json:"routes"`          // that are of one of them

	// Kinds has the version by which each kind of Gateway API is read, by the plural name
	// of the kind: "v1", "v1alpha2", "none" where the API server serves none that is known
	// here, or "unread" where none has been read, as without the right to.
	Kinds map[string]string `json:"kinds,omitempty"`

	Refusals []Refusal `json:"refusals,omitempty"` // by object
	More     int       `json:"moreRefusals,omitempty"`
}

// A GatewayReport is one Gateway.
type GatewayReport struct {
	Name      string           `json:"name"` // "shop/edge"
	Addresses []string         `json:"addresses"`
	Ready     bool             `json:"ready"` // accepted and programmed
	Why       string           `json:"why,omitempty"`
	Listeners []ListenerReport `json:"listeners"`
}

// A ListenerReport is a listener of a Gateway or of one of its ListenerSets.
type ListenerReport struct {
	Name     string `json:"name"`          // of the listener
	Set      string `json:"set,omitempty"` // the ListenerSet that has it, "shop/more"
	Protocol string `json:"protocol"`
	Port     int    `json:"port"`
	State    string `json:"state"`
	Why      string `json:"why,omitempty"`
	Routes   int    `json:"routes"` // that are attached
}

// States of listeners.
const (
	ListenerOpen    = "open"
	ListenerPending = "pending" // is being opened
	ListenerFailed  = "failed"
)

// maxRefusals is how many of a Report are listed.
const maxRefusals = 32

// Report returns the state of the Gateways as this process sees them, whether it leads or not. It may
// be called at any time.
func (c *Controller) Report() Report {
	out := Report{Gateways: []GatewayReport{}}
	if l := c.current.Load(); l != nil {
		out = report(l.inputs, l.result, l.conflicting...)
		out.Known = true
	}
	out.Kinds = c.clients.versions.all()
	l := c.unreachable.Load()
	if l == nil {
		l = c.unusable.Load()
	}
	if l != nil {
		out.Lost, out.Error = &l.since, l.err.Error()
	}
	return out
}

// An outage has the time since which the API server cannot be used, and the reason.
type outage struct {
	since time.Time
	err   error
}

// A translated is Inputs with their Result.
type translated struct {
	inputs *Inputs
	result *Result

	conflicting []Refusal // whose status others write, too
}

func report(w *Inputs, res *Result, more ...Refusal) Report {
	r := Report{Gateways: []GatewayReport{}}
	for _, g := range w.Gateways {
		st, ok := res.Gateways[key(g)]
		if !ok {
			continue
		}
		out := GatewayReport{Name: g.Namespace + "/" + g.Name, Addresses: []string{}, Listeners: []ListenerReport{}}
		for _, a := range st.Addresses {
			out.Addresses = append(out.Addresses, a.Value)
		}
		out.Ready, out.Why = allTrue(st.Conditions, "Accepted", "Programmed")
		specs := map[gwv1.SectionName]gwv1.Listener{}
		for _, l := range g.Spec.Listeners {
			specs[l.Name] = l
		}
		for _, l := range st.Listeners {
			s := specs[l.Name]
			out.Listeners = append(out.Listeners, listenerReport("", string(l.Name), string(s.Protocol), int(s.Port), int(l.AttachedRoutes), l.Conditions))
		}
		for _, set := range w.ListenerSets {
			st, ok := res.ListenerSets[key(set)]
			if !ok || string(set.Spec.ParentRef.Name) != g.Name || string(ptr.Deref(set.Spec.ParentRef.Namespace, gwv1.Namespace(set.Namespace))) != g.Namespace {
				continue
			}
			for _, l := range st.Listeners {
				i := slices.IndexFunc(set.Spec.Listeners, func(s gwv1.ListenerEntry) bool { return s.Name == l.Name })
				if i >= 0 {
					s := set.Spec.Listeners[i]
					out.Listeners = append(out.Listeners, listenerReport(set.Namespace+"/"+set.Name, string(l.Name), string(s.Protocol), int(s.Port), int(l.AttachedRoutes), l.Conditions))
				}
			}
		}
		r.Gateways = append(r.Gateways, out)
	}
	slices.SortFunc(r.Gateways, func(a, b GatewayReport) int { return strings.Compare(a.Name, b.Name) })
	for _, st := range res.Routes {
		if len(st.Parents) > 0 {
			r.Routes++
		}
	}
	r.Refusals = append(more[:len(more):len(more)], refusals(res)...)
	if n := len(r.Refusals) - maxRefusals; n > 0 {
		r.Refusals, r.More = r.Refusals[:maxRefusals], n
	}
	return r
}

func listenerReport(set, name, protocol string, port, routes int, cs []metav1.Condition) ListenerReport {
	l := ListenerReport{Name: name, Set: set, Protocol: protocol, Port: port, State: ListenerOpen, Routes: routes}
	ok, why := allTrue(cs, "Accepted", "Programmed", "ResolvedRefs")
	if l.Why = why; !ok {
		l.State = ListenerFailed
	}
	for _, c := range cs {
		if !ok && c.Type == "Programmed" && c.Reason == string(gwv1.ListenerReasonPending) {
			l.State = ListenerPending
		}
	}
	if ok, _ := allTrue(cs, "Accepted", "Programmed"); ok {
		l.State = ListenerOpen // with a part that can't be served
	}
	return l
}

// wellAs reports whether conditions of those types are all true, or why the first
// is not.
func allTrue(cs []metav1.Condition, kinds ...string) (bool, string) {
	for _, kind := range kinds {
		for _, c := range cs {
			if c.Type == kind && c.Status != metav1.ConditionTrue {
				return false, strings.TrimSuffix(c.Reason+": "+c.Message, ": ")
			}
		}
	}
	return true, ""
}
