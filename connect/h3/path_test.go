package h3

import (
	"net"
	"sync"
	"testing"
	"time"
)

// slowPath leads to addr, and takes the given time for each way. It returns
// its address.
func slowPath(t *testing.T, addr string, delay time.Duration) string {
	to, err := net.ResolveUDPAddr("udp", addr)
	if err != nil {
		t.Fatal(err)
	}
	near, far := socket(t), socket(t)
	for _, pc := range []*net.UDPConn{near, far} {
		_ = pc.SetReadBuffer(4 << 20)
		_ = pc.SetWriteBuffer(4 << 20)
	}
	var wg sync.WaitGroup
	var mu sync.Mutex
	var client *net.UDPAddr
	type piece struct {
		due time.Time
		b   []byte
	}
	carry := func(from, out *net.UDPConn, target func(sender *net.UDPAddr) *net.UDPAddr) {
		pieces := make(chan piece, 100_000)
		wg.Go(func() {
			defer close(pieces)
			for {
				b := make([]byte, 2048)
				n, sender, err := from.ReadFromUDP(b)
				if err != nil {
					return
				}
				if from == near {
					mu.Lock()
					client = sender
					mu.Unlock()
				}
				pieces <- piece{time.Now().Add(delay), b[:n]}
			}
		})
		wg.Go(func() {
			for p := range pieces {
				time.Sleep(time.Until(p.due))
				_, _ = out.WriteToUDP(p.b, target(nil))
			}
		})
	}
	carry(near, far, func(*net.UDPAddr) *net.UDPAddr { return to })
	carry(far, near, func(*net.UDPAddr) *net.UDPAddr { mu.Lock(); defer mu.Unlock(); return client })
	t.Cleanup(func() {
		_, _ = near.Close(), far.Close()
		wg.Wait()
	})
	return near.LocalAddr().String()
}
