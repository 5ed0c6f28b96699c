package poll

import (
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"os"
	"syscall"
	"unsafe"
)

const (
	originalDestination = 80 // SO_ORIGINAL_DST and IP6T_SO_ORIGINAL_DST
	transparent6        = 75 // IPV6_TRANSPARENT
)

// OriginalDestination returns where the client of c, a socket, connected to, if a rule of this
// host has led it here instead.
func OriginalDestination(c net.Conn) (dst netip.AddrPort, ok bool) {
	_ = onSocket(c, func(fd int) error {
		sa, err := syscall.Getsockname(fd)
		if err != nil {
			return err
		}
		local, is6 := sockaddrOf(sa)
		level, option := syscall.IPPROTO_IP, syscall.IP_TRANSPARENT
		if is6 {
			level, option = syscall.IPPROTO_IPV6, transparent6
		}
		if on, err := syscall.GetsockoptInt(fd, level, option); err == nil && on != 0 {
			dst, ok = local, true // TPROXY leaves the addresses as they are
			return nil
		}
		if local.Addr().Is4() { // also of a socket of IPv6
			level = syscall.IPPROTO_IP
		}
		if dst, err = originalDst(fd, level); err == nil {
			ok = dst != local
		}
		return err
	})
	if !ok {
		return netip.AddrPort{}, false
	}
	return dst, true
}

// originalDst asks connection tracking.
func originalDst(fd, level int) (netip.AddrPort, error) {
	// It has room for either family, and is the only such option of package syscall.
	info, err := syscall.GetsockoptIPv6MTUInfo(fd, level, originalDestination)
	if err != nil {
		return netip.AddrPort{}, os.NewSyscallError("getsockopt", err)
	}
	b := (*[syscall.SizeofSockaddrInet6]byte)(unsafe.Pointer(&info.Addr))
	port := binary.BigEndian.Uint16(b[2:])
	if info.Addr.Family == syscall.AF_INET {
		return netip.AddrPortFrom(netip.AddrFrom4([4]byte(b[4:8])), port), nil
	}
	return netip.AddrPortFrom(netip.AddrFrom16(info.Addr.Addr).Unmap(), port), nil
}

func sockaddrOf(sa syscall.Sockaddr) (a netip.AddrPort, is6 bool) {
	switch sa := sa.(type) {
	case *syscall.SockaddrInet4:
		return netip.AddrPortFrom(netip.AddrFrom4(sa.Addr), uint16(sa.Port)), false
	case *syscall.SockaddrInet6:
		return netip.AddrPortFrom(netip.AddrFrom16(sa.Addr).Unmap(), uint16(sa.Port)), true
	}
	return netip.AddrPort{}, false
}

// onSocket calls f with the descriptor of c.
func onSocket(c net.Conn, f func(fd int) error) error {
	switch c := c.(type) {
	case interface {
		Control(func(fd int32) error) error
	}: // a Conn
		return c.Control(func(fd int32) error { return f(int(fd)) })
	case syscall.Conn:
		raw, err := c.SyscallConn()
		if err != nil {
			return err
		}
		var failed error
		if err := raw.Control(func(fd uintptr) { failed = f(int(fd)) }); err != nil {
			return err
		}
		return failed
	}
	return net.ErrClosed
}

// Transparent has a listening socket take connections to any address that TPROXY hands it. It
// is the Control of a net.ListenConfig, and needs CAP_NET_ADMIN or CAP_NET_RAW.
func Transparent(network, _ string, c syscall.RawConn) error {
	level, option := syscall.IPPROTO_IP, syscall.IP_TRANSPARENT
	if network == "tcp6" {
		level, option = syscall.IPPROTO_IPV6, transparent6
	}
	return setOption(c, level, option, 1, "IP_TRANSPARENT")
}

// SetMark returns the Control of a net.Dialer that gives its sockets a mark. It needs
// CAP_NET_ADMIN or CAP_NET_RAW.
func SetMark(mark uint32) func(network, address string, c syscall.RawConn) error {
	return func(_, _ string, c syscall.RawConn) error {
		return setOption(c, syscall.SOL_SOCKET, syscall.SO_MARK, int(mark), "SO_MARK")
	}
}

func setOption(c syscall.RawConn, level, option, value int, name string) (err error) {
	if failed := c.Control(func(fd uintptr) { err = syscall.SetsockoptInt(int(fd), level, option, value) }); failed != nil {
		return failed
	}
	return optionError(name, err)
}

func optionError(name string, err error) error {
	if err != nil {
		return fmt.Errorf("set %s on a socket: %w: it needs CAP_NET_ADMIN", name, err)
	}
	return nil
}
