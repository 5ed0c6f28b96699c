//go:build amd64 || arm64

package poll

import (
	"net"
	"syscall"
	"unsafe"
)

// System calls that never block are made raw: they don't tell the scheduler,
// which would cost more than the call.

const (
	spliceFlags  = 0x1 | 0x2 // SPLICE_F_MOVE | SPLICE_F_NONBLOCK
	fDupCloexec  = 1030      // F_DUPFD_CLOEXEC
	fSetPipeSize = 1031      // F_SETPIPE_SZ

	tcpKeepIdle     = 4 // seconds
	tcpKeepInterval = 5
	tcpKeepCount    = 6
)

// Read is read(2), without blocking.
func Read(fd int32, p []byte) (int, syscall.Errno) {
	n, _, errno := syscall.RawSyscall(syscall.SYS_READ, uintptr(fd), uintptr(unsafe.Pointer(&p[0])), uintptr(len(p)))
	return int(n), errno
}

// maxVectors is how many slices are read or sent at once, at most.
const maxVectors = 8

// vectorsOf returns at most maxVectors slices as the kernel has them. They are not empty.
func vectorsOf(run [][]byte) (vectors [maxVectors]syscall.Iovec, n int) {
	n = min(len(run), maxVectors)
	for i, p := range run[:n] {
		vectors[i].Base = &p[0]
		vectors[i].SetLen(len(p))
	}
	return vectors, n
}

// ReadAll is Read into several slices, one after the other. It may leave out those behind the first
// maxVectors.
func ReadAll(fd int32, run [][]byte) (int, syscall.Errno) {
	vectors, n := vectorsOf(run)
	read, _, errno := syscall.RawSyscall(syscall.SYS_READV, uintptr(fd), uintptr(unsafe.Pointer(&vectors[0])), uintptr(n))
	return int(read), errno
}

// Send writes without raising SIGPIPE.
func Send(fd int32, p []byte) (int, syscall.Errno) {
	n, _, errno := syscall.RawSyscall6(syscall.SYS_SENDTO, uintptr(fd), uintptr(unsafe.Pointer(&p[0])), uintptr(len(p)), syscall.MSG_NOSIGNAL, 0, 0)
	return int(n), errno
}

// SendAll is Send for several slices, in order, that are not empty. It may leave out those behind
// the first maxVectors.
func SendAll(fd int32, run [][]byte) (int, syscall.Errno) {
	if len(run) == 1 {
		return Send(fd, run[0])
	}
	vectors, n := vectorsOf(run)
	message := syscall.Msghdr{Iov: &vectors[0], Iovlen: uint64(n)}
	sent, _, errno := syscall.RawSyscall(syscall.SYS_SENDMSG, uintptr(fd), uintptr(unsafe.Pointer(&message)), syscall.MSG_NOSIGNAL)
	return int(sent), errno
}

// Splice moves up to most bytes from one descriptor to another, of which one is a
// pipe.
func Splice(from, to int32, most int) (int, syscall.Errno) {
	n, _, errno := syscall.RawSyscall6(syscall.SYS_SPLICE, uintptr(from), 0, uintptr(to), 0, uintptr(most), spliceFlags)
	return int(n), errno
}

// ShutdownWrite sends the end of the stream.
func ShutdownWrite(fd int32) syscall.Errno {
	_, _, errno := syscall.RawSyscall(syscall.SYS_SHUTDOWN, uintptr(fd), syscall.SHUT_WR, 0)
	return errno
}

// AtEOF reports whether the next read of fd would find the end of the stream.
func AtEOF(fd int32) bool {
	var b [1]byte
	n, _, errno := syscall.RawSyscall6(syscall.SYS_RECVFROM, uintptr(fd), uintptr(unsafe.Pointer(&b[0])), 1, syscall.MSG_PEEK|syscall.MSG_DONTWAIT, 0, 0)
	return errno == 0 && n == 0
}

// CloseFD closes fd.
func CloseFD(fd int32) { _, _, _ = syscall.RawSyscall(syscall.SYS_CLOSE, uintptr(fd), 0, 0) }

// setNoDelay has fd send small pieces at once.
func setNoDelay(fd int32) {
	on := int32(1)
	_, _, _ = syscall.RawSyscall6(syscall.SYS_SETSOCKOPT, uintptr(fd), syscall.IPPROTO_TCP, syscall.TCP_NODELAY, uintptr(unsafe.Pointer(&on)), 4, 0)
}

// ResetFD closes fd with a reset, whatever is unread or unsent.
func ResetFD(fd int32) {
	_ = syscall.SetsockoptLinger(int(fd), syscall.SOL_SOCKET, syscall.SO_LINGER, &syscall.Linger{Onoff: 1})
	CloseFD(fd)
}

// SocketError returns and clears the pending error of a socket.
func SocketError(fd int32) syscall.Errno {
	n, err := syscall.GetsockoptInt(int(fd), syscall.SOL_SOCKET, syscall.SO_ERROR)
	if err != nil {
		return 0
	}
	return syscall.Errno(n)
}

// LimitUnsent has writes to c wait while the kernel has n bytes of it that it has not sent, where c
// is a socket.
func LimitUnsent(c net.Conn, n int) {
	const notSentLowAt = 25 // TCP_NOTSENT_LOWAT, Linux 3.12
	if IsSocket(c) {
		_ = Control(c, func(fd int32) error { return syscall.SetsockoptInt(int(fd), syscall.IPPROTO_TCP, notSentLowAt, n) })
	}
}

// RoomCheck returns what reports whether a short Write to c, a socket, would return at once:
// the kernel has room for it, or it fails. It returns nil where c is no socket.
func RoomCheck(c net.Conn) func() bool {
	if !IsSocket(c) {
		return nil
	}
	return func() bool {
		room := false
		return Control(c, func(fd int32) error { room = hasRoom(fd); return nil }) != nil || room
	}
}

// hasRoom reports whether a third of the buffer for sending is free, or fd has failed.
func hasRoom(fd int32) bool {
	const out = 0x4 // POLLOUT
	p := struct {
		fd              int32
		events, revents int16
	}{fd: fd, events: out}
	var at syscall.Timespec // do not wait
	n, _, errno := syscall.RawSyscall6(syscall.SYS_PPOLL, uintptr(unsafe.Pointer(&p)), 1, uintptr(unsafe.Pointer(&at)), 0, 0, 0)
	return errno == 0 && n == 1
}

// IsSocket reports whether c is a TCP socket that TakeFD can take.
func IsSocket(c net.Conn) bool {
	switch c.(type) {
	case *Conn, *net.TCPConn:
		return true
	}
	return false
}

// IsPollable reports whether a loop can wait for c: a socket of TCP, or a Unix socket.
func IsPollable(c net.Conn) bool {
	if IsSocket(c) {
		return true
	}
	_, isUnix := c.(interface {
		SyscallConn() (syscall.RawConn, error)
		ReadMsgUnix(b, oob []byte) (n, oobn, flags int, addr *net.UnixAddr, err error)
	})
	return isUnix
}

// TakeFD takes c's socket from it: c is closed, and the descriptor belongs to the
// caller and is in no poller. After an error c is as it was.
func TakeFD(c net.Conn) (int32, error) {
	switch c := c.(type) {
	case *Conn:
		return c.take()
	case *net.TCPConn:
		fd, err := duplicate(c)
		if err == nil {
			_ = c.Close() // the duplicate lives on
		}
		return fd, err
	}
	return -1, net.ErrClosed
}

// duplicate returns a second descriptor for c's socket, which stays
// non-blocking. The first one is c's and closes with c.
func duplicate(c syscall.Conn) (int32, error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return -1, err
	}
	fd, errno := int32(-1), syscall.Errno(0)
	if err := raw.Control(func(s uintptr) {
		var n uintptr
		n, _, errno = syscall.RawSyscall(syscall.SYS_FCNTL, s, fDupCloexec, 0)
		fd = int32(n)
	}); err != nil {
		return -1, err
	}
	if errno != 0 {
		return -1, errno
	}
	return fd, nil
}

// A Pipe is a kernel buffer to splice through.
type Pipe struct{ R, W int32 }

// NewPipe makes a pipe of size bytes, or of the size that the kernel allows.
func NewPipe(size int) (Pipe, error) {
	var fds [2]int
	if err := syscall.Pipe2(fds[:], syscall.O_NONBLOCK|syscall.O_CLOEXEC); err != nil {
		return Pipe{}, err
	}
	// Beyond pipe-user-pages-soft the kernel refuses to enlarge: the pipe works all the same.
	_, _, _ = syscall.RawSyscall(syscall.SYS_FCNTL, uintptr(fds[1]), fSetPipeSize, uintptr(size))
	return Pipe{R: int32(fds[0]), W: int32(fds[1])}, nil
}

// Close closes both ends.
func (p Pipe) Close() {
	CloseFD(p.R)
	CloseFD(p.W)
}

// SetKeepAlive sets the keepalive of a socket.
func SetKeepAlive(fd int32, cfg net.KeepAliveConfig) {
	_ = syscall.SetsockoptInt(int(fd), syscall.SOL_SOCKET, syscall.SO_KEEPALIVE, 1)
	_ = syscall.SetsockoptInt(int(fd), syscall.IPPROTO_TCP, tcpKeepIdle, int(cfg.Idle.Seconds()))
	_ = syscall.SetsockoptInt(int(fd), syscall.IPPROTO_TCP, tcpKeepInterval, int(cfg.Interval.Seconds()))
	_ = syscall.SetsockoptInt(int(fd), syscall.IPPROTO_TCP, tcpKeepCount, cfg.Count)
}

// SocketMemory returns how many bytes of memory the kernel uses for a socket:
// for what has arrived and for what is to be sent.
func SocketMemory(fd int32) int64 {
	const (
		memInfo = 55 // SO_MEMINFO, Linux 4.12: the numbers of sock_diag(7)
		arrived = 0  // SK_MEMINFO_RMEM_ALLOC
		queued  = 5  // SK_MEMINFO_WMEM_QUEUED
	)
	var info [9]uint32
	size := uint32(unsafe.Sizeof(info))
	_, _, errno := syscall.RawSyscall6(syscall.SYS_GETSOCKOPT, uintptr(fd), syscall.SOL_SOCKET, memInfo, uintptr(unsafe.Pointer(&info)), uintptr(unsafe.Pointer(&size)), 0)
	if errno != 0 {
		return 0
	}
	return int64(info[arrived]) + int64(info[queued])
}

// KernelMemory is SocketMemory of a connection, and 0 where that is no socket.
func KernelMemory(c net.Conn) (n int64) {
	if !IsSocket(c) {
		return 0
	}
	_ = Control(c, func(fd int32) error {
		n = SocketMemory(fd)
		return nil
	})
	return n
}

// PendingError returns and clears the pending error of a connection that is a
// socket: the next call that uses the socket would have failed with it.
func PendingError(c net.Conn) error {
	var errno syscall.Errno
	_ = Control(c, func(fd int32) error { errno = SocketError(fd); return nil })
	if errno == 0 {
		return nil
	}
	return errno
}

// Control calls f with the descriptor of c, a socket, unless that is closed.
func Control(c net.Conn, f func(fd int32) error) error {
	switch c := c.(type) {
	case *Conn:
		return c.Control(f)
	case syscall.Conn:
		raw, err := c.SyscallConn()
		if err != nil {
			return err
		}
		var failed error
		if err := raw.Control(func(fd uintptr) { failed = f(int32(fd)) }); err != nil {
			return err
		}
		return failed
	}
	return net.ErrClosed
}

// RawConn returns the means to wait in Go's poller for c, a socket.
func RawConn(c net.Conn) (syscall.RawConn, error) {
	switch c := c.(type) {
	case *Conn:
		c.mu.Lock()
		f, err := c.wait()
		c.mu.Unlock()
		if err != nil {
			return nil, err
		}
		raw, err := f.SyscallConn()
		return &rawConn{raw, c}, fileError(err)
	case syscall.Conn:
		return c.SyscallConn()
	}
	return nil, net.ErrClosed
}

// A rawConn reports errors as a Conn does.
type rawConn struct {
	syscall.RawConn
	c *Conn
}

func (r *rawConn) Read(f func(fd uintptr) bool) error {
	if err := r.RawConn.Read(f); err != nil {
		return r.c.waitError(err)
	}
	return nil
}
