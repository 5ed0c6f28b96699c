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
// A closed service is in the table, for explain to name it, but without its endpoints, because no
// client can reach them.
//
// # Endpoints
//
// Ready endpoints are used. If a port has none, those that are terminating but still serve are used
// for it, as kube-proxy does. Zone hints are followed if every ready endpoint has one, and one is for
// our zone, which is kube-proxy's rule, too. A pod with two addresses is one endpoint, unless Prefer
// is PreferBoth.
//
// # What is watched
//
// Services, Namespaces and Nodes, by package internal/kube/watch, into stores of this package, and
// EndpointSlices into a Store of internal/kube/endpoints, which Gateway API uses as well. They keep
// only the fields that are used: a service of ten endpoints takes about 2 KiB. A change of one
// EndpointSlice converts one service; all others keep their pointers. There are at most 10 Updates
// per second.
//
// The first Update waits until everything has been listed. When the API server cannot be reached an
// Update has an Err, and the last snapshot stays in force. A missing permission is logged once, and
// the request is repeated: without permission to read Nodes there are no gateways at their ports,
// and without permission to read Namespaces a service is exposed only if its own annotations say to
// whom. If all objects of a kind vanish they are kept until the API server confirms it.
//
// Several clusters, each by a kubeconfig in a Secret, are Clusters.
package discovery
