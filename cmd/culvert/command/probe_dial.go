package command

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"syscall"
	"time"

	"culvert.dev/connect"
	"culvert.dev/connect/h2"
	"culvert.dev/connect/h3"
	"culvert.dev/connect/hbone"
	"culvert.dev/connect/proxyproto"
	"culvert.dev/connect/socks5"
	"culvert.dev/connect/ws"
	"culvert.dev/internal/gateway/upstream"
	"culvert.dev/tunnel"
)

// probeModes are the ways to ask a gateway.
var probeModes = []string{"sni", "connect", "connect-h2", "connect-h3", "hbone", "socks5", "websocket", "websocket-h2", "proxy", "tcp", "quic", "udp", "connect-udp"}

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
		one := &hbone.Dialer{Gateway: p.o.via, TLS: p.secure(), Verifier: p.verifier(p.o.peers)}
		if len(p.o.behind) == 0 {
			return one
		}
		return &hbone.Double{Outer: one, TLS: p.secure(), Verifier: p.verifier(p.o.behind)}
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
			return upstream.NewWebSocketDialer(d)
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

// sayName sends a PROXY header, version 2, as a proxy in front does that knows
// whom its client asks for.
func sayName(c net.Conn, name string) error {
	client, server := c.LocalAddr().(*net.TCPAddr).AddrPort(), c.RemoteAddr().(*net.TCPAddr).AddrPort()
	h := proxyproto.Header{Version: 2, Source: client, Destination: server, Authority: name}
	b, err := h.Append(nil)
	if err == nil {
		_, err = c.Write(b)
	}
	return err
}

// firstWords is how long a service that speaks first is waited for.
const firstWords = time.Second

// listen waits for what the service says first, where the gateway says nothing:
// there is no other sign that it was reached.
func (p *prober) listen(ctx context.Context, conn net.Conn) error {
	err := p.step(serviceStep, func() (string, error) {
		deadline := time.Now().Add(firstWords)
		if d, ok := ctx.Deadline(); ok && d.Before(deadline) {
			deadline = d
		}
		_ = conn.SetReadDeadline(deadline)
		first := make([]byte, 64)
		n, err := conn.Read(first)
		switch {
		case n > 0:
			return fmt.Sprintf("it speaks first: %q", first[:n]), nil
		case errors.Is(err, os.ErrDeadlineExceeded):
			return "it waits for the client: the connection stays open", nil
		}
		return "", err
	})
	p.refusedByReset(err)
	return err
}

// refusedByReset notes a connection that was ended where the gateway has no words
// for it: at a port of a service's own, and after a PROXY header.
func (p *prober) refusedByReset(err error) {
	if err == nil || errors.Is(err, syscall.ECONNREFUSED) {
		return
	}
	switch p.o.mode {
	case "proxy":
		p.report.Refusal = &probeRefusal{
			Answer: "the connection was closed without an answer: " + err.Error(),
			Hint:   "a gateway refuses like this after a PROXY header, and clients that are not in the listener's proxyProtocol.from: its log has the reason",
		}
	case "tcp":
		p.report.Refusal = &probeRefusal{
			Answer: "the connection was closed without an answer: " + err.Error(),
			Hint:   "a gateway refuses like this at a port of one service, and so may the service: \"culvert explain\" with --listener shows the gateway's decision",
		}
	}
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
