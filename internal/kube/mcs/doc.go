// Package mcs keeps the objects of the multi-cluster services API (KEP-1645,
// multicluster.x-k8s.io/v1beta1) for the clusters that one process knows.
//
//	c := &mcs.Controller{Leads: leads, VIPs: addresses, OnExports: tell, Log: log}
//	remove := c.Add(ctx, "west", mcs.Cluster{Core: core, API: api})
//	defer remove()
//	go c.Run(ctx)
//
// A ServiceExport makes the Service of its name part of the cluster set. OnExports reports it to
// discovery, which gives the service the name SERVICE.NAMESPACE.svc.clusterset.local. Exports of
// one name in several clusters are one service, because namespaces of one name are considered the
// same. Where they differ the oldest export decides, and all of them get the condition Conflict.
//
// For each such service there is a ServiceImport in every cluster that has the namespace, for as
// long as a cluster exports it. The leading replica writes imports and conditions. A ServiceImport
// without our label belongs to another controller and is never changed; nor is a condition other
// than Valid, Ready and Conflict.
//
// A cluster that cannot be reached exports what it did before. While a cluster has not been read
// since the start, or may not be, nothing is removed from services that it takes part in. Where all
// objects of a kind vanish they stay until the API server confirms it: see internal/kube/watch.
//
// No EndpointSlices are written here: DNS and gateways lead to services of other clusters, and the
// imports say that there are none. In the own cluster an import has the address that Address gives
// it, which is a ClusterIP if internal/kube/imported keeps a Service for it; in other clusters it has
// VIPs. The labels and annotations of a ServiceExport are not copied.
package mcs
