package dns_test

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"time"

	"culvert.dev/dns"
)

// splitTable knows one name, which means a service's own address to clients in
// the network "office" and a gateway's to everybody else.
type splitTable struct{}

func (splitTable) Updated() time.Time { return time.Now() }

func (splitTable) Answer(q dns.Question, a *dns.Answer) {
	switch {
	case q.Name != "db.mesh.internal":
		a.Status = dns.Absent
	case q.View == "office":
		a.Status, a.Addrs = dns.Exists, []dns.Addr{{Addr: netip.MustParseAddr("10.0.1.7")}}
	default:
		a.Status, a.Addrs = dns.Exists, []dns.Addr{{Addr: netip.MustParseAddr("198.51.100.7")}}
	}
}

// A server answers by the network of the client.
func Example() {
	for _, office := range []string{"127.0.0.0/8", "10.0.0.0/8"} {
		srv := &dns.Server{
			Zones: []string{"mesh.internal"},
			Names: func() dns.Names { return splitTable{} },
			Views: []dns.View{{Name: "office", Sources: []netip.Prefix{netip.MustParsePrefix(office)}}},
		}
		pc, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
		if err != nil {
			fmt.Println(err)
			return
		}
		served := make(chan error, 1)
		go func() { served <- srv.ServeUDP(context.Background(), pc, "") }()

		client := &net.Resolver{PreferGo: true, Dial: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "udp", pc.LocalAddr().String())
		}}
		addrs, err := client.LookupNetIP(context.Background(), "ip4", "db.mesh.internal")
		fmt.Println(addrs, err)
		srv.Close()
		<-served
	}
	// Output:
	// [10.0.1.7] <nil>
	// [198.51.100.7] <nil>
}
