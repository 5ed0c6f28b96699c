package gateway

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/tls"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"sync"
	"time"

	"culvert.dev/nat"
	"culvert.dev/registry"
	"culvert.dev/tunnel"
)

// dialBackName is the reserved name at which a gateway connects back to its caller: to the
// address that the caller's own connection comes from, at the port that it asks for. What the
// caller then says to itself over that stream proves that the address leads to it.
var dialBackName = tunnel.MustParseName("dialback." + tunnel.ReservedZone)

// Limits of dialing back.
const (
	dialBackIdle        = 10 * time.Second // without a byte
	dialBackConnections = 16               // at once, for all callers
	dialBackPerSecond   = 8                // for all callers
	dialBackPerCaller   = 12               // a minute
	maxDialBackCallers  = 1024             // that are told apart in a minute

	maxProofNames = 3 // names of a listener's certificates that are tried
)

// A dialBackResolver resolves requests to dial back, and leaves all others to the registry.
type dialBackResolver struct {
	*registry.Registry
	limits  tunnel.ServiceLimits
	permits func(netip.Addr) bool // whether a caller may come from there; nat.IsPublic, but in tests

	mu     sync.Mutex // guards what follows
	minute time.Time
	calls  map[string]int // of callers in this minute
}

func newDialBackResolver(r *registry.Registry) *dialBackResolver {
	return &dialBackResolver{Registry: r, permits: nat.IsPublic, limits: tunnel.ServiceLimits{Connections: dialBackConnections, NewPerSecond: dialBackPerSecond}}
}

// Resolve implements tunnel.Resolver.
func (r *dialBackResolver) Resolve(ctx context.Context, req *tunnel.Request) (tunnel.Route, error) {
	if req.Name != dialBackName {
		return r.Registry.Resolve(ctx, req)
	}
	to := netip.AddrPortFrom(req.Source.Addr().Unmap().WithZone(""), req.Port)
	switch {
	case req.Datagrams != nil:
		return tunnel.Route{}, tunnel.Refusef(tunnel.Unsupported, "gateway: %q dials back by TCP alone", req.Name)
	case !r.permits(to.Addr()):
		return tunnel.Route{}, tunnel.Refusef(tunnel.Prohibited, "gateway: %q dials back to callers from the internet, and this one comes from %s", req.Name, to.Addr())
	case to.Port() == 0 || to.Port() == 25:
		return tunnel.Route{}, tunnel.Refusef(tunnel.Prohibited, "gateway: %q does not dial back to port %d", req.Name, to.Port())
	case !r.allow(req.Peer.ID, time.Now()):
		return tunnel.Route{}, tunnel.Refusef(tunnel.Overload, "gateway: %q dials back to a caller %d times a minute", req.Name, dialBackPerCaller)
	}
	return tunnel.Route{
		Service: dialBackName.String(), Pattern: dialBackName.String(), Generation: r.Generation(), Endpoints: []tunnel.Endpoint{{Addr: to, Named: !nat.IsPublic(to.Addr())}},
		IdleTimeout: dialBackIdle, HalfClosedTimeout: dialBackIdle, Limits: &r.limits,
	}, nil
}

// allow counts a call.
func (r *dialBackResolver) allow(caller string, now time.Time) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.calls == nil || now.Sub(r.minute) >= time.Minute {
		r.minute, r.calls = now, make(map[string]int)
	}
	n, known := r.calls[caller]
	if n >= dialBackPerCaller || !known && len(r.calls) >= maxDialBackCallers {
		return false
	}
	r.calls[caller] = n + 1
	return true
}

// proofs are the names that the gateway asks itself for, from outside.
type proofs struct {
	mu   sync.Mutex // guards what follows
	open map[tunnel.Name]bool
}

// proofName returns a name that nobody else knows.
func (p *proofs) proofName() (tunnel.Name, error) {
	var secret [16]byte
	if _, err := rand.Read(secret[:]); err != nil {
		return tunnel.Name{}, err
	}
	name, err := tunnel.ParseName(hex.EncodeToString(secret[:]) + "." + dialBackName.String())
	if err != nil {
		return tunnel.Name{}, err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.open == nil {
		p.open = make(map[tunnel.Name]bool)
	}
	p.open[name] = false
	return name, nil
}

// arrived notes a request for name, if it is one of p.
func (p *proofs) arrived(name tunnel.Name) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if _, ok := p.open[name]; ok {
		p.open[name] = true
	}
}

// done forgets name, and reports whether it has arrived.
func (p *proofs) done(name tunnel.Name) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	arrived := p.open[name]
	delete(p.open, name)
	return arrived
}

// verify has the gateways of other networks connect to a mapped port, one after the other, until
// this gateway has found itself there. It is a nat.Verifier.
func (n *natService) verify(ctx context.Context, p nat.Port, public netip.AddrPort) error {
	if p.Network != "tcp" {
		return errors.New("a port of UDP is not verified from outside")
	}
	t := n.g.registry.Table()
	if t == nil {
		return errors.New("there is no table yet")
	}
	var failed []error
	for network := range t.Networks() {
		if network.Name == t.Mesh().Network {
			continue
		}
		for i := range network.Gateways {
			gw := &network.Gateways[i]
			at := gw.AddressFrom(network.Name, t.Mesh().Network)
			if !gw.HasCarriers() {
				continue
			}
			err := n.verifyBy(ctx, p, public, gw, &at)
			if err == nil {
				return nil
			}
			failed = append(failed, fmt.Errorf("gateway %s of network %s: %w", at, network.Name, err))
			if ctx.Err() != nil {
				return errors.Join(failed...)
			}
		}
	}
	if len(failed) == 0 {
		return errors.New("no other network of the configuration has a gateway that could connect to this one: list one with its transports in networks")
	}
	return errors.Join(failed...)
}

// verifyBy has one gateway connect to a mapped port.
func (n *natService) verifyBy(ctx context.Context, p nat.Port, public netip.AddrPort, gw *registry.Gateway, at *registry.Endpoint) error {
	transport, err := n.g.upstreams.New(&registry.Service{Name: dialBackName.String()}, at, gw)
	if err != nil {
		return err
	}
	back := func() (net.Conn, error) {
		ep := &tunnel.Endpoint{Host: dialBackName.String(), Addr: netip.AddrPortFrom(netip.Addr{}, public.Port())}
		return transport.Dial(ctx, ep, &tunnel.Request{Proto: "nat", Name: dialBackName, Port: public.Port(), Start: time.Now()})
	}
	err = n.provesByName(ctx, back)
	names := n.certificateNames(p.Name)
	if len(names) == 0 && errors.Is(err, errOtherServer) {
		names = []string{dialBackName.String()} // it may be our own listener, with one certificate for all names
	}
	for _, name := range names {
		if err == nil || ctx.Err() != nil {
			break
		}
		err = n.provesByCertificate(ctx, p, name, back)
	}
	return err
}

var errOtherServer = errors.New("something else answers there")

// provesByName reports whether a ClientHello with a secret name comes from outside to this
// gateway.
func (n *natService) provesByName(ctx context.Context, back func() (net.Conn, error)) error {
	name, err := n.proofs.proofName()
	if err != nil {
		return err
	}
	defer n.proofs.done(name)
	c, err := back()
	if err != nil {
		return err
	}
	defer c.Close()
	_, err = handshake(ctx, c, name.String())
	if n.proofs.done(name) {
		return nil
	}
	if err == nil {
		return errOtherServer
	}
	return fmt.Errorf("this gateway did not answer there: %w", err)
}

// provesByCertificate reports whether the port has, from outside, the certificate that it has here,
// and its key.
func (n *natService) provesByCertificate(ctx context.Context, p nat.Port, name string, back func() (net.Conn, error)) error {
	route := n.manager.Status().Route
	if route == nil {
		return errors.New("there is no way to the router")
	}
	own, err := n.g.cfg.Sockets.DialContext(ctx, "tcp", netip.AddrPortFrom(route.Local, p.Internal).String())
	if err != nil {
		return err
	}
	defer own.Close()
	want, err := handshake(ctx, own, name)
	if err != nil {
		return fmt.Errorf("own listener: %w", err)
	}
	c, err := back()
	if err != nil {
		return err
	}
	defer c.Close()
	got, err := handshake(ctx, c, name)
	if err != nil {
		return fmt.Errorf("this gateway did not answer there: %w", err)
	}
	if !bytes.Equal(got, want) {
		return fmt.Errorf("something else answers there: its certificate for %q is another one", name)
	}
	return nil
}

// handshake completes TLS on c, which ends with ctx, and returns the certificate of the server. It is
// not verified: only whose key the server has counts.
func handshake(ctx context.Context, c net.Conn, name string) ([]byte, error) {
	client := tls.Client(c, &tls.Config{ServerName: name, InsecureSkipVerify: true}) //nolint:gosec // compared with our own
	if err := client.HandshakeContext(ctx); err != nil {
		return nil, err
	}
	return client.ConnectionState().PeerCertificates[0].Raw, nil
}

// certificateNames returns names for which TLS ends at a listener.
func (n *natService) certificateNames(listener string) (names []string) {
	configured, _ := n.g.inbound.describeAll()
	for i := range configured {
		for _, t := range configured[i].TLS {
			for _, name := range t.Names {
				if configured[i].Configured == listener && !strings.Contains(name, "*") && len(names) < maxProofNames {
					names = append(names, name)
				}
			}
		}
	}
	return names
}
