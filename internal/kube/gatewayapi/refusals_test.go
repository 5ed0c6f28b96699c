package gatewayapi

import (
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"
)

// Whatever is wrong with what people write is a condition of the object, a line
// of the log of each replica, and in the report.
func TestWhatIsRefusedIsSaid(t *testing.T) {
	grantless := "{name: web, namespace: b, port: 443}"
	for _, tt := range []struct {
		name, docs     string
		object, reason string
		why            string // a part of the message
	}{
		{"a Secret that is not there", edge(terminate), "Gateway a/edge", "InvalidCertificateRef", "listener tls: ResolvedRefs: "},
		{"a Secret without a pair", edge(terminate) + "\n---\nkind: Secret\nmetadata: {namespace: a, name: cert}\nstringData: {tls.crt: x, tls.key: y}\n", "Gateway a/edge", "InvalidCertificateRef", "do not match, or can't be read"},
		{"no grant for a Secret", edge("  - {name: tls, port: 443, protocol: TLS, tls: {mode: Terminate, certificateRefs: [{name: cert, namespace: b}]}}\n"), "Gateway a/edge", "RefNotPermitted", "no ReferenceGrant of namespace"},
		{"no grant for a Service", edge(passthrough) + testRoute("TLSRoute", "r", "abc.example.com", grantless), "TLSRoute a/r", "RefNotPermitted", "no ReferenceGrant of namespace"},
		{"a Service that is not there", edge(tcp) + testRoute("TCPRoute", "r", "", "{name: none, port: 443}"), "TCPRoute a/r", "BackendNotFound", "there is no Service a/none"},
		{"a backend of another kind", edge(udp) + testRoute("UDPRoute", "r", "", "{group: x.example, kind: X, name: none, port: 443}"), "UDPRoute a/r", "InvalidKind", "ResolvedRefs: "},
		{"a listener that is not there", edge(passthrough) + testRoute("TLSRoute", "r", "abc.example.com", "{name: web, port: 443}", "{name: edge, sectionName: none}"), "TLSRoute a/r", "NoMatchingParent", "Accepted: "},
		{"a protocol that nobody knows", edge(passthrough + "  - {name: x, port: 99, protocol: x.example/SCTP}\n"), "Gateway a/edge", "UnsupportedProtocol", "listener x: Accepted: "},
		{"two listeners of a port", edge(tcp + "  - {name: more, port: 9000, protocol: TCP}\n"), "Gateway a/edge", "ListenerConflict", "listener more: Accepted: "},
		{"a set that is not let in", edge(passthrough) + "\n---\nkind: ListenerSet\nmetadata: {namespace: a, name: more}\nspec:\n  parentRef: {name: edge}\n  listeners:\n" + tcp, "ListenerSet a/more", "NotAllowed", "Accepted: "},
		{"a CA that is not there", edge(tcp) + testRoute("TCPRoute", "r", "", "{name: web, port: 443}") + `
---
kind: BackendTLSPolicy
metadata: {namespace: a, name: p}
spec:
  targetRefs: [{group: "", kind: Service, name: web}]
  validation: {hostname: web.example, caCertificateRefs: [{group: "", kind: ConfigMap, name: none}]}
`, "BackendTLSPolicy a/p", "NoValidCACertificate", "Accepted: "},
		{"a class with parameters", "kind: GatewayClass\nmetadata: {name: more}\nspec: {controllerName: culvert.dev/gateway, parametersRef: {group: x.example, kind: X, name: x}}\n", "GatewayClass more", "InvalidParameters", "Accepted: "},
		{"a listener that only a ListenerSet has", edge(passthrough, "allowedListeners: {namespaces: {from: Same}}") + "\n---\nkind: ListenerSet\nmetadata: {namespace: a, name: more}\nspec:\n  parentRef: {name: edge}\n  listeners:\n" + tcp +
			testRoute("TCPRoute", "r", "", "{name: web, port: 443}", "{name: edge, sectionName: tcp}"), "TCPRoute a/r", "NoMatchingParent", "its ListenerSet a/more has: name that as the parent"},
		{"a port that no listener is at", edge(passthrough) + testRoute("TLSRoute", "r", "abc.example.com", "{name: web, port: 443}", "{name: edge, port: 444}"), "TLSRoute a/r", "NoMatchingParent", "Gateway a/edge has no listener at port 444"},
		{"a kind that no listener takes", edge(passthrough) + testRoute("TCPRoute", "r", "", "{name: web, port: 443}"), "TCPRoute a/r", "NotAllowedByListeners", "no listener allows a TCPRoute: tls (TLS) allows TLSRoute"},
		{"an HTTPRoute", edge("  - {name: http, port: 80, protocol: HTTP}\n") + testRoute("HTTPRoute", "r", "abc.example.com", "{name: web, port: 80}"), "HTTPRoute a/r", "HTTPNotRouted", noHTTP},
		{"a GRPCRoute", edge("  - {name: http, port: 80, protocol: HTTP}\n") + testRoute("GRPCRoute", "r", "abc.example.com", "{name: web, port: 80}"), "GRPCRoute a/r", "NotAllowedByListeners", "culvert routes no gRPC yet"},
		{"a name that an older TLSRoute has", edge(passthrough) + testRoute("TLSRoute", "old", "abc.example.com", "{name: web, port: 443}") + testRoute("TLSRoute", "new", "abc.example.com", "{name: web, port: 443}"), "TLSRoute a/new", "Shadowed", "abc.example.com of listener tls goes to TLSRoute a/old, which is older"},
		{"a listener that an older TCPRoute has", edge(tcp) + testRoute("TCPRoute", "old", "", "{name: web, port: 443}") + testRoute("TCPRoute", "new", "", "{name: web, port: 443}"), "TCPRoute a/new", "Shadowed", "listener tcp goes to TCPRoute a/old, which is older"},
		{"a listener that an older UDPRoute has", edge(udp) + testRoute("UDPRoute", "old", "", "{name: web, port: 53}") + testRoute("UDPRoute", "new", "", "{name: web, port: 53}"), "UDPRoute a/new", "Shadowed", "listener udp goes to UDPRoute a/old, which is older"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := newBench(t, tt.docs)
				b.c.cfg.Leads = func() bool { return false }
				defer b.start()()
				calm()
				var got []string
				for line := range strings.Lines(b.log.String()) {
					if strings.Contains(line, `msg="Kubernetes object refused" object="`+tt.object+`" reason=`+tt.reason) && strings.Contains(line, tt.why) {
						got = append(got, line)
					}
				}
				if len(got) != 1 {
					t.Errorf("got %d lines of %s %s, %q, want one:\n%s", len(got), tt.object, tt.reason, tt.why, b.log)
				}
				if !slices.ContainsFunc(b.c.Report().Refusals, func(r Refusal) bool {
					return r.Object == tt.object && r.Reason == tt.reason && strings.Contains(r.Message, tt.why)
				}) {
					t.Errorf("got report %+v", b.c.Report().Refusals)
				}
				conds := allConditions(b.c.current.Load().result, tt.object)
				if !slices.ContainsFunc(conds, func(c metav1.Condition) bool {
					if tt.reason == reasonShadowed || tt.reason == reasonHTTPNotRouted {
						return c.Type == "Accepted" && c.Status == metav1.ConditionTrue && c.Message == "accepted, but "+tt.why
					}
					_, why, _ := strings.Cut(tt.why, "listener ") // which a listener's own condition does not say
					_, why, found := strings.Cut(why, ": ")
					if !found {
						why = tt.why
					}
					return c.Reason == tt.reason && c.Status == metav1.ConditionFalse && strings.Contains(c.Type+": "+c.Message, why)
				}) {
					t.Errorf("got conditions %+v", conds)
				}
			})
		})
	}
}

// allConditions has all conditions of an object, "TLSRoute a/r".
func allConditions(res *Result, object string) (cs []metav1.Condition) {
	kind, name, _ := strings.Cut(object, " ")
	for k, st := range res.Classes {
		if kind == "GatewayClass" && k == name {
			cs = append(cs, st.Conditions...)
		}
	}
	for k, st := range res.Gateways {
		if kind == "Gateway" && k.String() == name {
			cs = append(cs, st.Conditions...)
			for _, l := range st.Listeners {
				cs = append(cs, l.Conditions...)
			}
		}
	}
	for k, st := range res.ListenerSets {
		if kind == "ListenerSet" && k.String() == name {
			cs = append(cs, st.Conditions...)
		}
	}
	for k, st := range res.Routes {
		if k.Kind == kind && k.NamespacedName.String() == name {
			for _, p := range st.Parents {
				cs = append(cs, p.Conditions...)
			}
		}
	}
	for k, as := range res.Policies {
		if kind == "BackendTLSPolicy" && k.String() == name {
			for _, a := range as {
				cs = append(cs, a.Conditions...)
			}
		}
	}
	return cs
}

// A thousand refusals are 32 lines and a number; one that comes and goes is one
// line; one that comes back later is told again.
func TestTeller(t *testing.T) {
	var out lockedBuffer
	log := newRefusalLog(slog.New(slog.NewTextHandler(&out, nil)))
	now := time.Unix(0, 0)
	lines := func(what string) int { return strings.Count(out.String(), what) }
	var many []Refusal
	for i := range 1000 {
		many = append(many, Refusal{Object: fmt.Sprint("TLSRoute a/", i), Reason: "BackendNotFound", Message: "there is none"})
	}
	for range 100 {
		log.update(many, now)
		now = now.Add(100 * time.Millisecond)
	}
	if n := lines("refused\" object"); n != refusalBurst {
		t.Errorf("got %d lines of a thousand, want %d", n, refusalBurst)
	}
	if n := lines("suppressed=968"); n != 1 {
		t.Errorf("got %d lines of the others, want one:\n%s", n, out.String())
	}

	one := []Refusal{{Object: "Gateway a/edge", Reason: "Invalid", Message: "flaps"}}
	for i := range 600 { // a minute
		log.update(one[:i%2], now)
		now = now.Add(100 * time.Millisecond)
	}
	if n := lines("flaps"); n != 1 {
		t.Errorf("got %d lines of what flaps, want one", n)
	}
	log.update(nil, now)
	log.update(nil, now.Add(2*suppressedInterval))
	log.update(one, now.Add(3*suppressedInterval))
	if n := lines("flaps"); n != 2 {
		t.Errorf("got %d lines of what is there again, want two", n)
	}
	if len(log.known) != 1 {
		t.Errorf("it remembers %d, want the one that there is", len(log.known))
	}
}

// A route that others come before says at each parent which of them has what.
func TestLosses(t *testing.T) {
	second := "  - {name: wide, port: 8443, protocol: TLS, hostname: \"*.example.com\", tls: {mode: Passthrough}}\n"
	for _, tt := range []struct {
		name, docs string
		want       []string // a/new's messages of Accepted
		notes      int
	}{
		{"nobody is before it", testRoute("TLSRoute", "new", "abc.example.com", "{name: web, port: 443}"), []string{"accepted"}, 0},
		{"by itself", testRoute("TLSRoute", "new", `abc.example.com, "*.example.com"`, "{name: web, port: 443}"), []string{"accepted"}, 0},
		{"one name of two", testRoute("TLSRoute", "old", "abc.example.com", "{name: web, port: 443}") + testRoute("TLSRoute", "new", "abc.example.com, more.example.com", "{name: web, port: 443}", "{name: edge, sectionName: tls}"),
			[]string{"accepted, but abc.example.com of listener tls goes to TLSRoute a/old, which is older"}, 1},
		{"at one parent of two", testRoute("TLSRoute", "old", "abc.example.com", "{name: web, port: 443}", "{name: edge, sectionName: tls}") +
			testRoute("TLSRoute", "new", "abc.example.com", "{name: web, port: 443}", "{name: edge, sectionName: wide}, {name: edge, sectionName: tls}"),
			[]string{"accepted", "accepted, but abc.example.com of listener tls goes to TLSRoute a/old, which is older"}, 1},
		{"a younger one that is more specific", testRoute("TLSRoute", "new", `"*.com"`, "{name: web, port: 443}", "{name: edge, sectionName: wide}") + testRoute("TLSRoute", "other", `"*.example.com"`, "{name: web, port: 443}"),
			[]string{"accepted, but *.example.com of listener wide goes to TLSRoute a/other, whose hostname is more specific"}, 1},
		{"one of the same second", strings.Replace(testRoute("TLSRoute", "new", "abc.example.com", "{name: web, port: 443}", "{name: edge, sectionName: tls}")+testRoute("TLSRoute", "early", "abc.example.com", "{name: web, port: 443}"),
			"namespace: a", "namespace: a, creationTimestamp: '2026-01-01T00:00:00Z'", 2),
			[]string{"accepted, but abc.example.com of listener tls goes to TLSRoute a/early, which is as old and comes first by name"}, 1},
	} {
		t.Run(tt.name, func(t *testing.T) {
			w := inputsOf(t, base, edge(passthrough+second)+tt.docs)
			w.PublicAddresses = addrs("192.0.2.1")
			res := Translate(w)
			k := RouteKey{Kind: tlsRoute}
			k.Namespace, k.Name = "a", "new"
			var got []string
			for _, p := range res.Routes[k].Parents {
				if c := p.Conditions[0]; c.Type != string(gwv1.RouteConditionAccepted) || c.Status != metav1.ConditionTrue {
					t.Errorf("got %+v, want that it is accepted", c)
				}
				got = append(got, p.Conditions[0].Message)
			}
			if !slices.Equal(got, tt.want) || len(res.Notes[k]) != tt.notes {
				t.Errorf("got %q and notes %v, want %q and %d", got, res.Notes[k], tt.want, tt.notes)
			}
			if len(res.Notes) > tt.notes {
				t.Errorf("got losses %v, want no others", res.Notes)
			}
		})
	}
}

// A cause is one Event and one line of the log, however many conditions and routes it
// spoils.
func TestOneCauseIsToldOnce(t *testing.T) {
	missing := edge("  - {name: one, port: 443, protocol: TLS, hostname: one.example.com, tls: {mode: Terminate, certificateRefs: [{name: cert}]}}\n" +
		"  - {name: two, port: 443, protocol: TLS, hostname: two.example.com, tls: {mode: Terminate, certificateRefs: [{name: cert}]}}\n")
	var many strings.Builder
	for i := range 40 {
		many.WriteString(testRoute("TLSRoute", fmt.Sprintf("r%02d", i), fmt.Sprintf("r%02d.example.com", i), "{name: none, port: 443}"))
	}
	taken := func(b *bench) {
		b.c.cfg.Plane = fixedPlane{"a/edge/tcp/9000": errors.New("listen tcp :9000: bind: address already in use")}
	}
	for _, tt := range []struct {
		name, docs string
		set        func(*bench)
		want       string // of the Event: object, reason and a part of the message
		unlogged   bool   // the data plane has logged it
	}{
		{"a Secret that is not there", missing, nil, "Gateway edge InvalidCertificateRef listeners one, two: ResolvedRefs: there is no Secret", false},
		{"a Secret that a listener of a set wants", edge(passthrough, "allowedListeners: {namespaces: {from: Same}}") +
			"\n---\nkind: ListenerSet\nmetadata: {namespace: a, name: more}\nspec:\n  parentRef: {name: edge}\n  listeners: [{name: l, port: 444, protocol: TLS, tls: {mode: Terminate, certificateRefs: [{name: cert}]}}]\n",
			nil, "ListenerSet more InvalidCertificateRef listener l: ResolvedRefs: there is no Secret", false},
		{"a port that is taken", edge(tcp), taken, "Gateway edge PortUnavailable listener tcp: Programmed: listen tcp :9000", true},
		{"a Gateway with parameters", edge(tcp, "infrastructure: {parametersRef: {group: x.example, kind: X, name: x}}"), nil, "Gateway edge InvalidParameters Accepted: infrastructure.parametersRef", false},
		{"a Service without endpoints", edge(passthrough) + "\n---\nkind: Service\nmetadata: {namespace: a, name: none}\nspec: {ports: [{port: 443}]}\n" + many.String(), nil,
			"TLSRoute r00 NoEndpoints Service a/none has no ready endpoint for port 443: connections to it are refused (so for 39 more TLSRoutes of the namespace)", false},
		{"a port that another Gateway has", edge(tcp) + "\n---\n" + strings.Replace(edge(tcp), "name: edge", "name: late", 1), nil,
			"Gateway late PortUnavailable listener tcp: Accepted: Gateway a/edge has port 9000 of all addresses: give this listener another port, or make it a listener of that Gateway", false},
		{"a hostname that the Gateway has", edge(passthrough, "allowedListeners: {namespaces: {from: Same}}") +
			"\n---\nkind: ListenerSet\nmetadata: {namespace: a, name: more}\nspec:\n  parentRef: {name: edge}\n  listeners: [{name: l, port: 443, protocol: TLS, tls: {mode: Passthrough}}]\n",
			nil, `ListenerSet more HostnameConflict listener l: Accepted: hostname "" of port 443 is already used by listener tls of Gateway a/edge`, false},
		{"a Service behind many routes", edge(passthrough) + many.String(), nil, "TLSRoute r00 BackendNotFound ResolvedRefs: there is no Service a/none (so for 39 more TLSRoutes of the namespace)", false},
		{"an HTTPRoute", edge("  - {name: http, port: 80, protocol: HTTP}\n") + testRoute("HTTPRoute", "r", "abc.example.com", "{name: web, port: 80}"), nil, "HTTPRoute r HTTPNotRouted culvert routes no HTTP yet", false},
		{"a GRPCRoute", edge("  - {name: http, port: 80, protocol: HTTP}\n") + testRoute("GRPCRoute", "r", "abc.example.com", "{name: web, port: 80}"), nil, "GRPCRoute r NotAllowedByListeners Accepted: culvert routes no gRPC yet", false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := newBench(t, tt.docs)
				if tt.set != nil {
					tt.set(b)
				}
				defer b.start()()
				calm()
				time.Sleep(time.Minute)
				synctest.Wait()
				events, err := b.core.CoreV1().Events("a").List(t.Context(), metav1.ListOptions{})
				if err != nil {
					t.Fatal(err)
				}
				var got []string
				for _, e := range events.Items {
					got = append(got, fmt.Sprintf("%s %s %s %s", e.InvolvedObject.Kind, e.InvolvedObject.Name, e.Reason, e.Message))
				}
				if len(got) != 1 || !strings.HasPrefix(got[0], tt.want) {
					t.Errorf("got Events %q, want one that says %q", got, tt.want)
				}
				want := 1
				if tt.unlogged {
					want = 0
				}
				if n := strings.Count(b.log.String(), "Kubernetes object refused"); n != want {
					t.Errorf("got %d lines of the log, want %d:\n%s", n, want, b.log)
				}
				if n := len(b.c.Report().Refusals); n != 1 {
					t.Errorf("got %d refusals in the report, want one: %+v", n, b.c.Report().Refusals)
				}
			})
		})
	}
}

// A fixedPlane has tried its listeners, and nothing changes.
type fixedPlane map[string]error

func (p fixedPlane) ListenerErrors() map[string]error { return p }
func (p fixedPlane) Changed() <-chan struct{}         { return nil }

// A parent that names a listener and no port is told of by that name, and of no port.
func TestAParentWithoutAPort(t *testing.T) {
	for parent, want := range map[string]string{
		"{name: edge, sectionName: none}":            `Gateway a/edge has no listener named "none"`,
		"{name: edge, port: 444}":                    "Gateway a/edge has no listener at port 444",
		"{name: edge, sectionName: none, port: 443}": `Gateway a/edge has no listener named "none" at port 443`,
	} {
		res := Translate(inputsOf(t, base, edge(passthrough)+testRoute("TLSRoute", "r", "abc.example.com", "{name: web, port: 443}", parent)))
		for k, r := range res.Routes {
			if c := r.Parents[0].Conditions[0]; c.Message != want {
				t.Errorf("%s, %s: got %q, want %q", k.Name, parent, c.Message, want)
			}
		}
	}
}
