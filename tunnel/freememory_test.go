package tunnel_test

import (
	"errors"
	"io"
	"net"
	"net/netip"
	"os"
	"syscall"
	"testing"
	"time"

	"culvert.dev/internal/testnet"
	"culvert.dev/tunnel"
)

// TestFreeMemory: memory that is full is freed by the client that keeps most of it,
// tunnel by tunnel, as long as it does; a tunnel that keeps nothing stands.
func TestFreeMemory(t *testing.T) {
	eachPath(t, func(t *testing.T, r *tunnel.Relay, p path) {
		var accounts tunnel.Clients
		var budget *tunnel.Budget
		many, few := budget.Client(&accounts, netip.MustParseAddr("192.0.2.1")), budget.Client(&accounts, netip.MustParseAddr("192.0.2.2"))
		carryFor := func(c *tunnel.Client) carried {
			client, in := tcpPair(t)
			out, server := tcpPair(t)
			for _, c := range []*net.TCPConn{client, in, out, server} {
				_ = c.SetReadBuffer(64 << 10)
				_ = c.SetWriteBuffer(64 << 10)
			}
			_ = in.SetDeadline(time.Time{})
			_ = out.SetDeadline(time.Time{})
			d := carried{client: client, server: server, end: make(chan tunnel.End, 1)}
			r.CarryFor(c, tunnel.Tunnel{Client: p.wrap(in), Server: p.wrap(out), Ended: func(e tunnel.End) { d.end <- e }})
			return d
		}
		stuck := func(c *tunnel.Client) carried {
			d := carryFor(c)
			for still := 0; still < 5; still++ { // until no byte goes any further, and not for a busy machine
				_ = d.client.SetWriteDeadline(time.Now().Add(100 * time.Millisecond))
				n, err := d.client.Write(make([]byte, 32<<20))
				if !errors.Is(err, os.ErrDeadlineExceeded) {
					t.Fatalf("the service does not read: %v", err)
				}
				if n > 0 {
					still = -1
				}
			}
			return d
		}
		idle := carryFor(many)
		// How much one keeps is by chance, and eight keep more than one.
		const tunnels = 8
		var mine []carried
		for range tunnels {
			mine = append(mine, stuck(many))
		}
		other := stuck(few)
		ended := func() (n int) {
			for _, d := range mine {
				n += len(d.end)
			}
			return n
		}

		// A busy machine's loop may not answer in time, and then nothing is ended.
		relieve := func(n int64) (did tunnel.FreedMemory) {
			testnet.Eventually(t, patience, func() bool { did = r.FreeMemory(n, false); return did.Ended > 0 }, "tunnels are ended")
			return did
		}
		did := relieve(1)
		if did.Ended != 1 || did.Client != many.String() || did.Freed < 1<<10 {
			t.Errorf("%+v, want one tunnel of %v", did, many)
		}
		testnet.Eventually(t, patience, func() bool { return ended() == 1 }, "it is ended")
		if len(other.end) > 0 {
			t.Error("the one of the client that keeps less was ended")
		}
		all := append(mine, other)
		for n := 1; ; {
			did := r.FreeMemory(1<<30, false)
			if !did.Late && did.Ended == 0 { // what is left keeps next to nothing, by chance
				if n > len(all) || n < len(all)-3 {
					t.Errorf("%d were ended in all, want those of %d that keep something", n, len(all))
				}
				break
			}
			n += did.Ended
			testnet.Eventually(t, patience, func() bool {
				at := 0
				for _, d := range all {
					at += len(d.end)
				}
				return at == n
			}, "they are ended")
		}
		for _, d := range all {
			if len(d.end) == 0 {
				continue
			}
			if e := d.wait(t); e.Reason != tunnel.Overload || e.Err == nil {
				t.Errorf("it ended with %v, %v, want overload and why", e.Reason, e.Err)
			}
		}
		if _, err := idle.client.Write([]byte("x")); err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadFull(idle.server, make([]byte, 1)); err != nil {
			t.Errorf("the tunnel that kept nothing: %v", err)
		}
		if did := r.FreeMemory(1<<30, true); did.Ended != 0 {
			t.Errorf("%+v, want nothing to be left", did)
		}
	})
}

// A lost stream gives bytes without end, until its peer is gone, which it tells
// only who asks.
type lost struct {
	*memStream
	gone chan struct{}
}

func (l *lost) Broken() error {
	select {
	case <-l.gone:
		return syscall.ECONNRESET
	default:
		return nil
	}
}

// TestAbortBehindAStuckWrite: a client that aborts its stream, of which the service
// does not take what came, is gone in seconds and holds nothing on.
func TestAbortBehindAStuckWrite(t *testing.T) {
	r := &tunnel.Relay{}
	defer r.Close()
	end := make(chan tunnel.End, 1)
	near, client := memPair(true)
	service, far := memPair(true)
	l := &lost{client, make(chan struct{})}
	r.Carry(tunnel.Tunnel{Client: l, Server: service, Ended: func(e tunnel.End) { end <- e }})
	if _, err := near.Write([]byte("never read")); err != nil {
		t.Fatal(err)
	}
	close(l.gone)
	select {
	case e := <-end:
		if e.Reason != tunnel.Reset {
			t.Errorf("it ended with %v, %v", e.Reason, e.Err)
		}
	case <-time.After(patience):
		t.Error("the tunnel stands")
	}
	_ = far.Close()
}
