//go:build unix

package interop

import (
	"errors"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
)

// A relay stands between client and gateway, and does to their datagrams what
// networks do.
type relay struct {
	front *net.UDPConn
	to    *net.UDPAddr

	first  atomic.Int64 // long headers of the client's before anything came back
	heard  atomic.Bool
	mess   func(i int, b []byte) [][]byte // what becomes of the client's i-th datagram; nil: itself
	mu     sync.Mutex                     // guards what follows
	back   *net.UDPConn                   // to the gateway
	client *net.UDPAddr
	wg     sync.WaitGroup
}

func newRelay(t *testing.T, g *gateway, mess func(i int, b []byte) [][]byte) *relay {
	t.Helper()
	to, err := net.ResolveUDPAddr("udp", strings.TrimPrefix(g.addr, "udp://"))
	must(t, err)
	r := &relay{to: to, mess: mess}
	r.front, err = net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	must(t, err)
	r.rebind(t)
	r.wg.Go(r.forth)
	t.Cleanup(func() {
		_ = r.front.Close()
		r.mu.Lock()
		_ = r.back.Close()
		r.mu.Unlock()
		r.wg.Wait()
	})
	return r
}

// rebind gives the client another address, as a NAT does.
func (r *relay) rebind(t *testing.T) {
	t.Helper()
	back, err := net.DialUDP("udp", nil, r.to)
	must(t, err)
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.back != nil {
		_ = r.back.Close()
	}
	r.back = back
	r.wg.Go(func() {
		b := make([]byte, 1<<16)
		for {
			n, err := back.Read(b)
			if errors.Is(err, net.ErrClosed) {
				return
			}
			if err != nil {
				continue
			}
			r.heard.Store(true)
			r.mu.Lock()
			client := r.client
			r.mu.Unlock()
			_, _ = r.front.WriteToUDP(b[:n], client)
		}
	})
}

func (r *relay) forth() {
	b := make([]byte, 1<<16)
	for i := 0; ; i++ {
		n, from, err := r.front.ReadFromUDP(b)
		if err != nil {
			return
		}
		if b[0]&0x80 != 0 && !r.heard.Load() {
			r.first.Add(1)
		}
		r.mu.Lock()
		r.client = from
		back := r.back
		r.mu.Unlock()
		all := [][]byte{b[:n]}
		if r.mess != nil {
			all = r.mess(i, append([]byte(nil), b[:n]...))
		}
		for _, d := range all {
			_, _ = back.Write(d)
		}
	}
}

func (r *relay) addr() string { return r.front.LocalAddr().String() }
