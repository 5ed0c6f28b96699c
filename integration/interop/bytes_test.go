//go:build unix

package interop

import (
	"bytes"
	"crypto/sha256"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"testing"
	"time"

	"culvert.dev/internal/testnet"
)

// A recorder stands on each side of the gateway. What the client's TLS wrote
// is what the service got, byte for byte, and the other way round: the gateway
// adds nothing, and terminates nothing.
func TestTheGatewayPassesTLSRecordsUnchanged(t *testing.T) {
	w := newWorld(t)
	const size = 3 << 20
	up, down := noise(size), noise(size+1)
	service := testnet.ServeTLS(t, w.service.ServerConfig(), func(c *tls.Conn) {
		got := make([]byte, size)
		if _, err := io.ReadFull(c, got); err == nil && bytes.Equal(got, up) {
			_, _ = c.Write(down)
		}
		_, _ = c.Read(got) // the client's close_notify
	})
	for _, by := range []string{"sni", "connect"} {
		t.Run(by, func(t *testing.T) {
			behind := testnet.NewRecorder(t, service.Addr())
			g := startGateway(t, "--listen", "127.0.0.1:0", "--route", route(behind.Addr()))
			front := testnet.NewRecorder(t, g.addr)

			raw, err := net.Dial("tcp", front.Addr())
			must(t, err)
			defer raw.Close()
			must(t, raw.SetDeadline(time.Now().Add(3*patience)))
			head, yes := "", ""
			if by == "connect" {
				head, yes = "CONNECT "+svc+":443 HTTP/1.1\r\nHost: "+svc+":443\r\n\r\n", "HTTP/1.1 200 Connection Established\r\n\r\n"
				_, err = io.WriteString(raw, head)
				must(t, err)
				got := make([]byte, len(yes))
				if _, err := io.ReadFull(raw, got); err != nil || string(got) != yes {
					t.Fatalf("the answer: got %q, %v, want %q", got, err, yes)
				}
			}
			c := tls.Client(raw, w.client.ClientConfig(svc))
			_, err = c.Write(up)
			must(t, err)
			got := make([]byte, len(down))
			if _, err := io.ReadFull(c, got); err != nil || !bytes.Equal(got, down) {
				t.Fatalf("the service's bytes: %v", err)
			}
			must(t, c.Close())

			l := g.line(t, "logged the tunnel", func(l line) bool { return l.Endpoint != "" })
			before, after := front.Flows()[0], behind.Flows()[0]
			if !bytes.HasPrefix(before.Up, []byte(head)) || !bytes.HasPrefix(before.Down, []byte(yes)) {
				t.Fatalf("the client's side begins with %.60q and %.60q", before.Up, before.Down)
			}
			same(t, "client to service", before.Up[len(head):], after.Up)
			same(t, "service to client", before.Down[len(yes):], after.Down)
			if len(after.Up) < size || after.Up[0] != 22 {
				t.Errorf("%d bytes that begin with %d went up: this is no TLS", len(after.Up), after.Up[0])
			}
			// And the log counts them.
			if l.In != int64(len(after.Up)) || l.Out != int64(len(after.Down)) {
				t.Errorf("the log says %d bytes in and %d out, want %d and %d", l.In, l.Out, len(after.Up), len(after.Down))
			}
		})
	}
}

func same(t *testing.T, what string, before, after []byte) {
	t.Helper()
	sum := func(b []byte) string { return fmt.Sprintf("%d bytes, sha256 %x", len(b), sha256.Sum256(b)) }
	if b, a := sum(before), sum(after); a != b {
		t.Errorf("%s: %s before the gateway, %s behind it", what, b, a)
	}
}
