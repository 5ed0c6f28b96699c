package tunnel_test

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"sync"
	"syscall"
	"testing"
	"time"

	"culvert.dev/tunnel"
)

// A socketShop makes loopback connections, cheaper than tcpPair when many are
// wanted.
type socketShop struct {
	mu sync.Mutex // one pair at a time, so that the ends belong together
	ln *net.TCPListener
}

func newSocketShop(t testing.TB) *socketShop {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = ln.Close() })
	return &socketShop{ln: ln.(*net.TCPListener)}
}

// pair returns two ends of a connection. The caller closes both.
func (s *socketShop) pair() (a, b *net.TCPConn, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	c, err := net.Dial("tcp", s.ln.Addr().String())
	if err != nil {
		return nil, nil, err
	}
	b, err = s.ln.AcceptTCP()
	if err != nil {
		_ = c.Close()
		return nil, nil, err
	}
	return c.(*net.TCPConn), b, nil
}

// tunnel carries between two fresh connections and returns the outer ends.
func (s *socketShop) tunnel(r *tunnel.Relay, p path, mod func(*tunnel.Tunnel)) (carried, error) {
	client, in, err := s.pair()
	if err != nil {
		return carried{}, err
	}
	server, out, err := s.pair()
	if err != nil {
		_, _ = client.Close(), in.Close()
		return carried{}, err
	}
	for _, c := range []*net.TCPConn{client, server} {
		_ = c.SetDeadline(time.Now().Add(patience))
	}
	c := carried{client: client, server: server, end: make(chan tunnel.End, 1)}
	tun := tunnel.Tunnel{Client: p.wrap(in), Server: p.wrap(out), Ended: func(e tunnel.End) { c.end <- e }}
	if mod != nil {
		mod(&tun)
	}
	r.Carry(tun)
	return c, nil
}

// A script is what one end of a tunnel does: it writes and reads at random
// and ends its stream, or aborts, somewhere on the way.
type script struct {
	seed  uint64
	total int  // bytes to write
	chunk int  // at most, at once
	reset bool // after total bytes, and not before, instead of the end of stream
	slow  bool // reads with pauses

	expect int // bytes the other end is to write
}

// A result is what an end did and saw.
type result struct {
	sent, got  int
	rerr, werr error // nil for an end of stream that was seen, and for one that was sent
	wrong      error // bytes that are not the ones that were sent
}

// cut reports whether the end was told that the other one aborted. Once a
// socket has told its writer of a reset, its reader finds an end of stream.
func (r *result) cut() bool { return isReset(r.rerr) || isReset(r.werr) }

func isReset(err error) bool {
	return errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE)
}

// play runs s over c, which it closes.
func (s *script) play(c *net.TCPConn, send, want []byte) (res result) {
	var wg sync.WaitGroup
	wrng, rrng := rand.New(rand.NewPCG(s.seed, 1)), rand.New(rand.NewPCG(s.seed, 2))
	wg.Go(func() {
		for res.sent < s.total {
			n := min(1+wrng.IntN(s.chunk), s.total-res.sent)
			n, res.werr = c.Write(send[res.sent : res.sent+n])
			res.sent += n
			if res.werr != nil {
				return
			}
			if wrng.IntN(8) == 0 {
				time.Sleep(time.Duration(wrng.IntN(1000)) * time.Microsecond)
			}
		}
		if s.reset {
			_ = c.SetLinger(0)
			_ = c.Close()
			return
		}
		res.werr = c.CloseWrite()
	})
	buf := make([]byte, max(1+rrng.IntN(128<<10), s.expect/500))
	for res.rerr == nil {
		var n int
		n, res.rerr = c.Read(buf[:1+rrng.IntN(len(buf))])
		if !bytes.Equal(buf[:n], want[res.got:min(res.got+n, len(want))]) {
			res.wrong = fmt.Errorf("bytes %d to %d are not the ones that were sent", res.got, res.got+n)
		}
		res.got += n
		if s.slow && rrng.IntN(4) == 0 {
			time.Sleep(time.Duration(rrng.IntN(500)) * time.Microsecond)
		}
	}
	if res.rerr == io.EOF {
		res.rerr = nil
	}
	wg.Wait()
	_ = c.Close()
	return res
}

func newScript(rng *rand.Rand) *script {
	s := &script{seed: rng.Uint64(), chunk: 1 << rng.IntN(19), slow: rng.IntN(3) == 0, reset: rng.IntN(4) == 0}
	switch rng.IntN(8) {
	case 0:
	case 1:
		s.total = 1 + rng.IntN(2<<20)
	default:
		s.total = 1 + rng.IntN(100<<10)
	}
	s.chunk = max(s.chunk, s.total/500)
	return s
}

// TestRelayModel plays random scripts over both ends of a tunnel and compares
// with what a single connection would do: what arrives is a prefix of what was
// sent; all of it, where the stream ended in order; and an abort is an abort.
func TestRelayModel(t *testing.T) {
	const schedules, atOnce = 300, 8
	up, down := random(2<<20, 7), random(2<<20, 8)
	shop := newSocketShop(t)
	eachPath(t, func(t *testing.T, r *tunnel.Relay, p path) {
		seeds := make(chan uint64)
		var wg sync.WaitGroup
		for range atOnce {
			wg.Go(func() {
				for seed := range seeds {
					if err := playSchedule(shop, r, p, seed, up, down); err != nil {
						t.Errorf("seed %d: %v", seed, err)
					}
				}
			})
		}
		base := rand.Uint64()
		t.Logf("seeds %d to %d", base, base+schedules-1)
		for i := range uint64(schedules) {
			seeds <- base + i
		}
		close(seeds)
		wg.Wait()
	})
}

func playSchedule(shop *socketShop, r *tunnel.Relay, p path, seed uint64, up, down []byte) error {
	rng := rand.New(rand.NewPCG(seed, 0))
	cs, ss := newScript(rng), newScript(rng)
	cs.expect, ss.expect = ss.total, cs.total
	c, err := shop.tunnel(r, p, nil)
	if err != nil {
		return err
	}
	var cr, sr result
	var wg sync.WaitGroup
	wg.Go(func() { cr = cs.play(c.client, up, down) })
	wg.Go(func() { sr = ss.play(c.server, down, up) })
	wg.Wait()
	var end tunnel.End
	select {
	case end = <-c.end:
	case <-time.After(patience):
		return errors.New("the tunnel did not end")
	}
	h := history{sides: [2]party{cs.party(&cr), ss.party(&sr)}, end: end}
	if err := errors.Join(cr.wrong, sr.wrong, h.judge()); err != nil {
		return fmt.Errorf("client %+v did %+v, server %+v did %+v: %w", *cs, cr, *ss, sr, err)
	}
	return nil
}

// party is what s did and saw, by its result.
func (s *script) party(r *result) party {
	p := party{sent: r.sent, got: r.got, reset: s.reset, fin: !s.reset && r.werr == nil, cut: r.cut()}
	p.eof = r.rerr == nil && !p.cut
	return p
}
