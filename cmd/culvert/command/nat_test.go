package command

import (
	"bytes"
	"net/netip"
	"reflect"
	"strings"
	"testing"
	"time"

	"culvert.dev/nat"
	"culvert.dev/registry/file"
)

func TestNATSettings(t *testing.T) {
	if s := natSettings(&file.Config{}); s != nil {
		t.Errorf("got %+v without nat, want nothing", s)
	}
	got := natSettings(&file.Config{NAT: &file.NAT{Lifetime: time.Hour, Ports: []file.NATPort{
		{Listener: ":443"}, {Listener: "udp://[::]:443"}, {Listener: "192.168.1.10:8443", External: 9443},
	}}})
	want := &nat.Settings{Lifetime: time.Hour, Ports: []nat.Port{
		{Name: ":443", Network: "tcp", Internal: 443}, {Name: "udp://[::]:443", Network: "udp", Internal: 443},
		{Name: "192.168.1.10:8443", Network: "tcp", Internal: 8443, External: 9443},
	}}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got %+v, want %+v", got, want)
	}
}

// What a router says is printed without control characters, in a line for each port.
func TestPrintNAT(t *testing.T) {
	var b bytes.Buffer
	s := &nat.Status{
		Kind: nat.DoubleNAT, Explanation: "two routers", Route: &nat.Route{Router: netip.MustParseAddr("192.168.1.1"), Local: netip.MustParseAddr("192.168.1.10")},
		Problem: "bad\x1b[2Jrouter", Unseen: "stun.example:3478 does not answer", Mappings: []nat.Mapping{
			{Listener: ":443", State: nat.Verified, External: netip.MustParseAddrPort("203.0.113.7:443"), Protocol: "pcp", Expires: time.Now().Add(time.Hour)},
			{Listener: ":80", State: nat.Pending, Error: "one\ntwo"},
		},
	}
	if err := printNAT(&b, s); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"nat:       double: two routers\n", "router:    192.168.1.1, from 192.168.1.10\n", ":443      verified  203.0.113.7:443  pcp  in ", ":80       pending   -                -    -", "one; two\n", "stun:      stun.example:3478 does not answer\n"} {
		if !strings.Contains(b.String(), want) {
			t.Errorf("got %q, want it to have %q", b.String(), want)
		}
	}
	if strings.Contains(b.String(), "\x1b") {
		t.Errorf("got %q, want no control characters", b.String())
	}
}
