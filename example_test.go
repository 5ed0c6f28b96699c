package culvert_test

import (
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net/http"
	"time"

	culvert "culvert.dev"
	"culvert.dev/internal/testca"
)

// A web server that nobody can dial has a name on a gateway, and a client reaches it by that
// name. TLS is between the two, so each verifies the other.
func Example() {
	site := newSite() // a gateway, and a CA
	defer site.close()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()

	// The side of the service.
	ln, err := culvert.Listen(ctx, "orders.shop.test:443", site.as("orders"))
	if err != nil {
		fmt.Println(err)
		return
	}
	defer ln.Close()
	server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		caller, _ := testca.PeerID(r.TLS.PeerCertificates[0])
		fmt.Fprintf(w, "hello, %s", caller)
	})}
	defer server.Close()
	go server.Serve(tls.NewListener(ln, site.pair("orders").ServerConfig()))

	// The side of the client.
	d := &culvert.Dialer{Via: site.as("laptop")}
	defer d.Close()
	transport := &http.Transport{DialContext: d.DialContext, TLSClientConfig: site.pair("laptop").ClientConfig("orders.shop.test")}
	defer transport.CloseIdleConnections()
	answer, err := (&http.Client{Transport: transport}).Get("https://orders.shop.test/")
	if err != nil {
		fmt.Println(err)
		return
	}
	defer answer.Body.Close()
	body, _ := io.ReadAll(answer.Body)
	fmt.Println(string(body))

	// Output: hello, spiffe://shop.test/laptop
}
