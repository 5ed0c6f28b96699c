// Package conformance runs the Gateway API's own conformance suite, unmodified,
// against culvert on a real control plane, and writes the standard report.
//
//	make conformance
//
// The suite's flags can be given, as for one test on pods that are kept:
//
//	go test ./conformance -run TestConformance -v -run-test TLSRouteSimpleSameNamespace
//
// gateway.yaml is the configuration of the gateway under test, manifests.yaml
// what it needs in the cluster. The features are those that the GatewayClass
// says in its status; a report runs with the suite's own limits of time.
package conformance
