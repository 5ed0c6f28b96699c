package gateway

import (
	"crypto/tls"
	"errors"
	"net"
	"net/netip"
	"testing"

	"culvert.dev/internal/gateway/upstream"
	"culvert.dev/registry"
	"culvert.dev/reverse"
	"culvert.dev/tunnel"
)

// The ClientHello to a replica asks for the configured name, or else for the DNS name that has
// its address.
func TestReplicasAreAskedByName(t *testing.T) {
	for _, c := range []struct{ proto, configured, name, want string }{
		{"connect-h2", "", "gateways.culvert.svc", "gateways.culvert.svc"},
		{"connect-h2", "gw.example", "gateways.culvert.svc", "gw.example"},
		{"connect-h2", "", "", ""},
		{"connect", "", "gateways.culvert.svc", "gateways.culvert.svc"},
		{"hbone", "", "gateways.culvert.svc", ""},
	} {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		asked := make(chan string, 1)
		go func() {
			raw, err := l.Accept()
			if err != nil {
				asked <- err.Error()
				return
			}
			defer raw.Close()
			name := "no ClientHello"
			_ = tls.Server(raw, &tls.Config{GetConfigForClient: func(hello *tls.ClientHelloInfo) (*tls.Config, error) {
				name = hello.ServerName
				return nil, errors.New("that is all")
			}}).HandshakeContext(t.Context())
			asked <- name
		}()
		g := &Gateway{toReplicas: &upstream.Transports{Direct: &tunnel.NetDialer{}}}
		to, err := g.replicaTransport(&reverse.ReplicaConfig{Hop: registry.Hop{
			Proto: c.proto, ServerName: c.configured, KeyName: "gw", TrustNames: []string{"corp.example"}, Peers: []string{"spiffe://corp.example/gw"},
		}}, l.Addr().String(), c.name)
		if err != nil {
			t.Fatal(err)
		}
		ep := &tunnel.Endpoint{Host: reverse.ReplicasName.String(), Addr: netip.AddrPortFrom(netip.Addr{}, 443)}
		if conn, err := to.Dial(t.Context(), ep, &tunnel.Request{Proto: "replica", Name: reverse.ReplicasName, Port: 443}); err == nil {
			_ = conn.Close()
			t.Errorf("%+v: there is a stream without a handshake", c)
		}
		_ = l.Close()
		if got := <-asked; got != c.want {
			t.Errorf("%+v: the ClientHello asks for %q", c, got)
		}
	}
}
