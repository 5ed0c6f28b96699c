package tunnel_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"

	"culvert.dev/connect"
	"culvert.dev/tunnel"
)

// A table leads names to addresses.
type exampleTable map[tunnel.Name]netip.AddrPort

func (t exampleTable) Resolve(_ context.Context, req *tunnel.Request) (tunnel.Route, error) {
	addr, ok := t[req.Name]
	if !ok {
		return tunnel.Route{}, tunnel.Refusef(tunnel.NoRoute, "nothing is known of %q", req.Target())
	}
	// Named lets the guard pass an address of loopback, since the table names it.
	return tunnel.Route{Service: req.Name.String(), Endpoints: []tunnel.Endpoint{{Addr: addr, Named: true}}}, nil
}

// A whole gateway: it accepts HTTP CONNECT, looks the name up in a table, dials
// and carries.
func Example() {
	service, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		fmt.Println(err)
		return
	}
	defer service.Close()
	go func() {
		if c, err := service.Accept(); err == nil {
			fmt.Fprint(c, "hello from the service")
			c.Close()
		}
	}()

	relay := &tunnel.Relay{}
	defer relay.Close()
	srv := &tunnel.Server{Handler: &tunnel.Router{
		Resolver: exampleTable{tunnel.MustParseName("db.example.com"): netip.MustParseAddrPort(service.Addr().String())},
		Dialer:   &tunnel.NetDialer{},
		Relay:    relay,
	}}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		fmt.Println(err)
		return
	}
	served := make(chan error, 1)
	go func() {
		served <- srv.Serve(context.Background(), tunnel.Listener{Listener: ln, Protocols: []tunnel.Protocol{&connect.Protocol{}}})
	}()

	d := &connect.Dialer{Proxy: ln.Addr().String()}
	conn, err := d.DialContext(context.Background(), "tcp", "db.example.com:5432")
	if err != nil {
		fmt.Println(err)
		return
	}
	said, _ := io.ReadAll(conn)
	fmt.Println(string(said))
	conn.Close()

	_, err = d.DialContext(context.Background(), "tcp", "elsewhere.example.com:5432")
	fmt.Println(tunnel.ReasonOf(err))

	srv.Close()
	fmt.Println(errors.Is(<-served, tunnel.ErrServerClosed))
	// Output:
	// hello from the service
	// no-route
	// true
}
