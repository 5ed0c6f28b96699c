package h3_test

import (
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net"

	"culvert.dev/connect/h3"
	"culvert.dev/internal/testca"
	"culvert.dev/internal/testnet"
)

// A client reaches a service by its name through a gateway, over UDP.
func Example() {
	ca, err := testca.New("example.com", nil)
	if err != nil {
		fmt.Println(err)
		return
	}
	pair, err := ca.Issue(testca.Options{SPIFFEID: "spiffe://example.com/gateway", DNSNames: []string{"gw.example.com"}})
	if err != nil {
		fmt.Println(err)
		return
	}
	handler, stop, err := testnet.ExampleHandler()
	if err != nil {
		fmt.Println(err)
		return
	}
	defer stop()
	pc, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		fmt.Println(err)
		return
	}
	server := &h3.Server{TLS: &tls.Config{Certificates: []tls.Certificate{pair.TLS}}}
	served := make(chan error, 1)
	go func() { served <- server.Serve(context.Background(), pc, handler) }()
	defer func() {
		server.Close()
		<-served
	}()

	d := &h3.Dialer{Proxy: pc.LocalAddr().String(), TLS: &tls.Config{RootCAs: ca.Pool(), ServerName: "gw.example.com"}}
	defer d.Close()
	conn, err := d.DialContext(context.Background(), "tcp", "db.example.com:5432")
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
