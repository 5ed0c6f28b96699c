//go:build linux

package nft

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"sync"

	"golang.org/x/sys/unix"
)

// A Conn is a netlink socket to nf_tables, in the network namespace of the thread that opened
// it. It has the tables that it owns.
type Conn struct {
	mu sync.Mutex // guards fd, and is held over each transaction
	fd int        // -1 once closed
}

// Errors that callers tell apart. Each says what to do.
var (
	ErrNotPermitted = errors.New("the process lacks CAP_NET_ADMIN in this network namespace; run as root, or give it the capability")
	ErrNotSupported = errors.New("this kernel has no nf_tables (Linux 5.12 or later with CONFIG_NF_TABLES and CONFIG_NF_TABLES_INET); load the module nf_tables")
	ErrOwned        = errors.New("another process owns the table; stop that process")
)

// Open opens a Conn. The caller closes it.
func Open() (*Conn, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.NETLINK_NETFILTER)
	if err != nil {
		if errors.Is(err, unix.EPROTONOSUPPORT) {
			err = ErrNotSupported
		}
		return nil, fmt.Errorf("open a socket to nftables: %w", err)
	}
	c := &Conn{fd: fd}
	if err := unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		_ = c.Close()
		return nil, fmt.Errorf("open a socket to nftables: %w", err)
	}
	// An answer is short then, and says more. Older kernels do without.
	_ = unix.SetsockoptInt(fd, unix.SOL_NETLINK, unix.NETLINK_CAP_ACK, 1)
	_ = unix.SetsockoptInt(fd, unix.SOL_NETLINK, unix.NETLINK_EXT_ACK, 1)
	return c, nil
}

// Close closes c, and so deletes the tables that it owns.
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

// Replace makes t, in place of a table that has its name.
func (c *Conn) Replace(t *Table) error {
	var b batch
	b.begin()
	b.replace(t)
	b.end()
	return c.commit(&b)
}

// Delete deletes a table. One that is not there is an error that wraps ENOENT.
func (c *Conn) Delete(table string) error {
	var b batch
	b.begin()
	b.remove(table)
	b.end()
	return c.commit(&b)
}

// A SetChange changes a set without Ranges.
type SetChange struct {
	Set            string
	Removed, Added []netip.Addr
}

// ChangeSets changes sets of a table, all at once.
func (c *Conn) ChangeSets(table string, changes ...SetChange) error {
	var b batch
	b.begin()
	elements := func(addrs []netip.Addr) (all []element) {
		for _, a := range addrs {
			all = append(all, element{a, false})
		}
		return all
	}
	for _, ch := range changes {
		b.elements(table, ch.Set, unix.NFT_MSG_DELSETELEM, elements(ch.Removed))
		b.elements(table, ch.Set, unix.NFT_MSG_NEWSETELEM, elements(ch.Added))
	}
	if len(b.whats) == 1 {
		return nil
	}
	b.end()
	return c.commit(&b)
}

// commit sends b. The kernel has done it, or nothing of it, when sendto returns, and has
// queued its answers.
func (c *Conn) commit(b *batch) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.fd < 0 {
		return errors.New("nftables: the socket is closed")
	}
	// The message before the end is answered where all is well.
	b.acknowledge(len(b.whats) - 1)
	// The limit of the system, wmem_max, is below what some batches have. Passing it takes
	// CAP_NET_ADMIN in the first user namespace.
	if unix.SetsockoptInt(c.fd, unix.SOL_SOCKET, unix.SO_SNDBUFFORCE, 2*len(b.buf)+1<<16) != nil {
		_ = unix.SetsockoptInt(c.fd, unix.SOL_SOCKET, unix.SO_SNDBUF, 2*len(b.buf)+1<<16)
	}
	switch err := unix.Sendto(c.fd, b.buf, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); {
	case errors.Is(err, unix.EMSGSIZE), errors.Is(err, unix.ENOBUFS):
		return fmt.Errorf("nftables: %d bytes of rules are more than the kernel takes at once: raise net.core.wmem_max: %w", len(b.buf), err)
	case err != nil:
		return fmt.Errorf("nftables: %w", err)
	}
	return c.answer(b)
}

// acknowledge asks for an answer to the n-th message, from 1.
func (b *batch) acknowledge(n int) {
	at := 0
	for ; n > 1; n-- {
		at += int(binary.NativeEndian.Uint32(b.buf[at:]))
	}
	b.buf[at+6] |= unix.NLM_F_ACK
}

// answer reads the answers to b, and returns the first error.
func (c *Conn) answer(b *batch) error {
	var failed error
	answered := false
	buf := make([]byte, 1<<16)
	for {
		n, _, err := unix.Recvfrom(c.fd, buf, 0)
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case errors.Is(err, unix.EAGAIN):
			if failed == nil && !answered {
				return errors.New("nftables: the kernel has not answered")
			}
			return failed
		case err != nil && !errors.Is(err, unix.ENOBUFS): // with ENOBUFS some answers are lost, and the first ones are there
			return fmt.Errorf("nftables: read the answer: %w", err)
		}
		for rest := buf[:max(n, 0)]; len(rest) >= unix.NLMSG_HDRLEN; {
			size := int(binary.NativeEndian.Uint32(rest))
			if size < unix.NLMSG_HDRLEN || size > len(rest) {
				return fmt.Errorf("nftables: the kernel's answer is cut off: %d of %d bytes", len(rest), size)
			}
			if binary.NativeEndian.Uint16(rest[4:]) == unix.NLMSG_ERROR && size >= unix.NLMSG_HDRLEN+4 {
				errno := unix.Errno(-int32(binary.NativeEndian.Uint32(rest[unix.NLMSG_HDRLEN:])))
				answered = true
				if errno != 0 && failed == nil {
					failed = b.failure(binary.NativeEndian.Uint32(rest[8:]), errno)
				}
			}
			rest = rest[min(len(rest), (size+3)&^3):]
		}
	}
}

// failure says what the kernel did not do.
func (b *batch) failure(seq uint32, errno unix.Errno) error {
	what := "change the tables"
	if seq >= 1 && int(seq) <= len(b.whats) {
		what = b.whats[seq-1]
	}
	switch {
	case errno == unix.EPERM && seq <= 1:
		return fmt.Errorf("nftables: %w", ErrNotPermitted)
	case errno == unix.EPERM:
		return fmt.Errorf("nftables: %s: %w", what, ErrOwned)
	case seq <= 1 && (errno == unix.EOPNOTSUPP || errno == unix.EINVAL):
		return fmt.Errorf("nftables: %w", ErrNotSupported)
	case errno == unix.ENOENT && seq > 1 && len(b.whats) > 3: // an expression of a module that is not there
		return fmt.Errorf("nftables: %s: the kernel lacks a part of it (modules nft_redir, nft_tproxy, nft_socket, nft_fib_inet, nft_reject_inet): %w", what, errno)
	}
	return fmt.Errorf("nftables: %s: %w", what, errno)
}
