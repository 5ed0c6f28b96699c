package tunnel_test

import (
	"context"
	"net"
	"testing"
	"time"

	"culvert.dev/tunnel"
)

// One listener of two is closed: it accepts no longer, what came by it goes on
// with a context that lives, the other one does not notice, and in the end the
// server has forgotten it. Sockets of the event loop and others alike.
func TestServerListenersComeAndGo(t *testing.T) {
	for name, listen := range map[string]func() (net.Listener, error){
		"loop":  func() (net.Listener, error) { return tunnel.Listen(t.Context(), "127.0.0.1:0") },
		"other": func() (net.Listener, error) { return net.Listen("tcp", "127.0.0.1:0") },
	} {
		t.Run(name, func(t *testing.T) {
			type visit struct {
				ctx  context.Context
				req  *tunnel.Request
				done chan struct{}
			}
			visits := make(chan visit)
			srv := &tunnel.Server{Handler: tunnel.HandlerFunc(func(ctx context.Context, req *tunnel.Request) {
				v := visit{ctx, req, make(chan struct{})}
				visits <- v
				<-v.done
				acceptAndClose(ctx, req)
			})}
			start := func() (net.Listener, chan error) {
				ln, err := listen()
				if err != nil {
					t.Fatal(err)
				}
				served := make(chan error, 1)
				go func() {
					served <- srv.Serve(t.Context(), tunnel.Listener{Listener: ln, Protocols: []tunnel.Protocol{&tunnel.Fixed{To: tunnel.MustParseName("a.example")}}})
				}()
				return ln, served
			}
			dial := func(ln net.Listener) net.Conn {
				c, err := net.Dial("tcp", ln.Addr().String())
				if err != nil {
					t.Fatal(err)
				}
				return c
			}
			stays, staysServed := start()
			for round := range 3 {
				goes, served := start()
				c := dial(goes)
				v := <-visits
				_ = goes.Close()
				if err := <-served; err != net.ErrClosed {
					t.Fatalf("round %d: serve of the closed listener: %v, want net.ErrClosed", round, err)
				}
				if c, err := net.Dial("tcp", goes.Addr().String()); err == nil {
					select {
					case v := <-visits:
						close(v.done)
						t.Errorf("round %d: the closed listener accepts", round)
					case <-time.After(100 * time.Millisecond): // another program listens there by now
					}
					_ = c.Close()
				}
				if err := v.ctx.Err(); err != nil {
					t.Errorf("round %d: the context of a request that came by it: %v", round, err)
				}
				other := dial(stays)
				w := <-visits
				close(w.done)
				wantEnd(t, other)
				if n := srv.Listeners(); n != 2 {
					t.Errorf("round %d: %d listeners with connections, want 2", round, n)
				}
				close(v.done)
				wantEnd(t, c)
				<-v.ctx.Done() // nobody needs it any more
				if n := srv.Listeners(); n != 1 {
					t.Errorf("round %d: %d listeners are kept, want 1", round, n)
				}
			}
			_ = srv.Shutdown(t.Context())
			if err := <-staysServed; err != tunnel.ErrServerClosed {
				t.Errorf("serve: %v", err)
			}
		})
	}
}
