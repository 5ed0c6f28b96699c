package udp

import (
	"bytes"
	"sync/atomic"
	"testing"
	"time"

	"culvert.dev/internal/testnet"
	"culvert.dev/tunnel"
)

// answers answers each datagram, as DNS does, until the test is over.
func (p *peer) answers() {
	go func() {
		b := make([]byte, maxDatagram)
		for {
			n, from, err := p.ReadFromUDPAddrPort(b)
			if err != nil {
				return
			}
			_, _ = p.WriteToUDPAddrPort(b[:n], from)
		}
	}()
}

// asks sends a question until its answer is there.
func (p *peer) asks(r *rig, question []byte) {
	p.t.Helper()
	b := make([]byte, maxDatagram)
	for end := time.Now().Add(patience); time.Now().Before(end); {
		p.say(r.addr, question)
		_ = p.SetReadDeadline(time.Now().Add(200 * time.Millisecond))
		if n, err := p.Read(b); err == nil && bytes.Equal(b[:n], question) {
			return
		}
	}
	p.t.Fatal("no answer")
}

// asksOnce sends a question once, however long its answer takes: a client that
// asks again after an answer proves that it is there.
func (p *peer) asksOnce(r *rig, question []byte) {
	p.t.Helper()
	b := make([]byte, maxDatagram)
	p.say(r.addr, question)
	_ = p.SetReadDeadline(time.Now().Add(patience))
	if n, err := p.Read(b); err != nil || !bytes.Equal(b[:n], question) {
		p.t.Fatalf("the answer is %q, %v", b[:n], err)
	}
}

// Forged sources, of which each sends once or twice, take half of the
// descriptors at most, and others are served meanwhile.
func TestForgedSources(t *testing.T) {
	for _, c := range []struct {
		name string
		each int // datagrams of a source
	}{{"once", 1}, {"twice", 2}} {
		t.Run(c.name, func(t *testing.T) {
			const descriptors, sources = 160, 300
			budget := &tunnel.Budget{Limit: descriptors}
			r, svc := plainRig(t, func(s *Server) {
				s.Budget, s.Router.Budget = budget, budget
				s.Limits = tunnel.Limits{MaxPendingPerClient: -1, MaxConnectionsPerClient: -1, ConnectionRatePerClient: -1}
			})
			svc.answers()
			var forged []*peer
			for range sources {
				forged = append(forged, newPeer(t))
			}
			var sent atomic.Int64
			stop, stopped := make(chan struct{}), make(chan struct{})
			go func() {
				defer close(stopped)
				tick := time.NewTicker(10 * time.Millisecond)
				defer tick.Stop()
				for i := 0; ; {
					select {
					case <-stop:
						return
					case <-tick.C:
					}
					for range 20 { // 2,000 datagrams a second
						p := forged[i/c.each%len(forged)]
						_, _ = p.WriteToUDPAddrPort([]byte("x"), r.addr)
						i++
					}
					sent.Store(int64(i))
				}
			}()
			defer func() { close(stop); <-stopped }()
			testnet.Eventually(t, patience, func() bool { return sent.Load() >= int64(sources*c.each) }, "each source to have sent")
			for range 10 {
				newPeer(t).asks(r, []byte("question"))
				testnet.Eventually(t, patience, func() bool { return budget.Used() <= descriptors/2+descriptors/8 }, // those being closed count for a moment
					"about half of %d descriptors are taken", descriptors)
			}
		})
	}
}

// Without an end of the descriptors in sight, sessions of sources that may be
// forged are as few as sessions that are half open.
func TestAnsweredOnceIsHalfOpen(t *testing.T) {
	r, svc := plainRig(t, func(s *Server) { s.Limits = tunnel.Limits{MaxPendingConnections: 5} })
	talker := newPeer(t)
	svc.answers()
	for range 2 {
		talker.asks(r, []byte("still here"))
	}
	for range 20 {
		newPeer(t).asksOnce(r, []byte("once"))
	}
	testnet.Eventually(t, patience, func() bool { return r.s.Stats().Sessions == 6 }, "the oldest to make room")
	for _, o := range r.told() {
		if o.Reason != tunnel.Idle || o.Source == talker.addr() {
			t.Errorf("outcome %+v", o)
		}
	}
}

// What waits for a route is shared: one client has half of the room at most,
// and the first bytes of each session, which are its hello, never want for it.
func TestRoomIsShared(t *testing.T) {
	s := &Server{}
	d := &activeListener{s: s}
	full := make([]byte, 1<<10)
	hold := func(src *tunnel.Client, n int) (k *session, all bool) {
		k = &session{d: d, src: src}
		before := s.dropped.Load()
		for range n {
			k.hold(full)
		}
		return k, s.dropped.Load() == before
	}
	if k, all := hold(&tunnel.Client{}, maxWaiting/len(full)+1); all || k.size != maxWaiting {
		t.Errorf("one session has %d bytes, limit %d", k.size, maxWaiting)
	} else {
		k.release()
	}
	var held []*session
	fill := func(src *tunnel.Client) {
		for range 2 * maxAllWaiting / maxWaiting {
			k, _ := hold(src, maxWaiting/len(full))
			held = append(held, k)
			if k.size < maxWaiting/2 {
				return
			}
		}
		t.Fatalf("%d bytes wait, and still more may", s.waiting)
	}
	one := &tunnel.Client{}
	fill(one)
	if s.waitingBy[one] > maxAllWaiting/2+firstWaiting {
		t.Errorf("one source has %d bytes of %d", s.waitingBy[one], maxAllWaiting)
	}
	k, all := hold(&tunnel.Client{}, maxWaiting/len(full))
	if !all {
		t.Error("another source has no room")
	}
	for range 100 {
		fill(&tunnel.Client{})
	}
	first, all := hold(&tunnel.Client{}, firstWaiting/len(full))
	if !all {
		t.Error("a hello has no room")
	}
	for _, k := range append(held, k, first) {
		k.release()
	}
	if s.waiting != 0 || len(s.waitingBy) != 0 {
		t.Errorf("%d bytes wait at the end, %v", s.waiting, s.waitingBy)
	}
}
