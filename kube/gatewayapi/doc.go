// Package gatewayapi serves Gateways of Gateway API: it turns the objects that
// there are into listeners of the table, and writes back to them what has become
// of each.
//
//	c, err := gatewayapi.New(gatewayapi.Config{
//		Settings: gatewayapi.Settings{Addresses: []gatewayapi.Address{{Bind: addr}}},
//		REST:     cfg, // of kube/client
//		Plane:    plane,
//		Leads:    leads,
//		Log:      log,
//	})
//	...
//	err = c.Run(ctx, updates) // it is a registry.Source
//
// # One direction
//
// Everything that is decided is decided by Translate, a function from a World to
// a Result: it looks at no clock, asks nobody, and gives the same for the same.
// What the rules of Gateway API are is in its files, one for each kind of object,
// and each rule is a row in its tests.
//
//	informers ─▶ World ─▶ Translate ─▶ Result ─▶ registry.Update     the table
//	   ▲                                   └───▶ writer              status of objects
//	   └── API server ◀──────────────────────────┘
//
// Around it there is little: a store of what is watched (store.go), a loop that
// makes the table at most ten times a second, and only when something has
// changed that the last one was made of (controller.go), and a writer that
// compares what is wanted with what is there, and writes what differs
// (writer.go, status.go). At rest nothing is asked of the API server.
//
// # Several of us
//
// Every replica serves; the one that leads writes. Two that lead at once, or
// another controller of the same class with the same settings, do no harm: what is
// written depends on the objects alone, conditions and entries of others are kept,
// nothing is written over what is of a newer generation, and conflicts are read
// again. One with other settings is told of, and not fought (contests.go).
//
// # What is refused
//
// Each refusal is a condition, a line of every replica's log (refusals.go), an entry
// of the Report, and, by the one that writes, an Event.
//
// # When something is missing
//
// Package kube/watch says what is known of each kind. If a kind that a table needs has never been
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
