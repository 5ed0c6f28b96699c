package culvert

import (
	"context"
	"net"
	"sync"
)

// A Dialer connects to services by name, through gateways. It shares their sessions among its
// connections, so a program has one. It is safe for concurrent use, and not to be copied once
// it was used.
type Dialer struct {
	Via *Gateways

	mu     sync.Mutex // guards what follows
	by     *running   // nil before the first dial
	closed bool
}

// DialContext connects to address, HOST:PORT, which the gateways are asked for as it is; network
// is "tcp". The ctx limits the dial and nothing after. The net.Conn is the caller's to close; it
// has CloseWrite, and is reset by Dialer.Close.
//
// Where all that is allowed through must be TLS, because a session to the gateways has no client
// certificate, the first byte that is written must begin it.
func (d *Dialer) DialContext(ctx context.Context, network, address string) (net.Conn, error) {
	if network != "tcp" {
		return nil, net.UnknownNetworkError(network)
	}
	by, err := d.running(ctx)
	if err != nil {
		return nil, err
	}
	c, err := by.Dial(ctx, address)
	if err != nil { // which an interface around a nil stream would not be
		return nil, err
	}
	return c, nil
}

func (d *Dialer) running(ctx context.Context) (*running, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return nil, net.ErrClosed
	}
	if d.by == nil {
		by, err := d.Via.run(ctx, nil)
		if err != nil {
			return nil, err
		}
		d.by = by
	}
	return d.by, nil
}

// Close ends the sessions to the gateways, and all connections. DialContext fails from then on.
func (d *Dialer) Close() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.by != nil {
		d.by.stop()
	}
	d.by, d.closed = nil, true
	return nil
}
