// Package mcs keeps the objects of the multi-cluster services API (KEP-1645,
// multicluster.x-k8s.io/v1beta1) for the clusters that one process knows.
//
//	c := &mcs.Controller{Leads: leads, VIPs: addresses, OnExports: tell, Log: log}
//	remove := c.Add(ctx, "west", mcs.Cluster{Core: core, API: api})
//	defer remove()
//	go c.Run(ctx)
//
// A ServiceExport makes the Service of its name part of the cluster set:
// whoever discovers services is told so (OnExports), and they get the name
// SERVICE.NAMESPACE.svc.clusterset.local there. Exports of one name in several
// clusters are one service, as namespaces of one name are taken for one. Where
// they differ the oldest export decides, and all of them are told by their
// condition Conflict.
//
// In every cluster that has the namespace there is a ServiceImport for each such
// service, for as long as anybody exports it. Imports and conditions are
// written by the one replica that leads. A ServiceImport without our label
// belongs to somebody else, and is never touched; nor is a condition that is
// none of Valid, Ready and Conflict.
//
// A cluster that can't be reached exports what it did. While one has not been
// seen since the start, or may not be, nothing is taken from services that it takes part in. Where
// all objects of a kind vanish they stay until the API server confirms it: see kube/watch.
//
// EndpointSlices are not made: it is DNS and the gateways that lead to services
// of other clusters, and imports say that there are none. The labels and
// annotations of a ServiceExport are not passed on.
package mcs
