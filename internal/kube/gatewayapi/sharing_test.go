package gatewayapi

import (
	"errors"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/types"
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"
)

// sharer is a Gateway with one listener for TLS at port 443; host may be "".
func sharer(namespace, name, host string, more ...string) string {
	l := "  - {name: tls, port: 443, protocol: TLS, tls: {mode: Passthrough}}\n"
	if host != "" {
		l = "  - {name: tls, port: 443, protocol: TLS, hostname: '" + host + "', tls: {mode: Passthrough}}\n"
	}
	return "\n---\nkind: Gateway\nmetadata: {namespace: " + namespace + ", name: " + name + "}\nspec:\n  gatewayClassName: culvert\n  listeners:\n" + l + strings.Join(more, "")
}

// inForce has Gateways say that their listeners tls were, at a generation.
func inForce(generation int64, names ...string) func(*Inputs) {
	return func(w *Inputs) {
		for _, g := range w.Gateways {
			for _, n := range names {
				if g.Name == n {
					g.Status.Addresses = []gwv1.GatewayStatusAddress{{Value: "192.0.2.1"}}
					g.Status.Listeners = []gwv1.ListenerStatus{{Name: "tls", Conditions: observe(generation, conditions("Programmed"))}}
				}
			}
		}
	}
}

// Gateways at one address share a port where hostnames tell them apart.
func TestGatewaysShareAPort(t *testing.T) {
	served := "\nlistener a/one tls Programmed=True/Programmed\nlistener a/one tls Conflicted=False/NoConflicts\nlistener a/two tls Programmed=True/Programmed\nlistener a/two tls Conflicted=False/NoConflicts\n"
	runRows(t, []row{
		{"hostnames that have nothing in common",
			sharer("a", "one", "one.test") + sharer("b", "two", "*.two.test") +
				testRoute("TLSRoute", "r", "one.test", "{name: web, port: 443}", "{name: one}") +
				testRoute("TLSRoute", "stranger", "one.test", "{name: other, port: 443}", "{name: two, namespace: b}"), nil, `
			gateway a/one Programmed=True/Programmed
			gateway b/two Programmed=True/Programmed
			listener a/one tls Conflicted=False/NoConflicts
			listener b/two tls Conflicted=False/NoConflicts
			listener a/one tls kinds=TLSRoute attached=1
			listener b/two tls kinds=TLSRoute attached=0
			open a/one/tls/443 tls
			!open b/two
			section a/one/tls/443 one.test gateway/a/one/tls
			section a/one/tls/443 *.two.test gateway/b/two/tls
			rule gateway/a/one/tls tlsroute/a/r [one.test] 1:a/web(10.244.0.1:8443)
			rules gateway/b/two/tls=0
			TLSRoute a/stranger two Accepted=False/NotAllowedByListeners
		`},
		{"a route has only the names of its own Gateway",
			sharer("a", "one", "*.one.test") + sharer("a", "two", "*.two.test") +
				testRoute("TLSRoute", "r", "x.one.test, x.two.test", "{name: web, port: 443}", "{name: two}"), nil, served + `
			listener a/one tls kinds=TLSRoute attached=0
			listener a/two tls kinds=TLSRoute attached=1
			rules gateway/a/one/tls=0
			rule gateway/a/two/tls tlsroute/a/r [x.two.test] 1:a/web(10.244.0.1:8443)
		`},
		{"the more specific of one namespace", sharer("a", "one", "*.one.test") + sharer("a", "two", "x.one.test"), nil, served + `
			section a/one/tls/443 *.one.test gateway/a/one/tls
			section a/one/tls/443 x.one.test gateway/a/two/tls
			listener a/one tls OverlappingTLSConfig=True/OverlappingHostnames
			listener a/two tls OverlappingTLSConfig=True/OverlappingHostnames
		`},
		{"TLS that ends beside TLS that passes, with CAs of its own",
			edge(strings.Replace(terminate, "TLS, tls", "TLS, hostname: '*.example.com', tls", 1), "tls: {frontend: {default: {validation: {caCertificateRefs: [{group: '', kind: ConfigMap, name: ca}]}}}}") + secret + caMap + sharer("b", "two", "two.test"), nil, `
			section a/edge/tls/443 *.example.com gateway/a/edge/tls ends 1 verify
			section a/edge/tls/443 two.test gateway/b/two/tls
			listener b/two tls Programmed=True/Programmed
		`},
		{"HTTP, which is refused", gatewayOf("a", "one", "  - {name: tls, port: 80, protocol: HTTP, hostname: one.test}\n") + gatewayOf("a", "two", "  - {name: tls, port: 80, protocol: HTTP, hostname: two.test}\n"), nil, served + "open a/one/http/80 http\n!open a/two"},
		{"addresses of the list", sharer("a", "one", "one.test") + sharer("a", "two", "two.test"), pool("10.0.0.1"), served + `
			gateway a/one address IPAddress 10.0.0.1
			gateway a/two address IPAddress 10.0.0.1
			section a/one/tls/443@10.0.0.1 two.test gateway/a/two/tls@10.0.0.1
		`},
		{"one that nobody has goes before one that is shared", sharer("a", "one", "one.test") + sharer("a", "two", "two.test"), pool("10.0.0.1", "10.0.0.2"), `
			gateway a/one address IPAddress 10.0.0.1
			gateway a/two address IPAddress 10.0.0.2
		`},
		{"when the first is gone", sharer("a", "two", "two.test"), nil, "open a/two/tls/443 tls\nsection a/two/tls/443 two.test gateway/a/two/tls"},
	})
}

func gatewayOf(namespace, name, listeners string) string {
	return "\n---\nkind: Gateway\nmetadata: {namespace: " + namespace + ", name: " + name + "}\nspec:\n  gatewayClassName: culvert\n  listeners:\n" + listeners
}

// What can't be told apart, or is another namespace's, is refused to who comes later.
func TestGatewaysThatCannotShareAPort(t *testing.T) {
	unreachable := func(gateway string) string {
		return "\nlistener " + gateway + " tls Conflicted=True/HostnameConflict\nlistener " + gateway + " tls Accepted=False/HostnameConflict\nlistener " + gateway +
			" tls Programmed=False/HostnameConflict\ngateway " + gateway + " Accepted=False/ListenersNotValid\n!section a/one/tls/443 x.one.test gateway/" + gateway + "\n"
	}
	won := func(gateway string) string {
		return "\nlistener " + gateway + " tls Programmed=True/Programmed\nlistener " + gateway + " tls Conflicted=False/NoConflicts\n"
	}
	for _, r := range []struct {
		row
		message string
	}{
		{row{"the same hostname", sharer("a", "one", "x.test") + sharer("a", "two", "x.test"), nil, won("a/one") + unreachable("a/two")},
			`Gateway a/one has hostname "x.test" at port 443: give this listener another hostname or port, or make it a listener of that Gateway, by a ListenerSet or in its spec`},
		{row{"no hostname twice", sharer("a", "one", "") + sharer("b", "two", ""), nil, won("a/one") + unreachable("b/two")}, "Gateway a/one has every hostname (its listener names none) at port 443: give"},
		{row{"who has it in force keeps it", sharer("a", "one", "x.test") + sharer("a", "two", "x.test"), inForce(7, "two"), won("a/two") + unreachable("a/one")}, "Gateway a/two has hostname"},
		{row{"but not by what it was before it was changed", sharer("a", "one", "x.test") + sharer("a", "two", "x.test"), inForce(6, "two"), won("a/one") + unreachable("a/two")}, "Gateway a/one has hostname"},
		{row{"an exact name within another namespace's wildcard", sharer("a", "one", "*.one.test") + sharer("b", "two", "x.one.test"), nil, won("a/one") + unreachable("b/two")},
			`Gateway a/one has hostname "*.one.test" at port 443, which includes hostname "x.one.test", and Gateways of different namespaces can't divide a hostname and the names that it includes: give this`},
		{row{"a wildcard within one", sharer("a", "one", "*.test") + sharer("b", "two", "*.x.one.test"), nil, won("a/one") + unreachable("b/two")}, `Gateway a/one has hostname "*.test"`},
		{row{"any name, in another namespace", sharer("a", "one", "") + sharer("b", "two", "x.one.test"), nil, won("a/one") + unreachable("b/two")}, "Gateway a/one has every hostname"},
		{row{"a wildcard over another namespace's name", sharer("a", "one", "x.one.test") + sharer("b", "two", "*.one.test"), nil, won("a/one") + unreachable("b/two")}, `Gateway a/one has hostname "x.one.test" at port 443, which is one of hostname "*.one.test"`},
		{row{"over names of the own namespace and another", sharer("b", "zero", "z.one.test") + sharer("a", "one", "x.one.test") + sharer("b", "two", "*.one.test"), nil, won("b/zero") + won("a/one") + unreachable("b/two")}, "Gateway a/one has"},
		{row{"an older Gateway that changes its hostname", sharer("b", "two", "x.one.test") + sharer("a", "one", "*.one.test"), func(w *Inputs) { inForce(7, "one")(w); inForce(6, "two")(w) }, won("a/one") + unreachable("b/two")}, "Gateway a/one has"},
		{row{"TCP", sharer("a", "one", "one.test") + gatewayOf("a", "two", "  - {name: tls, port: 443, protocol: TCP}\n"), nil, won("a/one") + "listener a/two tls Accepted=False/PortUnavailable\n!section a/two"}, "Gateway a/one has port 443 of all addresses: give this listener another port, or make it"},
		{row{"UDP twice", gatewayOf("a", "one", "  - {name: tls, port: 53, protocol: UDP}\n") + gatewayOf("a", "two", "  - {name: tls, port: 53, protocol: UDP}\n"), nil, won("a/one") + "listener a/two tls Accepted=False/PortUnavailable"}, "Gateway a/one has port 53 of all addresses"},
	} {
		t.Run(r.name, func(t *testing.T) {
			w := inputsOf(t, base, r.docs)
			w.PublicAddresses = addrs("192.0.2.1")
			if r.set != nil {
				r.set(w)
			}
			res := Translate(w)
			expect(t, res, r.want)
			said := false
			for _, n := range refusals(res) {
				said = said || strings.Contains(n.Message, r.message)
			}
			if !said {
				t.Errorf("nobody is told %q: %+v", r.message, refusals(res))
			}
		})
	}
}

// A Gateway whose own listeners conflict keeps names shut in itself, and in no other.
func TestAConflictShutsNoOtherGateway(t *testing.T) {
	twice := strings.Repeat("  - {name: N, port: 443, protocol: TLS, hostname: x.one.test, tls: {mode: Passthrough}}\n", 2)
	twice = strings.Replace(strings.Replace(twice, "N", "first", 1), "N", "second", 1)
	for _, namespace := range []string{"a", "b"} {
		w := inputsOf(t, base, sharer("a", "one", "*.one.test")+sharer(namespace, "two", "two.test", twice))
		w.PublicAddresses = addrs("192.0.2.1")
		if namespace == "b" {
			expect(t, Translate(w), "listener b/two first Accepted=False/HostnameConflict\nsection a/one/tls/443 two.test gateway/b/two/tls\n!section a/one/tls/443 x.one.test")
			continue
		}
		expect(t, Translate(w), "listener a/two first Accepted=False/HostnameConflict\nsection a/one/tls/443 x.one.test gateway/a/two/first")
	}
}

// What one Gateway can't serve is not said of another at the same port.
func TestASectionThatFailsIsItsGatewaysOwn(t *testing.T) {
	w := inputsOf(t, base, sharer("a", "one", "one.test")+sharer("a", "two", "two.test"))
	w.PublicAddresses = addrs("192.0.2.1")
	w.Plane = map[string]error{"a/one/tls/443": nil, "gateway/a/two/tls": errors.New("no certificate")}
	expect(t, Translate(w), "listener a/one tls Programmed=True/Programmed\nlistener a/two tls Programmed=False/PortUnavailable")
	w.Plane = map[string]error{"a/one/tls/443": errors.New("in use")}
	expect(t, Translate(w), "listener a/one tls Programmed=False/PortUnavailable\nlistener a/two tls Programmed=False/PortUnavailable")
}

// A change of its spec does not take from a Gateway what it had before and has still.
func TestAChangeLosesNothing(t *testing.T) {
	w := inputsOf(t, base, sharer("a", "one", "x.test")+sharer("a", "two", "x.test"))
	w.PublicAddresses, w.memo = addrs("192.0.2.1"), newMemo()
	inForce(7, "two")(w)
	expect(t, Translate(w), "listener a/two tls Programmed=True/Programmed")
	w.Gateways[1].Generation++ // another listener, say
	expect(t, Translate(w), "listener a/two tls Programmed=True/Programmed\nlistener a/one tls Accepted=False/HostnameConflict")
}

func TestInfrastructureIsHeldToAList(t *testing.T) {
	w := inputsOf(t, base, edge(passthrough, "infrastructure: {labels: {plain: x, policy.example.com/role: admin}, annotations: {eks.amazonaws.com/role-arn: 'arn:aws:iam::1:role/admin', team.example.com/owner: me, note: here}}"))
	w.PublicAddresses = addrs("192.0.2.1")
	of := types.NamespacedName{Namespace: "a", Name: "edge"}
	res := Translate(w)
	a := res.Accounts[of]
	if len(a.Annotations) != 2 || a.Annotations["note"] != "here" || a.Labels["plain"] != "x" || a.Labels["policy.example.com/role"] != "" || strings.Contains(a.Annotations[applied], "/role") {
		t.Errorf("without a list: labels %v, annotations %v", a.Labels, a.Annotations)
	}
	const want = "infrastructure: ServiceAccount edge-culvert does not get annotation eks.amazonaws.com/role-arn, annotation team.example.com/owner, label policy.example.com/role: gatewayAPI.infrastructureKeys does not list it"
	if c := res.Gateways[of].Conditions[0]; c.Status != "True" || !strings.Contains(c.Message, want) {
		t.Errorf("Accepted is %+v", c)
	}
	said := false
	for _, r := range refusals(res) {
		said = said || r.Reason == reasonInfrastructureLeftOut && r.Message == want
	}
	if !said {
		t.Errorf("it is not said: %+v", refusals(res))
	}
	w.InfrastructureKeys = []string{"*.example.com/*"}
	a = Translate(w).Accounts[of]
	if a.Annotations["team.example.com/owner"] != "me" || a.Labels["policy.example.com/role"] != "admin" || a.Annotations["eks.amazonaws.com/role-arn"] != "" {
		t.Errorf("with a list: labels %v, annotations %v", a.Labels, a.Annotations)
	}
}
