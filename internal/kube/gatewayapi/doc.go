// Package gatewayapi serves Gateways of Gateway API: it turns the objects that
// there are into listeners of the table, and writes back to them what has become
// of each.
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
// what differs (writer.go, status.go). An idle controller sends no requests.
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
// Each refusal is a condition, a line of every replica's log (refusals.go), an entry
// of the Report, and, by the one that writes, an Event.
//
// # When something is missing
//
// Package internal/kube/watch says what is known of each kind. If a kind that a table needs has never been
// read for lack of a permission there is no table: the registry is told why, no status is written,
// and what somebody has kept of an earlier run stays in force. A missing CRD is nothing to wait for.
//
// An API server that does not answer, restarts, or suddenly lists nothing of a kind empties no
// table: the last snapshot stays in force, and the registry is told that it is stale. What was not
// read cannot be what admits a client, or has something sent without TLS.
//
// A Secret that is changed for the worse leaves in force what it had before, until
// it is gone, and a Gateway whose class was deleted says so: that it was ours, and
// what the Secret was, is all that a replica knows and the objects do not say.
//
// It does not route HTTP: HTTPRoutes attach and have a status, and the message of
// it says that requests are refused. It creates no infrastructure but a
// ServiceAccount for each Gateway, which carries the labels of
// spec.infrastructure and which nothing runs as.
package gatewayapi
