//go:build linux

package main

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"net/netip"
	"os"
	"syscall"
	"time"
)

const chunk = 256 << 10 // bytes of a bulk write

// A backend serves all connections from one event loop.
type backend struct {
	poll      *poller
	listeners map[int]bool
	conns     []*backendConn // by descriptor
	buf       []byte
	zeros     []byte
}

type backendConn struct {
	head  []byte // of an opening that came in pieces
	state byte   // a command, 0 before it, stateEnding after the last byte
	count uint64
	until time.Time
}

const stateEnding = 'x'

// backendMain listens on eight loopback addresses and one port, prints the
// port, and serves until its standard input ends.
func backendMain() error {
	poll, err := newPoller()
	if err != nil {
		return err
	}
	b := &backend{poll: poll, listeners: make(map[int]bool), buf: make([]byte, 64<<10), zeros: make([]byte, chunk)}
	var port uint16
	for i := range addresses {
		var fd int
		fd, port, err = listenFD(netip.AddrPortFrom(netip.AddrFrom4(loopback(i)), port))
		if err != nil {
			return err
		}
		b.listeners[fd] = true
		b.poll.add(fd, syscall.EPOLLIN)
	}
	if err := serveDatagrams(port); err != nil {
		return err
	}
	fmt.Println(port)
	b.poll.add(int(os.Stdin.Fd()), syscall.EPOLLIN)
	for {
		for _, ev := range b.poll.wait(-1) {
			fd := int(ev.Fd)
			switch {
			case fd == 0:
				return nil
			case b.listeners[fd]:
				b.accept(fd)
			default:
				b.serve(fd, b.conns[fd])
			}
		}
	}
}

func (b *backend) accept(listener int) {
	for {
		fd, errno := acceptFD(listener)
		if errno != 0 {
			return
		}
		noDelay(fd)
		for fd >= len(b.conns) {
			b.conns = append(b.conns, nil)
		}
		b.conns[fd] = &backendConn{}
		b.poll.add(fd, syscall.EPOLLIN)
	}
}

func (b *backend) close(fd int) {
	b.conns[fd] = nil
	closeFD(fd)
}

func (b *backend) serve(fd int, c *backendConn) {
	if c == nil {
		return // closed by an earlier event of the same batch
	}
	switch c.state {
	case cmdDownload:
		b.send(fd, c)
	case cmdUpload:
		b.count(fd, c)
	default:
		n, errno := readFD(fd, b.buf)
		switch {
		case errno == syscall.EAGAIN:
		case errno != 0 || n <= 0:
			b.close(fd)
		case c.state == 0:
			b.open(fd, c, b.buf[:n])
		case c.state == cmdEcho:
			b.echo(fd, b.buf[:n])
		}
	}
}

// open takes the hello and the command off the start of the stream.
func (b *backend) open(fd int, c *backendConn, p []byte) {
	if c.head != nil {
		p = append(c.head, p...)
	}
	p, whole := b.unwrapped(fd, p)
	end := helloLen(p) + commandLen
	if !whole || len(p) < 5 || len(p) < end {
		c.head = append([]byte(nil), p...)
		return
	}
	c.head = nil
	command, rest := p[end-commandLen:end], p[end:]
	arg := binary.BigEndian.Uint64(command[8:])
	c.state = command[0]
	switch c.state {
	case cmdEcho:
		if len(rest) > 0 {
			b.echo(fd, rest)
		}
	case cmdUpload:
		c.count = uint64(len(rest))
	case cmdStall:
		b.poll.mod(fd, 0) // its end is still an event
	case cmdDownload:
		c.until = time.Now().Add(time.Duration(arg) * time.Millisecond)
		b.poll.mod(fd, syscall.EPOLLOUT)
	default:
		fmt.Fprintf(os.Stderr, "bench: the backend got the command %q: a proxy changed the stream\n", c.state)
		b.close(fd)
	}
}

// unwrapped returns p without what a proxy may put before the stream: a PROXY
// header, version 2, or a CONNECT, which is answered. It is false where p is
// not all of that.
func (b *backend) unwrapped(fd int, p []byte) ([]byte, bool) {
	const head = 16 // bytes, the last two of them the length of the rest
	switch {
	case len(p) > 0 && p[0] == '\r':
		if len(p) < head || len(p) < head+int(binary.BigEndian.Uint16(p[head-2:])) {
			return p, false
		}
		return p[head+int(binary.BigEndian.Uint16(p[head-2:])):], true
	case len(p) > 0 && p[0] == 'C':
		_, rest, whole := bytes.Cut(p, []byte("\r\n\r\n"))
		if !whole {
			return p, false
		}
		writeFD(fd, []byte("HTTP/1.1 200 OK\r\n\r\n"))
		return rest, true
	}
	return p, true
}

// echo sends back what fits a socket buffer; more is never asked of it.
func (b *backend) echo(fd int, p []byte) {
	if n, _ := writeFD(fd, p); n != len(p) {
		b.close(fd)
	}
}

func (b *backend) send(fd int, c *backendConn) {
	if _, errno := writeFD(fd, b.zeros); errno != 0 && errno != syscall.EAGAIN {
		b.close(fd)
		return
	}
	if time.Now().After(c.until) {
		_ = syscall.Shutdown(fd, syscall.SHUT_WR)
		c.state = stateEnding
		b.poll.mod(fd, syscall.EPOLLIN)
	}
}

func (b *backend) count(fd int, c *backendConn) {
	n, errno := dropFD(fd, 1<<20)
	switch {
	case errno == syscall.EAGAIN:
	case errno != 0:
		b.close(fd)
	case n == 0:
		_, _ = writeFD(fd, binary.BigEndian.AppendUint64(nil, c.count))
		b.close(fd)
	default:
		c.count += uint64(n)
	}
}
