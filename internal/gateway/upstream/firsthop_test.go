package upstream

import (
	"bufio"
	"context"
	"crypto/tls"
	"io"
	"net"
	"testing"
	"time"

	"culvert.dev/connect"
	"culvert.dev/connect/h2"
	"culvert.dev/connect/hbone"
	"culvert.dev/internal/testca"
	"culvert.dev/internal/testnet"
	"culvert.dev/tunnel"
)

// Of a name with two addresses the kernel at the first one takes connections, and nothing
// answers there: the handshake is made with the second one.
func TestFirstHopWithASilentAddress(t *testing.T) {
	ca, err := testca.New("corp.example", nil)
	if err != nil {
		t.Fatal(err)
	}
	pair, err := ca.Issue(testca.Options{SPIFFEID: "spiffe://corp.example/gw", DNSNames: []string{"localhost"}})
	if err != nil {
		t.Fatal(err)
	}
	silent := testnet.Listen(t) // 127.0.0.1, the first address of localhost
	_, port, _ := net.SplitHostPort(silent.Addr().String())
	ln, err := net.Listen("tcp", net.JoinHostPort("::1", port))
	if err != nil {
		t.Fatal(err)
	}
	keys := pair.ServerConfig()
	keys.NextProtos = []string{"h2", "http/1.1"}
	srv := &tunnel.Server{Handler: tunnel.HandlerFunc(func(_ context.Context, req *tunnel.Request) {
		if s, err := req.Accept(); err == nil {
			_, _ = io.WriteString(s, "hello\n")
			_ = s.Close()
		}
	})}
	served := make(chan error, 1)
	go func() {
		served <- srv.Serve(context.WithoutCancel(t.Context()), tunnel.Listener{
			Listener: tls.NewListener(ln, keys), Name: "test", Protocols: []tunnel.Protocol{&h2.Protocol{}, &connect.Protocol{}},
		})
	}()
	t.Cleanup(func() { _ = srv.Close(); <-served })

	up := &Transports{Direct: &tunnel.NetDialer{}}
	defer up.Close()
	budget := &tunnel.Budget{Limit: 1000}
	way := budgetDialer{up.FirstHop(), budget}
	gateway := net.JoinHostPort("localhost", port)
	client := pair.ClientConfig("localhost")
	overH2 := &h2.Dialer{Proxy: gateway, Dialer: way, TLS: client}
	overHBONE := &hbone.Dialer{Gateway: gateway, Dialer: way, TLS: client}
	for name, d := range map[string]tunnel.Dialer{
		"connect": &connect.Dialer{Proxy: gateway, Dialer: way, TLS: client}, "connect-h2": overH2, "hbone": overHBONE,
	} {
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second) // less than a handshake may take
		c, err := d.DialContext(ctx, "tcp", "svc.example:443")
		cancel()
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		if line, err := bufio.NewReader(c).ReadString('\n'); line != "hello\n" {
			t.Errorf("%s: got %q and %v", name, line, err)
		}
		_ = c.Close()
	}
	_, _ = overH2.Close(), overHBONE.Close()
	testnet.Eventually(t, patience, func() bool { return budget.Used() == 0 }, "all descriptors are given back")
}
