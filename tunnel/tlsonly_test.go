package tunnel_test

import (
	"context"
	"errors"
	"io"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"culvert.dev/tunnel"
)

var errUnencrypted = &tunnel.Error{Reason: tunnel.Insecure, Err: errors.New("the way there is unencrypted")}

// unencrypted resolves everything to an address that nothing but TLS may go to.
func unencrypted(context.Context, *tunnel.Request) (tunnel.Route, error) {
	eps := endpoints("192.0.2.1:80")
	eps[0].TLSOnly = errUnencrypted
	return tunnel.Route{Service: "svc", Endpoints: eps}, nil
}

// TestRouterCarriesTLSAlone sends what is TLS and what is not over a way that is
// unencrypted: the service gets all of the one and not a byte of the other.
func TestRouterCarriesTLSAlone(t *testing.T) {
	const hello = "\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 and the rest of it"
	const minute = time.Minute
	for name, c := range map[string]struct {
		sent  []string // in pieces
		then  string   // what happens next: "", "ends", "drains"
		want  tunnel.Reason
		after time.Duration // the most that it takes to refuse
	}{
		"a hello":                          {sent: []string{hello}},
		"a hello in pieces":                {sent: []string{hello[:1], hello[1:5], hello[5:6], hello[6:]}},
		"a long hello":                     {sent: []string{hello + strings.Repeat("x", 5000)}},
		"plaintext":                        {sent: []string{"GET / HTTP/1.1\r\n\r\n"}, want: tunnel.Insecure},
		"one byte of plaintext":            {sent: []string{"S"}, want: tunnel.Insecure},
		"a record that is no handshake":    {sent: []string{"\x17\x03\x03\x00\x10 data"}, want: tunnel.Insecure},
		"a handshake that is no hello":     {sent: []string{"\x16\x03\x03\x00\x10\x02"}, want: tunnel.Insecure},
		"a record of no length":            {sent: []string{"\x16\x03\x01\x00\x00\x01"}, want: tunnel.Insecure},
		"a record that is too long":        {sent: []string{"\x16\x03\x01\x50\x00\x01"}, want: tunnel.Insecure},
		"another version":                  {sent: []string{"\x16\x02\x01\x02\x00\x01"}, want: tunnel.Insecure},
		"plaintext after what may be TLS":  {sent: []string{"\x16\x03\x01", "xxxxxxxx"}, want: tunnel.Insecure},
		"nothing":                          {want: tunnel.Insecure, after: minute},
		"the beginning of a hello":         {sent: []string{hello[:5]}, want: tunnel.Insecure, after: minute},
		"nothing, and the client leaves":   {then: "ends", want: tunnel.Gone},
		"nothing, and the gateway drains":  {then: "drains", want: tunnel.Drain},
		"half a hello, and it drains then": {sent: []string{hello[:3]}, then: "drains", want: tunnel.Drain},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := newBench(t, resolverFunc(unencrypted))
				a := &asker{}
				ctx, drain := context.WithCancel(t.Context())
				defer drain()
				start := time.Now()
				req := a.request()
				served := make(chan struct{})
				go func() {
					defer close(served)
					b.ServeTunnel(ctx, req)
				}()
				go func() {
					for _, piece := range c.sent {
						if _, err := io.WriteString(a.client, piece); err != nil {
							return
						}
					}
					switch c.then {
					case "ends":
						_ = a.client.Close()
					case "drains":
						drain()
					}
				}()
				synctest.Wait()
				var got strings.Builder
				if c.want == "" {
					p := make([]byte, 100)
					for want := strings.Join(c.sent, ""); got.Len() < len(want); {
						n, err := b.dialer.ends()[0].Read(p)
						got.Write(p[:n])
						if err != nil {
							t.Fatalf("the service got %q, and then %v", got.String(), err)
						}
					}
					if got.String() != strings.Join(c.sent, "") {
						t.Errorf("the service got %q, want what the client sent", got.String())
					}
					<-served
					_ = a.client.Close()
					b.dialer.closeAll()
					time.Sleep(time.Second) // of the bubble: the relay waits for a moment where both ends close
					if o := b.last(t); !o.Carried() || o.BytesIn != int64(got.Len()) {
						t.Errorf("outcome %s with %d bytes, want all %d counted", o.Reason, o.BytesIn, got.Len())
					}
				} else {
					_, _ = io.Copy(&got, b.dialer.ends()[0])
					<-served
					o := b.last(t)
					if o.Reason != c.want || o.Carried() || got.Len() > 0 || time.Since(start) > c.after {
						t.Errorf("outcome %s (%v) after %v, and the service got %q; want %s within %v and nothing", o.Reason, o.Err, time.Since(start), got.String(), c.want, c.after)
					}
					if c.want == tunnel.Insecure && !errors.Is(o.Err, errUnencrypted) {
						t.Errorf("the outcome says %v, want the route's reason with it", o.Err)
					}
					if ours, theirs := b.dialer.gateway[0].ending(), a.conn.ending(); ours != "aborted" || theirs != "aborted" {
						t.Errorf("the service's connection is %s and the client's %s, want both aborted", ours, theirs)
					}
				}
				b.stop()
			})
		})
	}
}

// TestOutcomeSaysInsecure carries plaintext to an endpoint by permission of the
// configuration: the outcome says so, and that of any other endpoint does not.
func TestOutcomeSaysInsecure(t *testing.T) {
	for _, insecure := range []bool{true, false} {
		synctest.Test(t, func(t *testing.T) {
			b := newBench(t, resolverFunc(func(context.Context, *tunnel.Request) (tunnel.Route, error) {
				eps := endpoints("192.0.2.1:80")
				eps[0].Insecure = insecure
				return tunnel.Route{Service: "svc", Endpoints: eps}, nil
			}))
			a := &asker{}
			b.ServeTunnel(t.Context(), a.request())
			_ = a.client.Close()
			b.dialer.closeAll()
			time.Sleep(time.Second) // of the bubble: the relay waits for a moment where both ends close
			if o := b.last(t); !o.Carried() || o.Insecure != insecure {
				t.Errorf("outcome %s, insecure %v; want it carried, and insecure %v", o.Reason, o.Insecure, insecure)
			}
			b.stop()
		})
	}
}

// A request that came in the clear to a listener that requires TLS carries TLS alone to
// every endpoint, whatever the configuration permits there. The Resolver's endpoints stay
// as they are.
func TestRouterRequiresTLS(t *testing.T) {
	shared := endpoints("192.0.2.1:80", "192.0.2.2:80")
	shared[0].TLSOnly = errUnencrypted
	shared[1].Insecure = true
	r := &tunnel.Router{Dialer: &tunnel.NetDialer{}, Resolver: resolverFunc(func(context.Context, *tunnel.Request) (tunnel.Route, error) {
		return tunnel.Route{Service: "svc", Endpoints: shared}, nil
	})}
	for name, row := range map[string]struct {
		req  tunnel.Request
		want bool
	}{
		"in the clear":     {tunnel.Request{RequireTLS: true, Listener: ":8080"}, true},
		"a hello was read": {tunnel.Request{RequireTLS: true, Hello: 1}, false},
		"not required":     {tunnel.Request{}, false},
	} {
		_, attempts, err := r.Forecast(t.Context(), &row.req)
		if err != nil || len(attempts) != 2 {
			t.Fatalf("%s: %v, %v", name, attempts, err)
		}
		if one := attempts[0].Endpoint; !errors.Is(one.TLSOnly, errUnencrypted) {
			t.Errorf("%s: the first endpoint carries TLS alone because of %v, want the route's reason", name, one.TLSOnly)
		}
		two := attempts[1].Endpoint
		if got := two.TLSOnly != nil; got != row.want || two.Insecure == row.want {
			t.Errorf("%s: the second endpoint carries TLS alone: %v, and is insecure: %v", name, two.TLSOnly, two.Insecure)
		}
		if row.want && two.TLSOnly.Error() != "listener :8080 requires TLS" {
			t.Errorf("%s: the reason is %v", name, two.TLSOnly)
		}
	}
	if shared[1].TLSOnly != nil || !shared[1].Insecure {
		t.Error("the Resolver's endpoints have changed")
	}
}
