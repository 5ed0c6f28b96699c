package udp

import (
	"context"
	"errors"
	"net"
	"sync/atomic"
	"testing"

	"culvert.dev/tunnel"
)

// A listener may say for each session what it is for, and be closed by itself:
// its sessions end with it, and no others.
func TestListenerOfItsOwn(t *testing.T) {
	var where atomic.Pointer[string]
	say := func(s string) { where.Store(&s) }
	say("a.test")
	to := func(req *tunnel.Request) {
		req.Name, req.Listener, req.ListenerOnly = tunnel.MustParseName(*where.Load()), "section", true
	}
	r := newRig(t, Listener{To: to}, nil)
	a, b := newPeer(t), newPeer(t)
	r.route("a.test", a.addr())
	r.route("b.test", b.addr())
	conn := listen(t, "127.0.0.1:0")
	served := make(chan error, 1)
	go func() { served <- r.s.Serve(context.Background(), Listener{Conn: conn, To: to}) }()

	stays, goes, late := newPeer(t), newPeer(t), newPeer(t)
	stays.say(r.addr, []byte("one"))
	goes.say(addrOf(conn), []byte("two"))
	from := map[string]bool{}
	for range 2 {
		got, _ := a.next()
		from[string(got)] = true
	}
	if !from["one"] || !from["two"] {
		t.Errorf("got answers from %v, want one and two", from)
	}
	say("b.test") // for those to come
	stays.say(r.addr, []byte("more"))
	a.hear([]byte("more"))
	late.say(r.addr, []byte("late"))
	b.hear([]byte("late"))

	if err := conn.Close(); err != nil {
		t.Fatal(err)
	}
	if err := <-served; !errors.Is(err, net.ErrClosed) {
		t.Errorf("Serve = %v, want %v", err, net.ErrClosed)
	}
	if o := r.outcome(1, tunnel.Drain); o.Source != goes.addr() || o.Listener != "section" || o.Target != "a.test" {
		t.Errorf("outcome %+v", o)
	}
	stays.say(r.addr, []byte("still"))
	a.hear([]byte("still"))
	if n := r.s.Stats().Sessions; n != 2 {
		t.Errorf("%d sessions, want 2", n)
	}
}
