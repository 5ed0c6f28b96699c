//go:build amd64 || arm64

package tunnel_test

import (
	"fmt"
	"net"
	"runtime"
	"syscall"
	"testing"
	"time"

	"culvert.dev/tunnel"
)

// A loopRig has what all schedules share.
type loopRig struct {
	listeners [4]*net.TCPListener
	relays    [2]*tunnel.Relay // with pipes, and with one
	data      [2][]byte        // what each side sends
	buf       []byte
	runs      uint32

	fds, goroutines int // at rest
}

const loopData = 8 << 20 // bytes a side sends at most

func newLoopRig(f *testing.F) *loopRig {
	rig := &loopRig{data: [2][]byte{random(loopData, 20), random(loopData, 21)}, buf: make([]byte, 1<<20)}
	rig.relays[0] = &tunnel.Relay{Loops: &tunnel.Loops{Budget: &tunnel.Budget{Limit: 1000}}}
	rig.relays[1] = &tunnel.Relay{Loops: &tunnel.Loops{Budget: &tunnel.Budget{Limit: 34}}} // 32 are never for pipes
	for i, buffers := range [4][2]int{{}, {256 << 10, 8 << 10}, {8 << 10, 8 << 10}, {256 << 10, 256 << 10}} {
		lc := net.ListenConfig{KeepAlive: -1, Control: func(_, _ string, c syscall.RawConn) error {
			return c.Control(func(fd uintptr) { setBuffers(int(fd), buffers) })
		}}
		ln, err := lc.Listen(f.Context(), "tcp", "127.0.0.1:0")
		if err != nil {
			f.Fatal(err)
		}
		rig.listeners[i] = ln.(*net.TCPListener)
	}
	f.Cleanup(func() {
		for _, ln := range rig.listeners {
			_ = ln.Close()
		}
		for _, r := range rig.relays {
			_ = r.Close()
			_ = r.Loops.Close()
		}
	})
	return rig
}

// setBuffers sets how much the socket receives and sends, before it is
// connected; 0 leaves it to the kernel.
func setBuffers(fd int, b [2]int) {
	for i, opt := range [2]int{syscall.SO_RCVBUF, syscall.SO_SNDBUF} {
		if b[i] > 0 {
			_ = syscall.SetsockoptInt(fd, syscall.SOL_SOCKET, opt, b[i])
		}
	}
}

// connect returns both ends of a fresh connection. The outer one blocks, but
// not for ever. Each comes from an address of its own, or the ports would run out.
func (rig *loopRig) connect(which int, buffers [2]int) (fd int, inner net.Conn, err error) {
	ln := rig.listeners[which]
	fd, err = syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, nil, err
	}
	setBuffers(fd, buffers)
	_ = syscall.SetsockoptInt(fd, syscall.IPPROTO_TCP, syscall.TCP_NODELAY, 1)
	_ = syscall.SetsockoptTimeval(fd, syscall.SOL_SOCKET, syscall.SO_RCVTIMEO, &syscall.Timeval{Sec: int64(patience / time.Second)})
	const bindAddressNoPort = 24 // IP_BIND_ADDRESS_NO_PORT
	_ = syscall.SetsockoptInt(fd, syscall.IPPROTO_IP, bindAddressNoPort, 1)
	from := &syscall.SockaddrInet4{Addr: [4]byte{127, 2, byte(rig.runs >> 8), byte(rig.runs)}}
	to := &syscall.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}, Port: ln.Addr().(*net.TCPAddr).Port}
	if err = syscall.Bind(fd, from); err == nil {
		err = syscall.Connect(fd, to)
	}
	if err == nil {
		inner, err = ln.Accept()
	}
	if err != nil {
		_ = syscall.Close(fd)
	}
	return fd, inner, err
}

// leftovers returns an error if more descriptors or goroutines are there than
// at rest.
func (rig *loopRig) leftovers() error {
	if rig.fds == 0 {
		return nil
	}
	goroutines, fds := runtime.NumGoroutine(), rig.descriptors()
	for deadline := time.Now().Add(patience / 10); goroutines > rig.goroutines || fds > rig.fds; {
		if time.Now().After(deadline) {
			err := fmt.Errorf("%d goroutines and %d descriptors are left, want %d and %d", goroutines, fds, rig.goroutines, rig.fds)
			rig.goroutines, rig.fds = goroutines, fds // the next schedule is to be told only of its own
			return err
		}
		time.Sleep(100 * time.Microsecond)
		goroutines, fds = runtime.NumGoroutine(), rig.descriptors()
	}
	return nil
}

// descriptors counts this process's, less those of the pipes that the Relays keep.
func (rig *loopRig) descriptors() int {
	pipes := func() int { return int(rig.relays[0].Loops.Budget.Used() + rig.relays[1].Loops.Budget.Used()) }
	for {
		before := pipes()
		n := 0
		fd, err := syscall.Open("/proc/self/fd", syscall.O_RDONLY|syscall.O_DIRECTORY|syscall.O_CLOEXEC, 0)
		if err != nil {
			return -1
		}
		for {
			m, err := syscall.ReadDirent(fd, rig.buf[:32<<10])
			if m <= 0 || err != nil {
				break
			}
			_, k, _ := syscall.ParseDirent(rig.buf[:m], -1, nil)
			n += k
		}
		_ = syscall.Close(fd)
		if pipes() == before {
			return n - before
		}
	}
}
