package sni

import (
	"context"
	"io"
	"net"
	"sync/atomic"
	"testing"
	"time"

	"culvert.dev/internal/testnet"
	"culvert.dev/tunnel"
	"culvert.dev/tunnel/tunneltest"
)

// most is how often a hello may be on its way here.
const most = 16

// later is a route that is known once there are gateways.
type later struct{ to atomic.Pointer[string] }

func (l *later) Resolve(context.Context, *tunnel.Request) (tunnel.Route, error) {
	return tunneltest.RouteTo(*l.to.Load()), nil
}

func gatewayTo(t *testing.T, r tunnel.Resolver) *tunneltest.Gateway {
	limits := tunnel.Limits{ConnectionRatePerClient: 200} // which ends a loop that goes on
	return tunneltest.Serve(t, tunneltest.Setup{Protocols: []tunnel.Protocol{&Protocol{}}, Resolver: r, MaxHelloRepeats: most, Limits: limits})
}

func dialHello(t *testing.T, addr string, hello []byte) net.Conn {
	t.Helper()
	c, err := net.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	_ = c.SetDeadline(time.Now().Add(patience))
	if _, err := c.Write(hello); err != nil {
		t.Fatal(err)
	}
	return c
}

func says(t *testing.T, c net.Conn, want []byte) {
	t.Helper()
	b := make([]byte, len(want))
	if _, err := io.ReadFull(c, b); string(b) != string(want) {
		t.Fatalf("got %x, %v, want %x", b, err, want)
	}
}

// TestLoop: where two gateways have each other as the endpoint, the hello that
// comes again and again ends it. The client is told.
func TestLoop(t *testing.T) {
	msg := hello(sniExt("svc.test"))
	for title, raw := range map[string][]byte{"one record": one(msg), "a record for each byte": records(msg, 1)} {
		t.Run(title, func(t *testing.T) {
			var back later
			first := gatewayTo(t, &back)
			second := gatewayTo(t, tunneltest.Table{"svc.test": first.Addr})
			back.to.Store(&second.Addr)
			c := dialHello(t, first.Addr, raw)
			says(t, c, alert(InternalError))
			_ = c.Close()
			for range most {
				if o := second.Outcome(t); o.Reason != tunnel.Done {
					t.Errorf("the second gateway's tunnel ended with %s, %v, want %s", o.Reason, o.Err, tunnel.Done)
				}
			}
			refused := 0
			for range most + 1 {
				if o := first.Outcome(t); o.Reason == tunnel.Loop {
					refused++
				}
			}
			if refused != 1 {
				t.Errorf("the first gateway refused %d requests with %s, want 1", refused, tunnel.Loop)
			}
			if n := len(first.Requests()); n != most+1 {
				t.Errorf("the first gateway had %d requests, want %d", n, most+1)
			}
		})
	}
}

// TestRepeatedHello: a client that sends the same hello again is no loop as long
// as it is answered.
func TestRepeatedHello(t *testing.T) {
	arrived := make(chan net.Conn)
	svc := testnet.Service(t, func(c net.Conn) {
		if _, err := c.Read(make([]byte, 1)); err != nil {
			return
		}
		select {
		case arrived <- c:
		case <-t.Context().Done():
			return
		}
		_, _ = io.Copy(io.Discard, c)
	})
	g := gatewayTo(t, tunneltest.Table{"svc.test": svc})
	arrival := func() net.Conn {
		t.Helper()
		select {
		case c := <-arrived:
			return c
		case <-time.After(patience):
			t.Fatal("the service is not reached")
			return nil
		}
	}
	type pair struct{ client, service net.Conn }
	var waiting []pair
	for range most {
		waiting = append(waiting, pair{dialHello(t, g.Addr, suiteHello), arrival()})
	}
	says(t, dialHello(t, g.Addr, suiteHello), alert(InternalError))
	for _, p := range waiting {
		_, _ = p.service.Write([]byte("!"))
		says(t, p.client, []byte("!"))
		next := pair{dialHello(t, g.Addr, suiteHello), arrival()}
		_, _ = next.service.Write([]byte("?"))
		says(t, next.client, []byte("?"))
	}
	if o := g.Outcome(t); o.Reason != tunnel.Loop {
		t.Errorf("outcome %s, %v, want %s", o.Reason, o.Err, tunnel.Loop)
	}
	// The end of a tunnel without an answer makes room, too.
	for range 2 * most {
		_ = dialHello(t, g.Addr, suiteHello).Close()
		_ = arrival().Close()
		testnet.Eventually(t, patience, func() bool { return g.Relay.Open() == 2*most }, "the tunnel has ended")
	}
}
