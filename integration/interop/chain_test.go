//go:build unix

package interop

import (
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"culvert.dev/connect/h2"
	"culvert.dev/connect/ws"
	"culvert.dev/tunnel"
)

// TestChainOfThree goes through three gateways, each of which speaks one thing
// only: TLS by its name, WebSocket and HTTP/2, in every order. The service at
// the end sees the client's own certificate.
func TestChainOfThree(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	nginx := w.nginx(t)
	for _, ways := range [][3]string{
		{"sni", "websocket", "connect-h2"}, {"sni", "connect-h2", "websocket"}, {"websocket", "connect-h2", "sni"},
		{"websocket", "sni", "connect-h2"}, {"connect-h2", "sni", "websocket"}, {"connect-h2", "websocket", "sni"},
	} {
		t.Run(strings.Join(ways[:], ", "), func(t *testing.T) {
			var gates [3]*gateway
			next := fmt.Sprintf("endpoints: [%q]", nginx)
			for i := 2; i >= 0; i-- {
				file := fmt.Sprintf("%s/chain-%s-%d.yaml", w.dir, strings.Join(ways[:], "-"), i)
				must(t, os.WriteFile(file, fmt.Appendf(nil, `
listeners:
  - address: 127.0.0.1:%s
    protocols: [%s]
admin: 127.0.0.1:%s
services:
  - name: %s
    ports: [443]
    %s
`, freePort(t), ways[i], freePort(t), svc, next), 0o600))
				gates[i] = startGateway(t, "--config", file)
				switch ways[i] {
				case "sni":
					next = fmt.Sprintf("endpoints: [%q]", gates[i].addr)
				case "websocket":
					next = fmt.Sprintf("via: [{websocket: %q}]", "ws://"+gates[i].addr+"/")
				default:
					next = fmt.Sprintf("via: [{%s: %q}]", ways[i], gates[i].addr)
				}
			}
			var way tunnel.Dialer
			target := svc + ":443"
			switch first := gates[0].addr; ways[0] {
			case "sni":
				way, target = new(net.Dialer), first
			case "websocket":
				way = &ws.Dialer{URL: "ws://" + first}
			default:
				d := &h2.Dialer{Proxy: first}
				defer d.Close()
				way = d
			}
			raw, err := way.DialContext(t.Context(), "tcp", target)
			must(t, err)
			defer raw.Close()
			must(t, raw.SetDeadline(time.Now().Add(patience)))
			c := tls.Client(raw, w.client.ClientConfig(svc))
			_, err = io.WriteString(c, "GET / HTTP/1.1\r\nHost: "+svc+"\r\nConnection: close\r\n\r\n")
			must(t, err)
			if reply, err := io.ReadAll(c); !strings.Contains(string(reply), "dn=CN=web serial="+w.serial()) {
				t.Errorf("got %q, %v, want the client's own certificate", reply, err)
			}
			_ = c.Close()
			for i, g := range gates {
				// However it ended: nginx closes first, and resets who says close_notify then.
				g.line(t, "carried it by "+ways[i], func(l line) bool { return l.Msg == "tunnel" && l.Proto == ways[i] && l.Service == svc })
			}
		})
	}
}
