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
	os.Exit(command.Main(context.Background(), os.Args[1:], os.Stdout, os.Stderr))
}
