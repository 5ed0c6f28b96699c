//go:build unix

package interop

import (
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"testing"
	"time"
)

// TestHelloMatch: TLS with another name, without one and with ALPN reaches the services
// as the guide says.
func TestHelloMatch(t *testing.T) {
	w := newWorld(t)
	serve := func(word string) (addr string) {
		config := &tls.Config{Certificates: []tls.Certificate{w.service.TLS}, NextProtos: []string{"h2", "acme-tls/1", "http/1.1"}}
		ln, err := tls.Listen("tcp", "127.0.0.1:0", config)
		must(t, err)
		done := make(chan struct{})
		go func() {
			defer close(done)
			for {
				c, err := ln.Accept()
				if err != nil {
					return
				}
				_ = c.SetDeadline(time.Now().Add(patience))
				_, _ = io.WriteString(c, word)
				_ = c.Close()
			}
		}()
		t.Cleanup(func() { _ = ln.Close(); <-done })
		return ln.Addr().String()
	}
	g := startGateway(t, "--config", w.write(t, "culvert.yaml", fmt.Sprintf(`
listeners: [{address: "127.0.0.1:%s"}]
admin: 127.0.0.1:%s
services:
  - {name: shop.example.com, endpoints: ["%s"]}
  - {name: shop.example.com, match: {alpn: [acme-tls/1]}, endpoints: ["%s"]}
  - {names: ["*"], match: {noSNI: true}, endpoints: ["%s"]}
`, freePort(t), freePort(t), serve("shop"), serve("acme"), serve("any"))))
	for _, row := range []struct {
		name string
		alpn []string
		want string
	}{
		{"shop.example.com", nil, "shop"},
		{"shop.example.com", []string{"h2", "http/1.1"}, "shop"},
		{"shop.example.com", []string{"acme-tls/1"}, "acme"},
		{"other.example.net", nil, "any"},
		{"other.example.net", []string{"acme-tls/1"}, "any"},
		{"", nil, "any"},
	} {
		c, err := net.Dial("tcp", g.addr)
		must(t, err)
		_ = c.SetDeadline(time.Now().Add(patience))
		got, err := io.ReadAll(tls.Client(c, &tls.Config{ServerName: row.name, NextProtos: row.alpn, InsecureSkipVerify: true})) // which service is the question
		if err != nil || string(got) != row.want {
			t.Errorf("name %q, ALPN %q: got %q, %v; want %q", row.name, row.alpn, got, err, row.want)
		}
		_ = c.Close()
	}
	// What is no hello reaches no service.
	c, err := net.Dial("tcp", g.addr)
	must(t, err)
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(patience))
	_, err = c.Write([]byte("\x16\x03\x01\x00\x05\x01\x00\x00\x01\x00"))
	must(t, err)
	_, _ = io.ReadAll(c)
	g.line(t, "refused a malformed hello", func(l line) bool { return l.Reason == "bad-hello" && l.Service == "" })
}
