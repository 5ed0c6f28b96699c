// Package discovery finds out what a Kubernetes cluster serves: a
// registry.Source over its Services and EndpointSlices, one for each cluster.
//
//	src := &discovery.Source{Client: core, Cluster: "east", Log: log}
//	go reg.Run(ctx, file, src)
//
// Every Service with a port of TCP becomes a service of the mesh zone,
// SERVICE.NAMESPACE.svc.CLUSTER.ZONE. It is closed until an annotation opens it,
// and the administrator's Rules agree:
//
//	metadata:
//	  annotations:
//	    culvert.dev/expose: "true"
//	    culvert.dev/networks: east,west
//
// A closed service is in the table, for explain to name it, but its endpoints
// are not: what can't be asked for costs nothing.
//
// # Endpoints
//
// Ready ones are used, and those that are terminating but still serve only
// where none is ready, for each port by itself, as kube-proxy does. Zone hints
// are obeyed by its rule, too: if every ready endpoint has one, and one is for our
// zone. A pod with two addresses is one endpoint, unless Prefer says both.
//
// # What is watched
//
// Services, EndpointSlices, Namespaces and Nodes, by package internal/kube/watch,
// into stores of this package, which keep only what is used: a service of ten
// endpoints takes about 2 KiB. A change of one EndpointSlice converts one service;
// all others keep their pointers. Changes are gathered: there are at most 10
// Updates per second.
//
// The first Update waits until everything has been listed. When the API server
// can't be reached Updates say so by their Err, and what was known stays in
// force. What RBAC forbids is said once and tried again: without the right to
// read Nodes there are no gateways at their ports, and without the right to read
// Namespaces a service is exposed only if its own annotations say to whom. Where
// all objects of a kind vanish they stay until the API server confirms it.
//
// Several clusters, each by a kubeconfig in a Secret, are Clusters.
package discovery
