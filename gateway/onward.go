package gateway

import (
	"context"
	"errors"
	"fmt"
	"net"

	"culvert.dev/registry"
	"culvert.dev/tunnel"
)

// Cross returns the way out of one request through gateways of another network,
// of which each is asked by what it takes. It is registry.Registry.Cross.
func (d *Dialers) Cross(s *registry.Service, c registry.RemoteDial) (tunnel.Dialer, error) {
	return &crossing{RemoteDial: c, ways: d, service: s}, nil
}

// A crossing dials the endpoints of one route, one after the other.
type crossing struct {
	registry.RemoteDial
	ways    *Dialers
	service *registry.Service

	decided error // what a gateway has said of the request itself
}

// Check returns nil if the gateway at ep may be dialed.
func (c *crossing) Check(ep tunnel.Endpoint) error { return c.ways.Direct.Check(ep) }

// asked says how the gateway at ep is asked; "" for one that reads the hello.
func (c *crossing) asked(ep tunnel.Endpoint) string {
	if by := c.Transport(ep); by != "sni" {
		return "by " + by + " for " + c.Target.String()
	}
	return ""
}

// DialRequest asks the gateway at ep on behalf of req. As with alternatives, a
// gateway's own no stands: those after it are not asked.
func (c *crossing) DialRequest(ctx context.Context, ep tunnel.Endpoint, req *tunnel.Request) (net.Conn, error) {
	if c.decided != nil {
		return nil, &tunnel.Error{Reason: tunnel.ReasonOf(c.decided), Err: fmt.Errorf("gateway %s is not asked, as another has decided", ep)}
	}
	// Before anybody is asked: what is not to be dialed is no gateway's decision.
	if err := c.Check(ep); err != nil {
		return nil, err
	}
	conn, err := c.dial(ctx, ep, req)
	switch {
	case err == nil:
		c.ways.dialed(ctx, ep, nil) // by a connection that was there already, maybe
	case ctx.Err() == nil && !another(err):
		c.decided = err
	}
	return conn, err
}

func (c *crossing) dial(ctx context.Context, ep tunnel.Endpoint, req *tunnel.Request) (net.Conn, error) {
	by := c.Transport(ep)
	if by == "sni" {
		way, err := c.ways.telling(c.service, (*near)(c.ways))
		if err != nil {
			return nil, err
		}
		return dialFor(ctx, way, ep, req)
	}
	at, err := c.ways.through(entrance{by, ep})
	if err != nil {
		return nil, err
	}
	way, err := c.ways.telling(c.service, at)
	if err != nil {
		return nil, err
	}
	return dialFor(ctx, way, c.Target, req)
}

// DialContext implements tunnel.Dialer. A Router does not call it.
func (c *crossing) DialContext(context.Context, string, string) (net.Conn, error) {
	return nil, errors.New("gateway: which of a network's gateways is to be dialed is not said")
}

// An entrance is a gateway at one of its addresses, and how it is asked. Equal
// ones share a way, so that carriers may keep connections.
type entrance struct {
	by string
	at tunnel.Endpoint
}

// through returns what asks the gateway at e.
func (d *Dialers) through(e entrance) (*through, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if way, ok := d.at[e]; ok {
		return way, nil
	}
	to := e.at.Addr.String()
	way, err := d.hop(&registry.Hop{Proto: e.by, Addresses: []string{to}}, to, &only{d, e.at})
	if err != nil {
		return nil, err
	}
	if d.at == nil || len(d.at) >= maxMade {
		d.at = make(map[entrance]*through)
		d.forget()
	}
	d.at[e] = &through{way: way, hops: []string{e.by + " " + to}}
	return d.at[e], nil
}

// only dials one endpoint, whatever it is told: its address may have come from a
// DNS name, which the guard has to know.
type only struct {
	ways *Dialers
	at   tunnel.Endpoint
}

// DialContext implements tunnel.Dialer.
func (o *only) DialContext(ctx context.Context, _, _ string) (net.Conn, error) {
	// It may be for several requests, none of which it ends with.
	ctx, cancel := context.WithTimeout(ctx, tunnel.DefaultConnectTimeout)
	defer cancel()
	return (*near)(o.ways).DialEndpoint(ctx, o.at)
}

// near dials gateways, and tells Dialed.
type near Dialers

// DialEndpoint dials ep.
func (n *near) DialEndpoint(ctx context.Context, ep tunnel.Endpoint) (net.Conn, error) {
	c, err := n.Direct.DialEndpoint(ctx, ep)
	(*Dialers)(n).dialed(ctx, ep, err)
	if err != nil {
		return nil, err
	}
	return c, nil
}

// DialContext dials addr, which must be an IP address and a port.
func (n *near) DialContext(ctx context.Context, network, addr string) (net.Conn, error) {
	return n.Direct.DialContext(ctx, network, addr)
}

// dialed tells Dialed of what says something of ep.
func (d *Dialers) dialed(ctx context.Context, ep tunnel.Endpoint, err error) {
	if d.ReportDial == nil {
		return
	}
	why := tunnel.ReasonOf(err)
	if err == nil || (why == tunnel.DialFailed || why == tunnel.DialTimeout) && !errors.Is(ctx.Err(), context.Canceled) {
		d.ReportDial(ep, err)
	}
}
