package gatewayapi

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	ktesting "k8s.io/client-go/testing"
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"
)

func testNode(name, addresses string, more string) string {
	return "\n---\nkind: Node\nmetadata: {name: " + name + more + "}\nstatus: {conditions: [{type: Ready, status: 'True'}], addresses: [" + addresses + "]}\n"
}

const (
	atPorts = "\n---\nkind: Service\nmetadata: {namespace: b, name: in}\nspec: {type: NodePort, clusterIPs: [10.96.0.1], ports: [{name: t, port: 443, targetPort: https, nodePort: 30443}]POLICY}\n" +
		"---\nkind: EndpointSlice\nmetadata: {namespace: b, name: in-1, labels: {kubernetes.io/service-name: in}}\naddressType: IPv4\nports: [{name: t, port: 443, protocol: TCP}]\nendpoints: [{addresses: [10.244.7.1], nodeName: n2}]\n"
	inner = "{type: InternalIP, address: 10.1.0.1}"
	outer = "{type: InternalIP, address: 10.1.0.2}, {type: ExternalIP, address: 198.51.100.2}, {type: Hostname, address: n2}"
)

// What clients know of a Gateway behind a Service of any type.
func TestAddressesOfServices(t *testing.T) {
	before := func(w *Inputs) {
		w.PublicAddresses, w.PublicService = nil, types.NamespacedName{Namespace: "b", Name: "in"}
	}
	ports := strings.Replace(atPorts, "POLICY", "", 1)
	local := strings.Replace(atPorts, "POLICY", ", externalTrafficPolicy: Local", 1)
	n1, n2 := testNode("n1", inner, ""), testNode("n2", outer, "")
	runRows(t, []row{
		{"nodes, by what is outside first", edge(passthrough) + ports + n1 + n2, before, `
			gateway a/edge Programmed=True/Programmed
			gateway a/edge address IPAddress 10.1.0.1
			gateway a/edge address IPAddress 198.51.100.2
			gateway a/edge addresses=2
		`},
		{"nodes that have it", edge(passthrough) + local + n1 + n2, before, "gateway a/edge address IPAddress 198.51.100.2\ngateway a/edge addresses=1"},
		{"a node that is not ready", edge(passthrough) + ports + n1 + strings.Replace(n2, "'True'", "'False'", 1), before, "gateway a/edge address IPAddress 10.1.0.1\ngateway a/edge addresses=1"},
		{"a node that is left out", edge(passthrough) + ports + n1 + testNode("n2", outer, ", labels: {node.kubernetes.io/exclude-from-external-load-balancers: ''}"), before, "gateway a/edge address IPAddress 10.1.0.1\ngateway a/edge addresses=1"},
		{"no nodes", edge(passthrough) + ports, before, "gateway a/edge address IPAddress 10.96.0.1\ngateway a/edge addresses=1"},
		{"nodes that are not known yet", edge(passthrough) + ports, func(w *Inputs) {
			before(w)
			w.Objects.(*fixture).nodeless = true
			w.Gateways[0].Status.Addresses = []gwv1.GatewayStatusAddress{ipAddress(addrs("10.1.0.9")[0])}
		}, "gateway a/edge address IPAddress 10.1.0.9\ngateway a/edge addresses=1"},
		{"external IPs of a NodePort", edge(passthrough) + strings.Replace(ports, "clusterIPs:", "externalIPs: [203.0.113.5], clusterIPs:", 1) + n1, before, "gateway a/edge address IPAddress 203.0.113.5\ngateway a/edge addresses=1"},
		{"external IPs of a ClusterIP", edge(passthrough) + "\n---\nkind: Service\nmetadata: {namespace: b, name: in}\nspec: {clusterIPs: [10.96.0.1], externalIPs: [203.0.113.5, '2001:db8::5']}\n", before, `
			gateway a/edge address IPAddress 203.0.113.5
			gateway a/edge address IPAddress 2001:db8::5
			gateway a/edge addresses=2
		`},
		{"external IPs beside a load balancer's", edge(passthrough) + "\n---\nkind: Service\nmetadata: {namespace: b, name: in}\nspec: {type: LoadBalancer, externalIPs: [203.0.113.5]}\nstatus: {loadBalancer: {ingress: [{ip: 198.51.100.7}]}}\n", before, `
			gateway a/edge address IPAddress 198.51.100.7
			gateway a/edge address IPAddress 203.0.113.5
			gateway a/edge addresses=2
		`},
	})
	var many strings.Builder
	for i := range 20 {
		many.WriteString(testNode(fmt.Sprintf("m%02d", i), fmt.Sprintf("{type: InternalIP, address: 10.2.0.%d}", i+1), ""))
	}
	runRows(t, []row{{"more nodes than a status may have addresses", edge(passthrough) + ports + many.String(), before, "gateway a/edge address IPAddress 10.2.0.1\ngateway a/edge addresses=16"}})

	// The port is another at nodes, and the condition is the one place to say it.
	for _, tt := range []struct{ listeners, want string }{
		{passthrough, "in force; of nodes, port 443 is 30443"},
		{passthrough + tcp, "in force; of nodes, port 443 is 30443; Service b/in has no port for 9000"},
		{"  - {name: x, port: 443, protocol: UDP}\n", "no listener can be reached: x (PortUnavailable)"},
	} {
		w := inputsOf(t, base, edge(tt.listeners)+ports+n1)
		before(w)
		for _, c := range Translate(w).Gateways[types.NamespacedName{Namespace: "a", Name: "edge"}].Conditions {
			if c.Type == "Programmed" && c.Message != tt.want {
				t.Errorf("got %q, want %q", c.Message, tt.want)
			}
		}
	}

	// A route to a port of a node that is ours leads back, and to another does not.
	to := func(port string) string {
		return edge(passthrough) + testRoute("TLSRoute", "r", "x.example.com", "{name: s, port: 7}") + ports + n1 +
			"\n---\nkind: Service\nmetadata: {namespace: a, name: s}\nspec: {ports: [{port: 7}]}\n---\nkind: EndpointSlice\nmetadata: {namespace: a, name: s-1, labels: {kubernetes.io/service-name: s}}\naddressType: IPv4\nports: [{port: " + port + "}]\nendpoints: [{addresses: [10.1.0.1]}]\n"
	}
	runRows(t, []row{
		{"a node's port that is ours", to("30443"), before, "TLSRoute a/r edge ResolvedRefs=False/Loop"},
		{"a node's port that is not", to("443"), before, "TLSRoute a/r edge ResolvedRefs=True/ResolvedRefs"},
	})
}

// Nodes are watched only where a NodePort needs them, and what they write all the
// time is no news.
func TestControllerLooksAtNodes(t *testing.T) {
	for _, typ := range []corev1.ServiceType{corev1.ServiceTypeClusterIP, corev1.ServiceTypeNodePort} {
		synctest.Test(t, func(t *testing.T) {
			b := newBench(t, edge(passthrough), strings.Replace(strings.Replace(atPorts, "POLICY", ", externalTrafficPolicy: Local", 1), "NodePort", string(typ), 1))
			b.c.cfg.PublicAddresses, b.c.cfg.PublicService = nil, types.NamespacedName{Namespace: "b", Name: "in"}
			nodes := b.core.CoreV1().Nodes()
			n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n2", UID: "n2"}, Status: corev1.NodeStatus{
				Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}, Addresses: []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: "10.1.0.2"}},
			}}
			if _, err := nodes.Create(t.Context(), n, metav1.CreateOptions{}); err != nil {
				t.Fatal(err)
			}
			defer b.start()()
			calm()
			asked := 0
			for _, a := range b.core.Actions() {
				if a.GetVerb() == "list" && a.GetResource().Resource == "nodes" {
					asked++
				}
			}
			got := b.gateway("edge").Status.Addresses
			if typ == corev1.ServiceTypeClusterIP {
				if asked != 0 || len(got) != 1 || got[0].Value != "10.96.0.1" {
					t.Errorf("%s: nodes are listed %d times, addresses are %v", typ, asked, got)
				}
				return
			}
			if asked != 1 || len(got) != 1 || got[0].Value != "10.1.0.2" {
				t.Errorf("%s: nodes are listed %d times, addresses are %v", typ, asked, got)
			}
			before := b.c.current.Load()
			n.Status.NodeInfo.KubeletVersion = "v2"
			n.Status.Conditions[0].LastHeartbeatTime = metav1.Now()
			if _, err := nodes.UpdateStatus(t.Context(), n, metav1.UpdateOptions{}); err != nil {
				t.Fatal(err)
			}
			calm()
			if b.c.current.Load() != before {
				t.Error("a node's heartbeat has a table made")
			}
			n.Status.Addresses[0].Address = "10.1.0.3"
			if _, err := nodes.UpdateStatus(t.Context(), n, metav1.UpdateOptions{}); err != nil {
				t.Fatal(err)
			}
			calm()
			if got := b.gateway("edge").Status.Addresses; len(got) != 1 || got[0].Value != "10.1.0.3" {
				t.Errorf("got %v after the node's address changed", got)
			}
		})
	}
}

// Without the right to look at nodes it is the Service's own addresses, and the log
// says which right.
func TestControllerMayNotLookAtNodes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, edge(passthrough), strings.Replace(atPorts, "POLICY", "", 1))
		b.c.cfg.PublicAddresses, b.c.cfg.PublicService = nil, types.NamespacedName{Namespace: "b", Name: "in"}
		b.core.PrependReactor("list", "nodes", func(ktesting.Action) (bool, runtime.Object, error) {
			return true, nil, apierrors.NewForbidden(schema.GroupResource{Resource: "nodes"}, "", context.Canceled)
		})
		defer b.start()()
		calm()
		calm()
		if got := b.gateway("edge").Status.Addresses; len(got) != 1 || got[0].Value != "10.96.0.1" {
			t.Errorf("got %v, want 10.96.0.1", got)
		}
		if n := strings.Count(b.log.String(), "may not list nodes"); n != 1 {
			t.Errorf("it is said %d times which right is missing, want once:\n%s", n, b.log)
		}
	})
}

// A listener at a port that the Service before the gateway lacks is not programmed,
// whatever the type of the Service is, and the condition says what to do.
func TestPortsThatTheServiceLacks(t *testing.T) {
	service := func(spec, status string) string {
		return "\n---\nkind: Service\nmetadata: {namespace: b, name: in}\nspec: {" + spec + ", ports: [{name: t, port: 443, targetPort: https}, {name: moved, port: 80, targetPort: 9001}]}\n" +
			"status: {" + status + "}\n---\nkind: EndpointSlice\nmetadata: {namespace: b, name: in-1, labels: {kubernetes.io/service-name: in}}\n" +
			"addressType: IPv4\nports: [{name: t, port: 443, protocol: TCP}, {name: moved, port: 9001, protocol: TCP}]\nendpoints: [{addresses: [10.244.7.1]}]\n"
	}
	before := func(w *Inputs) {
		w.PublicAddresses, w.PublicService = nil, types.NamespacedName{Namespace: "b", Name: "in"}
	}
	clusterIP := service("clusterIPs: [10.96.0.1]", "")
	balanced := service("type: LoadBalancer, clusterIPs: [10.96.0.1]", "loadBalancer: {ingress: [{ip: 198.51.100.7}]}")
	external := service("externalIPs: [203.0.113.5], clusterIPs: [10.96.0.1]", "")
	const want = `
		gateway a/edge Programmed=True/Programmed
		listener a/edge tls Programmed=True/Programmed
		listener a/edge tcp Accepted=True/Accepted
		listener a/edge tcp Programmed=False/PortUnavailable
		open a/edge/tcp/9000 tcp
	`
	for name, s := range map[string]string{"ClusterIP": clusterIP, "LoadBalancer": balanced, "external IPs": external} {
		runRows(t, []row{{name, edge(passthrough+tcp) + s, before, want}})
	}
	runRows(t, []row{
		{"none of them", edge(tcp) + clusterIP, before, "gateway a/edge Programmed=False/Invalid\nlistener a/edge tcp Programmed=False/PortUnavailable"},
		{"UDP is another port", edge("  - {name: x, port: 443, protocol: UDP}\n") + clusterIP, before, "listener a/edge x Programmed=False/PortUnavailable"},
		{"addresses of its own beside the Service", edge(tcp) + clusterIP, func(w *Inputs) {
			before(w)
			w.PublicAddresses = addrs("192.0.2.1")
		}, "gateway a/edge Programmed=True/Programmed\nlistener a/edge tcp Programmed=True/Programmed"},
		{"under another number", edge("  - {name: x, port: 9001, protocol: TCP}\n") + clusterIP, before, "listener a/edge x Programmed=True/Programmed"},
	})
	message := func(docs string) (out string) {
		w := inputsOf(t, base, docs)
		before(w)
		st := Translate(w).Gateways[types.NamespacedName{Namespace: "a", Name: "edge"}]
		for _, cs := range [][]metav1.Condition{st.Conditions, st.Listeners[len(st.Listeners)-1].Conditions} {
			for _, c := range cs {
				if c.Type == "Programmed" {
					out += c.Message + "\n"
				}
			}
		}
		return out
	}
	for _, tt := range []struct{ name, docs, want string }{
		{"what to do", edge(passthrough+tcp) + balanced, "Service b/in, through which clients connect, has no TCP port that leads to it; add the port to the Service"},
		{"at the Gateway", edge(passthrough+tcp) + balanced, "in force; Service b/in has no port for 9000"},
		{"under another number", edge("  - {name: x, port: 9001, protocol: TCP}\n") + clusterIP, "in force; of Service b/in, port 9001 is 80"},
		{"pending", edge(passthrough) + service("type: LoadBalancer", ""), "Service b/in of type LoadBalancer has no address yet"},
		{"headless", edge(passthrough) + service("clusterIPs: [None]", ""), "Service b/in, through which clients connect, has no address: it is headless"},
		{"gone", edge(passthrough), "there is no Service b/in, through which clients connect"},
	} {
		if got := message(tt.docs); !strings.Contains(got, tt.want) {
			t.Errorf("%s: got %q, want %q", tt.name, got, tt.want)
		}
	}
}
