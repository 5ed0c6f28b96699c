// Package checks probes the endpoints and gateways of a registry that have a
// Check, at intervals, and reports the results to the registry.
//
//	reg := &registry.Registry{Lookup: resolver.Lookup, ...}
//	c := &checks.Checker{Registry: reg, Dial: dialer.DialEndpoint, Lookup: resolver.Lookup, Log: log}
//	reg.OnTable = c.Changed
//	go c.Run(ctx)
//
// # What is asked
//
// The endpoints that can be reached from here without a gateway, of services
// that have a check and no Via, and the gateways of all networks, at the address
// that they have for us. An address is asked once, however many services have it
// with the same check. A DNS name is looked up, again and again, and every
// address of its is asked.
//
// An endpoint that has a Via of its own is asked over it: the same address over other
// hops is another endpoint. Its name is not looked up here. An http check in the clear is
// not made where plaintext may not go. Endpoints behind the gateways of a network are not
// asked: those gateways ask them.
//
// # How
//
//   - tcp: a connect, which is closed in order. A reset would leave no TIME-WAIT
//     here, but servers complain of resets in their logs and say nothing of
//     clients that leave without a byte.
//   - tls: a ClientHello, and then a reset. Any record of TLS in answer is a
//     sign of life, also an alert that wants a certificate or does not know the
//     name. No certificate is looked at: what answers is not who it says until
//     a client has made sure, end to end. The hello is never followed by
//     anything.
//   - http: a GET, in the clear unless the gateway speaks TLS to the service. The status must be one of the check's; redirects
//     are not followed. Of the body 16 KiB are read, for a close in order.
//
// Where the gateway speaks TLS to the service, so do its probes of tls and http at the
// endpoint's own port, with the same settings: an endpoint whose certificate does not
// pass is down. A tls check is that handshake and nothing else.
//
// A probe goes to the endpoint's own port, or to the check's where it has one: a
// database may be asked for its role at the port of its REST interface.
//
// Where connections begin with a PROXY header, probes begin with a LOCAL one,
// which has no client.
//
// Each probe has a Timeout. As many as UnhealthyThreshold must fail in a row before
// an address is down. A packet may be lost, so a first failure is followed by a
// second probe at once, unless one is enough; both fit into an Interval, and
// further ones are an Interval apart. With the default threshold of two, an
// endpoint that refuses is down within one Interval of its death, and a silent one,
// such as a host that is off, within two: one until the probe, and one for both
// probes. HealthyThreshold probes in a row bring it back; the very first counts at
// once. A fault of this host's own, such as a lack of descriptors or an address
// that the guard refuses, counts for neither.
//
// An endpoint without a Check is not probed: its fault is found only when the
// gateway fails to dial it.
//
// # What it costs
//
// Nothing but a place in a queue between probes; at most 64 are under way, and
// of them at most 16 of addresses that are down: those take their full time each,
// and must not keep the others from being asked. First probes are spread over
// the interval. Where many addresses begin to time out at once, finding out takes
// longer than the interval: 48 of them a second, with the default Timeout.
package checks
