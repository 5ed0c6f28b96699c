// Package dns speaks DNS in both directions.
//
// A Server answers the names of a table, as they are meant from where the
// asker stands, and has everything else answered by other resolvers:
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
// The table is one small interface, Names. What it answers is never cached: a
// new table is in the next answer.
//
// A Resolver looks up endpoints for the gateway itself:
//
//	resolver := &dns.Resolver{}
//	reg := &registry.Registry{Lookup: resolver.Lookup}
//
// The standard library's resolver does not tell how long an answer is good
// for; this one keeps answers for as long as DNS says, asks once for any
// number of callers, and serves what it had when the servers are gone.
//
// Both are stubs: they ask recursive resolvers and believe what is to the
// question. Nobody here walks the tree from the root, validates DNSSEC,
// transfers zones or takes updates.
//
// # Stability
//
// Until version 1.0 a release may change the exported API; CHANGELOG.md lists each
// change. From then on it follows semantic versioning.
package dns
