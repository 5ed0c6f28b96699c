package h2_test

import (
	"context"
	"fmt"
	"io"

	"culvert.dev/connect/h2"
	"culvert.dev/internal/testnet"
)

// A client reaches a service by its name through a gateway.
func Example() {
	gateway, stop, err := testnet.ServeExample(&h2.Protocol{})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer stop()

	d := &h2.Dialer{Proxy: gateway}
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
