package nat

import (
	"context"
	"encoding/binary"
	"net"
	"net/netip"
	"os"
	"slices"
	"sync"
	"testing"
	"time"
)

var (
	routerAddr = netip.MustParseAddr("192.168.1.1")
	localAddr  = netip.MustParseAddr("192.168.1.10")
	stunServer = netip.MustParseAddrPort("192.0.2.3:3478")
)

// A router answers PCP, NAT-PMP and STUN in memory, and keeps mappings as a real one does.
type router struct {
	t *testing.T

	mu       sync.Mutex // guards what follows
	pcp, pmp bool
	outside  netip.Addr
	seen     netip.Addr // by the STUN server; zero for no server
	started  time.Time  // of its epoch
	mappings map[[2]uint16]routerMapping
	refuse   byte            // result of MAP; 0 for none
	lifetime time.Duration   // most that is granted; 0 for no limit
	taken    map[uint16]bool // outside ports of others
	drop     int             // so many requests get no answer
	lie      func(answer []byte) [][]byte
	requests []string
	deleted  int
}

type routerMapping struct {
	external uint16
	nonce    [12]byte
	expires  time.Time
}

func newRouter(t *testing.T) *router {
	return &router{t: t, pcp: true, pmp: true, outside: netip.MustParseAddr("203.0.113.7"), started: time.Now(), mappings: map[[2]uint16]routerMapping{}, taken: map[uint16]bool{}}
}

// do calls f with mu held.
func (r *router) do(f func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	f()
}

// restart loses everything. The caller holds mu.
func (r *router) restart() { r.started, r.mappings = time.Now(), map[[2]uint16]routerMapping{} }

func (r *router) count(request string) (n int) {
	r.do(func() {
		for _, got := range r.requests {
			if got == request {
				n++
			}
		}
	})
	return n
}

func (r *router) dial(_ context.Context, _, address string) (net.Conn, error) {
	return &memoryConn{r: r, to: netip.MustParseAddrPort(address), in: make(chan []byte, 16)}, nil
}

// answer returns what comes back for a datagram.
func (r *router) answer(to netip.AddrPort, b []byte) (out [][]byte) {
	r.mu.Lock()
	defer r.mu.Unlock()
	var one []byte
	switch {
	case to == stunServer && r.seen.IsValid():
		one, _ = new(Responder).Answer(b, netip.AddrPortFrom(r.seen, 4321))
	case to.Addr() != routerAddr || to.Port() != routerPort:
		return nil
	case len(b) > 0 && b[0] == pcpVersion:
		one = r.answerPCP(b)
	case len(b) >= 2:
		one = r.answerPMP(b)
	}
	if r.drop > 0 {
		r.drop--
		return nil
	}
	switch {
	case one == nil:
		return nil
	case r.lie != nil:
		return r.lie(one)
	}
	return [][]byte{one}
}

func (r *router) epoch() uint32 { return uint32(time.Since(r.started) / time.Second) }

func (r *router) answerPCP(b []byte) []byte {
	if !r.pcp {
		if r.pmp { // RFC 6886 section 3.5
			return []byte{0, 128 + b[1], 0, 1, 0, 0, 0, 0}
		}
		return nil
	}
	opcode := b[1]
	out := append([]byte{pcpVersion, pcpResponse | opcode, 0, 0}, b[4:8]...)
	out = binary.BigEndian.AppendUint32(out, r.epoch())
	out = append(out, make([]byte, 12)...)
	if opcode == pcpAnnounce {
		r.requests = append(r.requests, "pcp announce")
		return out
	}
	out = append(out, b[24:60]...)
	nonce := [12]byte(b[24:36])
	key := [2]uint16{uint16(b[36]), binary.BigEndian.Uint16(b[40:])}
	lifetime := time.Duration(binary.BigEndian.Uint32(b[4:])) * time.Second
	if lifetime == 0 {
		if m, ok := r.mappings[key]; ok && m.nonce == nonce {
			delete(r.mappings, key)
			r.deleted++
		}
		return out
	}
	r.requests = append(r.requests, "pcp map")
	switch m, ok := r.mappings[key]; {
	case r.refuse != 0:
		out[3] = r.refuse
		return out
	case ok && m.nonce != nonce && time.Now().Before(m.expires):
		out[3] = 2
		return out
	}
	external := r.grant(key, nonce, binary.BigEndian.Uint16(b[42:]), &lifetime)
	binary.BigEndian.PutUint32(out[4:], uint32(lifetime/time.Second))
	binary.BigEndian.PutUint16(out[42:], external)
	as16 := r.outside.As16()
	copy(out[44:], as16[:])
	return out
}

func (r *router) answerPMP(b []byte) []byte {
	if !r.pmp {
		return nil
	}
	out := binary.BigEndian.AppendUint32([]byte{0, 128 + b[1], 0, 0}, r.epoch())
	if b[1] == natpmpAddress {
		r.requests = append(r.requests, "nat-pmp address")
		return append(out, r.outside.AsSlice()...)
	}
	lifetime := time.Duration(binary.BigEndian.Uint32(b[8:])) * time.Second
	key := [2]uint16{17, binary.BigEndian.Uint16(b[4:])}
	if b[1] == natpmpMapTCP {
		key[0] = 6
	}
	out = append(out, b[4:6]...)
	if lifetime == 0 {
		delete(r.mappings, key)
		r.deleted++
		return append(out, 0, 0, 0, 0, 0, 0)
	}
	r.requests = append(r.requests, "nat-pmp map")
	if r.refuse != 0 {
		out[3] = r.refuse
		return append(out, 0, 0, 0, 0, 0, 0)
	}
	external := r.grant(key, [12]byte{}, binary.BigEndian.Uint16(b[6:]), &lifetime)
	out = binary.BigEndian.AppendUint16(out, external)
	return binary.BigEndian.AppendUint32(out, uint32(lifetime/time.Second))
}

func (r *router) grant(key [2]uint16, nonce [12]byte, want uint16, lifetime *time.Duration) uint16 {
	if r.lifetime > 0 {
		*lifetime = min(*lifetime, r.lifetime)
	}
	for r.taken[want] {
		want++
	}
	r.mappings[key] = routerMapping{want, nonce, time.Now().Add(*lifetime)}
	return want
}

// A memoryConn is a connected socket of UDP to a router.
type memoryConn struct {
	r  *router
	to netip.AddrPort
	in chan []byte

	mu       sync.Mutex // guards what follows
	deadline chan struct{}
	timer    *time.Timer
}

func (c *memoryConn) Write(b []byte) (int, error) {
	for _, answer := range c.r.answer(c.to, slices.Clone(b)) {
		c.in <- answer
	}
	return len(b), nil
}

func (c *memoryConn) Read(b []byte) (int, error) {
	c.mu.Lock()
	over := c.deadline
	c.mu.Unlock()
	select {
	case in := <-c.in:
		return copy(b, in), nil
	case <-over:
		return 0, os.ErrDeadlineExceeded
	}
}

func (c *memoryConn) SetReadDeadline(at time.Time) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.timer == nil || !c.timer.Stop() {
		c.deadline = make(chan struct{})
	}
	over, left := c.deadline, time.Until(at)
	if left <= 0 { // as a timer of synctest that fires at once crashes the race detector of Go 1.26
		c.timer = nil
		close(over)
		return nil
	}
	c.timer = time.AfterFunc(left, func() { close(over) })
	return nil
}

func (c *memoryConn) Close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.timer != nil {
		c.timer.Stop()
	}
	return nil
}

func (c *memoryConn) LocalAddr() net.Addr {
	return net.UDPAddrFromAddrPort(netip.AddrPortFrom(localAddr, 40000))
}
func (c *memoryConn) RemoteAddr() net.Addr             { return net.UDPAddrFromAddrPort(c.to) }
func (c *memoryConn) SetDeadline(t time.Time) error    { return c.SetReadDeadline(t) }
func (c *memoryConn) SetWriteDeadline(time.Time) error { return nil }
