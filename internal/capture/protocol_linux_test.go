package capture

import (
	"log/slog"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"culvert.dev/internal/testnet"
	"culvert.dev/tunnel"
)

// A client whose TLS names another service than the one that has the address is logged; one that
// names this one, or sends something else or nothing, is not.
func TestNamesThatDoNotAgree(t *testing.T) {
	dst := netip.MustParseAddrPort("240.0.0.7:443")
	for _, row := range []struct{ what, sent, want string }{
		{"another name", "\x16db.shop.test", `msg="captured TLS names another service; the address decides" destination=240.0.0.7:443 service=web.shop.test server_name=db.shop.test`},
		{"the same name", "\x16web.shop.test", ""},
		{"no name", "\x16", ""},
		{"no TLS", "GET / HTTP/1.1\r\n", ""},
		{"nothing", "", ""},
	} {
		ln, err := tunnel.Listen(t.Context(), "127.0.0.1:0") // whose connections are read without waiting
		if err != nil {
			t.Fatal(err)
		}
		client, err := net.Dial("tcp", ln.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		server, err := ln.Accept()
		if err != nil {
			t.Fatal(err)
		}
		if _, err := client.Write([]byte(row.sent)); err != nil {
			t.Fatal(err)
		}
		c := tunnel.NewConn(server)
		testnet.Eventually(t, time.Minute, func() bool { return row.sent == "" || c.FillNow(maxHello) == nil && len(c.Buffered()) == len(row.sent) }, "%s has come", row.what)
		var log strings.Builder
		p := &Protocol{
			ServerName: func(b []byte) string {
				name, tls := strings.CutPrefix(string(b), "\x16")
				if !tls {
					return ""
				}
				return name
			},
			Serves: func(at netip.AddrPort, name string) (string, bool) {
				return "web.shop.test", at == dst && name == "web.shop.test"
			},
			Log: slog.New(slog.NewTextHandler(&log, nil)),
		}
		p.compare(c, dst)
		if got := log.String(); row.want == "" && got != "" || !strings.Contains(got, row.want) {
			t.Errorf("%s: logged %q, want %q", row.what, got, row.want)
		}
		if string(c.Buffered()) != row.sent {
			t.Errorf("%s: %q is left for the service, want %q", row.what, c.Buffered(), row.sent)
		}
		_ = c.Close()
		_ = client.Close()
		_ = ln.Close()
	}
}
