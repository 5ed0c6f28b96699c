package localuser

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"

	"golang.org/x/sys/unix"

	"culvert.dev/internal/unixsocket"
)

// Supported reports whether User works on this system.
const Supported = true

// The messages of sock_diag(7), linux/inet_diag.h. The kernel's own byte order is that of
// all but ports and addresses.
const (
	sockDiagByFamily = 20
	headerLen        = 16          // struct nlmsghdr
	requestLen       = 8 + idLen   // struct inet_diag_req_v2
	idLen            = 48          // struct inet_diag_sockid: ports 2+2, addresses 16+16, interface 4, cookie 8
	answerLen        = 72          // struct inet_diag_msg
	uidOffset        = 4 + 48 + 12 // in inet_diag_msg
	inodeOffset      = uidOffset + 4
)

var (
	errGone    = errors.New("the socket is gone, or no process has it any more")
	errForeign = errors.New("its user is not known in the user namespace of this process")
)

// User returns the user who made the socket at client, an address of loopback, which is
// connected to server. The socket must be open in a process at this moment: one that was
// closed has no user, whatever it still sends.
func User(client, server netip.AddrPort) (uid uint32, err error) {
	if !client.Addr().Unmap().IsLoopback() {
		return 0, errNotLoopback(client)
	}
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, unix.NETLINK_SOCK_DIAG)
	if err != nil {
		return 0, os.NewSyscallError("socket", err)
	}
	defer unix.Close(fd)
	// The kernel answers within the call of sendto; the timeout is for nothing but a kernel
	// that does not.
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: 1}); err != nil {
		return 0, os.NewSyscallError("setsockopt", err)
	}
	if err := unix.Sendto(fd, request(client, server), 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return 0, os.NewSyscallError("sendto", err)
	}
	answer := make([]byte, 4096)
	for {
		n, _, err := unix.Recvfrom(fd, answer, 0)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return 0, os.NewSyscallError("recvfrom", err)
		}
		if uid, err = parseAnswer(answer[:n], client, server); err == nil && unixsocket.IsUnmapped(uid) {
			err = errForeign
		}
		return uid, err
	}
}

// request asks for the one socket of client. Its own address is the source: this is the
// other end of the connection that was accepted here.
func request(client, server netip.AddrPort) []byte {
	b := make([]byte, headerLen+requestLen)
	ne := binary.NativeEndian
	ne.PutUint32(b[0:], uint32(len(b)))
	ne.PutUint16(b[4:], sockDiagByFamily)
	ne.PutUint16(b[6:], unix.NLM_F_REQUEST)
	ne.PutUint32(b[8:], 1) // sequence
	r := b[headerLen:]
	r[0], r[1] = unix.AF_INET, unix.IPPROTO_TCP
	if client.Addr().Unmap().Is6() {
		r[0] = unix.AF_INET6
	}
	ne.PutUint32(r[4:], ^uint32(0)) // states: all
	putID(r[8:], client, server)
	ne.PutUint64(r[8+40:], ^uint64(0)) // INET_DIAG_NOCOOKIE
	return b
}

// putID writes ports and addresses of an inet_diag_sockid.
func putID(b []byte, client, server netip.AddrPort) {
	binary.BigEndian.PutUint16(b[0:], client.Port())
	binary.BigEndian.PutUint16(b[2:], server.Port())
	copy(b[4:20], client.Addr().Unmap().AsSlice())
	copy(b[20:36], server.Addr().Unmap().AsSlice())
}

// parseAnswer returns the user of the socket of client in an answer of the kernel.
func parseAnswer(b []byte, client, server netip.AddrPort) (uid uint32, err error) {
	if len(b) < headerLen {
		return 0, fmt.Errorf("an answer of %d bytes", len(b))
	}
	ne := binary.NativeEndian
	body := b[headerLen:]
	switch kind := ne.Uint16(b[4:]); {
	case kind == unix.NLMSG_ERROR && len(body) >= 4:
		if errno := unix.Errno(-int32(ne.Uint32(body))); errno != unix.ENOENT {
			return 0, os.NewSyscallError("sock_diag", errno)
		}
		return 0, errGone
	case kind != sockDiagByFamily || len(body) < answerLen:
		return 0, fmt.Errorf("an answer of type %d with %d bytes", kind, len(body))
	}
	var want [36]byte
	putID(want[:], client, server)
	if body[0] == unix.AF_INET6 { // also of a socket that sees IPv4 by addresses such as ::ffff:127.0.0.1, as those of Java do
		from, to := client.Addr().As16(), server.Addr().As16()
		copy(want[4:20], from[:])
		copy(want[20:36], to[:])
	}
	if string(body[4:4+36]) != string(want[:]) {
		return 0, errors.New("an answer about another socket")
	}
	if ne.Uint32(body[inodeOffset:]) == 0 { // then its user is 0, too: of none
		return 0, errGone
	}
	return ne.Uint32(body[uidOffset:]), nil
}
