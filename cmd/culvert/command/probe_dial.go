package command

import (
	"crypto/tls"
	"net"
	"strings"

	"culvert.dev/connect"
	"culvert.dev/connect/h2"
	"culvert.dev/connect/h3"
	"culvert.dev/connect/hbone"
	"culvert.dev/connect/socks5"
	"culvert.dev/connect/ws"
	"culvert.dev/gateway"
	"culvert.dev/tunnel"
)

// probeModes are the ways to ask a gateway.
var probeModes = []string{"sni", "connect", "connect-h2", "connect-h3", "hbone", "socks5", "websocket", "websocket-h2"}

// dialer returns the client of the gateway's protocol; nil for one that needs
// none.
func (p *prober) dialer() tunnel.Dialer {
	switch p.o.mode {
	case "connect":
		return &connect.Dialer{Proxy: p.gateway(), TLS: p.secure(), Authorization: p.credentials()}
	case "connect-h2":
		return &h2.Dialer{Proxy: p.gateway(), TLS: p.secure(), Authorization: p.credentials()}
	case "connect-h3":
		return &h3.Dialer{Proxy: p.gateway(), TLS: p.secure(), Authorization: p.credentials()}
	case "hbone":
		return &hbone.Dialer{Gateway: p.o.via, TLS: p.secure(), Peers: p.o.peers}
	case "socks5":
		user, password, _ := strings.Cut(p.o.user, ":")
		return &socks5.Dialer{Proxy: p.o.via, User: user, Password: password}
	case "websocket", "websocket-h2":
		at := p.o.via
		if !strings.Contains(at, "://") {
			at = "ws://" + at
		}
		d := &ws.Dialer{URL: at, Authorization: p.credentials(), TLS: &tls.Config{RootCAs: p.roots}}
		if p.o.mode == "websocket-h2" {
			return gateway.NewWebSocketDialer(d)
		}
		return d
	}
	return nil
}

func (p *prober) credentials() string {
	switch {
	case p.o.user != "":
		user, password, _ := strings.Cut(p.o.user, ":")
		return connect.BasicCredentials(user, password)
	case p.o.token != "":
		return connect.BearerCredentials(p.o.token)
	}
	return ""
}

// overHTTP2 says so of a WebSocket that shares a connection: where it might,
// the other side decides.
func overHTTP2(c net.Conn) string {
	if s, ok := c.(*ws.Stream); ok {
		if _, ok := s.NetConn().(*h2.Stream); ok {
			return ", over HTTP/2"
		}
	}
	return ""
}
