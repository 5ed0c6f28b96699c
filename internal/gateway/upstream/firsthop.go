package upstream

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"sync"

	"culvert.dev/connect"
	"culvert.dev/connect/h3"
	"culvert.dev/internal/race"
	"culvert.dev/registry"
	"culvert.dev/tunnel"
)

// A budgetDialer dials gateways by connections that carry many tunnels: each
// connection takes a descriptor of the budget, and its tunnels take none.
type budgetDialer struct {
	tunnel.Dialer
	budget *tunnel.Budget
}

// DialContext implements tunnel.Dialer.
func (d budgetDialer) DialContext(ctx context.Context, network, addr string) (net.Conn, error) {
	if !d.budget.Take(1) {
		return nil, d.budgetSpent()
	}
	c, err := d.Dialer.DialContext(ctx, network, addr)
	if err != nil {
		d.budget.Give(1)
		return nil, err
	}
	return &budgetConn{Conn: c, release: sync.OnceFunc(func() { d.budget.Give(1) })}, nil
}

// DialHandshake implements connect.HandshakeDialer. Each connection that is made takes a
// descriptor.
func (d budgetDialer) DialHandshake(ctx context.Context, network, addr string, handshake connect.Handshake) (net.Conn, error) {
	return connect.DialHandshake(ctx, d.Dialer, network, addr, func(ctx context.Context, c net.Conn) (net.Conn, error) {
		if !d.budget.Take(1) {
			_ = c.Close()
			return nil, d.budgetSpent()
		}
		return handshake(ctx, &budgetConn{Conn: c, release: sync.OnceFunc(func() { d.budget.Give(1) })})
	})
}

func (d budgetDialer) budgetSpent() error {
	return tunnel.Refusef(tunnel.Overload, "the %d descriptors for connections are taken", d.budget.Limit)
}

// A budgetConn gives its descriptor back when it is closed.
type budgetConn struct {
	net.Conn
	release func()
}

// Close implements net.Conn.
func (c *budgetConn) Close() error {
	defer c.release()
	return c.Conn.Close()
}

// CloseWrite implements tunnel.Stream.
func (c *budgetConn) CloseWrite() error {
	if w, ok := c.Conn.(tunnel.Stream); ok {
		return w.CloseWrite()
	}
	return errors.ErrUnsupported
}

// FirstHop returns what dials a host and a port that an operator has named.
func (t *Transports) FirstHop() tunnel.Dialer { return firstHopDialer{t} }

// A firstHopDialer dials the first hop, which is a host and a port.
type firstHopDialer struct{ transports *Transports }

// DialContext implements tunnel.Dialer.
func (d firstHopDialer) DialContext(ctx context.Context, network, addr string) (net.Conn, error) {
	return d.DialHandshake(ctx, network, addr, noHandshake)
}

// DialHandshake implements connect.HandshakeDialer.
func (d firstHopDialer) DialHandshake(ctx context.Context, network, addr string, handshake connect.Handshake) (net.Conn, error) {
	if proxy := d.transports.proxy.Load(); proxy != nil {
		to, err := connect.ParseAuthority(addr)
		if err != nil {
			return nil, err
		}
		if !bypasses(to) {
			c, err := proxy.dial(ctx, to.String())
			if err != nil {
				return nil, err
			}
			return handshake(ctx, c)
		}
	}
	return directDialer(d).DialHandshake(ctx, network, addr, handshake)
}

func noHandshake(_ context.Context, c net.Conn) (net.Conn, error) { return c, nil }

// A directDialer dials a host and a port that an operator has named, without a Proxy.
type directDialer struct{ transports *Transports }

// DialContext implements tunnel.Dialer.
func (d directDialer) DialContext(ctx context.Context, network, addr string) (net.Conn, error) {
	return d.DialHandshake(ctx, network, addr, noHandshake)
}

// DialHandshake implements connect.HandshakeDialer. The addresses of a name are tried at once
// where the first one does not answer soon.
func (d directDialer) DialHandshake(ctx context.Context, _, addr string, handshake connect.Handshake) (net.Conn, error) {
	to, err := connect.ParseAuthority(addr)
	if err != nil {
		return nil, err
	}
	dial := func(ctx context.Context, ep tunnel.Endpoint) (net.Conn, error) {
		c, err := d.transports.Direct.DialEndpoint(ctx, ep)
		if err != nil {
			return nil, err
		}
		return handshake(ctx, c)
	}
	if to.Addr.IsValid() {
		return dial(ctx, tunnel.Endpoint{Addr: netip.AddrPortFrom(to.Addr, to.Port), Named: true})
	}
	host := to.Name.String()
	addrs, err := d.transports.addresses(ctx, host)
	if err != nil {
		return nil, err
	}
	return race.First(ctx, min(len(addrs), maxFirstHopAddrs), func(ctx context.Context, i int) (net.Conn, error) {
		return dial(ctx, tunnel.Endpoint{Addr: netip.AddrPortFrom(addrs[i], to.Port), Host: host, Named: registry.IsLocalhost(host)})
	}, func(c net.Conn) { _ = c.Close() })
}

// maxFirstHopAddrs is how many addresses of the first hop are tried.
const maxFirstHopAddrs = 3

// addresses returns those of the first hop's name; there is at least one.
func (t *Transports) addresses(ctx context.Context, host string) ([]netip.Addr, error) {
	if registry.IsLocalhost(host) {
		return []netip.Addr{netip.AddrFrom4([4]byte{127, 0, 0, 1}), netip.IPv6Loopback()}, nil
	}
	if t.Lookup == nil {
		return nil, tunnel.Refusef(tunnel.LookupError, "gateway %q: no DNS resolver is configured", host)
	}
	addrs, err := t.Lookup(ctx, host)
	if err != nil {
		reason := tunnel.LookupError
		if ne := net.Error(nil); errors.As(err, &ne) && ne.Timeout() {
			reason = tunnel.LookupTime
		}
		return nil, tunnel.Refusef(reason, "lookup of gateway %q: %w", host, err)
	}
	if len(addrs) == 0 {
		return nil, tunnel.Refusef(tunnel.LookupError, "gateway %q has no address", host)
	}
	return addrs, nil
}

// listenUDP opens a UDP socket to reach the first hop at the address to, of a
// host that the configuration names.
func (t *Transports) listenUDP(ctx context.Context, host string, to netip.AddrPort) (net.PacketConn, error) {
	_, err := netip.ParseAddr(host)
	written := err == nil || registry.IsLocalhost(host)
	if t.proxy.Load() != nil && !to.Addr().Unmap().IsLoopback() {
		return nil, &tunnel.Error{Reason: tunnel.DialFailed, Err: errNoDatagrams}
	}
	if err := t.Direct.Guard.CheckUDP(to, written); err != nil {
		return nil, err
	}
	return h3.Listen(ctx, t.Direct.Sockets, to)
}

// A gatewayList asks gateways in order until one dials. The client has been
