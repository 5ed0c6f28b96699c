package ws

import (
	"runtime"
	"strings"
	"testing"
	"time"

	"culvert.dev/internal/testnet"
	"culvert.dev/tunnel"
	"culvert.dev/tunnel/tunneltest"
)

// rests waits until no goroutine moves the bytes of a tunnel.
func rests(t *testing.T) {
	t.Helper()
	stacks := make([]byte, 1<<20)
	testnet.Eventually(t, patience, func() bool {
		return !strings.Contains(string(stacks[:runtime.Stack(stacks, true)]), ".(*pump).run(")
	}, "the tunnel rests")
}

// TestFramesAtRest: what comes at rest is answered as ever, and leaves the
// tunnel at rest where it is no byte of the stream, or not one yet.
func TestFramesAtRest(t *testing.T) {
	for _, over := range carriers(t)[1:] {
		t.Run(over.name, func(t *testing.T) {
			g := serve(t, tunneltest.Table{"svc.test:443": testnet.Echo(t).Addr()}, over.protocol())
			c := over.open(t, g)
			rests(t)
			for _, said := range []string{"", "still there?"} {
				_, _ = c.Write(frame(0x89, true, []byte(said)))
				if h, payload := next(t, c); h.opcode != opPong || string(payload) != said {
					t.Errorf("got opcode %d, %q, want the pong to %q", h.opcode, payload, said)
				}
				rests(t)
			}
			late := frame(0x82, true, []byte("late"))
			for _, piece := range [][]byte{late[:1], late[1:5], late[5:6], late[6:8], late[8:]} {
				_, _ = c.Write(piece)
				rests(t)
			}
			var got []byte
			for len(got) < 4 {
				_, payload := next(t, c)
				got = append(got, payload...)
			}
			if string(got) != "late" {
				t.Errorf("got %q, want what was sent in pieces", got)
			}
			_, _ = c.Write(closeFrame(1000, true, ""))
			if code := closeOf(t, c); code != 1000 {
				t.Errorf("got close code %d, want 1000", code)
			}
			if o := g.Outcome(t); o.Reason != tunnel.Done || o.BytesIn != 4 || o.BytesOut != 4 {
				t.Errorf("got outcome %+v, want 4 bytes each way and their end", o)
			}
		})
	}
}

// TestKeepAliveAtRest: a peer that says nothing at all is given up also where
// nobody is in a Read.
func TestKeepAliveAtRest(t *testing.T) {
	g := serve(t, tunneltest.Table{"svc.test:443": testnet.Echo(t).Addr()}, &Protocol{Options: Options{Ping: 800 * time.Millisecond}})
	c := open(t, g, Subprotocol)
	rests(t)
	if o := g.Outcome(t); o.Reason != tunnel.Reset || o.Err == nil || !strings.Contains(o.Err.Error(), "no answer to 3 pings") {
		t.Errorf("got outcome %s, %v, want %s and no answer to 3 pings", o.Reason, o.Err, tunnel.Reset)
	}
	_ = c.Close()
}
