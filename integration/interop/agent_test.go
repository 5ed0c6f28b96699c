//go:build unix

package interop

import (
	"fmt"
	"net"
	"path/filepath"
	"testing"

	"culvert.dev/internal/testca"
)

// agentOf starts a gateway with services, and an agent that asks it with the certificate of the
// client. The agent listens at the addresses that are returned, a port and a Unix socket, and at
// those of its forwards.
func (w *world) agentOf(t *testing.T, services, forwards string) (gw, agent *gateway, at []string) {
	t.Helper()
	issue(t, w.authority, w.dir, "gw", testca.Options{SPIFFEID: "spiffe://example.test/gateway", IPs: []net.IP{net.ParseIP(w.host)}, Usage: testca.ServerOnly})
	gw = startGateway(t, "--config", w.write(t, "gw.yaml", fmt.Sprintf(`
identity: {trust: {example.test: {caFile: ca.crt}}}
listeners: [{address: "127.0.0.1:%s", tls: {certificateFile: gw.crt, keyFile: gw.key, trust: example.test}}]
admin: 127.0.0.1:%s
drain: {delay: 0s}
services:
%s`, freePort(t), freePort(t), services)))
	proxy, socket := "127.0.0.1:"+freePort(t), "unix:"+filepath.Join(w.dir, "agent.sock")
	agent = startGateway(t, "--config", w.write(t, "agent.yaml", fmt.Sprintf(`
agent: {gateway: %q, certificateFile: web.crt, keyFile: web.key, caFile: ca.crt, proxy: %q, names: ["*.shop.example", "*.example.test"], forwards: {%s}}
listeners: [{address: %q, protocols: [connect]}]
admin: 127.0.0.1:%s
`, gw.addr, proxy, forwards, socket, freePort(t))))
	return gw, agent, []string{proxy, socket}
}
