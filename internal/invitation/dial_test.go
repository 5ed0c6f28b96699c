package invitation

import (
	"crypto/sha256"
	"crypto/tls"
	"io"
	"net"
	"strings"
	"sync"
	"testing"

	"culvert.dev/internal/testca"
	"culvert.dev/internal/testnet"
)

// What is wrong with the listener that a token leads to is said with what the gateway has to have.
func TestDialSaysWhatTheGatewayNeeds(t *testing.T) {
	ca, err := testca.New("east.example", nil)
	if err != nil {
		t.Fatal(err)
	}
	pair, err := ca.Issue(testca.Options{SPIFFEID: "spiffe://east.example/gw"})
	if err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		tls  *tls.Config // nil for none
		want string
	}{
		"no TLS":       {nil, "the gateway has to invite by the address of a listener with tls"},
		"no such name": {&tls.Config{GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return nil, nil }}, "the gateway needs that name in tls.names"},
		"certificates": {&tls.Config{Certificates: []tls.Certificate{pair.TLS}, ClientAuth: tls.RequireAnyClientCert, NextProtos: []string{"h2", "http/1.1"}}, "it needs clientCertificates: optional"},
	} {
		for _, transport := range Transports {
			t.Run(name+" by "+transport, func(t *testing.T) {
				ln := testnet.Listen(t)
				var serving sync.WaitGroup
				t.Cleanup(func() { _ = ln.Close(); serving.Wait() })
				serving.Go(func() {
					for {
						raw, err := ln.Accept()
						if err != nil {
							return
						}
						if c.tls == nil {
							_, _ = io.WriteString(raw, "HTTP/1.1 400 Bad Request\r\n\r\n")
						} else {
							_ = tls.Server(raw, c.tls).HandshakeContext(t.Context())
						}
						_, _ = io.Copy(io.Discard, io.LimitReader(raw, 1<<16))
						_ = raw.Close()
					}
				})
				spki := sha256.Sum256(pair.TLS.Leaf.RawSubjectPublicKeyInfo)
				token := &Token{Transport: transport, Address: ln.Addr().String(), SPKI: spki[:]}
				stream, _, err := token.Dial(t.Context(), &net.Dialer{}, "join.culvert.alt")
				if err == nil {
					_ = stream.Close()
				}
				if err == nil || !strings.Contains(err.Error(), c.want) {
					t.Errorf("got %v, want %q", err, c.want)
				}
			})
		}
	}
}
