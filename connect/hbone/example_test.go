package hbone_test

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"io"

	"culvert.dev/connect/hbone"
	"culvert.dev/identity"
	"culvert.dev/internal/termination"
	"culvert.dev/internal/testca"
	"culvert.dev/internal/testnet"
	"culvert.dev/sni"
	"culvert.dev/tunnel"
)

// A workload of a mesh reaches a service through a gateway. Both sides verify
// the SPIFFE id of the other.
func Example() {
	ca, err := testca.New("cluster.local", nil)
	if err != nil {
		fmt.Println(err)
		return
	}
	server, err := ca.Issue(testca.Options{SPIFFEID: "spiffe://cluster.local/ns/istio-system/sa/gateway"})
	if err != nil {
		fmt.Println(err)
		return
	}
	client, err := ca.Issue(testca.Options{SPIFFEID: "spiffe://cluster.local/ns/shop/sa/web"})
	if err != nil {
		fmt.Println(err)
		return
	}
	trust := []*identity.Trust{identity.NewTrust("cluster.local", ca.Root())}
	p := &termination.Protocol{Hello: &sni.Protocol{Nameless: true}}
	err = p.Use(termination.Item{
		Keys: &termination.Keys{
			Certificates: []*identity.Key{identity.NewKey(&server.TLS)},
			Trust:        trust,
		},
		Any:   true, // an HBONE client sends no server name
		Inner: []tunnel.Protocol{&hbone.Protocol{}}, ALPN: []termination.Offer{{Name: "h2"}},
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	gateway, stop, err := testnet.ServeExample(p)
	if err != nil {
		fmt.Println(err)
		return
	}
	defer stop()

	d := &hbone.Dialer{
		Gateway: gateway,
		TLS:     &tls.Config{Certificates: []tls.Certificate{client.TLS}},
		Verifier: &identity.Verifier{
			Trust: trust,
			Want:  identity.Expectation{Usage: x509.ExtKeyUsageServerAuth, IDs: []string{"spiffe://cluster.local/ns/istio-system/sa/gateway"}},
		},
	}
	defer d.Close()
	conn, err := d.DialContext(context.Background(), "tcp", "db.shop.svc.cluster.local:5432")
	if err != nil {
		fmt.Println(err)
		return
	}
	defer conn.Close()
	fmt.Fprint(conn, "hello")
	answer := make([]byte, len("hello"))
	if _, err := io.ReadFull(conn, answer); err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println(string(answer))
	// Output: hello
}
