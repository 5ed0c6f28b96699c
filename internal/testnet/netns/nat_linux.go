package netns

import (
	"fmt"
	"testing"
)

// natRules are those of a home router: connections from inside have the address of the outer
// interface and a port, which others cannot send to, and nothing comes in by itself. The
// chains that are empty are for port mappings.
const natRules = `table inet filter
delete table inet filter
table inet nat
delete table inet nat
table inet filter {
	chain forward {
		type filter hook forward priority 0; policy drop;
		ct state established,related accept
		iifname != "%[1]s" accept
		jump miniupnpd
	}
	chain miniupnpd {}
}
table inet nat {
	chain prerouting { type nat hook prerouting priority -100; jump prerouting_miniupnpd; }
	chain postrouting {
		type nat hook postrouting priority 100;
		jump postrouting_miniupnpd
		oifname "%[1]s" %[2]s
	}
	chain prerouting_miniupnpd {}
	chain postrouting_miniupnpd {}
}`

// Masquerade makes ns a router with a port-restricted NAT on the interface that leads outside.
// The tables are as miniupnpd expects them. Called again, it forgets all mappings.
func (ns *NS) Masquerade(t testing.TB, outside string) { ns.router(t, outside, "masquerade") }

// MasqueradeRandomly is Masquerade with another random port for each connection, a symmetric
// NAT.
func (ns *NS) MasqueradeRandomly(t testing.TB, outside string) {
	ns.router(t, outside, "masquerade fully-random")
}

// Firewall is Masquerade without NAT: nothing comes in by itself.
func (ns *NS) Firewall(t testing.TB, outside string) { ns.router(t, outside, "accept") }

func (ns *NS) router(t testing.TB, outside, statement string) {
	t.Helper()
	run(t, "ip", "netns", "exec", ns.Name, "sysctl", "-q", "-w", "net.ipv4.ip_forward=1")
	ns.nft(t, fmt.Sprintf(natRules, outside, statement))
}
