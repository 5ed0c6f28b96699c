package reverse

import (
	"context"
	"net"
	"net/netip"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"culvert.dev/tunnel"
)

// A stallingConn delivers nothing for a while, as a path that loses packets.
type stallingConn struct {
	net.Conn
	mu    sync.Mutex
	until time.Time // when what was read is delivered
}

func (c *stallingConn) CloseWrite() error { return nil }

func (c *stallingConn) stall(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.until = time.Now().Add(d)
}

// Read implements net.Conn.
func (c *stallingConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	c.mu.Lock()
	wait := time.Until(c.until)
	c.mu.Unlock()
	time.Sleep(wait)
	return n, err
}

// A session whose path is silent for less than it takes to give it up serves requests
// afterwards, also where one has been waiting for an answer. Meanwhile requests go to another
// session, if there is one.
func TestASessionServesAfterAStall(t *testing.T) {
	for _, sessions := range []int{1, 2} {
		synctest.Test(t, func(t *testing.T) {
			g := newTestGateway(t)
			g.pair = func(context.Context) (near, far net.Conn, err error) {
				near, far = net.Pipe()
				return near, far, nil
			}
			var paths []*stallingConn
			g.wrap = func(c net.Conn) net.Conn {
				paths = append(paths, &stallingConn{Conn: c})
				return paths[len(paths)-1]
			}
			for range sessions {
				defer run(t, client([]Registration{named("cam.edge.example")}, g))()
				synctest.Wait()
			}
			ask := func() (time.Duration, error) {
				began := time.Now()
				n := tunnel.MustParseName("cam.edge.example")
				ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second) // as a gateway dials
				defer cancel()
				s := g.groups.Service(n)
				c, err := g.groups.Transport(s.Endpoints[0].Group, false).Dial(ctx, &tunnel.Endpoint{Addr: netip.AddrPortFrom(netip.Addr{}, 443)}, &tunnel.Request{Name: n, Port: 443})
				if err == nil {
					_ = c.Close()
				}
				return time.Since(began), err
			}
			time.Sleep(100 * time.Millisecond)
			paths[0].stall(3800 * time.Millisecond)
			for range 2 * sessions { // they take turns; some come to the silent one first
				if _, err := ask(); sessions > 1 && err != nil {
					t.Errorf("%d sessions: while one is silent: %v", sessions, err)
				}
				if sessions == 1 {
					break
				}
			}
			if sessions > 1 {
				for range 4 {
					if took, err := ask(); err != nil || took > 100*time.Millisecond {
						t.Errorf("the session that is known to be silent is asked first: %v after %v", err, took)
					}
				}
			}
			time.Sleep(10 * time.Second)
			for range 4 {
				if took, err := ask(); err != nil || took > 100*time.Millisecond {
					t.Errorf("%d sessions: after the stall: %v after %v", sessions, err, took)
				}
			}
			if got := g.Sessions(); len(got) != sessions || len(paths) != sessions {
				t.Errorf("the sessions are %+v on %d paths, want those from the beginning", got, len(paths))
			}
		})
	}
}
