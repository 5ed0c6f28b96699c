package udp

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"culvert.dev/internal/testnet"
	"culvert.dev/tunnel"
)

const (
	firstID  = "client's first id"
	serverID = "srv1"
	otherID  = "srv2"
	clientID = "cid"
)

// quicRig is one for QUIC, with the services svc.test, which is svc, and
// pri.test, which is pri.
func quicRig(t testing.TB, change func(*Server)) (r *rig, svc, pri *peer) {
	t.Helper()
	r, svc, pri = newRig(t, Listener{Open: newOpening}, change), newPeer(t), newPeer(t)
	r.route("svc.test", svc.addr())
	r.route("pri.test", pri.addr())
	return r, svc, pri
}

// shake begins a session, of which svc announces serverID and which is proven.
// It returns where svc sees the client.
func shake(r *rig, client, svc *peer) netip.AddrPort {
	r.t.Helper()
	hello := long(firstID, clientID, "name=svc.test")
	client.say(r.addr, hello)
	from := svc.hear(hello)
	answer := long(clientID, serverID, "server hello")
	svc.say(from, answer)
	client.hear(answer)
	done := long(serverID, clientID, "finished")
	client.say(r.addr, done)
	if again := svc.hear(done); again != from {
		r.t.Fatalf("the service sees %s, and then %s", from, again)
	}
	over := short(clientID, "handshake done")
	svc.say(from, over)
	client.hear(over)
	return from
}

func TestQUICGoesByItsName(t *testing.T) {
	r, svc, pri := quicRig(t, nil)
	client := newPeer(t)
	hello := [][]byte{long(firstID, clientID, "more"), long(firstID, clientID, "more"), long(firstID, clientID, "stray"), long(firstID, clientID, "name=svc.test")}
	for _, b := range hello {
		client.say(r.addr, b)
	}
	var from netip.AddrPort
	for _, b := range slices.Delete(hello, 2, 3) {
		from = svc.hear(b)
	}
	svc.say(from, short(clientID, "data"))
	client.hear(short(clientID, "data"))

	// Another connection from the same socket is another session.
	client.say(r.addr, long("another first id", clientID, "name=pri.test"))
	pri.hear(long("another first id", clientID, "name=pri.test"))
	svc.silent()
	if n := r.relay.Open(); n != 2 {
		t.Errorf("%d sessions, want 2", n)
	}
	for l := range r.relay.List() {
		if l.Proto != "quic" || l.Source != client.addr() {
			t.Errorf("listed: %+v", l)
		}
	}
}

// Where the way to a service leads back here, through somebody else, there is one
// session: what comes back is to an id that is known, and from another address.
func TestQUICLoop(t *testing.T) {
	r, _, _ := quicRig(t, nil)
	there := newPeer(t)
	r.route("svc.test", there.addr())
	hello := long(firstID, clientID, "name=svc.test")
	newPeer(t).say(r.addr, hello)
	there.hear(hello)
	newPeer(t).say(r.addr, hello) // as a gateway there passes it on
	testnet.Eventually(t, patience, func() bool { return r.s.Stats().Dropped == 1 }, "the datagram to be dropped")
	there.silent()
	if n := r.relay.Open(); n != 1 {
		t.Errorf("%d sessions, want 1", n)
	}
}

// Sessions of one address are told apart by the services' ids.
func TestSessionsOfOneAddress(t *testing.T) {
	r, svc, pri := quicRig(t, nil)
	client := newPeer(t)
	shake(r, client, svc)
	client.say(r.addr, long("another first id", clientID, "name=pri.test"))
	_, from := pri.next()
	pri.say(from, long(clientID, otherID, "server hello"))
	client.next()
	client.say(r.addr, short(otherID, "to pri"))
	pri.hear(short(otherID, "to pri"))
	client.say(r.addr, short(serverID, "to svc"))
	svc.hear(short(serverID, "to svc"))
	// An id that nobody has seen goes to who was spoken to last.
	client.say(r.addr, short("????", "to svc"))
	svc.hear(short("????", "to svc"))
}

// A client whose address changes under it is found by the service's id, and
// the service sees that it moved.
func TestQUICFollowsANewAddress(t *testing.T) {
	r, svc, _ := quicRig(t, nil)
	old := newPeer(t)
	was := shake(r, old, svc)
	moved := newPeer(t)
	for _, b := range [][]byte{short(serverID, "one"), short(serverID, "two"), long(serverID, clientID, "three")} {
		moved.say(r.addr, b)
		svc.hear(b)
	}
	moved.say(r.addr, short(serverID, "four"))
	now := svc.hear(short(serverID, "four"))
	if now == was {
		t.Fatalf("the service sees %s as before: it can't validate the new address", now)
	}
	// Each address gets what is sent to it, and nothing else.
	svc.say(now, short(clientID, "to the new"))
	moved.hear(short(clientID, "to the new"))
	svc.say(was, short(clientID, "to the old"))
	old.hear(short(clientID, "to the old"))
	moved.silent()
	if n := r.relay.Open(); n != 1 {
		t.Errorf("%d sessions, want one", n)
	}

	// An id that was seen from a known address is as good: most services give
	// out several, all of one length.
	old.say(r.addr, short("srvX", "five"))
	svc.hear(short("srvX", "five"))
	again := newPeer(t)
	again.say(r.addr, short("srvX", "six"))
	svc.hear(short("srvX", "six"))

	// No more than maxPaths at once: the quietest goes.
	for i := range 2 * maxPaths {
		p := newPeer(t)
		b := short(serverID, fmt.Sprint("path ", i))
		p.say(r.addr, b)
		svc.hear(b)
	}
	r.s.mu.Lock()
	defer r.s.mu.Unlock()
	for d := range r.s.listeners {
		for k := range d.sessions {
			if len(k.paths) != maxPaths || len(d.byAddr) != maxPaths {
				t.Errorf("%d paths, %d addresses, want %d", len(k.paths), len(d.byAddr), maxPaths)
			}
		}
	}
}

// A service may be exposed to some addresses only, and who moves away from
// them is not followed.
func TestQUICDoesNotFollowWhereItMayNot(t *testing.T) {
	r, svc, _ := quicRig(t, nil)
	client := newPeer(t)
	shake(r, client, svc)
	stranger := newPeer(t)
	r.mu.Lock()
	r.refusals[stranger.addr().String()] = tunnel.Refusef(tunnel.NotExposed, "not from there")
	asked := r.asked
	r.mu.Unlock()
	for range 10 {
		stranger.say(r.addr, short(serverID, "let me in"))
	}
	svc.silent()
	r.mu.Lock()
	if r.asked != asked+1 {
		t.Errorf("asked %d times, want once", r.asked-asked)
	}
	r.mu.Unlock()
	client.say(r.addr, short(serverID, "still here"))
	svc.hear(short(serverID, "still here"))
}

// Until the service answers a client that has written to its id, nothing is
// proven: what the client writes can't be read, and a session of which nothing
// is proven stays at its address.
func TestQUICProof(t *testing.T) {
	r, svc, _ := quicRig(t, nil)
	client := newPeer(t)
	client.say(r.addr, long(firstID, clientID, "name=svc.test"))
	_, from := svc.next()
	client.say(r.addr, short(firstID, "blind")) // its own id, not the service's
	svc.next()
	svc.say(from, long(clientID, serverID, "server hello"))
	client.next()
	if st := r.s.Stats(); st.HalfOpen != 1 {
		t.Fatalf("%+v, want half open", st)
	}
	svc.say(from, short(clientID, "early")) // what a service says in 1-RTT with its first flight
	client.next()
	if st := r.s.Stats(); st.HalfOpen != 1 {
		t.Fatalf("%+v, want half open: the client has not written to the service's id", st)
	}
	newPeer(t).say(r.addr, short("guessed", "data"))
	svc.silent()
	for _, b := range [][]byte{long(serverID, clientID, "0-RTT"), short(serverID, "garbage")} {
		client.say(r.addr, b)
		svc.hear(b)
	}
	svc.say(from, long(clientID, serverID, "server hello again"))
	client.next()
	if st := r.s.Stats(); st.HalfOpen != 1 {
		t.Fatalf("%+v, want half open: the service has not answered in 1-RTT", st)
	}
	svc.say(from, short(clientID, "handshake done"))
	client.next()
	testnet.Eventually(t, patience, func() bool { return r.s.Stats().HalfOpen == 0 }, "none is half open") // a moment after the client has it
}

// What the Opening does not let through stays here; an Initial to an id that
// nobody has is a new session, whatever there is already.
func TestQUICChecksWhatFollows(t *testing.T) {
	r, svc, pri := quicRig(t, nil)
	client := newPeer(t)
	shake(r, client, svc)
	client.say(r.addr, long(serverID, clientID, "bad"))
	client.say(r.addr, long(firstID, clientID, "bad"))
	svc.silent()
	client.say(r.addr, long("yet another id", clientID, "name=pri.test"))
	pri.hear(long("yet another id", clientID, "name=pri.test"))
	client.say(r.addr, long("one more id", clientID, "name=nobody.test"))
	client.hear([]byte("no: no-route"))
	svc.silent()
}

func TestQUICRefusals(t *testing.T) {
	hello := long(firstID, clientID, "name=nobody.test")
	for _, c := range []struct {
		name   string
		say    []byte
		why    tunnel.Reason
		answer string
		silent bool
	}{
		{"no route", hello, tunnel.NoRoute, "no: no-route", false},
		{"no route, silently", hello, tunnel.NoRoute, "", true},
		{"no name", long(firstID, clientID, "name="), tunnel.NoSNI, "no: no-sni", false},
		{"another version", long(firstID, clientID, "version"), tunnel.Unsupported, "no: unsupported", false},
		{"not QUIC", long(firstID, clientID, "garbage"), tunnel.BadPreamble, "", false},
		{"a short header of nobody", short("nobody", "data"), tunnel.BadPreamble, "", false},
		{"a panic", long(firstID, clientID, "panic"), tunnel.Internal, "", false},
		{"DNS", make([]byte, 30), tunnel.BadPreamble, "", false},
		{"an empty datagram", nil, tunnel.BadPreamble, "", false},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := newRig(t, Listener{Open: newOpening, Silent: c.silent}, nil)
			client := newPeer(t)
			client.say(r.addr, c.say)
			if c.answer != "" {
				client.hear([]byte(c.answer))
			}
			o := r.outcome(1, c.why)
			if o.Proto != "quic" || o.Source != client.addr() || o.Err == nil {
				t.Errorf("outcome %+v", o)
			}
			client.silent()
		})
	}
}

// A client that did not hear asks again, gets the same answer, ever more
// rarely, and is one line in the log.
func TestQUICRefusalsAreRepeated(t *testing.T) {
	r, _, _ := quicRig(t, nil)
	client := newPeer(t)
	hello := long(firstID, clientID, "name=nobody.test")
	client.say(r.addr, hello)
	client.hear([]byte("no: no-route"))
	for range 15 {
		client.say(r.addr, hello)
	}
	for range 4 { // to the first, second, fourth and eighth
		client.hear([]byte("no: no-route"))
	}
	client.silent()
	if n := len(r.told()); n != 1 {
		t.Errorf("%d outcomes, want one", n)
	}
}

func TestQUICHelloMustCome(t *testing.T) {
	r, svc, _ := quicRig(t, func(s *Server) { s.Limits.HandshakeTimeout = 500 * time.Millisecond })
	client := newPeer(t)
	client.say(r.addr, long(firstID, clientID, "more"))
	o := r.outcome(1, tunnel.HelloTimeout)
	if o.Source != client.addr() || o.Proto != "quic" || o.Target != "" {
		t.Errorf("outcome %+v", o)
	}
	client.say(r.addr, long(firstID, clientID, "name=svc.test"))
	svc.hear(long(firstID, clientID, "name=svc.test"))
}

func TestQUICBuffersAreBounded(t *testing.T) {
	r, _, _ := quicRig(t, nil)
	client := newPeer(t)
	for range 100 {
		client.say(r.addr, long(firstID, clientID, strings.Repeat(" ", 1100)+"more"))
	}
	testnet.Eventually(t, patience, func() bool { return r.s.Stats().Dropped > 0 }, "some to be dropped")
	r.s.mu.Lock()
	defer r.s.mu.Unlock()
	if r.s.waiting > maxWaiting {
		t.Errorf("%d bytes wait, limit %d", r.s.waiting, maxWaiting)
	}
}

// After a Version Negotiation the client begins again, with the same id or
// another one.
func TestQUICVersionNegotiationOfTheService(t *testing.T) {
	r, svc, _ := quicRig(t, nil)
	client := newPeer(t)
	client.say(r.addr, long(firstID, clientID, "name=svc.test"))
	_, from := svc.next()
	svc.say(from, versionNegotiation(clientID, firstID))
	client.hear(versionNegotiation(clientID, firstID))
	r.outcome(1, tunnel.Unsupported)
	client.say(r.addr, long(firstID, clientID, "name=svc.test"))
	if _, again := svc.next(); again == from {
		t.Error("the session went on")
	}
}

// A Local has the connections of its names, and what nobody else knows.
func TestLocal(t *testing.T) {
	conn := listen(t, "127.0.0.1:0")
	l := NewLocal(conn)
	own := name(t, "own.test")
	r, svc := newRig(t, Listener{Conn: conn, Open: newOpening, Local: l, Own: func(n tunnel.Name) bool { return n == own }}, nil), newPeer(t)
	r.route("svc.test", svc.addr())
	client, other := newPeer(t), newPeer(t)
	b := make([]byte, maxDatagram)
	expect := func(want []byte, from *peer) {
		t.Helper()
		_ = l.SetReadDeadline(time.Now().Add(patience))
		n, addr, err := l.ReadFrom(b)
		if err != nil || string(b[:n]) != string(want) || addr.String() != from.addr().String() {
			t.Fatalf("ReadFrom = %q from %v, %v, want %q from %s", b[:n], addr, err, want, from.addr())
		}
	}
	client.say(r.addr, long(firstID, clientID, "more"))
	client.say(r.addr, long(firstID, clientID, "name=own.test"))
	expect(long(firstID, clientID, "more"), client)
	expect(long(firstID, clientID, "name=own.test"), client)
	answer := long(clientID, serverID, "server hello")
	if _, err := l.WriteTo(answer, client.LocalAddr()); err != nil {
		t.Fatal(err)
	}
	client.hear(answer)
	client.say(r.addr, long(serverID, clientID, "bad")) // its own judge
	expect(long(serverID, clientID, "bad"), client)
	if st := r.s.Stats(); st.HalfOpen != 1 {
		t.Errorf("%+v, want half open: the Local has not answered", st)
	}
	if _, err := l.WriteTo(short(clientID, "handshake done"), client.LocalAddr()); err != nil {
		t.Fatal(err)
	}
	client.hear(short(clientID, "handshake done"))
	if st := r.s.Stats(); st.HalfOpen != 0 || st.Sessions != 1 {
		t.Errorf("%+v, want one session, proven", st)
	}
	client.say(r.addr, short("????", "an id given in private"))
	expect(short("????", "an id given in private"), client)
	other.say(r.addr, short(serverID, "moved"))
	expect(short(serverID, "moved"), other)
	stranger := newPeer(t)
	stranger.say(r.addr, short("????", "moved on purpose"))
	expect(short("????", "moved on purpose"), stranger)
	if _, err := l.WriteTo([]byte("hello there"), stranger.LocalAddr()); err != nil {
		t.Fatal(err)
	}
	stranger.hear([]byte("hello there"))

	// Others go on beside it.
	third := newPeer(t)
	third.say(r.addr, long("third id", clientID, "name=svc.test"))
	svc.hear(long("third id", clientID, "name=svc.test"))

	// By the Local's ids its packets are known also where the same socket has
	// a session with a service.
	id := string(l.NewID())
	for _, b := range [][]byte{short(id, "beside a session"), long(id, clientID, "beside a session")} {
		third.say(r.addr, b)
		expect(b, third)
	}
	svc.silent()

	_ = l.SetReadDeadline(time.Now().Add(-time.Second))
	if _, _, err := l.ReadFrom(b); err == nil || !strings.Contains(err.Error(), "timeout") {
		t.Errorf("ReadFrom after the deadline: %v", err)
	}
	_ = l.SetReadDeadline(time.Time{})
	ended := make(chan error, 1)
	go func() { _, _, err := l.ReadFrom(b); ended <- err }()
	_ = l.SetReadDeadline(time.Now().Add(time.Millisecond))
	if err := <-ended; err == nil {
		t.Error("ReadFrom went on after its deadline")
	}
	_ = l.Close()
	if _, _, err := l.ReadFrom(b); err == nil {
		t.Error("ReadFrom went on after Close")
	}
	if _, err := l.WriteTo(answer, client.LocalAddr()); err == nil {
		t.Error("WriteTo went on after Close")
	}
	client.say(r.addr, short(serverID, "nobody reads")) // and nobody waits for it
}

// A flood of what is no QUIC leaves nothing behind: no session, no memory, and
// few lines.
func TestFloodOfGarbage(t *testing.T) {
	r, svc, _ := quicRig(t, nil)
	client := newPeer(t)
	shake(r, client, svc)
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	rnd := rand.New(rand.NewPCG(1, 2))
	flood := newPeer(t)
	b := make([]byte, 1200)
	const n = 100_000
	began := time.Now()
	for i := range n {
		for j := 0; j < len(b); j += 8 {
			b[j] = byte(rnd.Uint32())
		}
		if i%2 == 0 { // half of it looks a little like QUIC
			copy(b, long(fmt.Sprintf("id %13d", i), clientID, "garbage"))
		}
		flood.say(r.addr, b[:1+rnd.IntN(len(b))])
	}
	svc.hearsOf(client, r.addr, short(serverID, "still here"))
	testnet.Eventually(t, patience, func() bool {
		runtime.GC()
		runtime.ReadMemStats(&after)
		return int64(after.HeapAlloc)-int64(before.HeapAlloc) <= 1<<20
	}, "no more than a mebibyte is left of %d datagrams", n)
	st := r.s.Stats()
	if st.Sessions != 1 || st.Dropped == 0 {
		t.Errorf("%+v, want one session and dropped datagrams", st)
	}
	if told, most := len(r.told()), reportsPerSecond*(10+int(time.Since(began)/time.Second)); told > most {
		t.Errorf("%d outcomes, want %d a second", told, reportsPerSecond)
	}
	flood.silent()
}

// A service's answer in 1-RTT is seen behind its handshake, too.
func TestIsShort(t *testing.T) {
	initial := []byte("\xc0\x00\x00\x00\x01\x03cid\x04srv1\x01t\x02ab")
	handshake := []byte("\xe0\x00\x00\x00\x01\x03cid\x04srv1\x02ab")
	second := []byte("\xd0\x6b\x33\x43\xcf\x03cid\x04srv1\x01t\x02ab") // an Initial of version 2
	data := short(clientID, "data")
	for _, c := range []struct {
		b    []byte
		want bool
	}{
		{nil, false}, {data, true}, {initial, false}, {handshake, false}, {second, false},
		{slices.Concat(initial, data), true}, {slices.Concat(initial, handshake, data), true}, {slices.Concat(second, data), true},
		{slices.Concat(handshake, []byte{0, 0, 0}), false}, {handshake[:12], false}, {initial[:16], false},
		{versionNegotiation(clientID, serverID), false},
	} {
		if got := isShort(c.b); got != c.want {
			t.Errorf("isShort(%x) = %v, want %v", c.b, got, c.want)
		}
	}
	for n := range len(initial) {
		isShort(initial[:n])
	}
}

// A datagram to an id that the client was given in private is checked once:
// an Opening that has seen the end of its handshake can't read it again.
func TestQUICChecksOnce(t *testing.T) {
	var checked atomic.Int32
	r, svc := newRig(t, Listener{Open: func() Opening { return &onceOpening{checked: &checked} }}, nil), newPeer(t)
	r.route("svc.test", svc.addr())
	client := newPeer(t)
	client.say(r.addr, long(firstID, clientID, "name=svc.test"))
	_, from := svc.next()
	svc.say(from, long(clientID, serverID, "server hello"))
	client.next()
	client.say(r.addr, long("srvX", clientID, "finished"))
	svc.hear(long("srvX", clientID, "finished"))
	if st := r.s.Stats(); st.Dropped != 0 || checked.Load() != 1 {
		t.Errorf("checked %d times, %d dropped, want once and none", checked.Load(), st.Dropped)
	}
}

// onceOpening lets only the first datagram follow.
type onceOpening struct {
	fakeOpening
	checked *atomic.Int32
}

func (o *onceOpening) Check([]byte) bool { return o.checked.Add(1) == 1 }

// A datagram to an unknown id is tried with the newest sessions of its client
// and the client's id, and only so often.
func TestGuessesAreBounded(t *testing.T) {
	var checked atomic.Int32
	r, svc := newRig(t, Listener{Open: func() Opening { return &deafOpening{checked: &checked} }},
		func(s *Server) { s.Limits = tunnel.Limits{MaxPendingPerClient: -1, ConnectionRatePerClient: -1} }), newPeer(t)
	r.route("svc.test", svc.addr())
	client := newPeer(t)
	const sessions = 20
	for i := range sessions {
		client.say(r.addr, long(fmt.Sprintf("first id %5d", i), clientID, "name=svc.test"))
		_, from := svc.next()
		svc.say(from, long(clientID, fmt.Sprintf("s%03d", i), "server hello"))
		client.next()
	}
	guess := func() {
		t.Helper()
		before := r.s.Stats().Dropped
		client.say(r.addr, long("????", clientID, "garbage"))
		testnet.Eventually(t, patience, func() bool { return r.s.Stats().Dropped > before }, "the guess")
	}
	guess()
	if n := checked.Load(); n != maxGuesses {
		t.Errorf("one datagram was checked %d times, want %d", n, maxGuesses)
	}
	start := time.Now()
	for range 2 * failedPerSecond {
		guess()
	}
	most := (failedPerSecond*time.Since(start).Seconds() + failedPerSecond + 1) * maxGuesses
	if n := checked.Load(); float64(n) > most {
		t.Errorf("%d checks, want at most %.0f", n, most)
	}
	r.s.mu.Lock()
	defer r.s.mu.Unlock()
	for d := range r.s.listeners {
		if len(d.callers) != 1 {
			t.Errorf("%d callers, want one", len(d.callers))
		}
	}
}

// deafOpening lets nothing follow.
type deafOpening struct {
	fakeOpening
	checked *atomic.Int32
}

func (o *deafOpening) Check([]byte) bool { o.checked.Add(1); return false }
