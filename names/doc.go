// Package names answers DNS questions from the registry's table: dns has the
// protocol, registry what there is and who may know of it.
//
//	source := &names.Source{Registry: reg}
//	srv := &dns.Server{Zones: []string{"mesh.internal", "svc.clusterset.local"}, Names: source.Names, Usable: reg.Healthy}
//
// The network of who asks decides, as it does for the gateway's own routes:
//
//	A, AAAA    the endpoints, where they can be reached from there, and else the
//	           gateways that take SNI; of either, those that work, if any does
//	SRV        _PORT._PROTO.NAME for ports that have names: for a headless service
//	           each endpoint by its own name, otherwise NAME itself. Behind a
//	           gateway the port is the gateway's
//	HTTPS      the port of the gateway where that is not 443, and addresses
//	PTR        the endpoints of headless services, and VIPs
//	TXT        dns-version.clusterset.local
//
// A name that the asker may not have does not exist for him.
package names
