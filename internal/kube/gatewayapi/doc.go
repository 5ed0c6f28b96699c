// Package gatewayapi serves Gateways of Gateway API: it turns the objects of the cluster into
// listeners of the table, and writes their status.
//
//	c, err := gatewayapi.New(gatewayapi.Config{
//		Settings: gatewayapi.Settings{Addresses: []gatewayapi.Address{{Bind: addr}}},
//		REST:     cfg, // of internal/kube/client
//		Plane:    plane,
//		Leads:    leads,
//		Log:      log,
//	})
//	...
//	err = c.Run(ctx, updates) // it is a registry.Source
//
// # One direction
//
// Translate makes all decisions. It is a pure function from Inputs to a Result: it reads no clock
// and does no I/O. The rules of Gateway API are in its files, one for each kind of object, and each
// rule is a row in its tests.
//
//	internal/kube/watch ─▶ Inputs ─▶ Translate ─▶ Result ─▶ registry.Update     the table
//	   ▲                                    └───▶ writer               status of objects
//	   └── API server ◀───────────────────────────┘
//
// There is little around it: a store of the watched objects (store.go), a loop that translates at
// most ten times a second, and only when an object has changed that the last result depends on
// (controller.go), and a writer that compares the wanted status with the present one, and writes
// what differs (writer.go, status.go). An event that its own write of status causes is ignored
// (ownwrites.go). An idle controller sends no requests.
//
// EndpointSlices are in a Store of internal/kube/endpoints, which discovery uses as well.
//
// # Several replicas
//
// Every replica serves; the leader writes. Two leaders at once, or another controller of the same
// class with the same settings, do no harm: what is written depends on the objects alone,
// conditions and entries of others are kept, a status of a newer generation is not overwritten, and
// after a conflict the object is read again. A controller with other settings is reported, and
// objects that both write are written rarely (statusconflicts.go).
//
// # What is refused
//
// Each refusal is a condition, a line in every replica's log (refusals.go), an entry of the Report,
// and an Event, which the leader writes.
//
// # When something is missing
//
// Package internal/kube/watch knows which kinds could be read. If a kind that a table needs has
// never been read for lack of a permission there is no table: the registry is told why, no status is
// written, and the saved snapshot of an earlier run stays in force. A missing CRD delays nothing.
//
// If the API server does not answer, restarts, or suddenly lists nothing of a kind, the last snapshot
// stays in force, and the registry is told that it is stale. An object that could not be read never
// admits a client, and never lets anything be sent without TLS.
//
// If a Secret is changed and its new content is invalid, the old content stays in force until the
// Secret is deleted. If a class is deleted, the status of its Gateways says so. Each replica
// remembers these two things by itself, because no object has them.
//
// HTTP is not routed: HTTPRoutes attach, and their status says that requests are refused. The only
// infrastructure that is created is a ServiceAccount for each Gateway, with the labels of
// spec.infrastructure; nothing runs as it.
package gatewayapi
