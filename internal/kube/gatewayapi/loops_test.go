package gatewayapi

import (
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/types"
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"
)

// culvert is a Service before two replicas.
const culvert = `
---
kind: Service
metadata: {namespace: b, name: culvert}
spec: {type: LoadBalancer, clusterIPs: [10.96.0.7], externalIPs: [198.51.100.9], ports: [{name: t, port: 443, targetPort: PORT}, {name: u, port: 443, targetPort: PORT, protocol: UDP}]}
status: {loadBalancer: {ingress: [{ip: 198.51.100.7}]}}
---
kind: EndpointSlice
metadata: {namespace: b, name: culvert-1, labels: {kubernetes.io/service-name: culvert}}
addressType: IPv4
ports: [{name: t, port: PORT, protocol: TCP}, {name: u, port: PORT, protocol: UDP}]
endpoints: [{addresses: [10.244.7.1], conditions: {ready: true}}, {addresses: [10.244.7.2], conditions: {ready: false}}]
---
kind: ReferenceGrant
metadata: {namespace: b, name: all}
spec: {from: [{group: gateway.networking.k8s.io, kind: KIND, namespace: a}], to: [{group: '', kind: Service}]}
`

// A route that leads back to the gateway that it is of leads nowhere, and says so.
func TestRoutesThatLeadBack(t *testing.T) {
	for _, tt := range []struct{ kind, listener, hosts, protocol, port string }{
		{"TLSRoute", passthrough, "x.example.com", "TCP", "443"},
		{"TCPRoute", tcp, "", "TCP", "9000"},
		{"UDPRoute", udp, "", "UDP", "5300"},
	} {
		section, names := map[string]string{"TLSRoute": "tls", "TCPRoute": "tcp", "UDPRoute": "udp"}[tt.kind], "["+tt.hosts+"]"
		before := strings.NewReplacer("PORT", tt.port, "KIND", tt.kind).Replace(culvert)
		// to is a route to a Service at some addresses.
		to := func(port string, addrs ...string) string {
			var es []string
			for _, a := range addrs {
				es = append(es, "{addresses: ['"+a+"']}")
			}
			return edge(tt.listener) + testRoute(tt.kind, "r", tt.hosts, "{name: s, port: 7}") + before + `
---
kind: Service
metadata: {namespace: a, name: s}
spec: {ports: [{name: p, port: 7, protocol: ` + tt.protocol + `}]}
---
kind: EndpointSlice
metadata: {namespace: a, name: s-1, labels: {kubernetes.io/service-name: s}}
addressType: IPv4
ports: [{name: p, port: ` + port + `, protocol: ` + tt.protocol + `}]
endpoints: [` + strings.Join(es, ", ") + `]
`
		}
		service := func(w *Inputs) {
			w.PublicAddresses, w.PublicService = nil, types.NamespacedName{Namespace: "b", Name: "culvert"}
		}
		route := tt.kind + " a/r edge "
		rule := "rule gateway/a/edge/" + section + " " + strings.ToLower(tt.kind) + "/a/r " + names + " "
		refused, resolved := route+"Accepted=True/Accepted\n"+route+"ResolvedRefs=False/Loop", route+"ResolvedRefs=True/ResolvedRefs"
		loop := refused + "\n" + rule + "1:broken"
		fine := func(addr, port string) string {
			return resolved + "\n" + rule + "1:a/s(" + addr + ":" + port + ")"
		}
		t.Run(tt.kind, func(t *testing.T) {
			runRows(t, []row{
				{"the Service before it", edge(tt.listener) + testRoute(tt.kind, "r", tt.hosts, "{name: culvert, namespace: b, port: 443}") + before, service, loop},
				{"a replica", to(tt.port, "10.244.7.1"), service, loop},
				{"a replica that is not ready", to(tt.port, "10.244.7.2"), service, loop},
				{"a replica in another form", to(tt.port, "::ffff:10.244.7.2"), service, loop},
				{"another port of a replica", to("8081", "10.244.7.1"), service, fine("10.244.7.1", "8081")},
				{"a load balancer", to("443", "198.51.100.7"), service, loop},
				{"an external address", to("443", "198.51.100.9"), service, loop},
				{"a cluster IP", to("443", "10.96.0.7"), service, loop},
				{"another port of a load balancer", to("444", "198.51.100.7"), service, fine("198.51.100.7", "444")},
				{"one address of two", to(tt.port, "10.244.7.1", "10.244.9.9"), service, route + "ResolvedRefs=False/Loop\n" + rule + "1:a/s(10.244.9.9:" + tt.port + ")"},
				{"a published address", to(tt.port, "192.0.2.1"), nil, loop},
				{"an address of its own", to(tt.port, "10.0.0.1"), pool("10.0.0.1"), refused},
				{"an address that nobody has", to(tt.port, "10.0.0.2"), pool("10.0.0.1", "10.0.0.2"), resolved},
				{"a port of its own address that it does not have", to("444", "10.0.0.1"), pool("10.0.0.1"), resolved},
				{"what its own is known by", to(tt.port, "203.0.113.8"), func(w *Inputs) {
					w.PublicAddresses, w.Addresses = nil, []Address{{addrs("10.0.0.5")[0], addrs("203.0.113.8")[0]}}
				}, refused},
				{"an address of the replica that leads", to(tt.port, "10.0.0.6"), func(w *Inputs) {
					pool("10.0.0.5")(w)
					w.Gateways[0].Status.Addresses = []gwv1.GatewayStatusAddress{{Value: "10.0.0.6"}}
				}, refused},
				{"another Gateway of ours", to(tt.port, "10.0.0.2") + "\n---\n" + strings.ReplaceAll(edge(tt.listener), "name: edge", "name: second"), pool("10.0.0.1", "10.0.0.2"), refused},
			})
		})
	}
}

// What is TCP's is not UDP's.
func TestRoutesThatLeadBackByProtocol(t *testing.T) {
	runRows(t, []row{{"a port of UDP", edge("  - {name: tcp, port: 5353, protocol: TCP}\n"+udp) + testRoute("UDPRoute", "r", "", "{name: web, port: 53}"), pool("10.244.0.1"), `
		UDPRoute a/r edge ResolvedRefs=True/ResolvedRefs
		rule gateway/a/edge/udp@10.244.0.1 udproute/a/r [] 1:a/web(10.244.0.1:5353)
	`}})
}
