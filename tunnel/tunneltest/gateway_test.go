package tunneltest_test

import (
	"io"
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

	"culvert.dev/internal/testnet"
	"culvert.dev/tunnel"
	"culvert.dev/tunnel/tunneltest"
)

func TestServe(t *testing.T) {
	for name, drained := range map[string]bool{"cut": false, "drained": true} {
		t.Run(name, func(t *testing.T) {
			g := tunneltest.Serve(t, tunneltest.Setup{
				Protocols: []tunnel.Protocol{&lengthProtocol{}},
				Resolver:  tunneltest.Table{"svc.test": testnet.Echo(t).Addr(), "down.test": "127.0.0.1:1"},
				Drained:   drained,
			})
			talk := func(host string) (string, error) {
				c := testnet.Connect(t, g.Addr)
				_, _ = io.WriteString(c, string(rune(len(host)))+host+"hello")
				_ = c.CloseWrite()
				got, err := io.ReadAll(c)
				return string(got), err
			}
			if got, err := talk("svc.test"); got != "hello" || err != nil {
				t.Errorf("got %q, %v, want what was sent", got, err)
			}
			if o := g.Outcome(t); o.Reason != tunnel.Done {
				t.Errorf("got %s, %v, want %s", o.Reason, o.Err, tunnel.Done)
			}
			for _, row := range []struct {
				host string
				want tunnel.Reason
			}{{"down.test", tunnel.DialFailed}, {"nobody.test", tunnel.NoRoute}} {
				_, _ = talk(row.host)
				if o, found := g.Outcome(t), g.Reason(t, row.want); o.Reason != row.want || o != found {
					t.Errorf("%s: got %s, %v, want %s", row.host, o.Reason, o.Err, row.want)
				}
			}
			var asked []string
			for _, req := range g.Requests() {
				asked = append(asked, req.Host())
			}
			if want := []string{"svc.test", "down.test", "nobody.test"}; !slices.Equal(asked, want) {
				t.Errorf("the requests are %q, want %q", asked, want)
			}
			if n := g.Dials(); n != 2 {
				t.Errorf("%d dials, want one of each route", n)
			}
		})
	}
}

// What the table does not have is refused, by name and by address.
func TestTable(t *testing.T) {
	name, addr := tunneltest.Table{"svc.test:1": "127.0.0.1:1"}, tunneltest.Table{"*": "127.0.0.1:2"}
	for _, row := range []struct {
		table tunneltest.Table
		req   tunnel.Request
		want  string // "" for no route
	}{
		{name, tunnel.Request{Name: tunnel.MustParseName("svc.test"), Port: 1}, "127.0.0.1:1"},
		{name, tunnel.Request{Name: tunnel.MustParseName("svc.test"), Port: 2}, ""},
		{name, tunnel.Request{Addr: netip.AddrFrom4([4]byte{127, 0, 0, 1}), Port: 1}, ""},
		{addr, tunnel.Request{Addr: netip.AddrFrom4([4]byte{127, 0, 0, 1}), Port: 1}, "127.0.0.1:2"},
		{addr, tunnel.Request{Name: tunnel.MustParseName("svc.test"), Port: 1}, ""},
	} {
		route, err := row.table.Resolve(t.Context(), &row.req)
		got := ""
		if len(route.Endpoints) > 0 {
			got = route.Endpoints[0].Addr.String()
		}
		if got != row.want || (err == nil) != (row.want != "") {
			t.Errorf("%v of %s: got %q, %v, want %q", row.table, row.req.Target(), got, err, row.want)
		}
		if row.want == "" {
			tunneltest.WantReason(t, err, tunnel.NoRoute)
		}
	}
}

// A Record wakes all who wait, each for its own.
func TestRecord(t *testing.T) {
	var r tunneltest.Record
	done := make(chan tunnel.Reason)
	for _, want := range []tunnel.Reason{tunnel.Reset, tunnel.Done} {
		go func() {
			var got tunnel.Reason
			defer func() { done <- got }() // even where the wait is in vain
			got = r.Reason(t, want).Reason
		}()
	}
	for _, reason := range []tunnel.Reason{tunnel.Idle, tunnel.Done, tunnel.Reset} {
		r.Observe(&tunnel.Outcome{Reason: reason})
	}
	if a, b := <-done, <-done; a == b {
		t.Errorf("both found %s", a)
	}
	if o := r.Outcome(t); o.Reason != tunnel.Idle || len(r.Outcomes()) != 3 {
		t.Errorf("the first of %d is %s, want %s of 3", len(r.Outcomes()), o.Reason, tunnel.Idle)
	}
}

func TestDial(t *testing.T) {
	c := tunneltest.Dial(t, new(net.Dialer), testnet.Greeting(t, "hi").Addr())
	_ = c.SetReadDeadline(time.Now().Add(time.Second))
	if _, err := io.ReadFull(c, make([]byte, 2)); err != nil {
		t.Error(err)
	}
	testnet.Ping(t, c, "there and back")
}
