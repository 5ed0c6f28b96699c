package ws

import (
	"strings"
	"testing"
	"time"

	"culvert.dev/internal/testnet"
	"culvert.dev/tunnel"
	"culvert.dev/tunnel/tunneltest"
)

func TestMain(m *testing.M) { testnet.GoroutinesEnd(m) }

// patience is how long anything in these tests may take.
const patience = 30 * time.Second

// serve starts a gateway with little time for the handshake, that many may do
// at once.
func serve(t *testing.T, routes tunneltest.Table, protocols ...tunnel.Protocol) *tunneltest.Gateway {
	t.Helper()
	return tunneltest.Serve(t, tunneltest.Setup{
		Protocols: protocols, Resolver: routes, Socket: testnet.Listen(t),
		Limits: tunnel.Limits{HandshakeTimeout: 5 * time.Second, MaxPendingPerClient: -1, MaxConnectionsPerClient: -1, ConnectionRatePerClient: -1},
	})
}

// The handshake of section 1.3 of RFC 6455, for svc.test:443.
const (
	sampleKey    = "dGhlIHNhbXBsZSBub25jZQ=="
	sampleAccept = "s3pPLMBiTxaQ9kYGzzhZRbK+xOo="
)

var sample = handshake("/.culvert/tunnel/svc.test:443")

// handshake is a request for path. Further fields are added, "Name: value", or
// replace one: "Name:" alone takes it out.
func handshake(path string, fields ...string) string {
	lines := []string{"Host: gw.test", "Upgrade: websocket", "Connection: Upgrade", "Sec-WebSocket-Key: " + sampleKey, "Sec-WebSocket-Version: 13"}
	for _, f := range fields {
		name, value, _ := strings.Cut(f, ":")
		at := len(lines)
		for i, l := range lines {
			if n, _, _ := strings.Cut(l, ":"); n == name {
				at = i
			}
		}
		switch {
		case at == len(lines):
			lines = append(lines, f)
		case value == "":
			lines = append(lines[:at], lines[at+1:]...)
		default:
			lines[at] = f
		}
	}
	return "GET " + path + " HTTP/1.1\r\n" + strings.Join(lines, "\r\n") + "\r\n\r\n"
}
