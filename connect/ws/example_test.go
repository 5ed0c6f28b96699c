package ws_test

import (
	"context"
	"fmt"
	"io"

	"culvert.dev/connect/ws"
	"culvert.dev/internal/testnet"
)

// A client reaches a service by its name through a gateway.
func Example() {
	gateway, stop, err := testnet.ServeExample(&ws.Protocol{})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer stop()

	d := &ws.Dialer{URL: "ws://" + gateway + "/"}
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
