package upstream

import (
	"net/netip"
	"testing"

	"culvert.dev/tunnel"
)

// closed is an address that nobody listens at.
var closed = netip.MustParseAddrPort("127.0.0.1:1")

// A gateway's name that leads to loopback is refused also where a connection is
// opened for several requests.
func TestGatewayIsGuarded(t *testing.T) {
	dialer, err := (&Dialers{Direct: &tunnel.NetDialer{}}).gateway(gatewayKey{"socks5", tunnel.Endpoint{Addr: closed, Host: "gw.test"}})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := dialer.DialContext(t.Context(), "tcp", "svc.test:443"); tunnel.ReasonOf(err) != tunnel.Prohibited {
		t.Errorf("dial of a name of loopback: got %v, want %s", err, tunnel.Prohibited)
	}
}

// The requests that go by one gateway share a dialer, and those by others do not.
func TestGatewayDialersAreShared(t *testing.T) {
	d := &Dialers{Direct: &tunnel.NetDialer{}}
	defer d.Close()
	ep := tunnel.Endpoint{Addr: closed, Named: true}
	a, err := d.gateway(gatewayKey{"connect-h2", ep})
	if err != nil {
		t.Fatal(err)
	}
	if b, _ := d.gateway(gatewayKey{"connect-h2", ep}); a != b {
		t.Error("the same gateway has two dialers")
	}
	for _, other := range []gatewayKey{{"connect", ep}, {"connect-h2", tunnel.Endpoint{Addr: ep.Addr, Host: "gw.test"}}} {
		if b, _ := d.gateway(other); a == b {
			t.Errorf("%+v has the dialer of another", other)
		}
	}
	if _, err := d.gateway(gatewayKey{"carrier pigeon", ep}); err == nil {
		t.Error("there is a dialer by carrier pigeon")
	}
	for i := range 2 * maxCached {
		if _, err := d.gateway(gatewayKey{"connect-h2", tunnel.Endpoint{Addr: netip.AddrPortFrom(ep.Addr.Addr(), uint16(i+10))}}); err != nil {
			t.Fatal(err)
		}
	}
	if len(d.remote) > maxCached || len(d.pools) > 3*maxCached {
		t.Errorf("got %d dialers and %d pools, want at most %d and %d", len(d.remote), len(d.pools), maxCached, 3*maxCached)
	}
}
