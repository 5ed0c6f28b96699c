package gatewayapi

import (
	"reflect"
	"strings"
	"testing"
	"testing/synctest"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"

	"culvert.dev/registry"
)

const webPolicy = `
---
kind: BackendTLSPolicy
metadata: {namespace: a, name: p}
spec:
  targetRefs: [{group: '', kind: Service, name: web}]
  validation: {hostname: abc.example.com, caCertificateRefs: [{group: '', kind: ConfigMap, name: ca}]}
`

// A backend is told who a client is as the annotation of its Service says. If that can't be done it
// is not reached, and the route says why.
func TestBackendsAreToldWhoClientsAre(t *testing.T) {
	const (
		client = "tls: {backend: {clientCertificateRef: {name: cert}}}"
		inside = "insideTLS; assertion=true"
	)
	route := secret + caMap + testRoute("TLSRoute", "r", "abc.example.com", "{name: web, port: 443}")
	signed := &registry.ForwardIdentity{InsideTLS: true, Assertion: true}
	for _, row := range []struct {
		name            string
		docs            string
		service, around string // annotations of the Service and of its Namespace
		want            *registry.ForwardIdentity
		why             string // the route is not resolved
	}{
		{name: "not told", docs: edge(terminate) + route},
		{name: "in TLS", docs: edge(terminate) + route + webPolicy, service: "insideTLS", want: &registry.ForwardIdentity{InsideTLS: true}},
		{name: "signed", docs: edge(terminate, client) + route + webPolicy, service: inside, want: signed},
		{name: "as its Namespace says", docs: edge(terminate, client) + route + webPolicy, around: inside, want: signed},
		{name: "as it says itself", docs: edge(terminate) + route, service: "beforeTLS; trustNetwork=true", around: inside, want: &registry.ForwardIdentity{}},
		{name: "by a TCPRoute", docs: edge(tcp, client) + secret + caMap + testRoute("TCPRoute", "r", "", "{name: web, port: 443}") + webPolicy, service: inside, want: signed},
		{name: "signed, without a certificate", docs: edge(terminate) + route + webPolicy, service: inside,
			why: "annotation culvert.dev/forward-identity of Service a/web asks for an assertion, which is signed with the key of spec.tls.backend.clientCertificateRef, and Gateway a/edge has none"},
		{name: "in TLS, without a policy", docs: edge(terminate) + route, service: "insideTLS",
			why: "annotation culvert.dev/forward-identity tells Service a/web of the client inside TLS, and no BackendTLSPolicy has the gateway speak TLS to it"},
		{name: "malformed", docs: edge(terminate) + route, service: "true", why: `annotation culvert.dev/forward-identity of Service a/web: "true": "true" is no position of a header`},
		{name: "malformed, of its Namespace", docs: edge(terminate) + route, around: "beforeTLS", why: `annotation culvert.dev/forward-identity of Namespace a: "beforeTLS": whoever can connect`},
	} {
		w := inputsOf(t, base, row.docs)
		f := w.Objects.(*fixture)
		if row.service != "" {
			annotate(&f.services["a/web"].ObjectMeta, "forward-identity", row.service)
		}
		if row.around != "" {
			annotate(&f.namespaces["a"].ObjectMeta, "forward-identity", row.around)
		}
		res := Translate(w)
		s := backendsOf(&res.Snapshot)["Service a/web:443"]
		switch {
		case row.why != "":
			if s != nil {
				t.Errorf("%s: got the service %+v, want none", row.name, s.ForwardIdentity)
			}
		case s == nil:
			t.Errorf("%s: got no service", row.name)
		case !reflect.DeepEqual(s.ForwardIdentity, row.want) || (s.ProxyProtocol == 2) != (row.want != nil) || row.want != nil && row.want.InsideTLS && s.TLS == nil:
			t.Errorf("%s: got %+v, version %d and TLS %v, want %+v", row.name, s.ForwardIdentity, s.ProxyProtocol, s.TLS, row.want)
		}
		for _, st := range res.Routes {
			for _, c := range st.Parents[0].Conditions {
				switch {
				case c.Type != string(gwv1.RouteConditionResolvedRefs):
				case row.why == "" && c.Status != metav1.ConditionTrue,
					row.why != "" && (c.Status != metav1.ConditionFalse || c.Reason != "InvalidAnnotation" || !strings.Contains(c.Message, row.why)):
					t.Errorf("%s: got ResolvedRefs %s, %s: %s; want %q", row.name, c.Status, c.Reason, c.Message, row.why)
				}
			}
		}
	}
	// Datagrams have no header.
	w := inputsOf(t, base, edge(tcp+udp), testRoute("UDPRoute", "u", "", "{name: web, port: 53}"))
	annotate(&w.Objects.(*fixture).services["a/web"].ObjectMeta, "forward-identity", "beforeTLS; trustNetwork=true")
	if s := backendsOf(&Translate(w).Snapshot)["Service a/web:53"]; s == nil || s.ForwardIdentity != nil || s.ProxyProtocol != 0 {
		t.Errorf("UDP: got %+v, want a service that is not told", s)
	}
}

// A change of the annotation is a change of the table, and a malformed one is an Event of the route.
func TestControllerFollowsForwardIdentity(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, edge(tcp), testRoute("TCPRoute", "r", "", "{name: web, port: 443}"))
		stop := b.start()
		defer stop()
		annotated := func(value string) *registry.Service {
			t.Helper()
			s, err := b.core.CoreV1().Services("a").Get(t.Context(), "web", metav1.GetOptions{})
			if err == nil {
				s = s.DeepCopy()
				annotate(&s.ObjectMeta, "forward-identity", value)
				_, err = b.core.CoreV1().Services("a").Update(t.Context(), s, metav1.UpdateOptions{})
			}
			if err != nil {
				t.Fatal(err)
			}
			calm()
			return backendsOf(&b.last().Snapshot)["Service a/web:443"]
		}
		if s := annotated("beforeTLS; trustNetwork=true"); s == nil || s.ForwardIdentity == nil {
			t.Errorf("got %+v, want a service that is told", s)
		}
		if s := annotated("true"); s != nil {
			t.Errorf("malformed: got %+v, want no service", s)
		}
		events, err := b.core.CoreV1().Events(corev1.NamespaceAll).List(t.Context(), metav1.ListOptions{})
		if err != nil {
			t.Fatal(err)
		}
		found := false
		for _, e := range events.Items {
			found = found || e.Reason == string(routeReasonAnnotation) && strings.Contains(e.Message, "culvert.dev/forward-identity")
		}
		if !found {
			t.Errorf("no Event has %s; the log is\n%s", routeReasonAnnotation, b.log)
		}
		if s := annotated("beforeTLS; trustNetwork=true"); s == nil || s.ForwardIdentity == nil {
			t.Errorf("repaired: got %+v, want a service that is told", s)
		}
	})
}
