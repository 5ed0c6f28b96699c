// Package kept keeps what a registry.Source has said on disk, so that a gateway
// whose source is out of reach when it starts serves what it did before.
//
//	src = &kept.Source{Source: src, Path: "/var/lib/culvert/kubernetes.discovery", Log: log}
//	go reg.Run(ctx, src)
//
// What the source says is passed on as it comes, and written about a second
// later. A Run begins with what is in the file where the source's first word is
// an Err, or where it says nothing for 3 seconds: each Update that is kept, and
// after it one with the Err that says since when it has not been confirmed. So the
// gateway is ready, and says how old its table is. A first start without a file
// has no table, as without this package.
//
// # Which names go
//
// What is kept of a name stands until the source says something else under it. A
// name that the source has no longer anything to say under goes as soon as that is
// known: see Source.Names.
//
// # What is not written
//
// Secrets: the keys of certificates, tokens and passwords. What can't work without
// them is kept as something that refuses, and does so until the source is back:
//
//   - a Section where TLS ends has no rules: its clients are refused, and not
//     served by a wildcard beside it. Those that pass TLS on are whole;
//   - a Backend whose Service needs a secret is Broken;
//   - a Service that needs one has its names and no endpoints;
//   - a Hop of a Network is kept without it: the gateway there refuses.
//
// # The file
//
// Lines of JSON. The first says what it is, its version, and by which settings it
// was made; the last has the SHA-256 of all before. It is written beside its place, synced
// and renamed, and only its owner may read it: after a crash there is the old
// one or the new one. One that is broken, foreign, of another version or of other
// settings is ignored as a whole, and said to be.
//
// Of several processes with one path the first writes, as long as it runs; the
// others read what is there when they start.
package kept
