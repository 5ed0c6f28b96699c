package socks5_test

import (
	"context"
	"fmt"
	"io"

	"culvert.dev/connect/socks5"
	"culvert.dev/internal/testnet"
)

// A client reaches a service by its name through a gateway.
func Example() {
	gateway, stop, err := testnet.ServeExample(&socks5.Protocol{})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer stop()

	d := &socks5.Dialer{Proxy: gateway}
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
