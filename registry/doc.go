// Package registry holds what a gateway knows: which names lead to which
// services, where their endpoints are, and from which networks each may be
// asked for. It answers one question, tunnel.Resolver's: where does this
// request go?
//
// A Table holds all services and routes, and never changes. Sources (a file, a cluster) send
// Snapshots of their services; Merge makes one Table of them; a Registry swaps tables under the
// running gateway and keeps the state that outlives a table: whose turn it is, and which endpoints
// fail.
//
//	reg := &registry.Registry{Lookup: resolver.Lookup, Log: log}
//	go reg.Run(ctx, &file.Source{Path: "culvert.yaml"})
//	router := &tunnel.Router{Resolver: reg, ...}
//
// # Which service
//
// A name is looked up exactly first, then as *.parent with the longest parent
// first. The first pattern that exists decides: a service found by its exact
// name that has no such port is no-route, not a reason to try a wildcard. The
// cost depends on the number of labels in the name, not on the number of
// services.
//
// Among the services of one pattern the port decides, for all protocols alike:
//
//   - a port was asked for (CONNECT): the service that lists it, else the one
//     that lists no ports and so takes any;
//   - none was asked for (SNI carries none): the only port there is, else the
//     rule above with the port of the listener the client came in at.
//
// A request by address matches a service's Addresses, or its VIPs, under the
// same port rule, or the address and port of an endpoint written as an IP
// address. One on tunnel.Forbidden's list is reached by the former two only.
//
// # Who may ask
//
// A service is private unless Exposed. ExposedTo narrows that to networks: the
// caller's network is the one with the longest prefix that holds its address,
// and no address, be it private or loopback, is in a network that does not
// list it.
//
// # Which endpoint
//
// Endpoints take turns. One that could not be dialed is last in the order for
// 1, 2, 10, 20 and then 30 seconds after each failure in a row, and after that
// one request at a time may try it first; a dial that works clears it, and so
// does a check (package checks) that passes. Those that a check reports as down
// come last for as long. No endpoint is ever left out: where all fail, the one
// that is due back first is tried first. A server that answers with several
// addresses at once, such as DNS, may leave out those not Healthy.
//
// An endpoint that is a DNS name is looked up once per request, and all
// addresses of the answer are candidates. "localhost" is not looked up.
//
// The package does not dial, does not read files and does not speak DNS.
//
// # Stability
//
// Until version 1.0 a release may change the exported API; CHANGELOG.md lists each
// change. From then on it follows semantic versioning.
package registry
