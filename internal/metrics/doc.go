// Package metrics turns Outcomes into Prometheus metrics.
//
// One Metrics has one registry of its own; there is no global one. It is told
// of every Outcome, and reads everything else when it is scraped:
//
//	m := metrics.New()
//	m.BuildInfo(version)
//	m.OpenTunnels(relay.OpenByService, relay.BytesByService)
//	router.Observe = m.Observe
//	server.Observe = m.Observe
//	admin := &admin.Admin{Metrics: m.Handler()}
//
// # What is counted
//
// A connection that asked for something is a request, and counts in
// culvert_requests_total when it is over, whether it was refused or carried. A
// connection that ended before it asked counts in
// culvert_connections_refused_total. No connection counts in both. Bytes count
// when their tunnel ends.
//
// # Labels
//
// Every label has a closed set of values. "reason" is one of tunnel.Reasons,
// "service" is the name of a configured service, never the name that a client
// asked for. Anything else becomes the empty value, which Prometheus treats as
// no label at all. After MaxServices services the next ones share the value
// "other", until Forget makes room. "policy" is the name of a configured policy, of the
// first thousand that have decided; further ones share "other". There is no label for the listener, the
// client, the endpoint or the asked name: those stand in the access log, where
// they cost one line and not a time series each.
//
// This is the only package that imports the Prometheus client. Others get an
// http.Handler or give a func.
package metrics
