package gatewayapi

import "testing"

// edge is a Gateway of namespace a; listeners are filled in.
func edge(listeners string, more ...string) string {
	s := `
kind: Gateway
metadata: {namespace: a, name: edge}
spec:
  gatewayClassName: culvert
`
	for _, m := range more {
		s += "  " + m + "\n"
	}
	return s + "  listeners:\n" + listeners
}

const (
	passthrough = "  - {name: tls, port: 443, protocol: TLS, tls: {mode: Passthrough}}\n"
	terminate   = "  - {name: tls, port: 443, protocol: TLS, tls: {mode: Terminate, certificateRefs: [{name: cert}]}}\n"
	tcp         = "  - {name: tcp, port: 9000, protocol: TCP}\n"
	udp         = "  - {name: udp, port: 5300, protocol: UDP}\n"
	secret      = "\n---\nkind: Secret\nmetadata: {namespace: a, name: cert}\nstringData: {tls.crt: CERT}\n"
	caMap       = "\n---\nkind: ConfigMap\nmetadata: {namespace: a, name: ca}\ndata: {ca.crt: CERT}\n"
)

// route is one of namespace a with a parent a/edge.
func testRoute(kind, name, hostnames, backends string, parent ...string) string {
	s := "\n---\nkind: " + kind + "\nmetadata: {namespace: a, name: " + name + "}\nspec:\n"
	p := "{name: edge}"
	if len(parent) > 0 {
		p = parent[0]
	}
	s += "  parentRefs: [" + p + "]\n"
	if hostnames != "" {
		s += "  hostnames: [" + hostnames + "]\n"
	}
	return s + "  rules: [{backendRefs: [" + backends + "]}]\n"
}

func TestTLSRoute(t *testing.T) {
	runRows(t, []row{
		{"same namespace", edge(passthrough) + testRoute("TLSRoute", "r", "abc.example.com", "{name: web, port: 443}"), nil, `
			gateway a/edge Accepted=True/Accepted
			gateway a/edge Programmed=True/Programmed
			gateway a/edge ResolvedRefs=True/ResolvedRefs
			gateway a/edge address IPAddress 192.0.2.1
			listener a/edge tls Accepted=True/Accepted
			listener a/edge tls Programmed=True/Programmed
			listener a/edge tls ResolvedRefs=True/ResolvedRefs
			listener a/edge tls Conflicted=False/NoConflicts
			listener a/edge tls kinds=TLSRoute attached=1
			TLSRoute a/r edge Accepted=True/Accepted
			TLSRoute a/r edge ResolvedRefs=True/ResolvedRefs
			open a/edge/tls/443 tls
			section a/edge/tls/443 * gateway/a/edge/tls
			rule gateway/a/edge/tls tlsroute/a/r [abc.example.com] 1:a/web(10.244.0.1:8443)
		`},
		{"backend nonexistent", edge(passthrough) + testRoute("TLSRoute", "r", "abc.example.com", "{name: none, port: 443}"), nil, `
			TLSRoute a/r edge Accepted=True/Accepted
			TLSRoute a/r edge ResolvedRefs=False/BackendNotFound
			rule gateway/a/edge/tls tlsroute/a/r [abc.example.com] 1:broken
		`},
		{"port nonexistent", edge(passthrough) + testRoute("TLSRoute", "r", "abc.example.com", "{name: web, port: 444}"), nil, `
			TLSRoute a/r edge ResolvedRefs=False/BackendNotFound
		`},
		{"port of UDP", edge(passthrough) + testRoute("TLSRoute", "r", "abc.example.com", "{name: web, port: 53}"), nil, `
			TLSRoute a/r edge ResolvedRefs=False/UnsupportedProtocol
		`},
		{"unknown kind", edge(passthrough) + testRoute("TLSRoute", "r", "abc.example.com", "{group: unknown.example.com, kind: NonExistent, name: web, port: 443}"), nil, `
			TLSRoute a/r edge Accepted=True/Accepted
			TLSRoute a/r edge ResolvedRefs=False/InvalidKind
			rule gateway/a/edge/tls tlsroute/a/r [abc.example.com] 1:broken
		`},
		{"ExternalName", edge(passthrough) + testRoute("TLSRoute", "r", "abc.example.com", "{name: ext, port: 443}") + `
---
kind: Service
metadata: {namespace: a, name: ext}
spec: {type: ExternalName, externalName: evil.example, ports: [{port: 443}]}
`, nil, `
			TLSRoute a/r edge ResolvedRefs=False/InvalidKind
			rule gateway/a/edge/tls tlsroute/a/r [abc.example.com] 1:broken
		`},
		{"the administrator refuses the Service", edge(passthrough) + testRoute("TLSRoute", "r", "abc.example.com", "{name: web, port: 443}"),
			func(in *Inputs) {
				in.Refuses = func(namespace, name string) string {
					if namespace+"/"+name == "a/web" {
						return "the administrator denies \"a/*\""
					}
					return ""
				}
			}, `
			TLSRoute a/r edge Accepted=True/Accepted
			TLSRoute a/r edge ResolvedRefs=False/RefNotPermitted
			rule gateway/a/edge/tls tlsroute/a/r [abc.example.com] 1:broken
		`},
		{"only an HTTP listener", edge("  - {name: http, port: 80, protocol: HTTP}\n") + testRoute("TLSRoute", "r", "abc.example.com", "{name: web, port: 443}"), nil, `
			TLSRoute a/r edge Accepted=False/NotAllowedByListeners
			listener a/edge http kinds=HTTPRoute attached=0
			open a/edge/http/80 http
		`},
		{"only an HTTPS listener", edge("  - {name: https, port: 443, protocol: HTTPS, tls: {certificateRefs: [{name: cert}]}}\n") + secret + testRoute("TLSRoute", "r", "abc.example.com", "{name: web, port: 443}"), nil, `
			TLSRoute a/r edge Accepted=False/NotAllowedByListeners
			listener a/edge https kinds=HTTPRoute attached=0
			listener a/edge https Programmed=True/Programmed
			section a/edge/tls/443 * gateway/a/edge/https
			rules gateway/a/edge/https=0
		`},
		{"unknown section", edge(passthrough) + testRoute("TLSRoute", "r", "abc.example.com", "{name: web, port: 443}", "{name: edge, sectionName: nope}"), nil, `
			TLSRoute a/r edge#nope Accepted=False/NoMatchingParent
			listener a/edge tls kinds=TLSRoute attached=0
		`},
		{"unknown port", edge(passthrough) + testRoute("TLSRoute", "r", "abc.example.com", "{name: web, port: 443}", "{name: edge, port: 444}"), nil, `
			TLSRoute a/r edge:444 Accepted=False/NoMatchingParent
		`},
		{"no hostname in common, exact", edge("  - {name: tls, port: 443, protocol: TLS, hostname: one.example.com, tls: {mode: Passthrough}}\n") + testRoute("TLSRoute", "r", "two.example.com", "{name: web, port: 443}"), nil, `
			TLSRoute a/r edge Accepted=False/NoMatchingListenerHostname
			listener a/edge tls kinds=TLSRoute attached=0
			rules gateway/a/edge/tls=0
		`},
		{"no hostname in common, wildcard", edge("  - {name: tls, port: 443, protocol: TLS, hostname: '*.example.com', tls: {mode: Passthrough}}\n") + testRoute("TLSRoute", "r", "example.com, '*.example.org'", "{name: web, port: 443}"), nil, `
			TLSRoute a/r edge Accepted=False/NoMatchingListenerHostname
		`},
		{"a hostname that is none", edge(passthrough) + testRoute("TLSRoute", "r", "a.1", "{name: web, port: 443}"), nil, `
			TLSRoute a/r edge Accepted=False/UnsupportedValue
		`},
		{"a hostname that is none beside one", edge(passthrough) + testRoute("TLSRoute", "r", "a.1, b.example.com", "{name: web, port: 443}"), nil, `
			TLSRoute a/r edge Accepted=True/Accepted
			rule gateway/a/edge/tls tlsroute/a/r [b.example.com] 1:a/web(10.244.0.1:8443)
		`},
		{"another's Gateway", "kind: Gateway\nmetadata: {namespace: a, name: edge}\nspec: {gatewayClassName: other, listeners: [{name: tls, port: 443, protocol: TLS}]}" + testRoute("TLSRoute", "r", "abc.example.com", "{name: web, port: 443}"), nil, `
			TLSRoute a/r parents=0
			!gateway
		`},
		{"a parent of another kind", edge(passthrough) + testRoute("TLSRoute", "r", "abc.example.com", "{name: web, port: 443}", "{group: '', kind: Service, name: edge}"), nil, `
			TLSRoute a/r parents=0
		`},
		{"the same parent twice", edge(passthrough) + testRoute("TLSRoute", "r", "abc.example.com", "{name: web, port: 443}", "{name: edge}, {name: edge, namespace: a}"), nil, `
			TLSRoute a/r parents=1
			listener a/edge tls kinds=TLSRoute attached=1
		`},
		{"two parents at one listener", edge(passthrough) + testRoute("TLSRoute", "r", "abc.example.com", "{name: web, port: 443}", "{name: edge}, {name: edge, sectionName: tls}"), nil, `
			TLSRoute a/r parents=2
			TLSRoute a/r edge Accepted=True/Accepted
			TLSRoute a/r edge#tls Accepted=True/Accepted
			listener a/edge tls kinds=TLSRoute attached=1
		`},
	})
}

func TestTLSRouteHostnames(t *testing.T) {
	listener := func(host string) string {
		return "  - {name: l" + "-" + host[len(host)-3:] + ", port: 443, protocol: TLS, hostname: '" + host + "', tls: {mode: Passthrough}}\n"
	}
	runRows(t, []row{
		{"exact listener, wildcard and exact routes: own hostname ranks", edge(listener("abc.example.com")) +
			testRoute("TLSRoute", "wild", "'*.example.com'", "{name: web, port: 443}") + testRoute("TLSRoute", "exact", "abc.example.com", "{name: other, port: 443}"), nil, `
			listener a/edge l-com kinds=TLSRoute attached=2
			rule gateway/a/edge/l-com tlsroute/a/exact [abc.example.com] 1:a/other(10.244.0.9:8443)
			rules gateway/a/edge/l-com=1
		`},
		{"wildcard listener within a wider route", edge(listener("*.foo.example.com")) +
			testRoute("TLSRoute", "wide", "'*.example.com'", "{name: web, port: 443}") + testRoute("TLSRoute", "narrow", "'*.foo.example.com'", "{name: other, port: 443}"), nil, `
			rule gateway/a/edge/l-com tlsroute/a/narrow [*.foo.example.com] 1:a/other(10.244.0.9:8443)
			rules gateway/a/edge/l-com=1
		`},
		{"the intersection is what is served", edge(listener("*.foo.example.com")) + testRoute("TLSRoute", "wide", "'*.example.com', x.foo.example.com", "{name: web, port: 443}"), nil, `
			rule gateway/a/edge/l-com tlsroute/a/wide [x.foo.example.com] 1:a/web(10.244.0.1:8443)
			rule gateway/a/edge/l-com tlsroute/a/wide [*.foo.example.com] 1:a/web(10.244.0.1:8443)
			rules gateway/a/edge/l-com=2
		`},
		{"oldest of the same", edge(passthrough) + testRoute("TLSRoute", "b", "x.example.com", "{name: web, port: 443}") + testRoute("TLSRoute", "a", "x.example.com", "{name: other, port: 443}"), nil, `
			rule gateway/a/edge/tls tlsroute/a/b [x.example.com] 1:a/web(10.244.0.1:8443)
			rules gateway/a/edge/tls=1
		`},
		{"several exact names are one rule", edge(passthrough) + testRoute("TLSRoute", "b", "x.example.com, y.example.com", "{name: web, port: 443}"), nil, `
			rule gateway/a/edge/tls tlsroute/a/b [x.example.com y.example.com] 1:a/web(10.244.0.1:8443)
		`},
		{"no hostnames are any", edge(passthrough+listener("*.example.com")) + testRoute("TLSRoute", "r", "", "{name: web, port: 443}"), nil, `
			TLSRoute a/r edge Accepted=True/Accepted
			rule gateway/a/edge/tls tlsroute/a/r [] 1:a/web(10.244.0.1:8443)
			rule gateway/a/edge/l-com tlsroute/a/r [*.example.com] 1:a/web(10.244.0.1:8443)
		`},
		{"isolation", edge(listener("*.example.com")+"  - {name: any, port: 443, protocol: TLS, tls: {mode: Passthrough}}\n") +
			testRoute("TLSRoute", "r", "x.example.com", "{name: web, port: 443}", "{name: edge, sectionName: any}"), nil, `
			rules gateway/a/edge/l-com=0
			rules gateway/a/edge/any=1
			listener a/edge any OverlappingTLSConfig=True/OverlappingHostnames
			listener a/edge l-com OverlappingTLSConfig=True/OverlappingHostnames
		`},
	})
}

func TestTLSTerminate(t *testing.T) {
	runRows(t, []row{
		{"terminate", edge(terminate) + secret + testRoute("TLSRoute", "r", "abc.example.com", "{name: web, port: 80}"), nil, `
			listener a/edge tls kinds=TLSRoute attached=1
			listener a/edge tls Accepted=True/Accepted
			section a/edge/tls/443 * gateway/a/edge/tls ends 1
			rule gateway/a/edge/tls tlsroute/a/r [abc.example.com] 1:a/web(10.244.0.1:3000)
		`},
		{"mixed", edge("  - {name: t, port: 443, hostname: tls.example.com, protocol: TLS, tls: {mode: Terminate, certificateRefs: [{name: cert}]}}\n  - {name: p, port: 443, hostname: abc.example.com, protocol: TLS, tls: {mode: Passthrough}}\n") + secret +
			testRoute("TLSRoute", "r", "tls.example.com", "{name: web, port: 80}") + testRoute("TLSRoute", "s", "abc.example.com", "{name: web, port: 443}"), nil, `
			listener a/edge t kinds=TLSRoute attached=1
			listener a/edge p kinds=TLSRoute attached=1
			section a/edge/tls/443 tls.example.com gateway/a/edge/t ends 1
			section a/edge/tls/443 abc.example.com gateway/a/edge/p
			rule gateway/a/edge/t tlsroute/a/r [tls.example.com] 1:a/web(10.244.0.1:3000)
			rule gateway/a/edge/p tlsroute/a/s [abc.example.com] 1:a/web(10.244.0.1:8443)
			!listener a/edge t OverlappingTLSConfig
		`},
		{"no certificate", edge(terminate) + testRoute("TLSRoute", "r", "abc.example.com", "{name: web, port: 80}"), nil, `
			listener a/edge tls ResolvedRefs=False/InvalidCertificateRef
			listener a/edge tls Programmed=False/Invalid
			listener a/edge tls kinds=TLSRoute attached=1
			gateway a/edge Accepted=True/Accepted
			gateway a/edge Programmed=False/Invalid
			gateway a/edge ResolvedRefs=False/ListenersNotResolved
			rules gateway/a/edge/tls=0
		`},
		{"wrong group", edge("  - {name: https, port: 443, protocol: HTTPS, tls: {certificateRefs: [{group: wrong.group.company.io, kind: Secret, name: cert}]}}\n") + secret, nil, `
			listener a/edge https ResolvedRefs=False/InvalidCertificateRef
			listener a/edge https kinds=HTTPRoute attached=0
		`},
		{"wrong kind", edge("  - {name: https, port: 443, protocol: HTTPS, tls: {certificateRefs: [{kind: WrongKind, name: cert}]}}\n") + secret, nil, `
			listener a/edge https ResolvedRefs=False/InvalidCertificateRef
		`},
		{"no PEM", edge("  - {name: https, port: 443, protocol: HTTPS, tls: {certificateRefs: [{name: cert}]}}\n") + "\n---\nkind: Secret\nmetadata: {namespace: a, name: cert}\nstringData: {tls.crt: Hello world, tls.key: x}\n", nil, `
			listener a/edge https ResolvedRefs=False/InvalidCertificateRef
		`},
		{"wrong type", edge("  - {name: https, port: 443, protocol: HTTPS, tls: {certificateRefs: [{name: cert}]}}\n") + "\n---\nkind: Secret\ntype: Opaque\nmetadata: {namespace: a, name: cert}\nstringData: {tls.crt: CERT}\n", nil, `
			listener a/edge https ResolvedRefs=False/InvalidCertificateRef
		`},
		{"one good certificate of two", edge("  - {name: tls, port: 443, protocol: TLS, tls: {mode: Terminate, certificateRefs: [{name: cert}, {name: none}]}}\n") + secret, nil, `
			listener a/edge tls ResolvedRefs=False/InvalidCertificateRef
			listener a/edge tls Programmed=True/Programmed
			section a/edge/tls/443 * gateway/a/edge/tls ends 1
		`},
		{"no certificateRefs", edge("  - {name: tls, port: 443, protocol: TLS, tls: {mode: Terminate, options: {x.example/y: z}}}\n"), nil, `
			listener a/edge tls ResolvedRefs=False/InvalidCertificateRef
			listener a/edge tls Programmed=False/Invalid
		`},
		{"auto-passthrough", edge("  - {name: tls, port: 443, protocol: TLS, tls: {mode: Passthrough, options: {culvert.dev/auto-passthrough: 'true', other.example/x: y}}}\n"), nil, `
			section a/edge/tls/443 * gateway/a/edge/tls istio
		`},
		{"no auto-passthrough where TLS ends", edge("  - {name: tls, port: 443, protocol: TLS, tls: {mode: Terminate, certificateRefs: [{name: cert}], options: {culvert.dev/auto-passthrough: 'true'}}}\n") + secret, nil, `
			section a/edge/tls/443 * gateway/a/edge/tls ends 1
		`},
	})
}

func TestFrontendValidation(t *testing.T) {
	with := func(frontend string) string {
		return edge(terminate, "tls: {frontend: "+frontend+"}") + secret
	}
	runRows(t, []row{
		{"default", with("{default: {validation: {caCertificateRefs: [{group: '', kind: ConfigMap, name: ca}]}}}") + caMap, nil, `
			section a/edge/tls/443 * gateway/a/edge/tls ends 1 verify
			listener a/edge tls ResolvedRefs=True/ResolvedRefs
			!gateway a/edge InsecureFrontendValidationMode
		`},
		{"per port replaces default", with("{default: {validation: {caCertificateRefs: [{group: '', kind: ConfigMap, name: ca}]}}, perPort: [{port: 443, tls: {}}]}") + caMap, nil, `
			section a/edge/tls/443 * gateway/a/edge/tls ends 1
		`},
		{"another port", with("{default: {}, perPort: [{port: 8443, tls: {validation: {caCertificateRefs: [{group: '', kind: ConfigMap, name: none}]}}}]}"), nil, `
			section a/edge/tls/443 * gateway/a/edge/tls ends 1
			listener a/edge tls ResolvedRefs=True/ResolvedRefs
		`},
		{"insecure fallback", with("{default: {validation: {mode: AllowInsecureFallback, caCertificateRefs: [{group: '', kind: ConfigMap, name: ca}]}}}") + caMap, nil, `
			section a/edge/tls/443 * gateway/a/edge/tls ends 1 verify optional
			gateway a/edge InsecureFrontendValidationMode=True/ConfigurationChanged
		`},
		{"none", with("{default: {validation: {caCertificateRefs: [{group: '', kind: ConfigMap, name: none}]}}}"), nil, `
			listener a/edge tls ResolvedRefs=False/InvalidCACertificateRef
			listener a/edge tls Accepted=False/NoValidCACertificate
			!open
		`},
		{"no ca.crt", with("{default: {validation: {caCertificateRefs: [{group: '', kind: ConfigMap, name: ca}]}}}") + "\n---\nkind: ConfigMap\nmetadata: {namespace: a, name: ca}\ndata: {x: y}\n", nil, `
			listener a/edge tls ResolvedRefs=False/InvalidCACertificateRef
			listener a/edge tls Accepted=False/NoValidCACertificate
		`},
		{"kind", with("{default: {validation: {caCertificateRefs: [{group: '', kind: Secret, name: cert}]}}}"), nil, `
			listener a/edge tls ResolvedRefs=False/InvalidCACertificateKind
			listener a/edge tls Accepted=False/NoValidCACertificate
		`},
		{"one of two", with("{default: {validation: {caCertificateRefs: [{group: '', kind: ConfigMap, name: none}, {group: '', kind: ConfigMap, name: ca}]}}}") + caMap, nil, `
			listener a/edge tls ResolvedRefs=False/InvalidCACertificateRef
			listener a/edge tls Accepted=True/Accepted
			section a/edge/tls/443 * gateway/a/edge/tls ends 1 verify
		`},
		{"no grant", with("{default: {validation: {caCertificateRefs: [{group: '', kind: ConfigMap, name: ca, namespace: b}]}}}"), nil, `
			listener a/edge tls ResolvedRefs=False/RefNotPermitted
			listener a/edge tls Accepted=False/NoValidCACertificate
		`},
		{"a grant", with("{default: {validation: {caCertificateRefs: [{group: '', kind: ConfigMap, name: ca, namespace: b}]}}}") + `
---
kind: ConfigMap
metadata: {namespace: b, name: ca}
data: {ca.crt: CERT}
---
kind: ReferenceGrant
metadata: {namespace: b, name: g}
spec: {from: [{group: gateway.networking.k8s.io, kind: Gateway, namespace: a}], to: [{group: '', kind: ConfigMap}]}
`, nil, `
			listener a/edge tls ResolvedRefs=True/ResolvedRefs
			section a/edge/tls/443 * gateway/a/edge/tls ends 1 verify
		`},
	})
}
