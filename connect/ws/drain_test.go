package ws

import (
	"bytes"
	"io"
	"testing"

	"culvert.dev/internal/testnet"
	"culvert.dev/tunnel"
	"culvert.dev/tunnel/tunneltest"
)

// A drain that cuts a tunnel says that the gateway goes away. What else cuts one
// has no close code of its own.
func TestDrainGoesAway(t *testing.T) {
	for why, code := range map[tunnel.Reason]int{tunnel.Drain: 1001, tunnel.Killed: 1011} {
		for _, over := range carriers(t) {
			// The code is sent where nothing else is at that moment, so that one
			// try may have none.
			heard := false
			for try := 0; try < 10 && !heard; try++ {
				g := serve(t, tunneltest.Table{"svc.test:443": testnet.Echo(t).Addr()}, over.protocol())
				c := over.open(t, g)
				_, _ = c.Write(frame(0x82, true, []byte("x")))
				next(t, c) // the tunnel stands
				g.Relay.Abort(t.Context(), why, 0)
				got, err := io.ReadAll(c)
				heard = bytes.Equal(got, closeFrame(code, false, ""))
				if err == nil || !heard && len(got) > 0 {
					t.Errorf("%s, %s: got %x, %v, want close code %d and a reset", over.name, why, got, err, code)
				}
				if o := g.Outcome(t); o.Reason != why {
					t.Errorf("%s: got outcome %s, want %s", over.name, o.Reason, why)
				}
			}
			if !heard && over.name != "over HTTP/2" { // which may take back what its reset overtakes
				t.Errorf("%s, %s: no close code in 10 tries, want %d", over.name, why, code)
			}
		}
	}
}
