package upstream

import (
	"context"
	"errors"
	"fmt"
	"net"

	"culvert.dev/registry"
	"culvert.dev/tunnel"
)

// Remote returns the dialer of one request to a service in another network. It
// asks each gateway of that network by the transport that r names. It is
// registry.Registry.RemoteDialer.
func (d *Dialers) Remote(s *registry.Service, r registry.RemoteDial) (tunnel.Dialer, error) {
	return &RemoteDialer{RemoteDial: r, dialers: d, service: s}, nil
}

// A RemoteDialer dials the endpoints of one route, which are gateways, one after
// the other.
type RemoteDialer struct {
	registry.RemoteDial
	dialers *Dialers
	service *registry.Service

	decision error // what a gateway has decided of the request itself
}

// Check returns nil if the gateway at ep may be dialed.
func (r *RemoteDialer) Check(ep tunnel.Endpoint) error { return r.dialers.Direct.Check(ep) }

// Describe says how the gateway at ep is asked; "" for one that reads the hello.
func (r *RemoteDialer) Describe(ep tunnel.Endpoint) string {
	if transport := r.Transport(ep); transport != "sni" {
		return "by " + transport + " for " + r.Target.String()
	}
	return ""
}

// DialRequest asks the gateway at ep on behalf of req. As with a fallbackDialer,
// a gateway's decision stands: those after it are not asked.
func (r *RemoteDialer) DialRequest(ctx context.Context, ep tunnel.Endpoint, req *tunnel.Request) (net.Conn, error) {
	if r.decision != nil {
		return nil, &tunnel.Error{Reason: tunnel.ReasonOf(r.decision), Err: fmt.Errorf("gateway %s is not asked, as another has decided", ep)}
	}
	// First of all: that an address must not be dialed is no gateway's decision.
	if err := r.Check(ep); err != nil {
		return nil, err
	}
	conn, err := r.dial(ctx, ep, req)
	switch {
	case err == nil:
		r.dialers.reportDial(ctx, ep, nil) // also where a connection was there already
	case ctx.Err() == nil && isDecision(err):
		r.decision = err
	}
	return conn, err
}

func (r *RemoteDialer) dial(ctx context.Context, ep tunnel.Endpoint, req *tunnel.Request) (net.Conn, error) {
	var transport tunnel.EndpointDialer = gatewayDialer{r.dialers}
	target := ep
	if proto := r.Transport(ep); proto != "sni" {
		var err error
		if transport, err = r.dialers.gateway(gatewayKey{proto, ep}); err != nil {
			return nil, err
		}
		target = r.Target
	}
	dialer, err := r.dialers.withLayers(r.service, transport)
	if err != nil {
		return nil, err
	}
	return dialRequest(ctx, dialer, target, req)
}

// DialContext implements tunnel.Dialer. A Router does not call it.
func (r *RemoteDialer) DialContext(context.Context, string, string) (net.Conn, error) {
	return nil, errors.New("gateway: the dial names no gateway endpoint")
}

// A gatewayKey is a gateway at one of its addresses, and the protocol by which it
// is asked. Equal keys share a dialer, so that carriers can share connections.
type gatewayKey struct {
	proto string
	ep    tunnel.Endpoint
}

// gateway returns the dialer that asks the gateway at k.
func (d *Dialers) gateway(k gatewayKey) (*viaHops, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if via, ok := d.remote[k]; ok {
		return via, nil
	}
	addr := k.ep.Addr.String()
	last, err := d.newHopDialer(&registry.Hop{Proto: k.proto, Addresses: []string{addr}}, addr, pinnedDialer{gatewayDialer{d}, k.ep})
	if err != nil {
		return nil, err
	}
	if d.remote == nil || len(d.remote) >= maxCached {
		d.remote = make(map[gatewayKey]*viaHops)
		d.dropPools()
	}
	d.remote[k] = &viaHops{last: last, hops: []string{k.proto + " " + addr}}
	return d.remote[k], nil
}

// A gatewayDialer dials gateways of other networks, and reports how that ended.
type gatewayDialer struct{ dialers *Dialers }

// DialEndpoint dials ep.
func (d gatewayDialer) DialEndpoint(ctx context.Context, ep tunnel.Endpoint) (net.Conn, error) {
	c, err := d.dialers.Direct.DialEndpoint(ctx, ep)
	d.dialers.reportDial(ctx, ep, err)
	if err != nil {
		return nil, err
	}
	return c, nil
}

// DialContext dials addr, which must be an IP address and a port.
func (d gatewayDialer) DialContext(ctx context.Context, network, addr string) (net.Conn, error) {
	return d.dialers.Direct.DialContext(ctx, network, addr)
}

// A pinnedDialer dials one endpoint, whatever address it is given: the address may
// have come from a DNS name, which the guard has to know.
type pinnedDialer struct {
	gateways gatewayDialer
	ep       tunnel.Endpoint
}

// DialContext implements tunnel.Dialer.
func (d pinnedDialer) DialContext(ctx context.Context, _, _ string) (net.Conn, error) {
	// The connection may serve several requests and ends with none of them.
	ctx, cancel := context.WithTimeout(ctx, tunnel.DefaultConnectTimeout)
	defer cancel()
	return d.gateways.DialEndpoint(ctx, d.ep)
}

// reportDial passes on a result that says something about ep.
func (d *Dialers) reportDial(ctx context.Context, ep tunnel.Endpoint, err error) {
	if d.ReportDial == nil {
		return
	}
	reason := tunnel.ReasonOf(err)
	if err == nil || (reason == tunnel.DialFailed || reason == tunnel.DialTimeout) && !errors.Is(ctx.Err(), context.Canceled) {
		d.ReportDial(ep, err)
	}
}
