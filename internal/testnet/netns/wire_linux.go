package netns

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"sync"
	"syscall"
	"testing"
	"time"
	"unsafe"
)

// A Wire joins two namespaces, and this process carries its packets: what it does
// to them no rule of nft can.
type Wire struct {
	AIf, BIf string // the interfaces' names

	mu   sync.Mutex // guards what follows
	fate func(size int) Fate
	read func(packet []byte)
	flip *rand.Rand
	stat WireStats
}

// A Fate is what becomes of one packet. The zero Fate delivers it at once.
type Fate struct {
	Lost  bool
	After time.Duration // packets with different ones overtake each other
	Twice bool
	Spoil bool // a bit of it is flipped, behind its IP header
}

// WireStats counts packets by what became of them.
type WireStats struct{ Carried, Lost, Late, Twice, Spoiled int }

// NewWire joins two namespaces by a Wire, whose ends have the given addresses, each
// with its prefix length. Every packet is delivered at once before SetFate.
func NewWire(t testing.TB, a *NS, aAddr string, b *NS, bAddr string) *Wire {
	t.Helper()
	w := &Wire{AIf: a.nextIf(), BIf: b.nextIf(), flip: rand.New(rand.NewPCG(1, 2))}
	ends := [2]*os.File{a.tun(t, w.AIf), b.tun(t, w.BIf)}
	a.configure(t, w.AIf, aAddr)
	b.configure(t, w.BIf, bAddr)
	done := make(chan struct{})
	var carrying sync.WaitGroup
	for i := range ends {
		carrying.Go(func() { w.carry(ends[i], ends[1-i], done) })
	}
	t.Cleanup(func() {
		close(done)
		for _, f := range ends {
			_ = f.Close()
		}
		carrying.Wait()
	})
	return w
}

// SetFate has f decide what becomes of each packet of size bytes from now on; nil
// delivers all. It is called for one packet at a time.
func (w *Wire) SetFate(f func(size int) Fate) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.fate, w.stat = f, WireStats{}
}

// Watch has f see each packet of either direction from now on; nil ends that. It is called
// for one packet at a time, and must not keep it.
func (w *Wire) Watch(f func(packet []byte)) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.read = f
}

// Stats returns what became of the packets since SetFate.
func (w *Wire) Stats() WireStats {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.stat
}

// carry takes the packets of one end to the other.
func (w *Wire) carry(from, to *os.File, done <-chan struct{}) {
	var late sync.WaitGroup
	defer late.Wait()
	p := make([]byte, 64<<10)
	for {
		n, err := from.Read(p)
		if err != nil {
			if errors.Is(err, os.ErrClosed) {
				return
			}
			continue // the interface is down
		}
		f := w.decide(p[:n])
		if f.Lost {
			continue
		}
		times := 1
		if f.Twice {
			times = 2
		}
		for range times {
			if f.After <= 0 {
				_, _ = to.Write(p[:n])
				continue
			}
			packet := append([]byte(nil), p[:n]...)
			late.Go(func() {
				t := time.NewTimer(f.After)
				defer t.Stop()
				select {
				case <-t.C:
					_, _ = to.Write(packet)
				case <-done:
				}
			})
		}
	}
}

// decide asks for the fate of a packet, and spoils it.
func (w *Wire) decide(p []byte) (f Fate) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.read != nil {
		w.read(p)
	}
	if w.fate != nil {
		f = w.fate(len(p))
	}
	count := func(n *int, is bool) {
		if is {
			*n++
		}
	}
	count(&w.stat.Carried, !f.Lost)
	count(&w.stat.Lost, f.Lost)
	count(&w.stat.Late, f.After > 0)
	count(&w.stat.Twice, f.Twice)
	const header = 40 // of IPv6, and more than that of IPv4 without options
	if f.Spoil && len(p) > header {
		w.stat.Spoiled++
		p[header+w.flip.IntN(len(p)-header)] ^= 1 << w.flip.IntN(8)
	}
	return f
}

// tun makes an interface whose packets are read from a file.
func (ns *NS) tun(t testing.TB, name string) (f *os.File) {
	t.Helper()
	err := ns.Do(func() error {
		fd, err := syscall.Open("/dev/net/tun", syscall.O_RDWR|syscall.O_CLOEXEC|syscall.O_NONBLOCK, 0)
		if err != nil {
			return fmt.Errorf("open /dev/net/tun: %w", err)
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
			return fmt.Errorf("make the interface %s: %w", name, errno)
		}
		f = os.NewFile(uintptr(fd), name)
		return nil
	})
	if err != nil {
		t.Fatalf("netns: %v", err)
	}
	return f
}
