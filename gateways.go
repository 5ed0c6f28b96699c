package culvert

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"strconv"
	"time"

	"culvert.dev/dns"
	"culvert.dev/identity"
	"culvert.dev/internal/gateway"
	"culvert.dev/registry"
	"culvert.dev/tunnel"
)

// Gateways say which gateways are asked, and as whom. They are not changed once a Dialer or a
// Listener has them.
type Gateways struct {
	Addresses []string // HOST:PORT of each, at least one

	// Carriers are the protocols by which they are asked, in order of preference; empty means
	// connect-h2, connect-h3, websocket and connect. All are inside of TLS. A Listener has
	// sessions by the first.
	Carriers []string

	// Identity has the Key to show to the gateways, and the Trust to verify them by. No Trust
	// means the CAs of the system. Nil has neither.
	Identity *identity.Store
	Key      string
	Trust    []string

	TokenFile  string   // with a bearer token for the gateways, read for each session; "" for none
	ServerName string   // in their certificates; "" means the host of the address
	Peers      []string // SPIFFE ids that their certificates may have in place of the name; needs Trust of their domain

	Log *slog.Logger // what becomes of sessions and streams; nil discards it
}

// name is what the gateways are in the table.
const name = "gateways"

// hop returns how a gateway is asked by one carrier.
func (g *Gateways) hop(carrier string) registry.Hop {
	return registry.Hop{
		Proto: carrier, TLS: true, KeyName: g.Key, TrustNames: g.Trust, TokenFile: g.TokenFile, ServerName: g.ServerName, Peers: g.Peers,
	}
}

// check finds what cannot work.
func (g *Gateways) check() error {
	if g == nil || len(g.Addresses) == 0 {
		return errors.New("culvert: no gateway: set Gateways.Addresses")
	}
	if g.Key == "" && g.TokenFile == "" {
		return errors.New("culvert: no credentials: gateways let no unknown caller in: set Gateways.Key or Gateways.TokenFile")
	}
	for _, carrier := range g.carriers() {
		switch carrier {
		case "connect", "connect-h2", "connect-h3", "websocket", "hbone":
		default:
			return fmt.Errorf("culvert: carrier %q: use connect, connect-h2, connect-h3, websocket or hbone", carrier)
		}
	}
	return nil
}

func (g *Gateways) carriers() []string {
	if len(g.Carriers) == 0 {
		return []string{"connect-h2", "connect-h3", "websocket", "connect"}
	}
	return g.Carriers
}

// snapshot has every name lead to the gateways.
func (g *Gateways) snapshot() (registry.Snapshot, error) {
	network := registry.Network{Name: name}
	for _, address := range g.Addresses {
		host, port, err := net.SplitHostPort(address)
		n, portErr := strconv.ParseUint(port, 10, 16)
		if err != nil || portErr != nil || n == 0 || host == "" {
			return registry.Snapshot{}, fmt.Errorf("culvert: gateway %q: write HOST:PORT", address)
		}
		to := registry.Gateway{Address: registry.Endpoint{Port: uint16(n)}}
		if to.Address.Addr, err = netip.ParseAddr(host); err != nil {
			to.Address.Host = host
		}
		for _, carrier := range g.carriers() {
			to.Transports = append(to.Transports, g.hop(carrier))
		}
		network.Gateways = append(network.Gateways, to)
	}
	all := &registry.Service{
		Name: name, Names: []tunnel.Pattern{tunnel.AnyName}, Exposed: true,
		Endpoints: []registry.Endpoint{{Host: "gateways.invalid", Port: 443, Network: name}}, // never looked up
	}
	return registry.Snapshot{Networks: []registry.Network{network}, Services: []*registry.Service{all}}, nil
}

// A running gateway is in this process, without a listener.
type running struct {
	*gateway.Gateway
	stop func() // returns when it has ended, with all that it carried
}

// run runs a gateway until stop; its values are those of ctx.
func (g *Gateways) run(ctx context.Context, reverse *gateway.Reverse) (*running, error) {
	if err := g.check(); err != nil {
		return nil, err
	}
	table, err := g.snapshot()
	if err != nil {
		return nil, err
	}
	serving := make(chan struct{})
	life, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
	made, err := gateway.New(life, gateway.Config{
		Sources: []registry.Source{registry.Static{Name: "program", Snapshot: table}}, DialOnly: true, Reverse: reverse,
		Lookup: new(dns.Resolver).Lookup, ReadFile: os.ReadFile, Identity: g.Identity, Log: g.Log,
		DrainDelay: -1, DrainTimeout: time.Millisecond, Serving: func() { close(serving) },
		Loops: 1, Memory: -1, // the process and its memory are the program's
	})
	if err != nil {
		cancel(nil)
		return nil, err
	}
	ended := make(chan error, 1)
	go func() { ended <- made.Run(life, nil) }()
	select {
	case <-serving:
	case err := <-ended:
		cancel(nil)
		return nil, err
	}
	return &running{made, func() { cancel(gateway.ErrInterrupted); <-ended }}, nil
}
