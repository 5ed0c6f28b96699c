package gatewayapi

import (
	"fmt"
	"slices"
	"strings"
	"testing"
)

func TestL4Routes(t *testing.T) {
	four := "  - {name: a, port: 9310, protocol: TCP}\n  - {name: b, port: 9311, protocol: TCP}\n  - {name: c, port: 9312, protocol: TCP}\n  - {name: d, port: 9313, protocol: TCP}\n"
	runRows(t, []row{
		{"TCP", edge(tcp) + testRoute("TCPRoute", "r", "", "{name: web, port: 443}"), nil, `
			listener a/edge tcp kinds=TCPRoute attached=1
			TCPRoute a/r edge Accepted=True/Accepted
			TCPRoute a/r edge ResolvedRefs=True/ResolvedRefs
			open a/edge/tcp/9000 tcp
			rule gateway/a/edge/tcp tcproute/a/r [] 1:a/web(10.244.0.1:8443)
		`},
		{"the oldest has it all, the others are attached", edge(tcp) + testRoute("TCPRoute", "first", "", "{name: web, port: 443}") + testRoute("TCPRoute", "a-second", "", "{name: other, port: 443}"), nil, `
			listener a/edge tcp kinds=TCPRoute attached=2
			TCPRoute a/first edge Accepted=True/Accepted
			TCPRoute a/a-second edge Accepted=True/Accepted
			rule gateway/a/edge/tcp tcproute/a/first [] 1:a/web(10.244.0.1:8443)
			rules gateway/a/edge/tcp=1
		`},
		{"all listeners", edge(four) + testRoute("TCPRoute", "r", "", "{name: web, port: 443}"), nil, `
			rules gateway/a/edge/a=1
			rules gateway/a/edge/b=1
			rules gateway/a/edge/c=1
			rules gateway/a/edge/d=1
		`},
		{"by port, by name, by both", edge(four) + testRoute("TCPRoute", "port", "", "{name: web, port: 443}", "{name: edge, port: 9310}") +
			testRoute("TCPRoute", "name", "", "{name: other, port: 443}", "{name: edge, sectionName: b}") +
			testRoute("TCPRoute", "both", "", "{name: web, port: 80}", "{name: edge, sectionName: c, port: 9312}") +
			testRoute("TCPRoute", "neither", "", "{name: web, port: 80}", "{name: edge, sectionName: c, port: 9310}"), nil, `
			rule gateway/a/edge/a tcproute/a/port [] 1:a/web(10.244.0.1:8443)
			rule gateway/a/edge/b tcproute/a/name [] 1:a/other(10.244.0.9:8443)
			rule gateway/a/edge/c tcproute/a/both [] 1:a/web(10.244.0.1:3000)
			rules gateway/a/edge/d=0
			TCPRoute a/both edge#c:9312 Accepted=True/Accepted
			TCPRoute a/neither edge#c:9310 Accepted=False/NoMatchingParent
		`},
		{"weights, and what can't be found keeps its share", edge(tcp) + testRoute("TCPRoute", "r", "", "{name: web, port: 443, weight: 70}, {name: other, port: 443, weight: 30}, {name: web, port: 80, weight: 0}, {name: none, port: 1, weight: 5}"), nil, `
			rule gateway/a/edge/tcp tcproute/a/r [] 70:a/web(10.244.0.1:8443) 30:a/other(10.244.0.9:8443) 0:a/web(10.244.0.1:3000) 5:broken
			TCPRoute a/r edge ResolvedRefs=False/BackendNotFound
		`},
		{"backend nonexistent", edge(tcp) + testRoute("TCPRoute", "r", "", "{name: none, port: 443}"), nil, `
			TCPRoute a/r edge Accepted=True/Accepted
			TCPRoute a/r edge ResolvedRefs=False/BackendNotFound
		`},
		{"a listener of HTTP", edge(tcp+"  - {name: http, port: 80, protocol: HTTP}\n") + testRoute("TCPRoute", "r", "", "{name: web, port: 443}", "{name: edge, sectionName: http}"), nil, `
			TCPRoute a/r edge#http Accepted=False/NotAllowedByListeners
			listener a/edge http kinds=HTTPRoute attached=0
		`},
		{"UDP", edge(udp) + testRoute("UDPRoute", "r", "", "{name: web, port: 53}"), nil, `
			listener a/edge udp kinds=UDPRoute attached=1
			open a/edge/udp/5300 udp
			rule gateway/a/edge/udp udproute/a/r [] 1:a/web(10.244.0.1:5353)
		`},
		{"UDPRoute at a TLS listener", edge(passthrough) + testRoute("UDPRoute", "r", "", "{name: web, port: 53}"), nil, "UDPRoute a/r edge Accepted=False/NotAllowedByListeners"},
		{"UDP to a port of TCP", edge(udp) + testRoute("UDPRoute", "r", "", "{name: web, port: 443}"), nil, `
			UDPRoute a/r edge Accepted=True/Accepted
			UDPRoute a/r edge ResolvedRefs=False/UnsupportedProtocol
			rule gateway/a/edge/udp udproute/a/r [] 1:broken
		`},
		{"UDP oldest", edge(udp) + testRoute("UDPRoute", "z", "", "{name: web, port: 53}") + testRoute("UDPRoute", "a", "", "{name: none, port: 53}"), nil, `
			listener a/edge udp kinds=UDPRoute attached=2
			rule gateway/a/edge/udp udproute/a/z [] 1:a/web(10.244.0.1:5353)
		`},
	})
}

func TestRouteGrants(t *testing.T) {
	grant := func(from, to string) string {
		return "\n---\nkind: ReferenceGrant\nmetadata: {namespace: b, name: g}\nspec: {from: [" + from + "], to: [" + to + "]}\n"
	}
	for kind, listener := range map[string]string{"TLSRoute": passthrough, "TCPRoute": tcp, "UDPRoute": udp} {
		hosts, port := "", "443"
		if kind == "TLSRoute" {
			hosts = "x.example.com"
		}
		more := ""
		if kind == "UDPRoute" {
			port, more = "53", "\n---\nkind: Service\nmetadata: {namespace: b, name: web}\nspec: {ports: [{name: dns, port: 53, protocol: UDP}]}\n"
		}
		docs := edge(listener) + testRoute(kind, "r", hosts, "{name: web, namespace: b, port: "+port+"}") + more
		from := "{group: gateway.networking.k8s.io, kind: " + kind + ", namespace: a}"
		no := kind + " a/r edge Accepted=True/Accepted\n" + kind + " a/r edge ResolvedRefs=False/RefNotPermitted"
		yes := kind + " a/r edge Accepted=True/Accepted\n" + kind + " a/r edge ResolvedRefs=True/ResolvedRefs"
		t.Run(kind, func(t *testing.T) {
			runRows(t, []row{
				{"none", docs, nil, no},
				{"a grant", docs + grant(from, "{group: '', kind: Service}"), nil, yes},
				{"by name", docs + grant(from, "{group: '', kind: Service, name: web}"), nil, yes},
				{"another name", docs + grant(from, "{group: '', kind: Service, name: not-web}"), nil, no},
				{"another kind from", docs + grant(strings.Replace(from, kind, "HTTPRoute", 1), "{group: '', kind: Service}"), nil, no},
				{"another group from", docs + grant(strings.Replace(from, "gateway.networking", "x.networking", 1), "{group: '', kind: Service}"), nil, no},
				{"another namespace from", docs + grant(strings.Replace(from, "namespace: a", "namespace: b", 1), "{group: '', kind: Service}"), nil, no},
				{"another kind to", docs + grant(from, "{group: '', kind: Secret}"), nil, no},
				{"another group to", docs + grant(from, "{group: 'x', kind: Service}"), nil, no},
				{"in another namespace", docs + strings.Replace(grant(from, "{group: '', kind: Service}"), "namespace: b, name: g", "namespace: a, name: g", 1), nil, no},
			})
		})
	}
}

func TestEndpoints(t *testing.T) {
	svc := func(spec string) string {
		return edge(tcp) + testRoute("TCPRoute", "r", "", "{name: s, port: 80}") + "\n---\nkind: Service\nmetadata: {namespace: a, name: s}\nspec: " + spec + "\n"
	}
	slice := func(name, typ, ports, endpoints string) string {
		return "\n---\nkind: EndpointSlice\nmetadata: {namespace: a, name: " + name + ", labels: {kubernetes.io/service-name: s}}\naddressType: " + typ + "\nports: [" + ports + "]\nendpoints: [" + endpoints + "]\n"
	}
	const one = "{ports: [{port: 80, targetPort: x}]}"
	to := func(s string) string { return "rule gateway/a/edge/tcp tcproute/a/r [] 1:a/s(" + s + ")" }
	const never = "rule gateway/a/edge/tcp tcproute/a/r [] 1:broken\nTCPRoute a/r edge ResolvedRefs=False/BackendNotFound"
	runRows(t, []row{
		{"none", svc(one), nil, to("") + "\nTCPRoute a/r edge ResolvedRefs=True/ResolvedRefs"},
		{"ready, of two slices, each once", svc(one) + slice("1", "IPv4", "{port: 8080}", "{addresses: [10.0.0.2], conditions: {ready: true}}, {addresses: [10.0.0.1]}") + slice("2", "IPv4", "{port: 8080}", "{addresses: [10.0.0.2], conditions: {ready: true}}"), nil, to("10.0.0.1:8080,10.0.0.2:8080")},
		{"not those that are not", svc(one) + slice("1", "IPv4", "{port: 8080}", "{addresses: [10.0.0.2], conditions: {ready: false}}, {addresses: [10.0.0.1]}, {addresses: [10.0.0.3], conditions: {ready: false, serving: true, terminating: true}}"), nil, to("10.0.0.1:8080")},
		{"those that end and serve, if there is nobody else", svc(one) + slice("1", "IPv4", "{port: 8080}", "{addresses: [10.0.0.2], conditions: {ready: false}}, {addresses: [10.0.0.3], conditions: {ready: false, serving: true, terminating: true}}"), nil, to("10.0.0.3:8080")},
		{"a named port", svc("{ports: [{name: a, port: 81}, {name: b, port: 80}]}") + slice("1", "IPv4", "{name: a, port: 1}, {name: b, port: 2}", "{addresses: [10.0.0.1]}"), nil, to("10.0.0.1:2")},
		{"a port with two numbers", svc("{ports: [{name: b, port: 80, targetPort: x}]}") + slice("1", "IPv4", "{name: b, port: 1}", "{addresses: [10.0.0.1]}") + slice("2", "IPv4", "{name: b, port: 2}", "{addresses: [10.0.0.2]}"), nil, to("10.0.0.1:1,10.0.0.2:2")},
		{"IPv6 beside IPv4", svc(one) + slice("1", "IPv4", "{port: 1}", "{addresses: [10.0.0.1]}") + slice("2", "IPv6", "{port: 1}", "{addresses: ['2001:db8::1']}"), nil, to("10.0.0.1:1,[2001:db8::1]:1")},
		{"both families of a pod are one", svc(one) + slice("1", "IPv4", "{port: 1}", "{addresses: [10.0.0.1], targetRef: {uid: p}}, {addresses: [10.0.0.2], targetRef: {kind: Pod, name: q}}") +
			slice("2", "IPv6", "{port: 1}", "{addresses: ['2001:db8::1'], targetRef: {uid: p}}, {addresses: ['2001:db8::2'], targetRef: {kind: Pod, name: q}}, {addresses: ['2001:db8::3'], targetRef: {uid: r}}"), nil, to("10.0.0.1:1,10.0.0.2:1,[2001:db8::3]:1")},
		{"the Service's first family", svc("{ipFamilies: [IPv6, IPv4], ports: [{port: 80}]}") + slice("1", "IPv4", "{port: 1}", "{addresses: [10.0.0.1], targetRef: {uid: p}}") + slice("2", "IPv6", "{port: 1}", "{addresses: ['2001:db8::1'], targetRef: {uid: p}}"), nil, to("[2001:db8::1]:1")},
		{"the family that is preferred", svc("{ipFamilies: [IPv6, IPv4], ports: [{port: 80}]}") + slice("1", "IPv4", "{port: 1}", "{addresses: [10.0.0.1], targetRef: {uid: p}}") + slice("2", "IPv6", "{port: 1}", "{addresses: ['2001:db8::1'], targetRef: {uid: p}}"), func(w *Inputs) { w.Prefer = "ipv4" }, to("10.0.0.1:1")},
		{"hints", svc(one) + slice("1", "IPv4", "{port: 1}", "{addresses: [10.0.0.1], hints: {forZones: [{name: east}]}}, {addresses: [10.0.0.2], hints: {forZones: [{name: west}, {name: east}]}}"), func(w *Inputs) { w.Zone = "west" }, to("10.0.0.2:1")},
		{"hints for nobody here", svc(one) + slice("1", "IPv4", "{port: 1}", "{addresses: [10.0.0.1], hints: {forZones: [{name: east}]}}"), func(w *Inputs) { w.Zone = "west" }, to("10.0.0.1:1")},
		{"hints of some", svc(one) + slice("1", "IPv4", "{port: 1}", "{addresses: [10.0.0.1]}, {addresses: [10.0.0.2], hints: {forZones: [{name: west}]}}"), func(w *Inputs) { w.Zone = "west" }, to("10.0.0.1:1,10.0.0.2:1")},
		{"hints and no zone", svc(one) + slice("1", "IPv4", "{port: 1}", "{addresses: [10.0.0.1], hints: {forZones: [{name: east}]}}, {addresses: [10.0.0.2], hints: {forZones: [{name: west}]}}"), nil, to("10.0.0.1:1,10.0.0.2:1")},
		{"headless", svc("{clusterIP: None, ports: [{port: 80}]}") + slice("1", "IPv4", "{port: 80}", "{addresses: [10.0.0.1], hostname: s-0}"), nil, to("10.0.0.1:80")},
		{"loopback beside others", svc(one) + slice("1", "IPv4", "{port: 1}", "{addresses: [127.0.0.1]}, {addresses: [10.0.0.1]}"), nil, to("10.0.0.1:1") + "\nTCPRoute a/r edge ResolvedRefs=True/ResolvedRefs"},
		{"loopback alone", svc(one) + slice("1", "IPv4", "{port: 1}", "{addresses: [127.0.0.1]}"), nil, never},
		{"metadata", svc(one) + slice("1", "IPv4", "{port: 1}", "{addresses: [169.254.169.254]}"), nil, never},
		{"unspecified", svc(one) + slice("1", "IPv4", "{port: 1}", "{addresses: [0.0.0.0]}"), nil, never},
		{"multicast", svc(one) + slice("1", "IPv4", "{port: 1}", "{addresses: [224.0.0.1]}"), nil, never},
		{"loopback of IPv6, and in disguise", svc(one) + slice("1", "IPv6", "{port: 1}", "{addresses: ['::1']}, {addresses: ['::ffff:127.0.0.1']}, {addresses: ['fe80::1']}, {addresses: ['::']}"), nil, never},
		{"names", svc(one) + slice("1", "FQDN", "{port: 1}", "{addresses: [metadata.internal]}"), nil, never},
		{"names beside addresses", svc(one) + slice("1", "FQDN", "{port: 1}", "{addresses: [metadata.internal]}") + slice("2", "IPv4", "{port: 1}", "{addresses: [10.0.0.1]}"), nil, to("10.0.0.1:1")},
		{"an address that is none, a port that is none", svc(one) + slice("1", "IPv4", "{port: 1}", "{addresses: [huh]}, {addresses: []}, {addresses: [10.0.0.1]}") + slice("2", "IPv4", "{port: 70000}, {}", "{addresses: [10.0.0.1]}"), nil, to("10.0.0.1:1")},
	})
}

// What a Service's endpoints are in is known, and its name there; of those of a
// ServiceImport it is not.
func TestBackendsAreInTheirNetwork(t *testing.T) {
	w := inputsOf(t, base, edge(tcp+udp), testRoute("TCPRoute", "r", "", "{name: web, port: 443}, {group: multicluster.x-k8s.io, kind: ServiceImport, name: far, port: 80}"), testRoute("UDPRoute", "u", "", "{name: web, port: 53}"), `
kind: ServiceImport
metadata: {namespace: a, name: far}
spec: {type: ClusterSetIP, ports: [{name: p, port: 80, protocol: TCP}]}
---
kind: EndpointSlice
metadata: {namespace: a, name: far-1, labels: {multicluster.kubernetes.io/service-name: far}}
addressType: IPv4
ports: [{name: p, port: 8080, protocol: TCP}]
endpoints: [{addresses: [10.99.0.1]}]
`)
	w.PublicAddresses = addrs("192.0.2.1")
	said := func() []string {
		var all []string
		for _, l := range Translate(w).Snapshot.Listeners {
			for _, b := range l.Sections[0].Rules[0].Backends {
				all = append(all, fmt.Sprintf("%s %v %v %q", b.Service.Name, b.Service.Names, b.Service.Endpoints, b.Service.Endpoints[0].Network))
			}
		}
		return all
	}
	if got, want := said(), []string{`a/web [] [10.244.0.1:8443] ""`, `a/far [] [10.99.0.1:8080] ""`, `a/web [] [10.244.0.1:5353] ""`}; !slices.Equal(got, want) {
		t.Errorf("without a network: %q, want %q", got, want)
	}
	w.Network, w.Cluster, w.Mesh.Zone = "pods", "west", "mesh.test"
	if got, want := said(), []string{`a/web [web.a.svc.west.mesh.test] [10.244.0.1:8443] "pods"`, `a/far [] [10.99.0.1:8080] ""`, `a/web [web.a.svc.west.mesh.test] [10.244.0.1:5353] "pods"`}; !slices.Equal(got, want) {
		t.Errorf("in a network: %q, want %q", got, want)
	}
}

func TestLeftOutIsSaid(t *testing.T) {
	docs := edge(tcp) + testRoute("TCPRoute", "r", "", "{name: s, port: 80}") + `
---
kind: Service
metadata: {namespace: a, name: s}
spec: {ports: [{port: 80}]}
---
kind: EndpointSlice
metadata: {namespace: a, name: z, labels: {kubernetes.io/service-name: s}}
addressType: IPv4
ports: [{port: 80}]
endpoints: [{addresses: [127.0.0.1]}, {addresses: [169.254.169.254]}]
---
kind: EndpointSlice
metadata: {namespace: a, name: b, labels: {kubernetes.io/service-name: s}}
addressType: FQDN
ports: [{port: 80}]
endpoints: [{addresses: [metadata.internal]}]
`
	const good = `
---
kind: EndpointSlice
metadata: {namespace: a, name: good, labels: {kubernetes.io/service-name: s}}
addressType: IPv4
ports: [{port: 80}]
endpoints: [{addresses: [10.0.0.1]}]
`
	const what = `EndpointSlice b: "metadata.internal" is a name, which culvert does not follow, and 2 more`
	for _, tt := range []struct{ docs, want string }{
		{docs, "no endpoint of Service a/s can be used: " + what},
		{docs + good, "all references are resolved; skipped: " + what},
	} {
		w := inputsOf(t, base, tt.docs)
		w.PublicAddresses = addrs("192.0.2.1")
		res := Translate(w)
		got := ""
		for _, c := range res.Routes[RouteKey{tcpRoute, key(w.TCPRoutes[0])}].Parents[0].Conditions {
			if c.Type == "ResolvedRefs" {
				got = c.Message
			}
		}
		if got != tt.want {
			t.Errorf("got %q, want %q", got, tt.want)
		}
	}
}

func TestServiceImport(t *testing.T) {
	docs := edge(tcp) + testRoute("TCPRoute", "r", "", "{group: multicluster.x-k8s.io, kind: ServiceImport, name: far, port: 80}") + `
---
kind: ServiceImport
metadata: {namespace: a, name: far}
spec: {type: ClusterSetIP, ips: [10.42.0.1], ports: [{name: p, port: 80, protocol: TCP}]}
---
kind: EndpointSlice
metadata: {namespace: a, name: far-1, labels: {multicluster.kubernetes.io/service-name: far}}
addressType: IPv4
ports: [{name: p, port: 8080, protocol: TCP}]
endpoints: [{addresses: [10.99.0.1]}]
`
	runRows(t, []row{
		{"by its slices", docs, nil, "rule gateway/a/edge/tcp tcproute/a/r [] 1:a/far(10.99.0.1:8080)=far.a.svc.clusterset.local"},
		{"by the table's service", docs[:strings.LastIndex(docs, "---")], nil, "rule gateway/a/edge/tcp tcproute/a/r [] 1:a/far()=far.a.svc.clusterset.local"},
		{"at our address, by a port that is not ours", docs, pool("10.99.0.1"), "TCPRoute a/r edge ResolvedRefs=True/ResolvedRefs"},
		{"it leads back by our port", strings.Replace(docs, "{name: p, port: 8080, protocol: TCP}", "{name: p, port: 9000, protocol: TCP}", 1), pool("10.99.0.1"), "TCPRoute a/r edge ResolvedRefs=False/Loop"},
		{"another port", strings.Replace(docs, "name: far, port: 80", "name: far, port: 81", 1), nil, "TCPRoute a/r edge ResolvedRefs=False/BackendNotFound"},
		{"its only port", strings.Replace(docs, "name: far, port: 80", "name: far", 1), nil, "rule gateway/a/edge/tcp tcproute/a/r [] 1:a/far(10.99.0.1:8080)=far.a.svc.clusterset.local"},
		{"no such", strings.Replace(docs, "name: far, port: 80", "name: near, port: 80", 1), nil, "TCPRoute a/r edge ResolvedRefs=False/BackendNotFound"},
		{"no grant", strings.Replace(docs, "name: far, port: 80", "name: far, namespace: b, port: 80", 1), nil, "TCPRoute a/r edge ResolvedRefs=False/RefNotPermitted"},
	})
}

func TestBackendTLSPolicy(t *testing.T) {
	policy := func(name, target, validation string) string {
		return "\n---\nkind: BackendTLSPolicy\nmetadata: {namespace: a, name: " + name + "}\nspec:\n  targetRefs: [" + target + "]\n  validation: " + validation + "\n"
	}
	options := func(list string) string { return "  options: {" + list + "}\n" }
	const (
		web    = "{group: '', kind: Service, name: web}"
		webTLS = "{group: '', kind: Service, name: web, sectionName: tls}"
		good   = "{hostname: abc.example.com, caCertificateRefs: [{group: '', kind: ConfigMap, name: ca}]}"
	)
	term := edge(terminate) + secret + caMap + testRoute("TLSRoute", "r", "abc.example.com", "{name: web, port: 443}")
	const (
		broken = "rule gateway/a/edge/tls tlsroute/a/r [abc.example.com] 1:broken"
		plain  = "rule gateway/a/edge/tls tlsroute/a/r [abc.example.com] 1:a/web(10.244.0.1:8443)"
		over   = plain + "+tls:abc.example.com+roots"
	)
	runRows(t, []row{
		{"none", term, nil, plain},
		{"re-encrypt", term + policy("p", web, good), nil, over + "\npolicy a/p edge Accepted=True/Accepted\npolicy a/p edge ResolvedRefs=True/ResolvedRefs\npolicy a/p ancestors=1"},
		{"TCPRoute", edge(tcp) + caMap + testRoute("TCPRoute", "r", "", "{name: web, port: 443}") + policy("p", web, good), nil,
			"rule gateway/a/edge/tcp tcproute/a/r [] 1:a/web(10.244.0.1:8443)+tls:abc.example.com+roots\npolicy a/p edge Accepted=True/Accepted"},
		{"not what passes", edge(passthrough) + caMap + testRoute("TLSRoute", "r", "abc.example.com", "{name: web, port: 443}") + policy("p", web, good), nil, plain + "\npolicy a/p ancestors=0"},
		{"not HTTP", edge("  - {name: http, port: 80, protocol: HTTP}\n") + caMap + testRoute("HTTPRoute", "r", "", "{name: web, port: 443}") + policy("p", web, good), nil, "policy a/p ancestors=0"},
		{"another Service", term + policy("p", "{group: '', kind: Service, name: other}", good), nil, plain + "\npolicy a/p ancestors=0"},
		{"system roots, and names", term + policy("p", web, "{hostname: abc.example.com, wellKnownCACertificates: System, subjectAltNames: [{type: Hostname, hostname: x.example.com}, {type: URI, uri: 'spiffe://td/x'}]}"), nil,
			plain + "+tls:abc.example.com|x.example.com|spiffe://td/x"},
		{"roots of one's own invention", term + policy("p", web, "{hostname: abc.example.com, wellKnownCACertificates: my.example/x}"), nil, broken + "\npolicy a/p edge Accepted=False/Invalid"},
		{"roots twice", term + policy("p", web, "{hostname: abc.example.com, wellKnownCACertificates: System, caCertificateRefs: [{group: '', kind: ConfigMap, name: ca}]}"), nil, broken + "\npolicy a/p edge Accepted=False/Invalid"},
		{"no roots", term + policy("p", web, "{hostname: abc.example.com}"), nil, broken + "\npolicy a/p edge Accepted=False/Invalid"},
		{"CA nonexistent", term + policy("p", web, "{hostname: abc.example.com, caCertificateRefs: [{group: '', kind: ConfigMap, name: none}]}"), nil,
			broken + "\npolicy a/p edge Accepted=False/NoValidCACertificate\npolicy a/p edge ResolvedRefs=False/InvalidCACertificateRef"},
		{"CA kind", term + policy("p", web, "{hostname: abc.example.com, caCertificateRefs: [{group: '', kind: Secret, name: cert}]}"), nil,
			broken + "\npolicy a/p edge Accepted=False/NoValidCACertificate\npolicy a/p edge ResolvedRefs=False/InvalidKind"},
		{"one CA of two", term + policy("p", web, "{hostname: abc.example.com, caCertificateRefs: [{group: '', kind: ConfigMap, name: none}, {group: '', kind: ConfigMap, name: ca}]}"), nil,
			over + "\npolicy a/p edge Accepted=True/Accepted\npolicy a/p edge ResolvedRefs=False/InvalidCACertificateRef"},
		{"UDP only", edge(udp) + caMap + testRoute("UDPRoute", "r", "", "{name: web, port: 53}") + policy("p", "{group: '', kind: Service, name: web, sectionName: dns}", good), nil,
			"policy a/p edge Accepted=False/Invalid\nrule gateway/a/edge/udp udproute/a/r [] 1:a/web(10.244.0.1:5353)"},
		{"the port's goes before the Service's, and both are accepted", term + policy("all", web, "{hostname: all.example.com, wellKnownCACertificates: System}") + policy("port", webTLS, good), nil,
			over + "\npolicy a/all edge Accepted=True/Accepted\npolicy a/port edge Accepted=True/Accepted"},
		{"another port's", term + policy("port", "{group: '', kind: Service, name: web, sectionName: plain}", good), nil, plain + "\npolicy a/port ancestors=0"},
		{"conflicts", term + policy("z", web, good) + policy("a", web, "{hostname: other.example.com, wellKnownCACertificates: System}"), nil,
			over + "\npolicy a/z edge Accepted=True/Accepted\npolicy a/a edge Accepted=False/Conflicted"},
		{"the oldest is in force even if it is no good", term + policy("z", web, "{hostname: abc.example.com}") + policy("a", web, good), nil,
			broken + "\npolicy a/z edge Accepted=False/Invalid\npolicy a/a edge Accepted=False/Conflicted"},
		{"no such section", term + policy("p", "{group: '', kind: Service, name: web, sectionName: none}", good), nil, plain},
		{"no such Service", edge(terminate) + secret + caMap + testRoute("TLSRoute", "r", "abc.example.com", "{name: none, port: 443}") + policy("p", "{group: '', kind: Service, name: none}", good), nil,
			broken + "\npolicy a/p edge Accepted=False/TargetNotFound"},
		{"two targets", term + policy("p", "{group: '', kind: Service, name: other}, "+web, good), nil, over + "\npolicy a/p edge Accepted=True/Accepted\npolicy a/p ancestors=1"},
		{"two targets, of which one is not there", term + testRoute("TLSRoute", "s", "b.example.com", "{name: none, port: 443}") + policy("p", web+", {group: '', kind: Service, name: none}", good), nil,
			over + "\npolicy a/p edge Accepted=False/TargetNotFound\npolicy a/p ancestors=1"},
		{"two ports of a Service", term + policy("p", webTLS+", {group: '', kind: Service, name: web, sectionName: plain}", good), nil, over + "\npolicy a/p edge Accepted=True/Accepted"},
		{"two targets, of which an older policy has one", term + policy("z", "{group: '', kind: Service, name: web, sectionName: plain}", good) + policy("a", "{group: '', kind: Service, name: web, sectionName: plain}, "+webTLS, good) + testRoute("TLSRoute", "s", "b.example.com", "{name: web, port: 80}"), nil,
			over + "\npolicy a/z edge Accepted=True/Accepted\npolicy a/a edge Accepted=False/Conflicted"},
		{"options", term + policy("p", web, good) + options("culvert.dev/min-version: '1.2', culvert.dev/max-version: '1.2', culvert.dev/cipher-suites: 'TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256, TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256', other.example/min-version: huh"), nil,
			over + "+min:TLS 1.2+max:TLS 1.2+suites:2\npolicy a/p edge Accepted=True/Accepted"},
		{"a version that is too old", term + policy("p", web, good) + options("culvert.dev/min-version: '1.1'"), nil, broken + "\npolicy a/p edge Accepted=False/Invalid\npolicy a/p edge ResolvedRefs=True/ResolvedRefs"},
		{"no version is left", term + policy("p", web, good) + options("culvert.dev/min-version: '1.3', culvert.dev/max-version: '1.2'"), nil, broken + "\npolicy a/p edge Accepted=False/Invalid"},
		{"an unknown cipher suite", term + policy("p", web, good) + options("culvert.dev/cipher-suites: 'TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256,huh'"), nil, broken + "\npolicy a/p edge Accepted=False/Invalid"},
		{"an insecure cipher suite", term + policy("p", web, good) + options("culvert.dev/cipher-suites: TLS_RSA_WITH_RC4_128_SHA"), nil, broken + "\npolicy a/p edge Accepted=False/Invalid"},
		{"no cipher suite", term + policy("p", web, good) + options("culvert.dev/cipher-suites: ''"), nil, broken + "\npolicy a/p edge Accepted=False/Invalid"},
		{"cipher suites without effect", term + policy("p", web, good) + options("culvert.dev/min-version: '1.3', culvert.dev/cipher-suites: TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256"), nil, broken + "\npolicy a/p edge Accepted=False/Invalid"},
		{"an unknown option", term + policy("p", web, good) + options("culvert.dev/minimum-version: '1.3'"), nil, broken + "\npolicy a/p edge Accepted=False/Invalid"},
		{"an option without a domain", term + policy("p", web, good) + options("min-version: '1.3'"), nil, broken + "\npolicy a/p edge Accepted=False/Invalid"},
		{"a client certificate", edge(terminate, "tls: {backend: {clientCertificateRef: {name: cert}}}") + secret + caMap + testRoute("TLSRoute", "r", "abc.example.com", "{name: web, port: 443}") + policy("p", web, good), nil,
			over + "+cert\ngateway a/edge ResolvedRefs=True/ResolvedRefs"},
		{"a client certificate makes no TLS", edge(terminate, "tls: {backend: {clientCertificateRef: {name: cert}}}") + secret + testRoute("TLSRoute", "r", "abc.example.com", "{name: web, port: 443}"), nil, plain},
		{"a client certificate that is not there", edge(terminate, "tls: {backend: {clientCertificateRef: {name: none}}}") + secret + caMap + testRoute("TLSRoute", "r", "abc.example.com", "{name: web, port: 443}") + policy("p", web, good), nil,
			broken + "\ngateway a/edge ResolvedRefs=False/InvalidClientCertificateRef\ngateway a/edge Programmed=True/Programmed"},
		{"a client certificate without grant", edge(passthrough, "tls: {backend: {clientCertificateRef: {name: cert, namespace: b}}}"), nil, "gateway a/edge ResolvedRefs=False/RefNotPermitted"},
	})
}
