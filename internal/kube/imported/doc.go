// Package imported gives the services that a cluster imports from the cluster set addresses that
// every pod reaches: ClusterIPs, which lead to the gateway.
//
//	s := &imported.Source{Client: core, Namespace: "culvert-system", Owner: "culvert", Selector: pods, Ports: ports, Leads: leads, Log: log}
//	s.SetImports(imports) // by mcs.Controller
//	err := s.Run(ctx, updates)
//
// For each ServiceImport with a TCP port the leading replica keeps one Service in the gateway's own
// namespace. It selects the gateway's pods, has the ports of the import, and each of these has a
// target port that no other one has. Kubernetes makes the EndpointSlices from the readiness of the
// pods, and kube-proxy leads the ClusterIP to them. A Service is the record of which ports it was
// given; nothing else keeps that.
//
// All replicas follow these Services, and a Source is a registry.Source with a listener at each of
// the target ports, which leads to the service's name in the cluster set. Who may connect is decided
// by the router, as for every listener.
//
// A target port that is free again is given to another import after ten minutes at the earliest, as
// far as the replica that leads has seen it become free. A Service without our labels is never
// changed.
package imported
