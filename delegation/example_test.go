package delegation_test

import (
	"crypto"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httptest"

	"culvert.dev/delegation"
	"culvert.dev/internal/testca"
)

const (
	gateway = "spiffe://corp.example/ns/edge/sa/gw"
	service = "spiffe://corp.example/ns/shop/sa/api"
)

// A web service behind a gateway greets the caller, and not the gateway.
func ExampleVerifier_Middleware() {
	roots, gw, own := certificates()

	v := &delegation.Verifier{
		Audience: []string{service},
		Gateways: []delegation.Gateway{{ID: gateway, Roots: roots}},
	}
	srv := httptest.NewUnstartedServer(v.Middleware(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		a := delegation.FromContext(r.Context())
		fmt.Fprintf(w, "hello %s, who came through %s", a.Subject, a.Actors)
	})))
	srv.TLS = &tls.Config{Certificates: []tls.Certificate{own}, ClientAuth: tls.RequireAnyClientCert}
	srv.StartTLS()
	defer srv.Close()

	// This is what the gateway does.
	c, err := tls.Dial("tcp", srv.Listener.Addr().String(), &tls.Config{Certificates: []tls.Certificate{gw}, RootCAs: roots, ServerName: "shop.test"})
	if err != nil {
		log.Fatal(err)
	}
	defer c.Close()
	cs := c.ConnectionState()
	binding, err := delegation.Binding(&cs)
	if err != nil {
		log.Fatal(err)
	}
	signer, err := delegation.NewSigner(gateway, gw.PrivateKey.(crypto.Signer), nil)
	if err != nil {
		log.Fatal(err)
	}
	token, err := signer.Sign(&delegation.Assertion{Subject: "alice", Method: "basic", Audience: service, Binding: binding})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Fprintf(c, "GET / HTTP/1.0\r\nHost: shop.test\r\n%s: %s\r\n\r\n", delegation.HeaderField, token)
	answer, err := io.ReadAll(c)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(string(answer[len(answer)-67:]))
	// Output:
	// hello alice, who came through [spiffe://corp.example/ns/edge/sa/gw]
}

// certificates returns a CA, and certificates of the gateway and the service.
func certificates() (roots *x509.CertPool, gw, own tls.Certificate) {
	ca, err := testca.New("corp.example", nil)
	if err != nil {
		log.Fatal(err)
	}
	g, err := ca.Issue(testca.Options{SPIFFEID: gateway})
	if err != nil {
		log.Fatal(err)
	}
	s, err := ca.Issue(testca.Options{SPIFFEID: service, DNSNames: []string{"shop.test"}})
	if err != nil {
		log.Fatal(err)
	}
	return ca.Pool(), g.TLS, s.TLS
}
