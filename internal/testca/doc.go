// Package testca is a small certificate authority for development: it gives
// workloads certificates that carry a SPIFFE id, so that mutual TLS can be
// tried on one machine.
//
//	ca, err := testca.New("example.test", nil)
//	pair, err := ca.Issue(testca.Options{
//		SPIFFEID: "spiffe://example.test/ns/demo/sa/echo",
//		DNSNames: []string{"echo.demo.test"},
//	})
//	srv := tls.NewListener(ln, pair.ServerConfig()) // asks every client for a certificate of this CA
//	err = pair.Save(dir, "echo")                    // echo.crt and echo.key
//
// There is one key, one level and no revocation, and the key lies in a file:
// it is not an authority for production. Certificates are short-lived instead.
package testca
