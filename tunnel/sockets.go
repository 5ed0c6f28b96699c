package tunnel

import (
	"context"
	"net"
	"syscall"

	"culvert.dev/tunnel/internal/poll"
)

// Sockets opens the sockets by which this process begins connections to others. A program has
// one, and hands it to all that dials, so that rules of the host can tell its sockets from those
// of other programs. The zero Sockets opens ordinary ones.
type Sockets struct {
	// Mark, unless it is 0, is given to every socket. It needs Linux and CAP_NET_ADMIN.
	Mark uint32
}

// Control is for a net.Dialer and a net.ListenConfig, which call it with each socket.
func (s Sockets) Control(network, address string, c syscall.RawConn) error {
	if s.Mark == 0 {
		return nil
	}
	return poll.SetMark(s.Mark)(network, address, c)
}

// Dialer returns a new dialer, also of names: what it asks of DNS goes by these sockets, too.
func (s Sockets) Dialer() *net.Dialer {
	return &net.Dialer{Control: s.Control, Resolver: s.Resolver()}
}

// DialContext is that of Dialer.
func (s Sockets) DialContext(ctx context.Context, network, address string) (net.Conn, error) {
	return s.Dialer().DialContext(ctx, network, address)
}

// ListenPacket opens a UDP socket that asks others. The caller closes it.
func (s Sockets) ListenPacket(ctx context.Context, network, address string) (net.PacketConn, error) {
	return (&net.ListenConfig{Control: s.Control}).ListenPacket(ctx, network, address)
}

// RoomCheck returns what reports whether a Write of a few KiB to c would return at once, as the
// kernel has room for it or the connection has failed, where nobody else writes to c. It does not
// block. RoomCheck returns nil where that can't be known: where c does not stand on a TCP socket,
// and elsewhere than on Linux.
func RoomCheck(c net.Conn) func() bool { return poll.RoomCheck(socketOf(c)) }

// LimitUnsent has a Write to c wait while the kernel has n bytes that it has not sent, whatever its
// buffer holds: what is written later waits behind fewer. Bytes under way to the peer do not count. It
// does nothing where c does not stand on a TCP socket, and elsewhere than on Linux.
func LimitUnsent(c net.Conn, n int) { poll.LimitUnsent(socketOf(c), n) }

// socketOf returns what c stands on.
func socketOf(c net.Conn) net.Conn {
	for {
		switch over := c.(type) {
		case *Conn:
			c = over.Conn
		case interface{ NetConn() net.Conn }:
			c = over.NetConn()
		default:
			return c
		}
	}
}

// Resolver returns the resolver of this host. With a Mark it is Go's own, as sockets of the C
// library cannot have one.
func (s Sockets) Resolver() *net.Resolver {
	if s.Mark == 0 {
		return net.DefaultResolver
	}
	d := &net.Dialer{Control: s.Control} // to addresses of resolv.conf
	return &net.Resolver{PreferGo: true, Dial: d.DialContext}
}
