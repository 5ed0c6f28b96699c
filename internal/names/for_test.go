package names

import (
	"net/netip"
	"testing"

	"culvert.dev/dns"
	"culvert.dev/registry"
)

// An endpoint that serves one port of its service is once among the addresses,
// and among the SRV records of that port only.
func TestAnswerForPorts(t *testing.T) {
	pod := func(name, addr string, port, serves uint16) registry.Endpoint {
		return registry.Endpoint{Name: name, Addr: netip.MustParseAddr(addr), Port: port, ServicePort: serves}
	}
	namedPort := []registry.NamedPort{{Name: "http", Protocol: "tcp", Port: 80}, {Name: "https", Protocol: "tcp", Port: 443}}
	eps := []registry.Endpoint{pod("db-0", "10.1.0.1", 8080, 80), pod("db-0", "10.1.0.1", 8443, 443), pod("db-1", "10.1.0.2", 8443, 443), pod("db-1", "10.1.0.2", 8081, 80)}
	host := func(port, serves uint16) registry.Endpoint {
		return registry.Endpoint{Host: "db.example.net", Port: port, ServicePort: serves}
	}
	table, err := registry.Merge(registry.Snapshot{Services: []*registry.Service{
		{Name: "db", Names: pattern("db.test"), Ports: []uint16{80, 443}, NamedPorts: namedPort, Headless: true, Exposed: true, Endpoints: eps},
		{Name: "web", Names: pattern("web.test"), Ports: []uint16{80, 443}, NamedPorts: namedPort, Exposed: true, Endpoints: eps},
		{Name: "open", Names: pattern("open.test"), NamedPorts: namedPort, Headless: true, Exposed: true, Endpoints: eps},
		{Name: "ext", Names: pattern("ext.test"), Ports: []uint16{80, 443}, Exposed: true, Endpoints: []registry.Endpoint{host(8080, 80), host(8443, 443)}},
	}})
	if err != nil {
		t.Fatal(err)
	}
	reg := &registry.Registry{}
	reg.Swap(table)
	ask(t, &Source{Registry: reg}, []question{
		{"db.test", dns.TypeA, "", "exists 0:10.1.0.1, 0:10.1.0.2"},
		{"db-0.db.test", dns.TypeA, "", "exists 0:10.1.0.1"},
		{"_http._tcp.db.test", dns.TypeSRV, "", "exists 0 1 db-0.db.test:8080, 0 1 db-1.db.test:8081"},
		{"_https._tcp.db.test", dns.TypeSRV, "", "exists 0 1 db-0.db.test:8443, 0 1 db-1.db.test:8443"},
		{"web.test", dns.TypeA, "", "exists 0:10.1.0.1, 0:10.1.0.2"},
		{"_http._tcp.web.test", dns.TypeSRV, "", "exists 0 1 web.test:8080"},
		{"_https._tcp.web.test", dns.TypeSRV, "", "exists 0 1 web.test:8443"},
		{"web.test", dns.TypeHTTPS, "", `exists 0 "" alpn=[] port=8443 hints=[]`},
		{"_http._tcp.open.test", dns.TypeSRV, "", "exists 0 1 db-0.open.test:8080, 0 1 db-1.open.test:8081"},
		{"ext.test", dns.TypeA, "", "exists 0:db.example.net:8080"},
	})
}
