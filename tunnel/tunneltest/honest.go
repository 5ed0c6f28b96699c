package tunneltest

import (
	"context"
	"testing"
	"time"

	"culvert.dev/tunnel"
)

// honest moves many small pieces, opens and ends many tunnels, and aborts some:
// which is no flood.
func (c Shared) honest(t *testing.T) {
	g := c.Serve(t, named{"svc": echoing(t)}, 0, 1)
	kept := g.open(t, "svc")
	for i := range 3000 {
		_ = kept.SetDeadline(time.Now().Add(patience))
		ping(t, kept)
		if i%2 != 0 {
			continue
		}
		s := g.open(t, "svc")
		if i%40 == 0 {
			_ = tunnel.Abort(s)
			continue
		}
		if err := s.CloseWrite(); err != nil {
			t.Fatal(err)
		}
		wantEnd(t, s)
		_ = s.Close()
	}
	if n := g.pool().Conns(); n != 1 {
		t.Errorf("%d connections, want one", n)
	}
	for _, o := range g.Outcomes() {
		switch o.Reason {
		case tunnel.Done, tunnel.Reset, tunnel.Gone:
		default:
			t.Errorf("outcome %s, %v", o.Reason, o.Err)
		}
	}
}

// ofOneClient: a gateway that asks another one for many clients shares its
// connection between them. What one client does, however often, does not end
// the tunnels of others.
func (c Shared) ofOneClient(t *testing.T) {
	for _, does := range []struct {
		name string
		do   func(g Served) error
	}{
		{"it aborts tunnels", func(g Served) error {
			s := g.open(t, "svc")
			_ = s.SetDeadline(time.Now().Add(patience))
			ping(t, s)
			_ = tunnel.Abort(s)
			return nil
		}},
		{"it closes tunnels before their ends", func(g Served) error {
			s := g.open(t, "svc")
			_ = s.SetDeadline(time.Now().Add(patience))
			ping(t, s)
			return s.Close()
		}},
		{"it asks for what is refused", func(g Served) error {
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			s, err := g.Dialer.DialContext(ctx, "tcp", "nobody:1")
			if err == nil {
				return s.Close()
			}
			if r := tunnel.ReasonOf(err); r != tunnel.NoRoute && r != tunnel.Overload {
				return err
			}
			return nil
		}},
		{"it gives up", func(g Served) error {
			ctx, cancel := context.WithTimeout(t.Context(), 100*time.Microsecond)
			defer cancel()
			if s, err := g.Dialer.DialContext(ctx, "tcp", "svc:1"); err == nil {
				_ = tunnel.Abort(s)
			}
			return nil
		}},
	} {
		t.Run(does.name, func(t *testing.T) {
			g := c.Serve(t, named{"svc": echoing(t)}, 0, 1)
			kept := g.open(t, "svc")
			for i := range 2000 {
				if err := does.do(g); err != nil {
					t.Fatalf("time %d: %v", i, err)
				}
				if i%100 == 0 {
					_ = kept.SetDeadline(time.Now().Add(patience))
					ping(t, kept)
				}
			}
			_ = kept.SetDeadline(time.Now().Add(patience))
			ping(t, kept)
			for _, o := range g.Outcomes() {
				if o.Reason == tunnel.Flood {
					t.Errorf("outcome %s, %v", o.Reason, o.Err)
				}
			}
		})
	}
}
