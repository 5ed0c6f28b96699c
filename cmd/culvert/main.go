// Culvert joins services across networks without a VPN: it passes end-to-end
// mutual TLS to the right service, by the name in the ClientHello or an HTTP
// CONNECT.
package main

import (
	"context"
	"os"

	"culvert.dev/cmd/culvert/command"
)

func main() {
	// The QUIC library writes a line of its own to stderr where the kernel gives
	// less for a socket than it asks for, which is everywhere by default.
	_ = os.Setenv("QUIC_GO_DISABLE_RECEIVE_BUFFER_WARNING", "true")
	os.Exit(command.Main(context.Background(), os.Args[1:], os.Stdout, os.Stderr))
}
