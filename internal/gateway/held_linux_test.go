package gateway

import (
	"net"
	"net/netip"
	"strconv"
	"testing"
)

// What has a port is told by its address, for each protocol: our own sockets at one address,
// which may be closed, and others.
func TestHeldByOthers(t *testing.T) {
	for _, network := range []string{"tcp", "udp"} {
		listen := func(address string) (net.Addr, func(), error) {
			if network == "tcp" {
				ln, err := net.Listen(network, address)
				if err != nil {
					return nil, nil, err
				}
				return ln.Addr(), func() { _ = ln.Close() }, nil
			}
			c, err := net.ListenPacket(network, address)
			if err != nil {
				return nil, nil, err
			}
			return c.LocalAddr(), func() { _ = c.Close() }, nil
		}
		var own net.Addr
		var ap netip.AddrPort
		for range 100 { // until nobody else has the port, at any address
			addr, closeOwn, err := listen("127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			defer closeOwn()
			own = addr
			ap, _, _ = socketAddress(own)
			if len(boundAddresses(network == "udp", ap.Port())) == 1 {
				break
			}
		}
		port := strconv.Itoa(int(ap.Port()))
		_, _, taken := listen(":" + port)
		if !inUse(taken) {
			t.Fatalf("%s: all addresses: got %v, want that the port is in use", network, taken)
		}
		if heldByOthers(taken, own) {
			t.Errorf("%s: another has the port, and it is our own", network)
		}
		if !heldByOthers(taken) {
			t.Errorf("%s: nobody has the port that is not to be closed", network)
		}
		_, closeOther, err := listen("127.0.0.2:" + port)
		if err != nil {
			t.Fatal(err)
		}
		if !heldByOthers(taken, own) {
			t.Errorf("%s: nobody else has the port, and 127.0.0.2 has it", network)
		}
		if _, _, err := listen("127.0.0.1:" + port); heldByOthers(err, own) {
			t.Errorf("%s: one at another address is in the way of 127.0.0.1", network)
		}
		closeOther()
		v6, closeV6, err := listen("[::1]:" + port)
		if err != nil {
			continue // there is no IPv6 here
		}
		if !heldByOthers(taken, own) || heldByOthers(taken, own, v6) {
			t.Errorf("%s: [::1] is not told apart", network)
		}
		closeV6()
	}
	if heldByOthers(nil) || heldByOthers(net.ErrClosed) {
		t.Error("another error is of a port that is held")
	}
}
