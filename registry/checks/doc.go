// Package checks finds out whether what is in a registry works: it asks the
// endpoints and gateways that have a Check, again and again, and tells the
// registry.
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
//   - http: a GET in the clear. A status of 200 to 399 is well; redirects are
//     not followed. Of the body 16 KiB are read, for a close in order.
//
// Where connections begin with a PROXY header, so do these: with one that says
// that nobody is behind them.
//
// Each has a Timeout, and is made twice before an address is down, as a packet may
// be lost; both fit into an Interval. What refuses is found by the next probe, so
// within one Interval of its death; what is silent, as a host that is off, within
// two: one until the probe, and one for both tries. Two that work in a row bring
// it back; the very first counts at once. What is this host's own fault, a lack of
// descriptors or an address that the guard does not let through, says nothing of
// an address.
//
// What has no Check nobody asks: it is found only when a dial of the gateway's
// fails.
//
// # What it costs
//
// Nothing but a place in a queue between probes; at most 64 are under way, and
// of them at most 16 of addresses that are down: those take their full time each,
// and must not keep the others from being asked. First probes are spread over
// the interval. Where many addresses begin to time out at once, finding out takes
// longer than the interval: 48 of them a second, with the default Timeout.
package checks
