package udp

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"sync"
)

// maxDatagram is the largest that can come, in bytes.
const maxDatagram = 1<<16 - 1

type buffer [maxDatagram]byte

var buffers = sync.Pool{New: func() any { return new(buffer) }}

// Scheme is in front of an address of UDP where one of TCP could stand.
const Scheme = "udp://"

// receiveBuffer is what is asked of the kernel for a listener, in bytes. It
// gives what it is told to (net.core.rmem_max on Linux).
const receiveBuffer = 4 << 20

// Listen opens a socket for a Server. addr is HOST:PORT, with or without
// Scheme; no host means every address of this host.
func Listen(ctx context.Context, addr string) (*net.UDPConn, error) {
	var lc net.ListenConfig
	c, err := lc.ListenPacket(ctx, "udp", strings.TrimPrefix(addr, Scheme))
	if err != nil {
		return nil, fmt.Errorf("listen on %s: %w", addr, err)
	}
	conn := c.(*net.UDPConn) // as the network is "udp"
	_ = conn.SetReadBuffer(receiveBuffer)
	return conn, nil
}

// A wire is a listener's socket and what it takes to answer from the address
// that was written to: one that is bound to all of them would let the kernel
// choose, and the client would not know who answers.
type wire struct {
	*net.UDPConn
	all bool // it is bound to every address, and says which one
	six bool
}

func newWire(c *net.UDPConn) *wire {
	w := &wire{UDPConn: c}
	if a, ok := c.LocalAddr().(*net.UDPAddr); ok {
		w.six = a.IP.To4() == nil
		w.all = a.IP.IsUnspecified() && askLocal(c, w.six)
	}
	return w
}

// receive waits for a datagram and returns who sent it, and to which address
// where that is not known anyway.
func (w *wire) receive(b, oob []byte) (n int, from netip.AddrPort, local netip.Addr, err error) {
	if !w.all {
		n, from, err = w.ReadFromUDPAddrPort(b)
		return n, netip.AddrPortFrom(from.Addr().Unmap(), from.Port()), local, err
	}
	n, oobn, _, from, err := w.ReadMsgUDPAddrPort(b, oob)
	return n, netip.AddrPortFrom(from.Addr().Unmap(), from.Port()), parseLocal(oob[:oobn]), err
}

// send sends b to a client, from local where that is known.
func (w *wire) send(b []byte, to netip.AddrPort, local netip.Addr) error {
	if !w.all || !local.IsValid() {
		_, err := w.WriteToUDPAddrPort(b, to)
		return err
	}
	var space [oobSize]byte
	_, _, err := w.WriteMsgUDPAddrPort(b, appendLocal(space[:0], local, w.six), to)
	return err
}
