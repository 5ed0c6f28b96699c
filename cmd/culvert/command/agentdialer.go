package command

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"syscall"
	"time"

	"culvert.dev/connect"
	"culvert.dev/internal/isolate"
	"culvert.dev/internal/unixsocket"
	"culvert.dev/tunnel"
)

// defaultAgent is where an agent is asked that was told nothing else.
const defaultAgent = "127.0.0.1:1080"

// An agentDialer is the one way out: it asks the agent by CONNECT.
type agentDialer struct {
	address     string // HOST:PORT or unix:PATH
	credentials agentCredentials
}

// DialContext dials the agent itself.
func (a *agentDialer) DialContext(ctx context.Context, _, _ string) (net.Conn, error) {
	var d net.Dialer
	if path, ok := unixsocket.Path(a.address); ok {
		return d.DialContext(ctx, "unix", path)
	}
	return d.DialContext(ctx, "tcp", a.address)
}

// find returns an error unless an agent answers. It asks for the PAC file: any answer will do,
// for a gateway that has none.
func (a *agentDialer) find(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	c, err := a.DialContext(ctx, "", "")
	if err != nil {
		return &cliError{err: fmt.Errorf("reach the agent: %w", err), hint: `start "culvert agent", or say where it is with --agent`, code: isolate.NotSetUp}
	}
	defer c.Close()
	defer context.AfterFunc(ctx, func() { _ = c.Close() })()
	if _, err = io.WriteString(c, "GET "+connect.PACPath+" HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"); err == nil {
		_, err = http.ReadResponse(bufio.NewReader(io.LimitReader(c, 64<<10)), nil)
	}
	if err != nil {
		return &cliError{err: fmt.Errorf("the agent at %s gives no answer: %w", a.address, err),
			hint: "an agent serves the user that it runs as: start one of your own at another address, and say where it is with --agent", code: isolate.NotSetUp}
	}
	return nil
}

// host returns the address as that of an HTTP proxy.
func (a *agentDialer) host() string {
	if strings.HasPrefix(a.address, "unix:") {
		return "agent:80"
	}
	return a.address
}

// Resolve implements tunnel.Resolver: everything goes to the agent, which decides.
func (a *agentDialer) Resolve(context.Context, *tunnel.Request) (tunnel.Route, error) {
	return tunnel.Route{Service: "agent", Endpoints: []tunnel.Endpoint{{Host: a.address, HealthKey: a.address, Transport: a}}}, nil
}

// Dial implements tunnel.Transport.
func (a *agentDialer) Dial(ctx context.Context, _ *tunnel.Endpoint, req *tunnel.Request) (net.Conn, error) {
	d := &connect.Dialer{Proxy: a.host(), Dialer: a}
	explain := a.credentials.use(d)
	c, err := d.DialContext(ctx, "tcp", req.Target())
	return c, explain(err)
}

// Check implements tunnel.Transport.
func (*agentDialer) Check(*tunnel.Endpoint) error { return nil }

// Info implements tunnel.Transport.
func (a *agentDialer) Info() tunnel.TransportInfo {
	return tunnel.TransportInfo{Hops: []string{"connect " + a.address}}
}

// exactly asks the agent for target, within wait, and returns the socket that leads to the agent.
// Nothing was read of it behind the answer: the program that gets the socket reads all that the
// service says.
func (a *agentDialer) exactly(ctx context.Context, target string, wait time.Duration) (socketStream, error) {
	var socket socketStream
	var away error
	d := &connect.Dialer{Proxy: a.host(), Wait: wait, Timeout: wait, Dialer: dialByFunc(func(ctx context.Context, network, addr string) (net.Conn, error) {
		c, err := a.DialContext(ctx, network, addr)
		if err != nil {
			away = err
			return nil, err
		}
		socket = c.(socketStream) // of TCP, or a Unix socket
		return byteByByte{socket}, nil
	})}
	explain := a.credentials.use(d)
	switch _, err := d.DialContext(ctx, "tcp", target); {
	case away != nil:
		return nil, fmt.Errorf("connect: reach the agent at %s: %w", a.address, away)
	case err != nil:
		return nil, explain(err)
	}
	return socket, nil
}

// A socketStream is a *net.TCPConn or a *net.UnixConn.
type socketStream interface {
	tunnel.Stream
	syscall.Conn
}

// A byteByByte reads one byte at a time, so that an answer is read and nothing behind it.
type byteByByte struct{ socketStream }

// Read implements net.Conn.
func (c byteByByte) Read(p []byte) (int, error) { return c.socketStream.Read(p[:min(1, len(p))]) }

// A dialByFunc is a tunnel.Dialer made of a function.
type dialByFunc func(ctx context.Context, network, addr string) (net.Conn, error)

// DialContext calls f.
func (f dialByFunc) DialContext(ctx context.Context, network, addr string) (net.Conn, error) {
	return f(ctx, network, addr)
}
