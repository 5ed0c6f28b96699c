package tunnel_test

import (
	"context"
	"errors"
	"io"
	"net"
	"testing"
	"time"

	"culvert.dev/internal/testnet"
	"culvert.dev/tunnel"
)

// through is a testnet.Dial with one tunnel of r between its ends.
func (s *socketShop) through(r *tunnel.Relay, p path) testnet.Dial {
	return func(context.Context) (client, server net.Conn, err error) {
		c, err := s.tunnel(r, p, nil)
		if err != nil {
			return nil, nil, err
		}
		return c.client, c.server, nil
	}
}

// TestRelayChaosPair has the chaos pair at both ends of a tunnel, and then the
// endings one by one.
func TestRelayChaosPair(t *testing.T) {
	shop := newSocketShop(t)
	eachPath(t, func(t *testing.T, r *tunnel.Relay, p path) {
		for seed := range uint64(60) {
			testnet.Run(t.Context(), t, shop.through(r, p), testnet.Random(seed, 2<<20))
		}
		testnet.TestEndings(t, shop.through(r, p), testnet.Transparent())
		if err := r.Wait(t.Context()); err != nil || r.Open() != 0 {
			t.Errorf("%v, %d tunnels left", err, r.Open())
		}
	})
}

// TestRelayDrips has one side send a byte at a time, or take one, while the
// other direction is as fast as it can be. A byte's hundredth of a second
// stands for any time: nothing here is a limit.
func TestRelayDrips(t *testing.T) {
	const drips, pause = 40, 10 * time.Millisecond
	data := random(16<<20, 22)
	eachPath(t, func(t *testing.T, r *tunnel.Relay, p path) {
		for _, tt := range []struct {
			name string
			most int // bytes that go to the slow side, or come from it
		}{{"sends", drips}, {"takes", len(data)}} {
			c := carryNarrow(t, r, p)
			sent := make(chan error, 1)
			each := make(chan int)
			go func() {
				var err error
				for i := range each { // a byte at a time
					_, werr := c.client.Write(data[i : i+1])
					err = errors.Join(err, werr)
				}
				if tt.most > drips { // all at once
					_, err = c.client.Write(data)
				}
				_ = c.client.CloseWrite()
				sent <- err
			}()
			if tt.most > drips {
				close(each)
			}
			back := make(chan error, 1)
			go func() { back <- transfer(c.server, c.client, data) }() // and the other way at full speed
			tick := time.NewTicker(pause)
			got := make([]byte, 1)
			for i := range drips {
				<-tick.C
				if tt.most == drips {
					each <- i
				}
				if _, err := io.ReadFull(c.server, got); err != nil || got[0] != data[i] {
					t.Fatalf("%s: byte %d is %d, %v; want %d", tt.name, i, got[0], err, data[i])
				}
			}
			tick.Stop()
			if tt.most == drips {
				close(each)
			}
			if err := <-back; err != nil {
				t.Errorf("%s: the fast direction: %v", tt.name, err)
			}
			if tt.most > drips && len(sent) > 0 {
				t.Errorf("%s: %d bytes went to one who took %d", tt.name, tt.most, drips)
			}
			rest, err := io.ReadAll(c.server)
			if err != nil || string(rest) != string(data[drips:tt.most]) {
				t.Errorf("%s: then %d bytes and %v, want the other %d", tt.name, len(rest), err, tt.most-drips)
			}
			_ = c.server.CloseWrite()
			if err := <-sent; err != nil {
				t.Errorf("%s: %v", tt.name, err)
			}
			if e := c.wait(t); e.Reason != tunnel.Done || e.In != int64(tt.most) || e.Out != int64(len(data)) {
				t.Errorf("%s: ended with %+v", tt.name, e)
			}
		}
	})
}
