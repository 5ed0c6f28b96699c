package connect_test

import (
	"context"
	"fmt"
	"io"

	"culvert.dev/connect"
	"culvert.dev/internal/testnet"
)

// A client reaches a service by its name through a gateway.
func Example() {
	gateway, stop, err := testnet.ServeExample(&connect.Protocol{})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer stop()

	d := &connect.Dialer{Proxy: gateway}
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
