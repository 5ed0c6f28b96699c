package gatewayapi

import (
	"fmt"
	"strings"
	"testing"

	"culvert.dev/registry"
)

// clientsText is what a filter adds to a line about its section or rule.
func clientsText(f registry.ClientFilter) string {
	if f.IsZero() {
		return ""
	}
	return fmt.Sprintf(" clients +%v -%v", f.Allow, f.Deny)
}

// TestClientAnnotations: a Gateway and a route each admit clients by address, and what
// can't be read admits nobody.
func TestClientAnnotations(t *testing.T) {
	annotated := func(docs, kind, notes string) string {
		return strings.Replace(docs, "kind: "+kind+"\nmetadata: {", "kind: "+kind+"\nmetadata: {annotations: {"+notes+"}, ", 1)
	}
	docs := edge(passthrough) + testRoute("TLSRoute", "r", "abc.example.com", "{name: web, port: 443}")
	runRows(t, []row{
		{"of a Gateway", annotated(docs, "Gateway", `culvert.dev/clients-allow: "10.0.0.0/8, 2001:db8::/32"`), nil, `
			gateway a/edge Accepted=True/Accepted
			section a/edge/tls/443 * gateway/a/edge/tls clients +[10.0.0.0/8 2001:db8::/32] -[]
			rule gateway/a/edge/tls tlsroute/a/r [abc.example.com] 1:a/web(10.244.0.1:8443)
		`},
		{"of a route", annotated(docs, "TLSRoute", `culvert.dev/clients-allow: 10.0.0.0/8, culvert.dev/clients-deny: 10.9.0.0/16`), nil, `
			TLSRoute a/r edge Accepted=True/Accepted
			section a/edge/tls/443 * gateway/a/edge/tls
			rule gateway/a/edge/tls tlsroute/a/r [abc.example.com] 1:a/web(10.244.0.1:8443) clients +[10.0.0.0/8] -[10.9.0.0/16]
		`},
		{"of a TCPRoute", edge("  - {name: tcp, port: 5432, protocol: TCP}\n") + annotated(testRoute("TCPRoute", "r", "", "{name: web, port: 443}"), "TCPRoute", `culvert.dev/clients-deny: 10.9.0.0/16`), nil, `
			rule gateway/a/edge/tcp tcproute/a/r [] 1:a/web(10.244.0.1:8443) clients +[] -[10.9.0.0/16]
		`},
		{"not readable, of a Gateway", annotated(docs, "Gateway", `culvert.dev/clients-deny: 10.0.0.1/8`), nil, `
			gateway a/edge Accepted=False/Invalid
			gateway a/edge Programmed=False/Invalid
		`},
		{"empty, of a Gateway", annotated(docs, "Gateway", `culvert.dev/clients-allow: ""`), nil, `
			gateway a/edge Accepted=False/Invalid
		`},
		{"not readable, of a route", annotated(docs, "TLSRoute", `culvert.dev/clients-allow: here`), nil, `
			gateway a/edge Accepted=True/Accepted
			TLSRoute a/r edge Accepted=False/UnsupportedValue
			listener a/edge tls kinds=TLSRoute attached=0
		`},
	})
}
