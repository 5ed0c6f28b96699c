package tunnel_test

import (
	"testing"

	"culvert.dev/tunnel"
)

// A client that closes in order while the service says goodbye has not reset
// the tunnel: the kernel may have answered the goodbye with a reset by the time
// the service's end is passed on, and the client's own end is still to be read.
func TestRelayBothCloseAtOnce(t *testing.T) {
	eachPath(t, func(t *testing.T, r *tunnel.Relay, p path) {
		for range 300 {
			c := carry(t, r, p, nil)
			start := make(chan struct{})
			done := make(chan struct{})
			go func() {
				defer close(done)
				<-start
				if p.name == "kernel" && tunnel.InKernel { // the copying path loses the second and can't tell why
					_, _ = c.server.Write([]byte("good"))
				}
				_, _ = c.server.Write([]byte("bye"))
				_ = c.server.Close()
			}()
			close(start)
			_ = c.client.CloseWrite() // a close alone is a reset where bytes are unread
			_ = c.client.Close()
			<-done
			if e := c.wait(t); e.Reason != tunnel.Done || e.Err != nil {
				t.Fatalf("ended with %+v, want done", e)
			}
		}
	})
}
