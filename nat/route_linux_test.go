package nat

import (
	"strings"
	"testing"
)

func TestParseRoutes(t *testing.T) {
	const head = "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT\n"
	for _, tt := range []struct{ name, lines, router, device string }{
		{"one", "eth0\t00000000\t0101A8C0\t0003\t0\t0\t100\t00000000\t0\t0\t0\neth0\t0001A8C0\t00000000\t0001\t0\t0\t100\t00FFFFFF\t0\t0\t0\n", "192.168.1.1", "eth0"},
		{"lowest metric", "wlan0\t00000000\t0102A8C0\t0003\t0\t0\t600\t00000000\t0\t0\t0\neth0\t00000000\t0101A8C0\t0003\t0\t0\t100\t00000000\t0\t0\t0\n", "192.168.1.1", "eth0"},
		{"no router on the link", "ppp0\t00000000\t00000000\t0001\t0\t0\t0\t00000000\t0\t0\t0\n", "", ""},
		{"half of the internet by a VPN", "tun0\t00000000\t0100080A\t0003\t0\t0\t0\t00000080\t0\t0\t0\n", "", ""},
		{"nonsense", "a b c\neth0\t00000000\tZZ\t0003\t0\t0\t0\t00000000\t0\t0\t0\n", "", ""},
		{"nothing", "", "", ""},
	} {
		router, device, err := parseRoutes(strings.NewReader(head + tt.lines))
		if got := router.String(); (err != nil) != (tt.router == "") || err == nil && (got != tt.router || device != tt.device) {
			t.Errorf("%s: got %s by %q, %v; want %s by %q", tt.name, got, device, err, tt.router, tt.device)
		}
	}
}
