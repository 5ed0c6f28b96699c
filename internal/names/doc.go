// Package names answers DNS questions from the registry's table: dns has the
// protocol, registry what there is and who may know of it.
//
//	source := &names.Source{Registry: reg}
//	srv := &dns.Server{Zones: []string{"mesh.internal", "svc.clusterset.local"}, Names: source.Names, Usable: reg.Healthy}
//
// The client's network decides, as it does for the gateway's own routes:
//
//	A, AAAA    the endpoints, where they can be reached from there, and else the
//	           gateways that take SNI; of either, those that work, if any does
//	SRV        _PORT._PROTO.NAME for ports that have names: for a headless service
//	           each endpoint by its own name, otherwise NAME itself. Behind a
//	           gateway the port is the gateway's, and where gateways differ in
//	           theirs, each has a name of its own: registry.GatewayName
//	HTTPS      the port where it is not the URL's, and addresses of gateways and
//	           VIPs; targets as of SRV
//	PTR        the endpoints of headless services, and VIPs
//	TXT        dns-version.clusterset.local
//
// Those in a network that Source.VIPs has are told of services' own addresses and
// ports in all of these. A name that the asker may not have does not exist for him,
// nor does that of a headless service without endpoints. As long as a source of the
// registry has yet to speak, nothing is said not to exist: dns.Unknown.
package names
