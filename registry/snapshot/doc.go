// Package snapshot saves what a registry.Source has sent, so that a gateway whose
// source is out of reach at the start serves what it served before.
//
//	src = &snapshot.Source{Source: src, Path: "/var/lib/culvert/kubernetes.discovery", Log: log}
//	go reg.Run(ctx, src)
//
// Updates of the source are passed on at once and written about a second later. A
// Run falls back to the file where the first word of the source is an Err, or where
// the source says nothing for 3 seconds: it sends each saved Update, and after it one
// with the Err that says since when it has not been confirmed. So the gateway is
// ready, and says how old its table is. A first start without a file has no table,
// as without this package.
//
// # Which names are dropped
//
// A name's saved entry stays until the source sends another one under it. A
// name that the source no longer uses is dropped as soon as that is known: see
// Source.Names.
//
// # What is not saved
//
// Secrets: the keys of certificates, tokens and passwords. What cannot work without
// them is saved as something that refuses, until the source is back:
//
//   - a Section where TLS ends has no rules: its clients are refused, and not
//     served by a wildcard beside it. Those that pass TLS on are whole;
//   - a Backend whose Service needs a secret is Broken;
//   - a Service that needs one has its names and no endpoints;
//   - a Hop of a Network is saved without it: the gateway there refuses.
//
// Listeners with Settings, and so SetAddresses, which lead to such: DNS leads to gateways
// meanwhile.
//
// # The file
//
// Lines of JSON: the types of package registry, one after the other. The first line
// has the version, and the settings by which the file was made; the last has the
// SHA-256 of all before. The file is written beside its place, synced and renamed,
// and only its owner may read it: after a crash there is the old one or the new one.
// A damaged or foreign file, or one of another version or other settings, is ignored
// as a whole and logged.
//
// Of several processes with one path the first writes, as long as it runs; the
// others read the file when they start.
package snapshot
