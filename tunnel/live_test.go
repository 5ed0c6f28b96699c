package tunnel_test

import (
	"fmt"
	"io"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"culvert.dev/internal/testnet"
	"culvert.dev/tunnel"
)

// about is a change to a Tunnel that gives it an ID and what else a Router knows.
func about(id uint64) func(*tunnel.Tunnel) {
	return func(t *tunnel.Tunnel) {
		t.About = &tunnel.Outcome{
			ID: id, Start: time.Unix(int64(id), 0), Proto: "sni", Listener: ":443",
			Source: netip.AddrPortFrom(netip.AddrFrom4([4]byte{192, 0, 2, 7}), uint16(id)),
			Peer:   tunnel.Peer{ID: "alice", Method: "basic"}, Target: fmt.Sprintf("t%d.example.com:443", id),
			Service: fmt.Sprintf("s%d", id%2), Pattern: "*.example.com", Endpoint: "10.0.0.1:443",
		}
	}
}

// listed returns the live tunnels.
func listed(r *tunnel.Relay) []tunnel.Live { return slices.Collect(r.List()) }

// ids returns the IDs of the live tunnels, as listed.
func ids(r *tunnel.Relay) []uint64 {
	var got []uint64
	for l := range r.List() {
		got = append(got, l.ID)
	}
	return got
}

// pass sends n bytes from one end to the other, and waits for them there.
func pass(t *testing.T, from io.Writer, to io.Reader, n int) {
	t.Helper()
	done := make(chan error, 1)
	go func() { _, err := from.Write(random(n, 20)); done <- err }()
	if _, err := io.CopyN(io.Discard, to, int64(n)); err != nil {
		t.Fatal(err)
	}
	if err := <-done; err != nil {
		t.Fatal(err)
	}
}

func TestListShowsATunnelFromItsBeginningToItsEnd(t *testing.T) {
	eachPath(t, func(t *testing.T, r *tunnel.Relay, p path) {
		if got := listed(r); got != nil {
			t.Errorf("a new Relay lists %v", got)
		}
		c := carry(t, r, p, about(7))
		want := tunnel.Live{
			ID: 7, Start: time.Unix(7, 0), Proto: "sni", Listener: ":443", Source: netip.MustParseAddrPort("192.0.2.7:7"),
			Peer: tunnel.Peer{ID: "alice", Method: "basic"}, Target: "t7.example.com:443",
			Service: "s1", Pattern: "*.example.com", Endpoint: "10.0.0.1:443",
		}
		// Bytes are counted when they are passed on, a moment before or after
		// they are seen.
		shows := func(what string) {
			t.Helper()
			var got []tunnel.Live
			testnet.Eventually(t, patience, func() bool {
				got = listed(r)
				if len(got) != 1 {
					return false
				}
				old := got[0].Age >= time.Since(want.Start)-time.Minute
				got[0].Quiet, got[0].Age = 0, 0
				return old && got[0] == want
			}, "%s", what)
		}
		shows("a tunnel without a byte")
		for _, n := range []int{1, 100, 3 << 20} { // the last one by splice
			pass(t, c.client, c.server, n)
			want.In += int64(n)
			shows(fmt.Sprintf("%d bytes more in", n))
			pass(t, c.server, c.client, n+1)
			want.Out += int64(n + 1)
			shows(fmt.Sprintf("%d bytes more out", n+1))
		}
		_ = c.server.CloseWrite()
		want.HalfClosed = true
		shows("half-closed")
		pass(t, c.client, c.server, 5)
		want.In += 5
		shows("five bytes after the half-close")
		_ = c.client.CloseWrite()
		e := c.wait(t)
		if e.Reason != tunnel.Done || e.In != want.In || e.Out != want.Out {
			t.Errorf("end: got %+v, want done, in %d, out %d", e, want.In, want.Out)
		}
		if got := listed(r); got != nil {
			t.Errorf("after the end it lists %v", got)
		}
	})
}

func TestListSaysHowLongATunnelIsQuiet(t *testing.T) {
	eachPath(t, func(t *testing.T, r *tunnel.Relay, p path) {
		start := time.Now()
		c := carry(t, r, p, about(1))
		quiet := func() time.Duration {
			l := listed(r)
			if len(l) != 1 {
				t.Fatalf("it lists %v", l)
			}
			if most := time.Since(start); l[0].Quiet < 0 || l[0].Quiet > most {
				t.Fatalf("quiet for %v, %v after its start", l[0].Quiet, most)
			}
			return l[0].Quiet
		}
		const long = 60 * time.Millisecond
		testnet.Eventually(t, patience, func() bool { return quiet() >= long }, "quiet from the beginning")
		moved := time.Now()
		pass(t, c.client, c.server, 1)
		testnet.Eventually(t, patience, func() bool { return quiet() <= time.Since(moved) }, "not quiet after a byte")
		testnet.Eventually(t, patience, func() bool { return quiet() >= long }, "quiet again")
		moved = time.Now()
		_ = c.server.CloseWrite()
		testnet.Eventually(t, patience, func() bool { return quiet() <= time.Since(moved) }, "an end of stream is a sign of life")
	})
}

// Both ways of carrying stand in one list, in the order of the IDs.
func TestListIsInOrderAndMayBeLeft(t *testing.T) {
	r := &tunnel.Relay{}
	defer r.Close()
	for i, id := range []uint64{5, 3, 900, 1, 4, 2} {
		carry(t, r, paths[i%len(paths)], about(id))
	}
	carry(t, r, paths[0], nil) // nothing is known of it
	if got, want := ids(r), []uint64{0, 1, 2, 3, 4, 5, 900}; !slices.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
	n := 0
	for range r.List() {
		if n++; n == 3 {
			break
		}
	}
	if n != 3 {
		t.Errorf("a list that is left after 3 showed %d", n)
	}
	// Those that end before their turn are not shown, whichever way they are carried.
	var got []uint64
	for l := range r.List() {
		if got = append(got, l.ID); l.ID == 2 {
			r.End(3, tunnel.Killed)
			r.End(4, tunnel.Killed)
			testnet.Eventually(t, patience, func() bool { return r.Open() == 5 }, "the tunnels are gone")
		}
	}
	if want := []uint64{0, 1, 2, 5, 900}; !slices.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}

func TestEndEndsOneTunnel(t *testing.T) {
	eachPath(t, func(t *testing.T, r *tunnel.Relay, p path) {
		for _, id := range []uint64{0, 1} {
			if r.End(id, tunnel.Killed) {
				t.Errorf("an empty Relay ended tunnel %d", id)
			}
		}
		var all []carried
		for id := uint64(1); id <= 5; id++ {
			all = append(all, carry(t, r, p, about(id)))
		}
		nameless := carry(t, r, p, nil)
		for _, id := range []uint64{0, 6} {
			if r.End(id, tunnel.Killed) {
				t.Errorf("tunnel %d was ended, and there is none", id)
			}
		}
		// Blocked: bytes that can't be passed on don't hold it up.
		_ = all[2].client.SetWriteDeadline(time.Now().Add(100 * time.Millisecond))
		_, _ = all[2].client.Write(make([]byte, 64<<20))
		if !r.End(3, tunnel.Killed) {
			t.Error("tunnel 3 is not known")
		}
		if e := all[2].wait(t); e.Reason != tunnel.Killed || e.Err != nil {
			t.Errorf("got %+v, want killed", e)
		}
		_, err := all[2].client.Read(make([]byte, 1))
		wantReset(t, "client", err)
		_, err = io.Copy(io.Discard, all[2].server)
		wantReset(t, "server", err)
		if r.End(3, tunnel.Killed) {
			t.Error("tunnel 3 was ended twice")
		}
		if got, want := ids(r), []uint64{0, 1, 2, 4, 5}; !slices.Equal(got, want) {
			t.Errorf("left: got %v, want %v", got, want)
		}
		for _, c := range []carried{all[0], all[1], all[3], all[4], nameless} {
			pass(t, c.client, c.server, 10)
			pass(t, c.server, c.client, 10)
		}
	})
}

func TestEndFuncEndsThoseThatMatch(t *testing.T) {
	eachPath(t, func(t *testing.T, r *tunnel.Relay, p path) {
		var all []carried
		for id := uint64(1); id <= 6; id++ {
			all = append(all, carry(t, r, p, about(id)))
		}
		var shown []uint64
		n := r.EndFunc(tunnel.Denied, func(l *tunnel.Live) bool {
			shown = append(shown, l.ID)
			return l.Service == "s1" && l.ID != 5
		})
		if want := []uint64{1, 2, 3, 4, 5, 6}; n != 2 || !slices.Equal(shown, want) {
			t.Errorf("ended %d of %v, want 2 of %v", n, shown, want)
		}
		for _, i := range []int{0, 2} {
			if e := all[i].wait(t); e.Reason != tunnel.Denied {
				t.Errorf("tunnel %d: got %+v, want denied", i+1, e)
			}
		}
		if got, want := ids(r), []uint64{2, 4, 5, 6}; !slices.Equal(got, want) {
			t.Errorf("left: got %v, want %v", got, want)
		}
		if n := r.EndFunc(tunnel.Killed, func(*tunnel.Live) bool { return false }); n != 0 {
			t.Errorf("ended %d where none matches", n)
		}
		testnet.Eventually(t, patience, func() bool { return r.Open() == 4 }, "four are left") // an end is told before it is counted
	})
}

func TestEndRecordsEndsThoseThatMatch(t *testing.T) {
	r := &tunnel.Relay{}
	defer r.Close()
	var all []carried
	for id := uint64(1); id <= 12; id++ {
		all = append(all, carry(t, r, paths[id%2], about(id)))
	}
	carry(t, r, paths[0], nil) // nothing is known of it
	shown := 0
	odd := func(rec tunnel.Record) bool {
		shown++
		return rec.Service() == tunnel.ServiceKey{Service: "s1"} && rec.Peer().ID == "alice"
	}
	if n := r.EndRecords(tunnel.Killed, odd); n != 6 || shown != 13 {
		t.Errorf("ended %d of %d, want 6 of 13", n, shown)
	}
	for i, c := range all {
		if i%2 != 0 {
			pass(t, c.client, c.server, 10)
			continue
		}
		if e := c.wait(t); e.Reason != tunnel.Killed || e.Err != nil {
			t.Errorf("tunnel %d: got %+v, want killed", i+1, e)
		}
		_, err := c.client.Read(make([]byte, 1))
		wantReset(t, "client", err)
	}
	testnet.Eventually(t, patience, func() bool { return r.Open() == 7 }, "seven are left")
	if n := r.EndRecords(tunnel.Killed, odd); n != 0 {
		t.Errorf("ended %d once more", n)
	}
}

// Tunnels come and go while they are listed and ended by several at once. Each
// passes exactly its ID's number of bytes, so that a list that showed one with
// the numbers of another would show.
func TestListWhileTunnelsComeAndGo(t *testing.T) {
	const tunnels, atOnce = 400, 8
	shop := newSocketShop(t)
	eachPath(t, func(t *testing.T, r *tunnel.Relay, p path) {
		var next atomic.Uint64
		var ends sync.Map // of tunnel.Reason, by ID
		var work, watch sync.WaitGroup
		stop := make(chan struct{})
		// Often, and not all the time: one processor is to do the work as well.
		often := func(f func()) {
			tick := time.NewTicker(time.Millisecond)
			defer tick.Stop()
			for {
				select {
				case <-stop:
					return
				case <-tick.C:
					f()
				}
			}
		}
		for range 2 {
			watch.Go(func() {
				often(func() {
					last := uint64(0)
					for l := range r.List() {
						if l.ID <= last || l.In > int64(l.ID) || l.Out > int64(l.ID) || l.Service != fmt.Sprintf("s%d", l.ID%2) {
							t.Errorf("after tunnel %d: %+v", last, l)
						}
						last = l.ID
					}
				})
			})
		}
		watch.Go(func() {
			often(func() {
				for id := range r.List() {
					r.End(id.ID, tunnel.Killed) // the oldest, which is likely to have passed some
					break
				}
			})
		})
		for range atOnce {
			work.Go(func() {
				for id := next.Add(1); id <= tunnels; id = next.Add(1) {
					c, err := shop.tunnel(r, p, about(id))
					if err != nil {
						t.Error(err)
						return
					}
					b := make([]byte, id)
					_, _ = c.client.Write(b)
					_, _ = io.ReadFull(c.server, b)
					_, _ = c.server.Write(b)
					_, _ = io.ReadFull(c.client, b)
					_, _ = c.client.Close(), c.server.Close()
					e := <-c.end
					ends.Store(e.Reason, true)
					if e.Reason == tunnel.Done && (e.In != int64(id) || e.Out != int64(id)) {
						t.Errorf("tunnel %d: ended with %+v", id, e)
					}
				}
			})
		}
		work.Wait()
		close(stop)
		watch.Wait()
		if got := listed(r); got != nil {
			t.Errorf("at the end it lists %v", got)
		}
		if _, ok := ends.Load(tunnel.Killed); !ok {
			t.Error("none was killed")
		}
	})
}
