//go:build linux

package main

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"
)

// A network is a network namespace without a name. It ends with its last
// process and socket.
type network struct {
	calls chan func()
	done  sync.WaitGroup
}

func newNetwork() (*network, error) {
	n := &network{calls: make(chan func())}
	made := make(chan error)
	n.done.Go(func() {
		runtime.LockOSThread() // for good: the thread ends with the goroutine
		err := syscall.Unshare(syscall.CLONE_NEWNET)
		made <- err
		if err != nil {
			return
		}
		for f := range n.calls {
			f()
		}
	})
	if err := <-made; err != nil {
		return nil, fmt.Errorf("make a network namespace, as root: %w", err)
	}
	return n, n.run("ip", "link", "set", "lo", "up")
}

// do calls f on a thread inside the network. The processes that f starts stay
// there, and end with the network at the latest.
func (n *network) do(f func() error) error {
	err := make(chan error)
	n.calls <- func() { err <- f() }
	return <-err
}

func (n *network) close() {
	close(n.calls)
	n.done.Wait()
}

func (n *network) run(name string, args ...string) error {
	return n.do(func() error {
		if out, err := exec.Command(name, args...).CombinedOutput(); err != nil {
			return fmt.Errorf("%s %s: %w: %s", name, strings.Join(args, " "), err, out)
		}
		return nil
	})
}

// set writes a setting of the network's TCP.
func (n *network) set(name, value string) error {
	return n.do(func() error { return os.WriteFile("/proc/sys/net/ipv4/"+name, []byte(value), 0o644) })
}

// Properties of a path.
const (
	pathDelay = 20 * time.Millisecond // each way
	pathRate  = 25e6                  // bytes a second, each way
	pathQueue = 1e6                   // bytes that wait for their turn, at most: what the path itself holds
	pathMTU   = 1500
)

// Addresses of the ends of a path, and the network that they share.
const nearHost, farHost, pathPrefix = "10.99.0.1", "10.99.0.2", "10.99.0.0/24"

// A path joins two networks. This process carries each packet as it is on the
// wire: neither side's kernel hands over several as one, so that a loss is a loss of
// one packet for TCP and QUIC alike.
type path struct {
	near, far *network
	loss      [2]atomic.Pointer[loss] // of each direction; nil loses nothing

	ends [2]*os.File
	done chan struct{}
	wg   sync.WaitGroup
}

func newPath() (p *path, err error) {
	p = &path{done: make(chan struct{})}
	defer func() {
		if err != nil {
			p.close()
		}
	}()
	for i, host := range []string{nearHost, farHost} {
		n, err := newNetwork()
		if n != nil && i == 0 {
			p.near = n
		} else {
			p.far = n
		}
		if err != nil {
			return p, err
		}
		if err := n.do(func() (err error) { p.ends[i], err = openTUN("path"); return err }); err != nil {
			return p, err
		}
		for _, args := range []string{
			"addr add " + host + "/24 dev path",
			fmt.Sprintf("link set path up mtu %d txqueuelen 10000", pathMTU),
		} {
			if err := n.run("ip", strings.Fields(args)...); err != nil {
				return p, err
			}
		}
		if err := n.set("tcp_no_metrics_save", "1"); err != nil { // each connection begins anew
			return p, err
		}
	}
	for i := range p.ends {
		packets := make(chan packet, pathQueue/40)
		p.wg.Go(func() { p.take(p.ends[i], packets, &p.loss[i]) })
		p.wg.Go(func() { p.deliver(packets, p.ends[1-i]) })
	}
	return p, nil
}

// A loss decides which packets are lost.
type loss struct {
	of   int64 // a million packets
	flip *rand.Rand
}

// lose has the path lose so many of a million packets in each direction: the same
// ones each time.
func (p *path) lose(of int64) {
	for i := range p.loss {
		p.loss[i].Store(&loss{of, rand.New(rand.NewPCG(1, uint64(i)))})
	}
}

// close ends the path and its networks, with the processes that are there.
func (p *path) close() {
	close(p.done)
	for _, f := range p.ends {
		if f != nil {
			_ = f.Close()
		}
	}
	p.wg.Wait()
	for _, n := range []*network{p.near, p.far} {
		if n != nil {
			n.close()
		}
	}
}

// A packet is under way.
type packet struct {
	at    time.Time // when it arrives
	bytes []byte
}

// take reads the packets of one end, loses some, and has the others wait.
func (p *path) take(from *os.File, to chan<- packet, losses *atomic.Pointer[loss]) {
	defer close(to)
	buf := make([]byte, 64<<10)
	free := time.Now() // when the packets before have left
	for {
		n, err := from.Read(buf)
		if errors.Is(err, os.ErrClosed) {
			return
		}
		if l := losses.Load(); err != nil || l != nil && l.flip.Int64N(1e6) < l.of {
			continue
		}
		now := time.Now()
		if free.Before(now) {
			free = now
		}
		if free.Sub(now).Seconds()*pathRate > pathQueue {
			continue
		}
		free = free.Add(time.Duration(float64(n) / pathRate * float64(time.Second)))
		select {
		case to <- packet{free.Add(pathDelay), append([]byte(nil), buf[:n]...)}:
		case <-p.done:
			return
		}
	}
}

func (p *path) deliver(packets <-chan packet, to *os.File) {
	for next := range packets {
		if d := time.Until(next.at); d > 0 {
			t := time.NewTimer(d)
			select {
			case <-t.C:
			case <-p.done:
				t.Stop()
			}
		}
		_, _ = to.Write(next.bytes)
	}
}

// openTUN makes an interface in the network of the calling thread. Its packets are
// read from the file and written to it, one at a time.
func openTUN(name string) (*os.File, error) {
	fd, err := syscall.Open("/dev/net/tun", syscall.O_RDWR|syscall.O_CLOEXEC|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, fmt.Errorf("open /dev/net/tun: %w", err)
	}
	const tunSetIff, iffTun, iffNoPI = 0x400454ca, 0x0001, 0x1000 // linux/if_tun.h
	var req struct {
		name  [16]byte
		flags uint16
		_     [22]byte
	}
	copy(req.name[:15], name)
	req.flags = iffTun | iffNoPI
	if _, _, errno := syscall.Syscall(syscall.SYS_IOCTL, uintptr(fd), tunSetIff, uintptr(unsafe.Pointer(&req))); errno != 0 {
		_ = syscall.Close(fd)
		return nil, fmt.Errorf("make the interface %s: %w", name, errno)
	}
	return os.NewFile(uintptr(fd), name), nil
}
