package tunnel_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"

	"culvert.dev/internal/testnet"
	"culvert.dev/tunnel"
)

// A watcher notes what it is told.
type watcher struct {
	mu   sync.Mutex // guards told
	told []string
}

func (w *watcher) Answered()            { w.note("answered") }
func (w *watcher) Unanswered(err error) { w.note("unanswered: " + err.Error()) }

func (w *watcher) note(s string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.told = append(w.told, s)
}

func (w *watcher) all() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.Clone(w.told)
}

// dialTo dials connections that are there already.
type dialTo struct{ net.Conn }

func (d dialTo) DialContext(context.Context, string, string) (net.Conn, error) { return d.Conn, nil }

// TestEndpointWatcher checks what is held against an endpoint: an abort before its first
// byte, and no answer to a ClientHello, but nothing that the client has done.
func TestEndpointWatcher(t *testing.T) {
	for name, c := range map[string]struct {
		hello uint32
		do    func(t *testing.T, client, service net.Conn)
		want  string // the beginning of what is told; "" for nothing
	}{
		"answers, and aborts": {do: func(t *testing.T, client, service net.Conn) {
			say(t, service, client)
			_ = testnet.Abort(service)
		}, want: "answered"},
		"answers a hello": {hello: 7, do: func(t *testing.T, client, service net.Conn) {
			say(t, client, service)
			say(t, service, client)
			_ = service.Close()
		}, want: "answered"},
		"aborts at once": {do: func(_ *testing.T, client, service net.Conn) {
			_ = testnet.Abort(service)
			readEnd(client)
		}, want: "unanswered: "},
		"reads and aborts": {do: func(t *testing.T, client, service net.Conn) {
			say(t, client, service)
			_ = testnet.Abort(service)
			readEnd(client)
		}, want: "unanswered: "},
		"closes, and has nothing to say": {do: func(_ *testing.T, client, service net.Conn) {
			_ = service.Close()
			readEnd(client)
		}},
		"closes in place of an answer to a hello": {hello: 7, do: func(t *testing.T, client, service net.Conn) {
			say(t, client, service)
			_ = service.Close()
			readEnd(client)
		}, want: "unanswered: it closed"},
		"the client aborts": {hello: 7, do: func(t *testing.T, client, service net.Conn) {
			say(t, client, service)
			_ = testnet.Abort(client)
			readEnd(service)
		}},
		"the client ends, and the service aborts": {hello: 7, do: func(_ *testing.T, client, service net.Conn) {
			_ = testnet.CloseWrite(client)
			readEnd(service)
			_ = testnet.Abort(service)
			readEnd(client)
		}},
		"both end": {hello: 7, do: func(_ *testing.T, client, service net.Conn) {
			_ = testnet.CloseWrite(client)
			readEnd(service)
			_ = service.Close()
			readEnd(client)
		}},
	} {
		for _, copied := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, copied %t", name, copied), func(t *testing.T) {
				var w watcher
				load := &tunnel.EndpointLoad{Watcher: &w}
				near, service := tcpPair(t)
				client, accepted := tcpPair(t)
				defer client.Close()
				defer service.Close()
				var stream tunnel.Stream = accepted
				if copied {
					stream = opaque{accepted}
				}
				ended := make(chan *tunnel.Outcome, 1)
				relay := &tunnel.Relay{}
				defer relay.Close()
				router := &tunnel.Router{
					Dialer: dialTo{near}, Relay: relay, Observe: func(o *tunnel.Outcome) { ended <- o },
					Resolver: resolverFunc(func(context.Context, *tunnel.Request) (tunnel.Route, error) {
						eps := endpoints("192.0.2.1:80")
						eps[0].Load = load
						return tunnel.Route{Service: "svc", Endpoints: eps}, nil
					}),
				}
				router.ServeTunnel(t.Context(), &tunnel.Request{
					Name: tunnel.MustParseName("svc.example"), Hello: c.hello,
					Accept: func() (tunnel.Stream, error) { return stream, nil },
					Refuse: func(err error) { t.Errorf("refused: %v", err) },
				})
				c.do(t, client, service)
				_ = client.Close()
				_ = service.Close()
				o := <-ended
				told := w.all()
				if c.want == "" && len(told) == 0 {
					return
				}
				if len(told) != 1 || c.want == "" || !strings.HasPrefix(told[0], c.want) {
					t.Errorf("told of %q, want %q; the tunnel ended with %s, %v", told, c.want, o.Reason, o.Err)
				}
			})
		}
	}
}

// say sends some bytes and waits until they have come.
func say(t *testing.T, from, to net.Conn) {
	t.Helper()
	if _, err := io.WriteString(from, "hello"); err != nil {
		t.Error(err)
	}
	if _, err := io.ReadFull(to, make([]byte, 5)); err != nil {
		t.Error(err)
	}
}

// readEnd reads up to the end, whatever it is.
func readEnd(c net.Conn) { _, _ = io.Copy(io.Discard, c) }

// TestConnectionsPerEndpoint checks that an endpoint at its limit is passed over, that
// this is no attempt, and that a request is refused where all are at theirs.
func TestConnectionsPerEndpoint(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		addrs := []string{"192.0.2.1:80", "192.0.2.2:80", "192.0.2.3:80", "192.0.2.4:80", "192.0.2.5:80"}
		loads := make([]tunnel.EndpointLoad, len(addrs))
		b := newBench(t, resolverFunc(func(ctx context.Context, req *tunnel.Request) (tunnel.Route, error) {
			route, err := routeTo(addrs...)(ctx, req)
			for i := range route.Endpoints {
				route.Endpoints[i].Load = &loads[i]
			}
			route.Limits = &tunnel.ServiceLimits{ConnectionsPerEndpoint: 2}
			return route, err
		}))
		var open []*asker
		for i := range 2 * len(addrs) {
			a := &asker{}
			b.ServeTunnel(t.Context(), a.request())
			if calls := b.dialer.calls(); len(calls) != i+1 || calls[i] != addrs[i/2] {
				t.Fatalf("dialed %v, want %s as the last one", calls, addrs[i/2])
			}
			open = append(open, a)
		}
		_, attempts, err := b.Forecast(t.Context(), (&asker{}).request())
		if tunnel.ReasonOf(err) != tunnel.Overload || len(attempts) != len(addrs) || tunnel.ReasonOf(attempts[4].Err) != tunnel.Overload {
			t.Errorf("Forecast: %v, attempts %v; want %s for each", err, attempts, tunnel.Overload)
		}
		a := &asker{}
		b.ServeTunnel(t.Context(), a.request())
		if len(a.refused) != 1 || tunnel.ReasonOf(a.refused[0]) != tunnel.Overload || !strings.Contains(a.refused[0].Error(), "service svc: limits.connectionsPerEndpoint: each of 5 endpoints has 2 connections, the limit") {
			t.Errorf("with all endpoints at their limit: %v", a.refused)
		}
		_ = open[9].client.Close() // one of the last endpoint, which is the fifth to be looked at
		_ = b.dialer.ends()[9].Close()
		synctest.Wait()
		if _, attempts, err := b.Forecast(t.Context(), (&asker{}).request()); err != nil || len(attempts) != len(addrs) || attempts[4].Err != nil {
			t.Errorf("Forecast with a free place: %v, %v", err, attempts)
		}
		b.dialer.answers[addrs[4]] = errors.New("down")
		a = &asker{}
		b.ServeTunnel(t.Context(), a.request())
		if len(a.refused) != 1 || tunnel.ReasonOf(a.refused[0]) != tunnel.DialFailed {
			t.Errorf("where the only one below its limit is down: %v", a.refused)
		}
		for _, a := range open {
			_ = a.client.Close()
		}
		b.stop()
		for i := range loads {
			if n := loads[i].Tunnels(); n != 0 {
				t.Errorf("endpoint %d has %d tunnels at the end", i, n)
			}
		}
	})
}
