package upstream

import (
	"context"
	"errors"
	"io"
	"net"
	"net/netip"
	"os"
	"sync"
	"time"

	"culvert.dev/connect"
	"culvert.dev/connect/connectudp"
	"culvert.dev/connect/h2"
	"culvert.dev/tunnel"
)

// An extendedOpener is a carrier that takes extended CONNECT: an h2.Dialer or an h3.Dialer.
type extendedOpener interface {
	tunnel.Dialer
	io.Closer
	Open(ctx context.Context, list *connect.HeaderList) (_ net.Conn, answer connect.Fields, err error)
}

// A datagramCarrier is a carrier that asks its gateway for datagrams, too, by CONNECT-UDP.
type datagramCarrier struct {
	extendedOpener
	udp connectudp.Dialer
}

// Conns returns how many connections there are.
func (c *datagramCarrier) Conns() int {
	if o, ok := c.extendedOpener.(interface{ Conns() int }); ok {
		return o.Conns()
	}
	return 0
}

// withDatagrams returns the carrier d, which asks the gateway at proxy.
func (t *Transports) withDatagrams(d extendedOpener, proxy string) *datagramCarrier {
	c := &datagramCarrier{extendedOpener: d}
	c.udp = connectudp.Dialer{Proxy: proxy, Open: c.open, Dropped: &t.DroppedDatagrams, Budget: t.Budget}
	return c
}

// open is the Open of the carrier. A gateway that does not take CONNECT-UDP has refused the
// request, and its carrier works.
func (c *datagramCarrier) open(ctx context.Context, list *connect.HeaderList) (net.Conn, connect.Fields, error) {
	conn, answer, err := c.Open(ctx, list)
	if errors.Is(err, errors.ErrUnsupported) || errors.Is(err, h2.ErrNotSpoken) {
		err = tunnel.HopRefusedf(tunnel.Unsupported, "%w: list connect-udp among the protocols of its listener", err)
	}
	return conn, answer, err
}

// DialContext implements tunnel.Dialer. With the network "udp" the connection is a
// tunnel.DatagramConn.
func (c *datagramCarrier) DialContext(ctx context.Context, network, addr string) (net.Conn, error) {
	if network == "udp" {
		return c.udp.DialContext(ctx, network, addr)
	}
	return c.extendedOpener.DialContext(ctx, network, addr)
}

// carriesDatagrams reports whether every gateway of f can be asked for datagrams.
func (f gatewayList) carriesDatagrams() bool {
	for _, d := range f {
		if _, ok := d.(*datagramCarrier); !ok {
			return false
		}
	}
	return true
}

// tunneledAddr stands for the address of a gateway behind another one: only that one knows
// the true address. It is of TEST-NET-1, RFC 5737, and nothing is sent there.
var tunneledAddr = netip.AddrFrom4([4]byte{192, 0, 2, 1})

// A packetConn is the socket of a connection by HTTP/3 to a gateway behind others: a
// net.PacketConn of one peer, over a tunnel of datagrams.
type packetConn struct {
	tunnel.DatagramConn
	peer  net.Addr
	queue chan []byte
	done  chan struct{} // closed when the tunnel has ended
	wg    sync.WaitGroup

	mu       sync.Mutex // guards what follows
	deadline time.Time
	changed  chan struct{} // closed when deadline changes
}

// maxTunneledQueue is how many datagrams of a tunnel wait for their reader; more are lost.
const maxTunneledQueue = 128

// newPacketConn returns the packetConn over c, which it owns, with peer at the other end.
func newPacketConn(c tunnel.DatagramConn, peer net.Addr) *packetConn {
	p := &packetConn{DatagramConn: c, peer: peer, queue: make(chan []byte, maxTunneledQueue), done: make(chan struct{}), changed: make(chan struct{})}
	p.wg.Go(func() {
		defer close(p.done)
		defer func() {
			if recover() != nil { // its connection ends with it
				_ = c.Close()
			}
		}()
		_ = c.ReceiveDatagrams(func(b []byte) {
			select {
			case p.queue <- append([]byte(nil), b...):
			default:
			}
		})
	})
	return p
}

// ReadFrom implements net.PacketConn.
func (p *packetConn) ReadFrom(b []byte) (int, net.Addr, error) {
	for {
		p.mu.Lock()
		deadline, changed := p.deadline, p.changed
		p.mu.Unlock()
		var late <-chan time.Time
		var timer *time.Timer
		if !deadline.IsZero() {
			timer = time.NewTimer(time.Until(deadline))
			late = timer.C
		}
		n, err, again := p.wait(b, late, changed)
		if timer != nil {
			timer.Stop()
		}
		if !again {
			return n, p.peer, err
		}
	}
}

// wait waits for a datagram. It returns true where the deadline has changed.
func (p *packetConn) wait(b []byte, late <-chan time.Time, changed <-chan struct{}) (n int, err error, again bool) {
	select {
	case d := <-p.queue:
		return copy(b, d), nil, false
	case <-p.done:
		return 0, net.ErrClosed, false
	case <-late:
		return 0, os.ErrDeadlineExceeded, false
	case <-changed:
		return 0, nil, true
	}
}

// WriteTo implements net.PacketConn. There is one peer, whatever addr is.
func (p *packetConn) WriteTo(b []byte, _ net.Addr) (int, error) {
	if err := p.SendDatagram(b); err != nil {
		return 0, err
	}
	return len(b), nil
}

// Close ends the tunnel.
func (p *packetConn) Close() error {
	err := p.DatagramConn.Close()
	p.wg.Wait()
	return err
}

// SetReadDeadline implements net.PacketConn.
func (p *packetConn) SetReadDeadline(t time.Time) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.deadline = t
	close(p.changed)
	p.changed = make(chan struct{})
	return nil
}

// SetDeadline sets the read deadline: writes do not wait.
func (p *packetConn) SetDeadline(t time.Time) error { return p.SetReadDeadline(t) }

// SetWriteDeadline does nothing: writes do not wait.
func (p *packetConn) SetWriteDeadline(time.Time) error { return nil }

// SetReadBuffer does nothing. QUIC logs a warning for a socket without the method.
func (p *packetConn) SetReadBuffer(int) error { return nil }

// SetWriteBuffer does nothing.
func (p *packetConn) SetWriteBuffer(int) error { return nil }

// listenTunneled returns the Listen of an h3.Dialer to the gateway at proxy, which is asked
// for by the gateways of dialer.
func listenTunneled(dialer tunnel.Dialer, proxy string) func(context.Context, string, netip.AddrPort) (net.PacketConn, error) {
	return func(ctx context.Context, _ string, to netip.AddrPort) (net.PacketConn, error) {
		c, err := dialer.DialContext(ctx, "udp", proxy)
		if err != nil {
			return nil, err
		}
		return newPacketConn(c.(tunnel.DatagramConn), net.UDPAddrFromAddrPort(to)), nil
	}
}
