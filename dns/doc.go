// Package dns speaks DNS in both directions.
//
// A Server answers the names of a table, for the network of each client, and
// forwards all other questions to other resolvers:
//
//	srv := &dns.Server{
//		Zones: []string{"mesh.internal", "svc.clusterset.local"},
//		Names: func() dns.Names { return table.Load() },
//		Views: []dns.View{{Name: "east", Sources: east}},
//		Forward: &dns.Forwarder{}, // resolv.conf's resolvers
//		RecursionClients: []netip.Prefix{pods},
//	}
//	go srv.ServeUDP(ctx, pc, "")
//	go srv.ServeTCP(ctx, ln, "")
//	...
//	srv.Shutdown(ctx)
//
// The table is one small interface, Names. Its answers are never cached: the
// next answer after a change has the new table.
//
// A Resolver looks up endpoints for the gateway itself:
//
//	resolver := &dns.Resolver{}
//	reg := &registry.Registry{Lookup: resolver.Lookup}
//
// The standard library's resolver does not return the TTL of an answer; this
// one keeps answers for as long as DNS says, asks once for any number of
// callers, and serves what it had when the servers are gone.
//
// Both are stubs: they ask recursive resolvers and use only records that answer
// the question. Neither resolves from the root, validates DNSSEC, transfers
// zones or takes updates.
//
// # Stability
//
// Until version 1.0 a release may change the exported API; CHANGELOG.md lists each
// change. From then on it follows semantic versioning.
package dns
