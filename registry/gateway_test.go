package registry_test

import (
	"context"
	"errors"
	"net/netip"
	"reflect"
	"strings"
	"testing"
	"time"

	"culvert.dev/internal/testnet"
	"culvert.dev/registry"
)

// The gateways of other sources are asked as the file says, and a carrier without TLS
// behind one with TLS is left out. Those of the file are what they are.
func TestTransportOfFoundGateways(t *testing.T) {
	ep := addrPort("198.51.100.1:443")
	how := &registry.Hop{Certificate: "crt", Key: "key", Token: "token", TokenFile: "file", JWTSVID: &registry.JWTSVID{Audience: []string{"a"}}, User: "user", Password: "password", Roots: "ca", ServerName: "gw.test", Path: "/t/"}
	with := func(proto, address string) registry.Hop {
		h := *how
		h.Proto, h.Addresses, h.TLS = proto, []string{address}, true
		return h
	}
	anonymous := with("hbone", "198.51.100.1:443")
	anonymous.TokenFile, anonymous.JWTSVID = "", nil
	anonymous.Token, anonymous.User, anonymous.Password = "", "", ""
	plain := func(proto string) registry.Hop {
		return registry.Hop{Proto: proto, Addresses: []string{"198.51.100.1:443"}}
	}
	for _, c := range []struct {
		name  string
		how   *registry.Hop
		found string
		want  []registry.Hop
		left  string
	}{
		{"without TLS", nil, "sni connect-h2 connect", []registry.Hop{plain("connect-h2"), plain("connect")}, ""},
		{"HTTP/3 has TLS", nil, "connect-h3 connect", []registry.Hop{plain("connect-h3")}, "transport connect of gateway"},
		{"HTTP/3 is the last", nil, "connect connect-h3", []registry.Hop{plain("connect"), plain("connect-h3")}, ""},
		{"keys", how, "connect-h3 connect-h2 websocket sni", []registry.Hop{with("connect-h3", "198.51.100.1:443"), with("connect-h2", "https://198.51.100.1:443"), with("websocket", "wss://198.51.100.1:443/t/")}, ""},
		{"HBONE shows its certificate alone", how, "hbone", []registry.Hop{anonymous}, ""},
		{"SOCKS has no TLS", how, "connect socks5", []registry.Hop{with("connect", "https://198.51.100.1:443")}, "transport socks5 of gateway"},
		{"SOCKS alone is shown no password", how, "sni socks5", []registry.Hop{plain("socks5")}, ""},
	} {
		found := registry.Snapshot{Networks: []registry.Network{{Name: "far", Gateways: []registry.Gateway{{Address: ep, Transports: registry.HopsBy(strings.Fields(c.found)...)}}}}}
		file := registry.Snapshot{GatewayTransport: c.how, Networks: []registry.Network{{Name: "own", Gateways: []registry.Gateway{{Address: ep, Transports: registry.HopsBy("connect")}}}}}
		table, err := registry.Merge(file, found)
		if c.left == "" && err != nil || c.left != "" && (err == nil || !strings.Contains(err.Error(), c.left)) {
			t.Errorf("%s: got error %v, want %q", c.name, err, c.left)
		}
		for n := range table.Networks() {
			got, want := n.Gateways[0].Carriers(ep), c.want
			if n.Name == "own" {
				want = []registry.Hop{plain("connect")}
			}
			if !reflect.DeepEqual(got, want) {
				t.Errorf("%s: gateways of %s are asked by\n%+v\nwant\n%+v", c.name, n.Name, got, want)
			}
		}
		if got := found.Networks[0].Gateways[0].Protocols(); strings.Join(got, " ") != c.found {
			t.Errorf("%s: the snapshot has become %q", c.name, got)
		}
	}
}

// A source of public addresses completes the gateways of others, and makes no table of its own.
func TestPublicAddressesCompleteGateways(t *testing.T) {
	inside, outside := netip.MustParseAddrPort("192.168.1.10:443"), netip.MustParseAddrPort("203.0.113.7:8443")
	ep := func(a netip.AddrPort) registry.Endpoint { return registry.Endpoint{Addr: a.Addr(), Port: a.Port()} }
	r := &registry.Registry{}
	others := make(chan registry.Update)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		done <- r.Run(ctx, told(others), supplement{registry.Static{Name: "nat", Snapshot: registry.Snapshot{Public: []registry.PublicAddress{{Address: inside, Public: outside}}}}})
	}()
	defer func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run returned %v", err)
		}
	}()
	for range 3 {
		others <- registry.Update{Source: "file", Err: errors.New("not yet")}
	}
	if got := r.Table(); got != nil {
		t.Errorf("generation %d of the table is made of a supplement alone", got.Generation())
	}
	network := registry.Network{Name: "home", Gateways: []registry.Gateway{{Address: ep(inside)}, {Address: ep(inside), Public: registry.Endpoint{Host: "gw.test", Port: 443}}}}
	others <- registry.Update{Source: "file", Snapshot: registry.Snapshot{Networks: []registry.Network{network}}}
	testnet.Eventually(t, time.Minute, func() bool { return r.Table() != nil }, "there is a table")
	for n := range r.Table().Networks() {
		if got := n.Gateways[0].Public; got != ep(outside) {
			t.Errorf("the public address is %s, want %s", got, outside)
		}
		if got := n.Gateways[1].Public.Host; got != "gw.test" {
			t.Errorf("the configured public address is %q now", got)
		}
	}
	if network.Gateways[0].Public != (registry.Endpoint{}) {
		t.Error("the snapshot of the other source was changed")
	}
}

type told chan registry.Update

func (s told) Run(ctx context.Context, updates chan<- registry.Update) error {
	for {
		select {
		case u := <-s:
			updates <- u
		case <-ctx.Done():
			return nil
		}
	}
}

type supplement struct{ registry.Static }

func (supplement) Supplements() {}
