package command

import (
	"fmt"
	"net"
	"slices"
	"strings"
	"testing"

	"github.com/miekg/dns"

	"culvert.dev/internal/testnet"
)

// A service of the file comes before one of the same name that a peer offers, and the
// conflict is in the log.
func TestFileComesBeforeCatalogs(t *testing.T) {
	east, west := newTestSite(t, "east"), newTestSite(t, "west")
	west.serve(t, east, "orders.west.example")
	west.start(t, east, fmt.Sprintf(`services:
  - {name: orders.west.example, ports: [443], endpoints: [%q]}
  - {name: stock.west.example, ports: [443], endpoints: [%[1]q]}
policies: [{name: east-sees, verb: catalog, action: allow, rules: [{sources: [{trustDomains: [east.example]}]}]}]
`, west.service))
	east.serve(t, west, "orders.west.example") // with a certificate of east
	east.start(t, west, fmt.Sprintf("services: [{name: orders.west.example, ports: [443], endpoints: [%q]}]\n", east.service))
	testnet.Eventually(t, patience, func() bool { s := east.Status().Peers[0]; return s.Connected && s.Services == 2 }, "east has the catalog of west")
	testnet.Eventually(t, patience, func() bool {
		for line := range strings.Lines(east.log.String()) {
			if strings.Contains(line, "ignored conflicting definitions") && strings.Contains(line, "orders.west.example") && strings.Contains(line, "culvert.yaml") && strings.Contains(line, "catalog of peer west") {
				return true
			}
		}
		return false
	}, "the log names the conflict and both sources")
	if said, err := east.call(t, west, east, "orders.west.example"); err != nil || said != "orders.west.example sees spiffe://west.example/client" {
		t.Errorf("the name of both: %q, %v; want the service of the file", said, err)
	}
	// It is west's where the file has it no more.
	east.write(t, "culvert.yaml", east.config(west, "services: []\n"))
	east.source.Reload()
	testnet.Eventually(t, patience, func() bool {
		said, err := east.call(t, east, west, "orders.west.example")
		return err == nil && said == "orders.west.example sees spiffe://east.example/client"
	}, "without the service of the file the name is that of west")
}

// DNS leads clients to the gateways of a peer that answer, and to one that is back.
func TestLostGatewaysOfPeersLeaveDNS(t *testing.T) {
	east, west := newTestSite(t, "east"), newTestSite(t, "west")
	west.start(t, east, `services: [{name: orders.west.example, ports: [443], endpoints: ["10.0.0.1:443"]}]
policies: [{name: east-sees, verb: catalog, action: allow, rules: [{sources: [{trustDomains: [east.example]}]}]}]
`)
	listen := func(address string) net.Listener {
		t.Helper()
		ln, err := net.Listen("tcp", address)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = ln.Close() })
		return ln
	}
	other := listen("127.0.0.2:0")
	asks := `{protocol: connect-h2, tls: true, key: gw, serverName: gw.west.example}`
	gateways := fmt.Sprintf(`gateways: [{address: %q, transports: [%s]}]`, west.addrs[0], asks)
	checked := fmt.Sprintf(`gateways: [{address: %q, transports: [%s, sni]}, {address: %q, transports: [%[2]s, sni], check: {kind: tcp, interval: 100ms}}]`, west.addrs[0], asks, other.Addr())
	east.files["other.pem"] = string(west.ca.CertPEM)
	east.files["culvert.yaml"] = strings.Replace(east.config(west, "services: []\ndns: {listen: [\"udp://127.0.0.1:3\"]}\n"), gateways, checked, 1)
	east.running = startFile(t, east.files)

	server := ""
	testnet.Eventually(t, patience, func() bool {
		s := east.Status().DNS
		if s == nil || len(s.Listeners) == 0 {
			return false
		}
		server = strings.TrimPrefix(s.Listeners[0].Address, "udp://")
		return server != ""
	}, "DNS is served")
	answer := func() (all []string) {
		m := new(dns.Msg)
		m.SetQuestion("orders.west.example.", dns.TypeA)
		r, err := dns.Exchange(m, server)
		if err != nil {
			return []string{err.Error()}
		}
		for _, rr := range r.Answer {
			if a, ok := rr.(*dns.A); ok {
				all = append(all, a.A.String())
			}
		}
		slices.Sort(all)
		return all
	}
	await := func(what string, want ...string) {
		t.Helper()
		testnet.Eventually(t, patience, func() bool { return slices.Equal(answer(), want) }, "%s: DNS answers %v, want %v", what, answer(), want)
	}
	await("with both", "127.0.0.1", "127.0.0.2")
	address := other.Addr().String()
	_ = other.Close()
	await("without the second", "127.0.0.1")
	listen(address)
	await("with the second back", "127.0.0.1", "127.0.0.2")
}
