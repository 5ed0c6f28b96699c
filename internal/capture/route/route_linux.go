package route

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"

	"golang.org/x/sys/unix"
)

// A Conn is a socket to rtnetlink, in the network namespace of the thread that opened it.
type Conn struct {
	mu sync.Mutex // guards fd, and is held over each request
	fd int        // -1 once closed
}

// Open opens a Conn. The caller closes it.
func Open() (*Conn, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("open a socket to rtnetlink: %w", err)
	}
	return &Conn{fd: fd}, nil
}

// Close closes c. What it has added stays.
func (c *Conn) Close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.fd < 0 {
		return nil
	}
	err := unix.Close(c.fd)
	c.fd = -1
	return err
}

// SetUp takes an interface up, in the network namespace of the thread.
func (c *Conn) SetUp(name string) error {
	dev, err := net.InterfaceByName(name)
	if err != nil {
		return fmt.Errorf("find the interface %s: %w", name, err)
	}
	b := []byte{unix.AF_UNSPEC, 0, 0, 0} // struct ifinfomsg
	b = binary.NativeEndian.AppendUint32(b, uint32(dev.Index))
	b = binary.NativeEndian.AppendUint32(b, unix.IFF_UP)
	b = binary.NativeEndian.AppendUint32(b, unix.IFF_UP) // the only flag to change
	return c.request("take up the interface "+name, unix.RTM_NEWLINK, 0, b)
}

// Loopback is the number of the interface lo, in every network namespace.
const Loopback = 1

// A Route leads to the interface lo.
type Route struct {
	To    netip.Prefix
	Local bool       // this host takes the packets as its own
	Table uint32     // 0 means the main one
	From  netip.Addr // that connections begin from; invalid leaves it to the system
}

func (r Route) message() []byte {
	kind, scope, table := byte(unix.RTN_UNICAST), byte(unix.RT_SCOPE_LINK), r.Table
	if r.Local {
		kind, scope = unix.RTN_LOCAL, unix.RT_SCOPE_HOST
	}
	if table == 0 {
		table = unix.RT_TABLE_MAIN
	}
	// struct rtmsg; the attribute has the table
	b := []byte{family(r.To.Addr()), byte(r.To.Bits()), 0, 0, unix.RT_TABLE_UNSPEC, unix.RTPROT_STATIC, scope, kind, 0, 0, 0, 0}
	b = attribute(b, unix.RTA_DST, r.To.Masked().Addr().AsSlice())
	b = attribute(b, unix.RTA_OIF, binary.NativeEndian.AppendUint32(nil, Loopback))
	b = attribute(b, unix.RTA_TABLE, binary.NativeEndian.AppendUint32(nil, table))
	if r.From.IsValid() {
		b = attribute(b, unix.RTA_PREFSRC, r.From.AsSlice())
	}
	return b
}

// AddRoute adds r. One that is there already is no error.
func (c *Conn) AddRoute(r Route) error {
	err := c.request(fmt.Sprintf("add a route to %s", r.To), unix.RTM_NEWROUTE, unix.NLM_F_CREATE|unix.NLM_F_EXCL, r.message())
	if errors.Is(err, unix.EEXIST) {
		return nil
	}
	return err
}

// DeleteRoute deletes r. One that is not there is no error.
func (c *Conn) DeleteRoute(r Route) error {
	err := c.request(fmt.Sprintf("delete the route to %s", r.To), unix.RTM_DELROUTE, 0, r.message())
	if errors.Is(err, unix.ESRCH) || errors.Is(err, unix.ENOENT) || NoFamily(err) {
		return nil
	}
	return err
}

// A Rule has packets with a mark routed by a table.
type Rule struct {
	IPv6     bool
	Mark     uint32
	Table    uint32
	Priority uint32 // lower ones come first; without one the kernel adds a rule again that is there
}

func (r Rule) message() []byte {
	f := byte(unix.AF_INET)
	if r.IPv6 {
		f = unix.AF_INET6
	}
	// struct fib_rule_hdr; the attribute has the table
	b := []byte{f, 0, 0, 0, unix.RT_TABLE_UNSPEC, 0, 0, unix.FR_ACT_TO_TBL, 0, 0, 0, 0}
	b = attribute(b, unix.FRA_FWMARK, binary.NativeEndian.AppendUint32(nil, r.Mark))
	b = attribute(b, unix.FRA_TABLE, binary.NativeEndian.AppendUint32(nil, r.Table))
	return attribute(b, unix.FRA_PRIORITY, binary.NativeEndian.AppendUint32(nil, r.Priority))
}

// AddRule adds r. One that is there already is no error.
func (c *Conn) AddRule(r Rule) error {
	err := c.request("add a rule of routing", unix.RTM_NEWRULE, unix.NLM_F_CREATE|unix.NLM_F_EXCL, r.message())
	if errors.Is(err, unix.EEXIST) {
		return nil
	}
	return err
}

// DeleteRule deletes r. One that is not there is no error.
func (c *Conn) DeleteRule(r Rule) error {
	err := c.request("delete a rule of routing", unix.RTM_DELRULE, 0, r.message())
	if errors.Is(err, unix.ENOENT) || NoFamily(err) {
		return nil
	}
	return err
}

// NoFamily reports whether err says that the system lacks the family of addresses, such as
// IPv6, or has turned it off.
func NoFamily(err error) bool {
	// EACCES is by disable_ipv6. Who lacks CAP_NET_ADMIN gets EPERM.
	return errors.Is(err, unix.EAFNOSUPPORT) || errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.EACCES)
}

func family(a netip.Addr) byte {
	if a.Is4() {
		return unix.AF_INET
	}
	return unix.AF_INET6
}

func attribute(b []byte, kind uint16, value []byte) []byte {
	b = binary.NativeEndian.AppendUint16(b, uint16(4+len(value)))
	b = binary.NativeEndian.AppendUint16(b, kind)
	b = append(b, value...)
	for len(b)%4 != 0 {
		b = append(b, 0)
	}
	return b
}

// request sends one message to rtnetlink and reads the answer.
func (c *Conn) request(what string, kind, flags uint16, body []byte) error {
	fail := func(err error) error { return fmt.Errorf("%s: %w", what, err) }
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.fd < 0 {
		return fail(net.ErrClosed)
	}
	m := binary.NativeEndian.AppendUint32(nil, uint32(unix.NLMSG_HDRLEN+len(body)))
	m = binary.NativeEndian.AppendUint16(m, kind)
	m = binary.NativeEndian.AppendUint16(m, unix.NLM_F_REQUEST|unix.NLM_F_ACK|flags)
	m = append(m, 1, 0, 0, 0, 0, 0, 0, 0) // sequence and port
	if err := unix.Sendto(c.fd, append(m, body...), 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return fail(err)
	}
	answer := make([]byte, 4096)
	n, _, err := unix.Recvfrom(c.fd, answer, 0)
	if err != nil {
		return fail(err)
	}
	if n < unix.NLMSG_HDRLEN+4 || binary.NativeEndian.Uint16(answer[4:]) != unix.NLMSG_ERROR {
		return fail(errors.New("the kernel's answer is not one of rtnetlink"))
	}
	if errno := unix.Errno(-int32(binary.NativeEndian.Uint32(answer[unix.NLMSG_HDRLEN:]))); errno != 0 {
		return fail(errno)
	}
	return nil
}
