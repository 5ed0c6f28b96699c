package testnet

import (
	"context"
	"io"
	"net"
	"net/netip"

	"culvert.dev/tunnel"
)

// ServeExample starts a gateway on loopback for an example: each connection to it
// speaks one of protocols, and whatever destination it asks for, it reaches a
// service that sends back what it receives. addr is the gateway's; stop ends both.
// Tests have tunneltest.Serve, which checks more.
func ServeExample(protocols ...tunnel.Protocol) (addr string, stop func(), err error) {
	h, stopService, err := ExampleHandler()
	if err != nil {
		return "", nil, err
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		stopService()
		return "", nil, err
	}
	srv := &tunnel.Server{Handler: h}
	served := make(chan error, 1)
	go func() {
		served <- srv.Serve(context.Background(), tunnel.Listener{Listener: ln, Protocols: protocols})
	}()
	return ln.Addr().String(), func() {
		srv.Close()
		<-served
		stopService()
	}, nil
}

// ExampleHandler returns a Handler that carries every request to a service that
// sends back what it receives. stop ends the tunnels and the service.
func ExampleHandler() (h tunnel.Handler, stop func(), err error) {
	service, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, nil, err
	}
	closed := make(chan struct{})
	go func() {
		defer close(closed)
		for {
			c, err := service.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				_, _ = io.Copy(c, c)
			}()
		}
	}()
	relay := &tunnel.Relay{}
	router := &tunnel.Router{
		Resolver: oneRoute(netip.MustParseAddrPort(service.Addr().String())),
		Dialer:   &tunnel.NetDialer{},
		Relay:    relay,
	}
	return router, func() {
		relay.Close()
		service.Close()
		<-closed
	}, nil
}

// oneRoute leads every request to one address.
type oneRoute netip.AddrPort

func (to oneRoute) Resolve(context.Context, *tunnel.Request) (tunnel.Route, error) {
	return tunnel.Route{Service: "echo", Endpoints: []tunnel.Endpoint{{Addr: netip.AddrPort(to), Named: true}}}, nil
}
