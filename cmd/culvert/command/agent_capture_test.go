package command

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"testing"
)

// Whatever is captured, the agent's gateways, the resolvers of its file and those of the host are
// reached by programs as before, at the addresses that they have now.
func TestHostsThatAreNotCaptured(t *testing.T) {
	resolvers := []netip.Addr{netip.MustParseAddr("192.0.2.53")}
	gateway := []netip.Addr{netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("2001:db8::1")}
	w := &wantedCapture{hosts: []string{"192.0.2.2", "gw.example", "nowhere.example"}}
	a := &agentCapture{
		resolvers: func() []netip.Addr { return resolvers },
		lookup: func(_ context.Context, host string) ([]netip.Addr, error) {
			if host == "gw.example" {
				return gateway, nil
			}
			return nil, errors.New("no such host")
		},
	}
	if got, want := fmt.Sprint(a.literals(w)), "[192.0.2.53/32 192.0.2.2/32]"; got != want {
		t.Errorf("at the start: got %s, want %s", got, want)
	}
	if got, want := fmt.Sprint(a.exceptions(t.Context(), w)), "[192.0.2.1/32 192.0.2.2/32 192.0.2.53/32 2001:db8::1/128]"; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
	resolvers, gateway = []netip.Addr{netip.MustParseAddr("::ffff:192.0.2.54")}, gateway[:1]
	if got, want := fmt.Sprint(a.exceptions(t.Context(), w)), "[192.0.2.1/32 192.0.2.2/32 192.0.2.54/32]"; got != want {
		t.Errorf("after a change: got %s, want %s", got, want)
	}
}
