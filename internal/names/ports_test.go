package names

import (
	"errors"
	"net/netip"
	"testing"

	"culvert.dev/dns"
	"culvert.dev/registry"
)

// apart has a service and a headless one behind gateways that have different ports.
func apart(t *testing.T) *Source {
	t.Helper()
	namedPort := []registry.NamedPort{{Name: "https", Protocol: "tcp", Port: 443}}
	s := registry.Snapshot{
		Networks: []registry.Network{
			{Name: "near", CIDRs: []netip.Prefix{netip.MustParsePrefix("10.3.0.0/16")}, Near: []string{"west", "south"}},
			{Name: "west", CIDRs: []netip.Prefix{netip.MustParsePrefix("10.2.0.0/16")}, Gateways: []registry.Gateway{
				{Address: ep("10.2.0.1:443"), Public: ep("198.51.100.1:443")},
				{Address: ep("198.51.100.2:8443"), Weight: 2},
				{Address: registry.Endpoint{Host: "LB.example.net", Port: 9443}},
				{Address: ep("198.51.100.9:3128"), Transports: registry.HopsBy("connect")},
			}},
			{Name: "south", CIDRs: []netip.Prefix{netip.MustParsePrefix("10.4.0.0/16")}, Gateways: []registry.Gateway{{Address: ep("198.51.100.3:443")}}},
		},
		Services: []*registry.Service{
			{Name: "far", Names: pattern("far.test"), Ports: []uint16{443}, Exposed: true, NamedPorts: namedPort, ALPN: []string{"h2"}, Endpoints: []registry.Endpoint{ep("10.2.5.1:443")}},
			{Name: "both", Names: pattern("both.test"), Ports: []uint16{443}, Exposed: true, NamedPorts: namedPort, Endpoints: []registry.Endpoint{ep("10.4.5.1:443"), ep("10.2.5.1:443")}},
			{Name: "db", Names: pattern("db.test"), Ports: []uint16{443}, Exposed: true, Headless: true, NamedPorts: namedPort, Endpoints: []registry.Endpoint{hosted("10.2.5.2:443", "db-0"), hosted("10.2.5.3:443", "db-1")}},
			{Name: "wild", Names: pattern("*.wild.test"), Ports: []uint16{443}, Exposed: true, Endpoints: []registry.Endpoint{ep("10.2.5.4:443")}},
		},
	}
	table, err := registry.Merge(s)
	if err != nil {
		t.Fatal(err)
	}
	reg := &registry.Registry{}
	reg.Swap(table)
	return &Source{Registry: reg}
}

func (s *Source) check(addr string, err error) {
	s.Registry.ReportCheck(registry.Target{Addr: netip.MustParseAddrPort(addr)}, err)
}

var errDead = errors.New("connection refused")

// Where gateways have different ports, every port comes with the addresses of the
// gateway that has it, and no other's.
func TestPortsOfGatewaysThatDiffer(t *testing.T) {
	src := apart(t)
	const two = "0 2 198-51-100-2.far.test:8443, 0 1 lb-example-net.far.test:9443"
	ask(t, src, []question{
		{"far.test", dns.TypeA, "", "exists 0:198.51.100.1, 0:198.51.100.2*2, 0:LB.example.net:9443"},
		{"_https._tcp.far.test", dns.TypeSRV, "", "exists 0 1 198-51-100-1.far.test:443, " + two},
		{"198-51-100-1.far.test", dns.TypeA, "", "exists 0:198.51.100.1"},
		{"198-51-100-2.far.test", dns.TypeA, "", "exists 0:198.51.100.2*2"},
		{"lb-example-net.far.test", dns.TypeA, "", "exists 0:LB.example.net:9443"},
		{"198-51-100-9.far.test", dns.TypeA, "", "absent "}, // it takes no SNI
		{"198-51-100-3.far.test", dns.TypeA, "", "absent "}, // it leads to another network
		{"10-2-0-1.far.test", dns.TypeA, "", "absent "},     // as those inside know it
		{"198-51-100-1.nobody.test", dns.TypeA, "", "absent "},
		{"198-51-100-1.198-51-100-1.far.test", dns.TypeA, "", "absent "},
		{"198-51-100-1.far.test", dns.TypeA, "west", "absent "}, // the service is reached from there
		{"far.test", dns.TypeHTTPS, "", `exists 1 "198-51-100-1.far.test" alpn=[h2] port=0 hints=[198.51.100.1], ` +
			`1 "198-51-100-2.far.test" alpn=[h2] port=8443 hints=[198.51.100.2], 1 "lb-example-net.far.test" alpn=[h2] port=9443 hints=[]`},
		{"both.test", dns.TypeSRV, "near", "exists "},
		{"_https._tcp.both.test", dns.TypeSRV, "near", "exists 0 1 198-51-100-1.both.test:443, 0 2 198-51-100-2.both.test:8443, 0 1 lb-example-net.both.test:9443, 1 1 198-51-100-3.both.test:443"},
		{"198-51-100-3.both.test", dns.TypeA, "near", "exists 1:198.51.100.3"},
		{"_https._tcp.db-1.db.test", dns.TypeSRV, "", "exists 0 1 198-51-100-1.db-1.db.test:443, 0 2 198-51-100-2.db-1.db.test:8443, 0 1 lb-example-net.db-1.db.test:9443"},
		{"198-51-100-2.db-1.db.test", dns.TypeA, "", "exists 0:198.51.100.2*2"},
		{"x.wild.test", dns.TypeHTTPS, "", `exists 1 "198-51-100-1.x.wild.test" alpn=[] port=0 hints=[198.51.100.1], ` +
			`1 "198-51-100-2.x.wild.test" alpn=[] port=8443 hints=[198.51.100.2], 1 "lb-example-net.x.wild.test" alpn=[] port=9443 hints=[]`},
		{"198-51-100-2.x.wild.test", dns.TypeA, "", "exists 0:198.51.100.2*2"},
	})
}

// What does not work is no port either, and where that leaves one port the name is
// that of all.
func TestPortsOfGatewaysThatAreDown(t *testing.T) {
	src := apart(t)
	src.check("198.51.100.2:8443", errDead)
	ask(t, src, []question{
		{"_https._tcp.far.test", dns.TypeSRV, "", "exists 0 1 198-51-100-1.far.test:443, 0 1 lb-example-net.far.test:9443"},
		{"198-51-100-2.far.test", dns.TypeA, "", "exists 0:198.51.100.2*2"}, // who has it, may try
	})
	const all = "exists 0 1 198-51-100-1.both.test:443, 0 2 198-51-100-2.both.test:8443, 0 1 lb-example-net.both.test:9443, 1 1 198-51-100-3.both.test:443"
	src.check("198.51.100.2:8443", nil)
	ask(t, src, []question{{"_https._tcp.both.test", dns.TypeSRV, "near", all}})

	src = source(t) // of two gateways at one port
	src.check("192.0.2.1:443", errDead)
	ask(t, src, []question{
		{"_https._tcp.web.example.com", dns.TypeSRV, "west", "exists 0 1 web.example.com:443"},
		{"web.example.com", dns.TypeHTTPS, "west", `exists 1 "" alpn=[h2] port=0 hints=[192.0.2.2]`},
	})
	src.check("192.0.2.2:443", errDead)
	ask(t, src, []question{
		{"_https._tcp.web.example.com", dns.TypeSRV, "west", "exists 0 1 web.example.com:443"},
		{"web.example.com", dns.TypeHTTPS, "west", `exists 1 "" alpn=[h2] port=0 hints=[192.0.2.1 192.0.2.2]`},
	})
}

// The only gateway that works decides the port; where none works all are told.
func TestPortsFollowWhatWorks(t *testing.T) {
	table, err := registry.Merge(registry.Snapshot{
		Networks: []registry.Network{{Name: "west", CIDRs: []netip.Prefix{netip.MustParsePrefix("10.2.0.0/16")}, Gateways: []registry.Gateway{
			{Address: ep("198.51.100.1:443")}, {Address: ep("198.51.100.2:8443")}}}},
		Services: []*registry.Service{{Name: "far", Names: pattern("far.test"), Ports: []uint16{443}, Exposed: true,
			NamedPorts: []registry.NamedPort{{Name: "https", Protocol: "tcp", Port: 443}}, Endpoints: []registry.Endpoint{ep("10.2.5.1:443")}}},
	})
	if err != nil {
		t.Fatal(err)
	}
	src := &Source{Registry: &registry.Registry{}}
	src.Registry.Swap(table)
	const both = "exists 0 1 198-51-100-1.far.test:443, 0 1 198-51-100-2.far.test:8443"
	for _, step := range []struct {
		addr         string
		err          error
		a, srv, bind string
	}{
		{"198.51.100.1:443", nil, "exists 0:198.51.100.1, 0:198.51.100.2", both,
			`exists 1 "198-51-100-1.far.test" alpn=[] port=0 hints=[198.51.100.1], 1 "198-51-100-2.far.test" alpn=[] port=8443 hints=[198.51.100.2]`},
		{"198.51.100.1:443", errDead, "exists 0:198.51.100.2", "exists 0 1 far.test:8443", `exists 1 "" alpn=[] port=8443 hints=[198.51.100.2]`},
		{"198.51.100.2:8443", errDead, "exists 0:198.51.100.1, 0:198.51.100.2", both,
			`exists 1 "198-51-100-1.far.test" alpn=[] port=0 hints=[198.51.100.1], 1 "198-51-100-2.far.test" alpn=[] port=8443 hints=[198.51.100.2]`},
		{"198.51.100.1:443", nil, "exists 0:198.51.100.1", "exists 0 1 far.test:443", `exists 1 "" alpn=[] port=0 hints=[198.51.100.1]`},
	} {
		src.check(step.addr, step.err)
		ask(t, src, []question{{"far.test", dns.TypeA, "", step.a}, {"_https._tcp.far.test", dns.TypeSRV, "", step.srv}, {"far.test", dns.TypeHTTPS, "", step.bind}})
	}
}

// Of a headless service's endpoints those that work are told, but never none.
func TestPortsOfEndpointsThatAreDown(t *testing.T) {
	src := source(t)
	const srv, name = "_postgres._tcp.db.two", "db.two"
	for _, step := range []struct {
		down   string
		a, srv string
	}{
		{"10.2.5.1:5432", "exists 0:10.2.5.2, 0:10.2.5.3", "exists 0 1 db-1.db.two:5432, 0 1 10-2-5-3.db.two:5432"},
		{"10.2.5.3:5432", "exists 0:10.2.5.2", "exists 0 1 db-1.db.two:5432"},
		{"10.2.5.2:5432", "exists 0:10.2.5.1, 0:10.2.5.2, 0:10.2.5.3", "exists 0 1 db-0.db.two:5432, 0 1 db-1.db.two:5432, 0 1 10-2-5-3.db.two:5432"},
	} {
		src.check(step.down, errDead)
		ask(t, src, []question{{name, dns.TypeA, "west", step.a}, {srv, dns.TypeSRV, "west", step.srv}})
	}
}
