// Package culvert has Go programs reach services through gateways, and serve names on them,
// without an agent beside them. It is the same composition as "culvert agent" and "culvert
// expose", in process: the carriers and their order, shared connections, the verification of
// gateways, reconnects.
//
// Gateways say by which gateways, and as whom. Keys and CAs are in an identity.Store, where
// they may be replaced at any time; sources such as those of identity/files and identity/spiffe
// do that.
//
//	keys := new(identity.Store)
//	keys.Key("me").Set(&certificate)                       // a tls.Certificate
//	keys.Trust("gateways").Set(&identity.Bundle{Roots: cas}) // []*x509.Certificate
//	via := &culvert.Gateways{Addresses: []string{"gw.example:443"}, Identity: keys, Key: "me", Trust: []string{"gateways"}}
//
// A Dialer connects to services by name, for all that takes a DialContext:
//
//	d := &culvert.Dialer{Via: via}
//	defer d.Close()
//	client := &http.Client{Transport: &http.Transport{DialContext: d.DialContext}}
//	resp, err := client.Get("https://orders.shop.example/")
//
// A Listener serves a name that nobody could dial otherwise:
//
//	ln, err := culvert.Listen(ctx, "cam.edge.example:443", via)
//	defer ln.Close()
//	err = http.Serve(tls.NewListener(ln, config), handler)
//
// Neither decrypts or encrypts what it carries beyond the session with the gateway. Who calls is
// for TLS from end to end to say: config above asks for client certificates, and verifies them.
// Where a gateway ends the TLS of callers, it can state who they are inside of TLS of its own:
// package delegation reads and verifies that.
//
// A refusal is a *tunnel.Error, whose Reason is that of the gateway.
//
// # Stability
//
// Until version 1.0 a release may change the exported API; CHANGELOG.md lists each
// change. From then on it follows semantic versioning.
package culvert
