// Package peer exchanges catalogs of services with other sites. Each site tells the other which of
// its services that may see, as long as one stream between two of their gateways is open:
//
//	peers := &peer.Peers{Site: "east", Table: reg.Table, NewTransport: upstreams.New, Log: log}
//	err := peers.Configure([]peer.Config{{Name: "west", Gateways: gateways, IDs: ids, Zones: zones}})
//	go reg.Run(ctx, file, peers)
//
// Peers is a registry.Source: the services that the peer west offers are in the network peer/west,
// whose gateways are those of the peer. It is also a tunnel.Handler, for streams
// that peers open to it.
//
// # The stream
//
// Both sides send lines of JSON, each a Message of 64 KiB at most. The first one of each
// side is a hello. A side that sends subscribe gets a snapshot of what it may see, in
// several lines of which the last one says so, and then changes, each with a generation. A
// side that was connected before says up to which generation it knows, and gets the changes
// since. Both send a heartbeat every 5 seconds.
//
// It does not matter which side has opened the stream: a site that cannot be dialed, because it is
// behind a NAT, is asked for its catalog on the stream that it opens.
//
// # What a peer can do
//
// It can offer names of its own zones, and no other names. Its gateways are verified by the
// bundle of its trust domain. It sees what a policy with the verb catalog allows to the
// identity of its gateway, and nothing by default. A catalog that exceeds a limit is refused
// as a whole, and the last good one stays.
//
// The package is not stable yet.
package peer
