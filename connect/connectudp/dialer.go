package connectudp

import (
	"context"
	"fmt"
	"net"
	"sync/atomic"

	"culvert.dev/connect"
	"culvert.dev/tunnel"
)

// A Dialer reaches UDP targets through an HTTP proxy. It keeps no connections; what Open
// does may. It is safe for concurrent use.
type Dialer struct {
	// Proxy is the "host:port" that requests name as their authority.
	Proxy string

	// Open sends an extended CONNECT and returns the stream of its 200, which the Dialer
	// owns from then on: that of an h2.Dialer or an h3.Dialer.
	Open func(ctx context.Context, list *connect.HeaderList) (_ net.Conn, answer connect.Fields, err error)

	// Dropped counts datagrams that were lost here; it may be nil.
	Dropped *atomic.Uint64

	Budget *tunnel.Budget // counts the bytes that wait to be sent; nil means no limit
}

var _ tunnel.Dialer = (*Dialer)(nil)

// DialContext asks the proxy for addr, a "host:port" that connect.ParseAuthority takes;
// network is "udp". The ctx covers the dial and nothing after. The net.Conn is a *Conn and
// belongs to the caller. A refusal is a *tunnel.Error, as of a plain CONNECT.
func (d *Dialer) DialContext(ctx context.Context, network, addr string) (net.Conn, error) {
	if network != "udp" {
		return nil, net.UnknownNetworkError(network)
	}
	to, err := connect.ParseAuthority(addr)
	if err != nil {
		return nil, &tunnel.Error{Reason: tunnel.BadRequest, Err: err}
	}
	c, _, err := d.Open(ctx, &connect.HeaderList{
		Protocol: protocolName, Scheme: "https", Authority: d.Proxy, Path: pathOf(to), Fields: connect.Fields{capsuleProtocol},
	})
	if err != nil {
		return nil, fmt.Errorf("connectudp: %q: %w", to, err)
	}
	s, ok := c.(tunnel.Stream)
	if !ok {
		_ = c.Close()
		return nil, fmt.Errorf("connectudp: the stream to %q is a %T, which cannot half-close", d.Proxy, c)
	}
	return newConn(s, d.Dropped, d.Budget), nil
}
