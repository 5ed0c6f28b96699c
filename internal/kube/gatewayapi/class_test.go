package gatewayapi

import (
	"slices"
	"strings"
	"testing"
	"testing/synctest"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"
)

// A class that goes wrong has no hold over Gateways that were accepted before.
func TestGatewayClassThatGoesWrong(t *testing.T) {
	wrong := func(w *Inputs) {
		w.Classes[0].Spec.ParametersRef = &gwv1.ParametersReference{Group: "x", Kind: "Y", Name: "z"}
	}
	before := func(w *Inputs) {
		wrong(w)
		w.Gateways[0].Status.Conditions = observe(1, conditions("Accepted"))
	}
	runRows(t, []row{
		{"a Gateway of before", edge(passthrough), before, `
			class culvert Accepted=False/InvalidParameters
			gateway a/edge Accepted=True/Accepted
			gateway a/edge Programmed=True/Programmed
			open a/edge/tls/443 tls
		`},
		{"a new one", edge(passthrough), wrong, `
			gateway a/edge Accepted=False/InvalidParameters
			gateway a/edge Programmed=False/Invalid
			listener a/edge tls Programmed=False/Invalid
			!open
		`},
		{"without a class, and never ours", strings.ReplaceAll(edge(passthrough), "gatewayClassName: culvert", "gatewayClassName: none"), nil, `
			!gateway
			!open
		`},
	})
}

// A class that is deleted takes its Gateways out of force, and they say so for as
// long as anybody remembers whose they were.
func TestGatewayClassThatIsDeleted(t *testing.T) {
	w := inputsOf(t, base, edge(passthrough)+testRoute("TLSRoute", "r", "x.example.com", "{name: web, port: 443}"))
	w.PublicAddresses, w.memo = addrs("192.0.2.1"), newMemo()
	expect(t, Translate(w), "gateway a/edge Programmed=True/Programmed")
	classes := w.Classes
	for range 2 {
		w.Classes = nil
		res := Translate(w)
		expect(t, res, `
			gateway a/edge Accepted=False/Invalid
			gateway a/edge Programmed=False/Invalid
			gateway a/edge addresses=0
			listener a/edge tls Programmed=False/Invalid
			!open
		`)
		if len(res.Classless) != 1 || !strings.Contains(res.Classless["culvert"], "it was deleted") {
			t.Errorf("got %v, want culvert, and that it was deleted", res.Classless)
		}
	}
	w.Classes = classes
	expect(t, Translate(w), "gateway a/edge Programmed=True/Programmed\nopen a/edge/tls/443 tls")
	// One that goes to another controller is that one's.
	other := *classes[0]
	other.Spec.ControllerName = "other.example/x"
	w.Classes = []*gwv1.GatewayClass{&other}
	expect(t, Translate(w), "!gateway\n!open")
}

// Of a Gateway that goes to another controller's class nothing of ours stays with
// the routes and policies that name it.
func TestGatewayThatMovesAway(t *testing.T) {
	const set = `
---
kind: ListenerSet
metadata: {namespace: a, name: set}
spec: {parentRef: {name: edge}, listeners: [{name: more, port: 444, protocol: TLS, tls: {mode: Passthrough}}]}
`
	for _, tt := range []struct {
		name, class string
		only        string // Settings.Class
		want        []string
	}{
		{"ours", "culvert", "", []string{"edge", "set"}},
		{"of another controller", "theirs", "", nil},
		{"of no class", "none", "", nil},
		{"of another instance of ours", "second", "culvert", []string{"edge", "set"}},
		{"of a class that may be another instance's", "unseen", "culvert", []string{"edge", "set"}},
		{"of another controller, beside an instance of ours", "theirs", "culvert", nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			w := inputsOf(t, base, edge(passthrough, "allowedListeners: {namespaces: {from: All}}")+set+testRoute("TLSRoute", "r", "x.example.com", "{name: web, port: 443}", "{name: edge}, {kind: ListenerSet, name: set}"),
				"kind: GatewayClass\nmetadata: {name: theirs}\nspec: {controllerName: other.example/x}", "kind: GatewayClass\nmetadata: {name: second}\nspec: {controllerName: culvert.dev/gateway}")
			w.PublicAddresses = addrs("192.0.2.1")
			k := RouteKey{tlsRoute, key(w.TLSRoutes[0])}
			theirs := gwv1.RouteParentStatus{ParentRef: gwv1.ParentReference{Name: "edge"}, ControllerName: "other.example/x"}
			have := append(Translate(w).Routes[k].Parents, theirs)
			if len(have) != 3 {
				t.Fatalf("got %+v before, want two parents of ours", have)
			}
			w.Gateways[0].Spec.GatewayClassName, w.Class = gwv1.ObjectName(tt.class), tt.only
			var got []string
			foreign := 0
			for _, p := range mergeParents(have, Translate(w).Routes[k], DefaultController, "a", metav1.Now()) {
				if p.ControllerName == DefaultController {
					got = append(got, string(p.ParentRef.Name))
				} else {
					foreign++
				}
			}
			if !slices.Equal(got, tt.want) || foreign != 1 {
				t.Errorf("got parents %q of ours and %d of another, want %q and 1", got, foreign, tt.want)
			}
		})
	}
}

// What becomes of a class is in the log, once, and in the status of its Gateways.
func TestControllerTellsOfClasses(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, edge(passthrough))
		defer b.start()()
		calm()
		said := func(want string) {
			t.Helper()
			if n := strings.Count(b.log.String(), want); n != 1 {
				t.Errorf("got %q %d times, want once:\n%s", want, n, b.log)
			}
		}
		classes := b.gw.GatewayV1().GatewayClasses()
		c, err := classes.Get(t.Context(), "culvert", metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		good := c.DeepCopy()
		c.Spec.ParametersRef = &gwv1.ParametersReference{Group: "x", Kind: "Y", Name: "z"}
		if _, err = classes.Update(t.Context(), c, metav1.UpdateOptions{}); err != nil {
			t.Fatal(err)
		}
		calm()
		said(`class=culvert reason="it is not accepted: parametersRef`)
		if u := b.last(); u == nil || len(u.Listeners) != 1 || !has(b.gateway("edge").Status.Conditions, "Programmed", "True", "Programmed") {
			t.Errorf("got %+v of a class that went wrong, want that the Gateway is served as before", u)
		}
		if err := classes.Delete(t.Context(), "culvert", metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		calm()
		said(`class=culvert reason="it was deleted; its Gateways are not served"`)
		if u := b.last(); u == nil || len(u.Listeners) != 0 || !has(b.gateway("edge").Status.Conditions, "Programmed", "False", "Invalid") {
			t.Errorf("got %+v and %+v without a class, want nothing served", u, b.gateway("edge").Status.Conditions)
		}
		good.ResourceVersion = ""
		if _, err := classes.Create(t.Context(), good, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		calm()
		said(`msg="GatewayClass accepted again or unused" class=culvert`)
		if u := b.last(); u == nil || len(u.Listeners) != 1 || !has(b.gateway("edge").Status.Conditions, "Programmed", "True", "Programmed") {
			t.Errorf("got %+v with the class again, want the Gateway served", u)
		}
	})
}
