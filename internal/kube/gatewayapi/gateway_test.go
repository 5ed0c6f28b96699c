package gatewayapi

import (
	"fmt"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	ktesting "k8s.io/client-go/testing"
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"
)

func TestGatewayClass(t *testing.T) {
	runRows(t, []row{
		{"ours", "", nil, `
			class culvert Accepted=True/Accepted
			class culvert feature TLSRoute
			class culvert feature TLSRouteModeMixed
			!class culvert feature HTTPRoute
			!class culvert feature GatewayHTTP
			!class culvert SupportedVersion
		`},
		{"another's", "kind: GatewayClass\nmetadata: {name: other}\nspec: {controllerName: other.example/x}", nil, `!class other`},
		{"a second one", "kind: GatewayClass\nmetadata: {name: second}\nspec: {controllerName: culvert.dev/gateway}", nil, `class second Accepted=True/Accepted`},
		{"only one is served", "kind: GatewayClass\nmetadata: {name: second}\nspec: {controllerName: culvert.dev/gateway}", func(w *Inputs) { w.Class = "second" }, `
			class second Accepted=True/Accepted
			!class culvert
		`},
		{"parameters", "kind: GatewayClass\nmetadata: {name: second}\nspec: {controllerName: culvert.dev/gateway, parametersRef: {group: x, kind: Y, name: z}}", nil, `
			class second Accepted=False/InvalidParameters
		`},
		{"version", "", func(w *Inputs) { w.Bundle = "v1.6.0" }, `class culvert SupportedVersion=True/SupportedVersion`},
		{"another version", "", func(w *Inputs) { w.Bundle = "v1.4.1" }, `class culvert SupportedVersion=False/UnsupportedVersion`},
		{"controller of one's own", "kind: GatewayClass\nmetadata: {name: second}\nspec: {controllerName: my.example/gw}", func(w *Inputs) { w.Controller = "my.example/gw" }, `
			class second Accepted=True/Accepted
			!class culvert
		`},
	})
}

func TestGatewayListeners(t *testing.T) {
	http := "  - {name: http, port: 80, protocol: HTTP}\n"
	runRows(t, []row{
		{"HTTPRoute attaches", edge(http) + testRoute("HTTPRoute", "h", "", "{name: web, port: 80}"), nil, `
			listener a/edge http kinds=HTTPRoute attached=1
			HTTPRoute a/h edge Accepted=True/Accepted
			HTTPRoute a/h edge ResolvedRefs=True/ResolvedRefs
			open a/edge/http/80 http
		`},
		{"HTTP by hostnames on one port", edge("  - {name: a, port: 80, protocol: HTTP, hostname: a.example.com}\n  - {name: b, port: 80, protocol: HTTP, hostname: b.example.com}\n") +
			testRoute("HTTPRoute", "h", "b.example.com", "{name: web, port: 80}"), nil, `
			listener a/edge a Accepted=True/Accepted
			listener a/edge b Accepted=True/Accepted
			listener a/edge a kinds=HTTPRoute attached=0
			listener a/edge b kinds=HTTPRoute attached=1
		`},
		{"invalid route kind", edge("  - {name: http, port: 80, protocol: HTTP, allowedRoutes: {kinds: [{kind: InvalidRoute}]}}\n"), nil, `
			listener a/edge http ResolvedRefs=False/InvalidRouteKinds
			listener a/edge http kinds= attached=0
		`},
		{"one invalid route kind of two", edge("  - {name: http, port: 80, protocol: HTTP, allowedRoutes: {kinds: [{kind: InvalidRoute}, {kind: HTTPRoute}]}}\n") + testRoute("HTTPRoute", "h", "", "{name: web, port: 80}"), nil, `
			listener a/edge http ResolvedRefs=False/InvalidRouteKinds
			listener a/edge http kinds=HTTPRoute attached=1
		`},
		{"kinds of a TLS listener", edge("  - {name: tls, port: 443, protocol: TLS, tls: {mode: Passthrough}, allowedRoutes: {kinds: [{kind: TCPRoute}, {kind: TLSRoute}]}}\n"), nil, `
			listener a/edge tls ResolvedRefs=False/InvalidRouteKinds
			listener a/edge tls kinds=TLSRoute attached=0
			gateway a/edge Programmed=True/Programmed
		`},
		{"kind of another group", edge("  - {name: tls, port: 443, protocol: TLS, tls: {mode: Passthrough}, allowedRoutes: {kinds: [{group: x.example, kind: TLSRoute}]}}\n"), nil, `
			listener a/edge tls ResolvedRefs=False/InvalidRouteKinds
			listener a/edge tls kinds= attached=0
		`},
		{"unsupported protocol", edge("  - {name: x, port: 80, protocol: INVALID}\n"), nil, `
			listener a/edge x Accepted=False/UnsupportedProtocol
			listener a/edge x kinds= attached=0
			gateway a/edge Accepted=False/ListenersNotValid
			gateway a/edge Programmed=False/Invalid
			gateway a/edge addresses=0
			!open
		`},
		{"unsupported protocol beside a good one", edge("  - {name: x, port: 80, protocol: INVALID}\n  - {name: http, port: 8080, protocol: HTTP}\n"), nil, `
			listener a/edge x Accepted=False/UnsupportedProtocol
			listener a/edge http Accepted=True/Accepted
			gateway a/edge Accepted=True/ListenersNotValid
			gateway a/edge Programmed=True/Programmed
			open a/edge/http/8080 http
		`},
		{"TCP and HTTP on a port: no winner", edge(http + "  - {name: tcp, port: 80, protocol: TCP}\n  - {name: ok, port: 81, protocol: TCP}\n"), nil, `
			listener a/edge http Accepted=False/ProtocolConflict
			listener a/edge http Conflicted=True/ProtocolConflict
			listener a/edge http Programmed=False/ProtocolConflict
			listener a/edge tcp Accepted=False/ProtocolConflict
			listener a/edge tcp Conflicted=True/ProtocolConflict
			listener a/edge ok Accepted=True/Accepted
			gateway a/edge Accepted=True/ListenersNotValid
			!open a/edge/http/80
		`},
		{"TCP, TLS by hosts: all of the port", edge("  - {name: a, port: 443, protocol: TLS, hostname: a.example.com, tls: {mode: Passthrough}}\n  - {name: b, port: 443, protocol: TLS, hostname: b.example.com, tls: {mode: Passthrough}}\n  - {name: tcp, port: 443, protocol: TCP}\n"), nil, `
			listener a/edge a Conflicted=True/ProtocolConflict
			listener a/edge b Conflicted=True/ProtocolConflict
			listener a/edge tcp Conflicted=True/ProtocolConflict
			gateway a/edge Accepted=False/ListenersNotValid
		`},
		{"TLS and HTTPS of one host", edge(passthrough+"  - {name: a, port: 443, protocol: TLS, hostname: a.example.com, tls: {mode: Passthrough}}\n  - {name: h, port: 443, protocol: HTTPS, hostname: a.example.com, tls: {certificateRefs: [{name: cert}]}}\n") + secret +
			testRoute("TLSRoute", "r", "'*.example.com'", "{name: web, port: 443}"), nil, `
			listener a/edge a Conflicted=True/HostnameConflict
			listener a/edge h Conflicted=True/HostnameConflict
			listener a/edge tls Accepted=True/Accepted
			# The name is refused: the listener for any host must not have it.
			rules gateway/a/edge/a=0
			rules gateway/a/edge/tls=1
		`},
		{"UDP beside TCP", edge("  - {name: t, port: 53, protocol: TCP}\n  - {name: u, port: 53, protocol: UDP}\n"), nil, `
			listener a/edge t Accepted=True/Accepted
			listener a/edge u Accepted=True/Accepted
			open a/edge/tcp/53 tcp
			open a/edge/udp/53 udp
		`},
		{"overlaps", edge("  - {name: a, port: 443, protocol: TLS, hostname: foo.example.com, tls: {mode: Passthrough}}\n  - {name: b, port: 443, protocol: TLS, hostname: foo.example.org, tls: {mode: Passthrough}}\n  - {name: c, port: 443, protocol: TLS, hostname: '*.example.com', tls: {mode: Passthrough}}\n"), nil, `
			listener a/edge a OverlappingTLSConfig=True/OverlappingHostnames
			listener a/edge c OverlappingTLSConfig=True/OverlappingHostnames
			!listener a/edge b OverlappingTLSConfig
		`},
		{"a hostname that is none", edge("  - {name: a, port: 443, protocol: TLS, hostname: a.1, tls: {mode: Passthrough}}\n"), nil, `
			listener a/edge a Accepted=False/UnsupportedValue
		`},
		{"parametersRef", edge(http, "infrastructure: {parametersRef: {group: invalid.io, kind: InvalidParameters, name: invalid}}"), nil, `
			gateway a/edge Accepted=False/InvalidParameters
			gateway a/edge Programmed=False/Invalid
			listener a/edge http Programmed=False/Invalid
			!open
		`},
		{"allowed namespaces", edge("  - {name: same, port: 1, protocol: TCP}\n"+
			"  - {name: all, port: 2, protocol: TCP, allowedRoutes: {namespaces: {from: All}}}\n"+
			"  - {name: red, port: 3, protocol: TCP, allowedRoutes: {namespaces: {from: Selector, selector: {matchLabels: {team: red}}}}}\n"+
			"  - {name: blue, port: 4, protocol: TCP, allowedRoutes: {namespaces: {from: Selector, selector: {matchLabels: {team: blue}}}}}\n"+
			"  - {name: none, port: 5, protocol: TCP, allowedRoutes: {namespaces: {from: None}}}\n"+
			"  - {name: missing, port: 6, protocol: TCP, allowedRoutes: {namespaces: {from: Selector}}}\n"+
			"  - {name: bad, port: 7, protocol: TCP, allowedRoutes: {namespaces: {from: Selector, selector: {matchExpressions: [{key: x, operator: Huh}]}}}}\n"+
			"  - {name: every, port: 8, protocol: TCP, allowedRoutes: {namespaces: {from: Selector, selector: {}}}}\n") +
			strings.Replace(testRoute("TCPRoute", "r", "", "{name: web, port: 443}", "{name: edge, namespace: a}"), "namespace: a,", "namespace: b,", 1), nil, `
			listener a/edge same kinds=TCPRoute attached=0
			listener a/edge all kinds=TCPRoute attached=1
			listener a/edge red kinds=TCPRoute attached=0
			listener a/edge blue kinds=TCPRoute attached=1
			listener a/edge none kinds=TCPRoute attached=0
			listener a/edge missing kinds=TCPRoute attached=0
			listener a/edge bad kinds=TCPRoute attached=0
			listener a/edge every kinds=TCPRoute attached=1
			TCPRoute b/r edge Accepted=True/Accepted
		`},
		{"a listener that is not accepted counts its routes", edge("  - {name: a, port: 1, protocol: TCP}\n  - {name: h, port: 1, protocol: HTTP}\n") + testRoute("TCPRoute", "r", "", "{name: web, port: 443}"), nil, `
			listener a/edge a kinds=TCPRoute attached=1
			TCPRoute a/r edge Accepted=True/Accepted
		`},
	})
}

func TestSecretGrants(t *testing.T) {
	https := edge("  - {name: https, port: 443, protocol: HTTPS, tls: {certificateRefs: [{name: cert, namespace: b}]}}\n") +
		"\n---\nkind: Secret\nmetadata: {namespace: b, name: cert}\nstringData: {tls.crt: CERT}\n"
	grant := func(from, to string) string {
		return "\n---\nkind: ReferenceGrant\nmetadata: {namespace: b, name: g}\nspec: {from: [" + from + "], to: [" + to + "]}\n"
	}
	const gw = "{group: gateway.networking.k8s.io, kind: Gateway, namespace: a}"
	no := "listener a/edge https ResolvedRefs=False/RefNotPermitted\nlistener a/edge https Programmed=False/Invalid"
	yes := "listener a/edge https ResolvedRefs=True/ResolvedRefs\nlistener a/edge https Programmed=True/Programmed"
	runRows(t, []row{
		{"none", https, nil, no},
		{"all in the namespace", https + grant(gw, "{group: '', kind: Secret}"), nil, yes},
		{"by name", https + grant(gw, "{group: '', kind: Secret, name: cert}"), nil, yes},
		{"another name", https + grant(gw, "{group: '', kind: Secret, name: not-cert}"), nil, no},
		{"another namespace", https + grant("{group: gateway.networking.k8s.io, kind: Gateway, namespace: c}", "{group: '', kind: Secret}"), nil, no},
		{"another kind from", https + grant("{group: gateway.networking.k8s.io, kind: HTTPRoute, namespace: a}", "{group: '', kind: Secret}"), nil, no},
		{"another group from", https + grant("{group: '', kind: Gateway, namespace: a}", "{group: '', kind: Secret}"), nil, no},
		{"another kind to", https + grant(gw, "{group: '', kind: ConfigMap}"), nil, no},
		{"another group to", https + grant(gw, "{group: x, kind: Secret}"), nil, no},
		{"a grant of another namespace", https + strings.Replace(grant(gw, "{group: '', kind: Secret}"), "namespace: b", "namespace: a", 1), nil, no},
		{"no such Secret, and no grant", edge("  - {name: https, port: 443, protocol: HTTPS, tls: {certificateRefs: [{name: none, namespace: b}]}}\n"), nil, no},
		{"no such Secret, but a grant", edge("  - {name: https, port: 443, protocol: HTTPS, tls: {certificateRefs: [{name: none, namespace: b}]}}\n") + grant(gw, "{group: '', kind: Secret}"), nil,
			"listener a/edge https ResolvedRefs=False/InvalidCertificateRef"},
	})
}

// A ListenerSet whose Gateway is deleted says so, and its entries say nothing more.
func TestAListenerSetOutlivesItsGateway(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, edge(passthrough, "allowedListeners: {namespaces: {from: Same}}")+orphan(`
---
kind: ListenerSet
metadata: {namespace: a, name: s}
spec: {parentRef: {name: edge}, listeners: [{name: l, port: 444, protocol: TLS, tls: {mode: Passthrough}}]}
`))
		b.gw.PrependReactor("update", "listenersets", func(a ktesting.Action) (bool, runtime.Object, error) {
			written := a.(ktesting.UpdateAction).GetObject().(*gwv1.ListenerSet)
			if len(written.ManagedFields) > 0 {
				t.Errorf("sent with managedFields %v, which replace those of the API server", written.ManagedFields)
			}
			written.ManagedFields = []metav1.ManagedFieldsEntry{{Manager: "culvert", Operation: "Update", Subresource: "status"}}
			return false, nil, nil
		})
		defer b.start()()
		calm()
		status := func() gwv1.ListenerSetStatus {
			s, err := b.gw.GatewayV1().ListenerSets("a").Get(t.Context(), "s", metav1.GetOptions{})
			if err != nil {
				t.Fatal(err)
			}
			return s.Status
		}
		if st := status(); !has(st.Conditions, "Programmed", "True", "Programmed") || len(st.Listeners) != 1 {
			t.Fatalf("got %+v, want a set in force", st)
		}
		if err := b.gw.GatewayV1().Gateways("a").Delete(t.Context(), "edge", metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		calm()
		if st := status(); !has(st.Conditions, "Accepted", "False", "ParentNotAccepted") || !has(st.Conditions, "Programmed", "False", "ParentNotProgrammed") || len(st.Listeners) != 0 {
			t.Errorf("got %+v, want a set without a Gateway", st)
		}
	})
}

// orphan says of the objects of a text that this program wrote their status.
func orphan(text string) string {
	return strings.ReplaceAll(text, "metadata: {", "metadata: {managedFields: [{manager: culvert, operation: Update, subresource: status}], ")
}

func TestListenerSet(t *testing.T) {
	gw := func(allowed string) string {
		return edge("  - {name: http, port: 80, protocol: HTTP, hostname: gw.example.com}\n", "allowedListeners: {namespaces: "+allowed+"}")
	}
	set := func(namespace, name, listeners string) string {
		return "\n---\nkind: ListenerSet\nmetadata: {namespace: " + namespace + ", name: " + name + "}\nspec:\n  parentRef: {name: edge, namespace: a}\n  listeners:\n" + listeners
	}
	tls := "  - {name: l, port: 443, protocol: TLS, tls: {mode: Passthrough}}\n"
	runRows(t, []row{
		{"not allowed by default", edge("  - {name: http, port: 80, protocol: HTTP}\n") + set("a", "s", tls), nil, `
			set a/s Accepted=False/NotAllowed
			set a/s Programmed=False/NotAllowed
			gateway a/edge sets=0
			gateway a/edge Accepted=True/Accepted
		`},
		{"None", gw("{from: None}") + set("a", "s", tls), nil, "set a/s Accepted=False/NotAllowed\nset a/s Programmed=False/NotAllowed\n!open a/edge/tls"},
		{"Same", gw("{from: Same}") + set("a", "s", tls) + set("b", "s", tls), nil, `
			set a/s Accepted=True/Accepted
			set a/s Programmed=True/Programmed
			entry a/s l Accepted=True/Accepted
			entry a/s l Programmed=True/Programmed
			set b/s Accepted=False/NotAllowed
			gateway a/edge sets=1
			section a/edge/tls/443 * listenerset/a/s/l
		`},
		{"Selector", gw("{from: Selector, selector: {matchLabels: {team: blue}}}") + set("a", "s", tls) + set("b", "s", tls), nil, `
			set a/s Accepted=False/NotAllowed
			set b/s Accepted=True/Accepted
			gateway a/edge sets=1
		`},
		{"All", gw("{from: All}") + set("a", "s", tls) + set("b", "s", "  - {name: l, port: 444, protocol: TLS, tls: {mode: Passthrough}}\n"), nil, "gateway a/edge sets=2"},
		{"hostname conflicts have a winner", gw("{from: Same}") +
			set("a", "one", "  - {name: ok, port: 80, protocol: HTTP, hostname: one.example.com}\n  - {name: gw, port: 80, protocol: HTTP, hostname: gw.example.com}\n  - {name: first, port: 80, protocol: HTTP, hostname: shared.example.com}\n") +
			set("a", "two", "  - {name: gw, port: 80, protocol: HTTP, hostname: gw.example.com}\n") +
			set("a", "three", "  - {name: ok, port: 80, protocol: HTTP, hostname: three.example.com}\n  - {name: second, port: 80, protocol: HTTP, hostname: shared.example.com}\n") +
			set("a", "four", "  - {name: second, port: 80, protocol: HTTP, hostname: shared.example.com}\n"), nil, `
			gateway a/edge Accepted=True/Accepted
			gateway a/edge sets=2
			listener a/edge http Accepted=True/Accepted
			listener a/edge http Conflicted=False/NoConflicts
			set a/one Accepted=True/ListenersNotValid
			set a/one Programmed=True/Programmed
			entry a/one gw Accepted=False/HostnameConflict
			entry a/one gw Programmed=False/HostnameConflict
			entry a/one gw Conflicted=True/HostnameConflict
			entry a/one first Accepted=True/Accepted
			entry a/one first Programmed=True/Programmed
			set a/two Accepted=False/ListenersNotValid
			set a/two Programmed=False/ListenersNotValid
			set a/three Accepted=True/ListenersNotValid
			entry a/three second Conflicted=True/HostnameConflict
			set a/four Accepted=False/ListenersNotValid
		`},
		{"protocol conflicts have a winner", gw("{from: Same}") +
			set("a", "one", "  - {name: ok, port: 80, protocol: HTTP, hostname: one.example.com}\n  - {name: tcp, port: 80, protocol: TCP}\n  - {name: first, port: 81, protocol: HTTP}\n") +
			set("a", "two", "  - {name: tcp, port: 80, protocol: TCP}\n") +
			set("a", "three", "  - {name: ok, port: 82, protocol: TCP}\n  - {name: second, port: 81, protocol: TCP}\n") +
			set("a", "four", "  - {name: third, port: 82, protocol: TCP}\n"), nil, `
			gateway a/edge sets=2
			entry a/one tcp Accepted=False/ProtocolConflict
			entry a/one tcp Programmed=False/ProtocolConflict
			entry a/one tcp Conflicted=True/ProtocolConflict
			set a/two Accepted=False/ListenersNotValid
			entry a/one first Accepted=True/Accepted
			entry a/three second Conflicted=True/ProtocolConflict
			entry a/four third Conflicted=True/ListenerConflict
		`},
		{"what the Gateway left undecided no set decides", edge("  - {name: t, port: 80, protocol: TCP}\n  - {name: h, port: 80, protocol: HTTP}\n  - {name: ok, port: 81, protocol: TCP}\n", "allowedListeners: {namespaces: {from: Same}}") +
			set("a", "s", "  - {name: l, port: 80, protocol: TCP}\n"), nil, `
			entry a/s l Conflicted=True/ProtocolConflict
			!open a/edge/tcp/80
		`},
		{"grants are the set's own", gw("{from: All}") + `
---
kind: Secret
metadata: {namespace: b, name: cert}
stringData: {tls.crt: CERT}
---
kind: ReferenceGrant
metadata: {namespace: b, name: g}
spec: {from: [{group: gateway.networking.k8s.io, kind: Gateway, namespace: a}], to: [{group: '', kind: Secret}]}
` + set("a", "without", "  - {name: l, port: 443, protocol: HTTPS, tls: {certificateRefs: [{name: cert, namespace: b}]}}\n") + set("b", "same", "  - {name: l, port: 444, protocol: HTTPS, tls: {certificateRefs: [{name: cert}]}}\n"), nil, `
			entry a/without l ResolvedRefs=False/RefNotPermitted
			set a/without Accepted=False/ListenersNotValid
			set a/without Programmed=False/ListenersNotValid
			entry b/same l ResolvedRefs=True/ResolvedRefs
			set b/same Accepted=True/Accepted
		`},
		{"a grant for the set", gw("{from: All}") + `
---
kind: Secret
metadata: {namespace: b, name: cert}
stringData: {tls.crt: CERT}
---
kind: ReferenceGrant
metadata: {namespace: b, name: g}
spec: {from: [{group: gateway.networking.k8s.io, kind: ListenerSet, namespace: a}], to: [{group: '', kind: Secret}]}
` + set("a", "with", "  - {name: l, port: 443, protocol: HTTPS, tls: {certificateRefs: [{name: cert, namespace: b}]}}\n"), nil, `
			entry a/with l ResolvedRefs=True/ResolvedRefs
			set a/with Accepted=True/Accepted
		`},
		{"kinds", gw("{from: All}") + set("a", "s", "  - {name: l, port: 443, protocol: TLS, hostname: l.example.com, tls: {mode: Passthrough}, allowedRoutes: {kinds: [{kind: HTTPRoute}]}}\n"), nil, `
			entry a/s l ResolvedRefs=False/InvalidRouteKinds
		`},
		{"the parent is not accepted", edge("  - {name: x, port: 80, protocol: NONE}\n", "allowedListeners: {namespaces: {from: All}}") + set("a", "s", tls), nil, `
			set a/s Accepted=False/ParentNotAccepted
			set a/s Programmed=False/ParentNotProgrammed
			gateway a/edge sets=0
			!open
		`},
		{"a parent that never was", set("a", "s", tls), nil, "!set"},
		{"a parent that is gone", orphan(set("a", "s", tls)), nil, `
			set a/s Accepted=False/ParentNotAccepted
			set a/s Programmed=False/ParentNotProgrammed
			!entry
		`},
		{"a parent of another class", strings.Replace(edge(passthrough), "culvert", "other", 1) + orphan(set("a", "s", tls)), nil, "!set"},
		{"a parent out of sight", orphan(set("b", "s", tls)), func(w *Inputs) { w.Namespaces = []string{"b"} }, "!set"},
		{"a parent that may not be read", orphan(set("a", "s", tls)), func(w *Inputs) {
			w.Unread = func(resource, _ string) bool { return resource == "gateways" }
		}, "!set"},
		{"routes attach to a set, and a Gateway has no names of its sets", gw("{from: All}") + set("a", "s", "  - {name: l, port: 443, protocol: TLS, tls: {mode: Passthrough}}\n") +
			testRoute("TLSRoute", "r", "x.example.com", "{name: web, port: 443}", "{kind: ListenerSet, name: s}, {name: edge, sectionName: l}, {kind: ListenerSet, name: s, sectionName: l, port: 443}"), nil, `
			TLSRoute a/r s Accepted=True/Accepted
			TLSRoute a/r s#l:443 Accepted=True/Accepted
			TLSRoute a/r edge#l Accepted=False/NoMatchingParent
			entry a/s l kinds=TLSRoute attached=1
			rule listenerset/a/s/l tlsroute/a/r [x.example.com] 1:a/web(10.244.0.1:8443)
		`},
	})
}

func TestAddresses(t *testing.T) {
	gw := func(name, spec, listeners string) string {
		return "\n---\nkind: Gateway\nmetadata: {namespace: a, name: " + name + "}\nspec:\n  gatewayClassName: culvert\n" + spec + "  listeners:\n" + listeners
	}
	http := "  - {name: http, port: 80, protocol: HTTP}\n"
	runRows(t, []row{
		{"unsupported type", gw("edge", "  addresses: [{type: test/fake-invalid-type, value: fake address teehee!}, {value: 10.0.0.1}, {value: 10.9.9.9}]\n", http), pool("10.0.0.1"), `
			gateway a/edge Accepted=False/UnsupportedAddress
			gateway a/edge addresses=0
		`},
		{"unusable beside usable", gw("edge", "  addresses: [{value: 10.9.9.9}, {type: IPAddress, value: 10.0.0.1}]\n", http), pool("10.0.0.1"), `
			gateway a/edge Accepted=True/Accepted
			gateway a/edge Programmed=False/AddressNotUsable
			gateway a/edge address IPAddress 10.0.0.1
			gateway a/edge addresses=1
			open a/edge/http/80@10.0.0.1 http
		`},
		{"usable", gw("edge", "  addresses: [{value: 10.0.0.2}]\n", http), pool("10.0.0.1", "10.0.0.2"), `
			gateway a/edge Programmed=True/Programmed
			gateway a/edge address IPAddress 10.0.0.2
			gateway a/edge addresses=1
			listener a/edge http Programmed=True/Programmed
		`},
		{"only unusable", gw("edge", "  addresses: [{value: 10.0.0.9}]\n", http), pool("10.0.0.1"), `
			gateway a/edge Programmed=False/AddressNotUsable
			listener a/edge http Programmed=False/Pending
			!open
		`},
		{"no value", gw("edge", "  addresses: [{type: IPAddress}]\n", http), pool("10.0.0.1"), "gateway a/edge address IPAddress 10.0.0.1"},
		{"one each", gw("one", "", http) + gw("two", "", http) + gw("three", "", "  - {name: x, port: 81, protocol: HTTP}\n"), pool("10.0.0.1", "10.0.0.2"), `
			gateway a/one address IPAddress 10.0.0.1
			gateway a/two address IPAddress 10.0.0.2
			gateway a/three address IPAddress 10.0.0.1
		`},
		{"none left", gw("one", "", http) + gw("two", "", http), pool("10.0.0.1"), `
			gateway a/one Programmed=True/Programmed
			gateway a/two Programmed=False/AddressNotAssigned
			gateway a/two Accepted=True/Accepted
			listener a/two http Programmed=False/Pending
		`},
		{"kept", gw("one", "", http) + gw("two", "", http), func(w *Inputs) {
			pool("10.0.0.1", "10.0.0.2")(w)
			w.Gateways[1].Status.Addresses = []gwv1.GatewayStatusAddress{{Value: "10.0.0.1"}}
		}, `
			gateway a/one address IPAddress 10.0.0.2
			gateway a/two address IPAddress 10.0.0.1
		`},
		{"public addresses of bound ones", gw("edge", "  addresses: [{value: 203.0.113.8}]\n", http), func(w *Inputs) {
			w.Addresses = []Address{{addrs("10.0.0.5")[0], addrs("203.0.113.8")[0]}}
		}, `
			gateway a/edge address IPAddress 203.0.113.8
			open a/edge/http/80@10.0.0.5 http
		`},
		{"everywhere, and nobody knows where that is", gw("edge", "", http), func(w *Inputs) { w.PublicAddresses = nil }, `
			gateway a/edge Programmed=False/AddressNotAssigned
			open a/edge/http/80 http
		`},
		{"everywhere, static", gw("edge", "  addresses: [{value: 192.0.2.1}]\n", http) + gw("bad", "  addresses: [{value: 192.0.2.2}]\n", "  - {name: x, port: 81, protocol: HTTP}\n"), nil, `
			gateway a/edge address IPAddress 192.0.2.1
			gateway a/bad Programmed=False/AddressNotUsable
			!open a/bad
		`},
		{"everywhere, two Gateways of one port", gw("one", "", http) + gw("two", "", http), nil, `
			gateway a/one Programmed=True/Programmed
			listener a/two http Accepted=False/HostnameConflict
			gateway a/two Accepted=False/ListenersNotValid
			!open a/two
		`},
		{"who has a port keeps it", gw("one", "", http) + gw("two", "", http), func(w *Inputs) {
			w.Gateways[1].Status.Addresses = []gwv1.GatewayStatusAddress{{Value: "192.0.2.1"}}
			w.Gateways[1].Status.Listeners = []gwv1.ListenerStatus{{Name: "http", Conditions: observe(7, conditions("Programmed"))}}
		}, `
			gateway a/two Programmed=True/Programmed
			listener a/one http Accepted=False/HostnameConflict
		`},
		{"of a LoadBalancer", gw("edge", "", http) + "\n---\nkind: Service\nmetadata: {namespace: b, name: lb}\nspec: {type: LoadBalancer, clusterIPs: [10.96.0.1]}\nstatus: {loadBalancer: {ingress: [{ip: 198.51.100.7}, {hostname: lb.example.com}]}}\n", func(w *Inputs) {
			w.PublicAddresses = nil
			w.PublicService = types.NamespacedName{Namespace: "b", Name: "lb"}
		}, `
			gateway a/edge address IPAddress 198.51.100.7
			gateway a/edge address Hostname lb.example.com
			gateway a/edge addresses=2
		`},
		{"of a ClusterIP", gw("edge", "", http) + "\n---\nkind: Service\nmetadata: {namespace: b, name: in}\nspec: {type: ClusterIP, clusterIPs: [10.96.0.1]}\n", func(w *Inputs) {
			w.PublicAddresses = nil
			w.PublicService = types.NamespacedName{Namespace: "b", Name: "in"}
		}, "gateway a/edge address IPAddress 10.96.0.1"},
	})
}

func TestPlane(t *testing.T) {
	plane := func(errs map[string]error) func(*Inputs) {
		return func(w *Inputs) { w.Plane = errs }
	}
	runRows(t, []row{
		{"unknown", edge(passthrough), plane(map[string]error{}), `
			gateway a/edge Programmed=False/Pending
			listener a/edge tls Programmed=False/Pending
			listener a/edge tls Accepted=True/Accepted
		`},
		{"unknown, but it was open", edge(passthrough), func(w *Inputs) {
			w.Plane = map[string]error{}
			w.Gateways[0].Status.Listeners = []gwv1.ListenerStatus{{Name: "tls", Conditions: observe(1, conditions("Programmed"))}}
		}, "gateway a/edge Programmed=True/Programmed"},
		{"open", edge(passthrough), plane(map[string]error{"a/edge/tls/443": nil}), "gateway a/edge Programmed=True/Programmed"},
		{"in use", edge(passthrough), plane(map[string]error{"a/edge/tls/443": fmt.Errorf("listen: %w", syscall.EADDRINUSE)}), `
			gateway a/edge Programmed=False/Invalid
			listener a/edge tls Programmed=False/PortUnavailable
		`},
		{"no such address", edge(passthrough), plane(map[string]error{"a/edge/tls/443": fmt.Errorf("listen: %w", syscall.EADDRNOTAVAIL)}), `
			gateway a/edge Programmed=False/AddressNotUsable
			listener a/edge tls Programmed=False/PortUnavailable
		`},
		{"one of two", edge(passthrough + tcp), plane(map[string]error{"a/edge/tls/443": nil, "a/edge/tcp/9000": syscall.EACCES}), `
			gateway a/edge Programmed=True/Programmed
			listener a/edge tcp Programmed=False/PortUnavailable
		`},
	})
}

func TestLongNames(t *testing.T) {
	name := strings.Repeat("g", 63) + "." + strings.Repeat("h", 63) + "." + strings.Repeat("i", 63) + "." + strings.Repeat("j", 61)
	w := inputsOf(t, base, strings.ReplaceAll(edge(passthrough), "edge", name), strings.ReplaceAll(testRoute("TLSRoute", "r", "x.example.com", "{name: web, port: 443}"), "edge", name))
	w.PublicAddresses = addrs("192.0.2.1")
	res := Translate(w)
	expect(t, res, "gateway a/"+name+" Programmed=True/Programmed\nTLSRoute a/r "+name+" Accepted=True/Accepted")
	a := res.Accounts[types.NamespacedName{Namespace: "a", Name: name}]
	if len(a.Name) > 253 || len(a.Labels["gateway.networking.k8s.io/gateway-name"]) > 63 || len(a.Labels["gateway.networking.k8s.io/gateway-name"]) == 0 {
		t.Errorf("got a ServiceAccount %q with labels %v", a.Name, a.Labels)
	}
}

func TestInfrastructure(t *testing.T) {
	w := inputsOf(t, base, edge(passthrough, "infrastructure: {labels: {key2: value2}, annotations: {key1: value1}}"))
	a := Translate(w).Accounts[types.NamespacedName{Namespace: "a", Name: "edge"}]
	if a.Labels["key2"] != "value2" || a.Annotations["key1"] != "value1" || a.Labels["gateway.networking.k8s.io/gateway-name"] != "edge" ||
		a.OwnerReferences[0].UID != w.Gateways[0].UID || *a.AutomountServiceAccountToken {
		t.Errorf("got %+v", a)
	}
}
