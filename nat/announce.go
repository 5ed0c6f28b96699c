package nat

import (
	"log/slog"
	"math/rand/v2"
	"net"
	"net/netip"
	"runtime/debug"
	"sync"
	"time"
)

// ListenAnnouncements opens a socket that receives what routers announce to all hosts of the network
// of an interface; "" means the kernel's choice. Several programs may have one: RFC 6886 section 3.2.1.
func ListenAnnouncements(ifname string) (net.PacketConn, error) {
	var in *net.Interface
	if ifname != "" {
		var err error
		if in, err = net.InterfaceByName(ifname); err != nil {
			return nil, err
		}
	}
	return net.ListenMulticastUDP("udp4", in, &net.UDPAddr{IP: net.IPv4(224, 0, 0, 1), Port: announcementPort})
}

// isAnnouncement reports whether b is an announcement of a router: of its outside address by
// NAT-PMP (RFC 6886 section 3.2.1), or ANNOUNCE of PCP (RFC 6887 section 14.1.2).
func isAnnouncement(b []byte) bool {
	if r, err := parseNATPMP(b); err == nil {
		return r.opcode == natpmpAddress && r.result == 0
	}
	r, err := parsePCP(b)
	return err == nil && r.opcode == pcpAnnounce && r.result == 0
}

// announcements receives those of one router. Their content is not trusted: they only have the
// router asked, and not more often than every announceDelay.
type announcements struct {
	log  *slog.Logger
	conn net.PacketConn
	wg   sync.WaitGroup
	quit chan struct{}
	kick chan struct{}
}

// received returns a channel that gets an element when there was an announcement; it is nil while
// there is no socket.
func (a *announcements) received() <-chan struct{} { return a.kick }

// start receives the announcements of a router, in place of those of another one.
func (a *announcements) start(listen func(ifname string) (net.PacketConn, error), route Route) error {
	a.stop()
	conn, err := listen(route.Interface)
	if err != nil {
		return err
	}
	a.conn, a.quit, a.kick = conn, make(chan struct{}), make(chan struct{}, 1)
	quit, kick := a.quit, a.kick
	a.wg.Go(func() { a.read(conn, netip.AddrPortFrom(route.Router, routerPort), quit, kick) })
	return nil
}

// read reads conn until it is closed.
func (a *announcements) read(conn net.PacketConn, router netip.AddrPort, quit <-chan struct{}, kick chan<- struct{}) {
	defer func() {
		if v := recover(); v != nil && a.log != nil {
			a.log.Error("panic in an announcement of the router", "panic", v, "stack", string(debug.Stack()))
		}
	}()
	b := make([]byte, maxMessage+1)
	for {
		n, from, err := conn.ReadFrom(b)
		if err != nil {
			return
		}
		at, ok := from.(*net.UDPAddr)
		if !ok || netip.AddrPortFrom(at.AddrPort().Addr().Unmap(), at.AddrPort().Port()) != router || !isAnnouncement(b[:n]) {
			continue
		}
		// All hosts of the network receive it at the same time: each waits for a random time.
		for _, wait := range []time.Duration{rand.N(announceDelay), announceDelay} {
			select {
			case <-quit:
				return
			case <-time.After(wait):
			}
			if wait != announceDelay {
				select {
				case kick <- struct{}{}:
				default:
				}
			}
		}
	}
}

// stop closes the socket.
func (a *announcements) stop() {
	if a.conn == nil {
		return
	}
	close(a.quit)
	_ = a.conn.Close()
	a.wg.Wait()
	a.conn, a.kick = nil, nil
}
