package command

import (
	"bufio"
	"context"
	"crypto/tls"
	"fmt"
	"strings"
	"testing"
	"time"

	"culvert.dev/connect"
	"culvert.dev/internal/testnet"
)

// replicaGateway is a gateway with other replicas: the names of its carrier, its address, and
// the part about the replicas.
const replicaGateway = `cluster: gw
listeners:
  - {address: "127.0.0.1:1", tls: {key: gw, trust: corp.example, clientCertificates: optional, protocols: [connect]}}
  - {address: "%s", tls: {key: gw, trust: corp.example, protocols: [%s]}}
identity:
  keys: {gw: {certificateFile: gw.crt, keyFile: gw.key}}
  trust: {corp.example: {caFile: ca.pem}}
policies:
  - name: edge-may-register
    verb: register
    action: allow
    targets: {names: ["*.edge.example"]}
    rules: [{sources: [{spiffe: ["spiffe://corp.example/ns/edge/*"]}]}]
  - name: web-may-see-cam
    action: allow
    targets: {names: [cam.edge.example]}
    rules: [{sources: [{spiffe: ["spiffe://corp.example/ns/web/*"]}]}]
services: []
%s`

// A request that comes to a replica without the session is passed on by each carrier, in the
// name of its caller: policies decide by it at both.
func TestReplicasStateCallers(t *testing.T) {
	w := newReverseWorld(t)
	front, admin := w.issue(t, frontID), w.issue(t, adminID)
	const gwID = "spiffe://corp.example/ns/gw/sa/gw1"
	for _, row := range []struct{ carrier, address string }{
		{"connect", "127.0.0.2:1"}, {"connect-h2", "127.0.0.2:1"}, {"hbone", "127.0.0.2:1"}, {"connect-h3", "udp://127.0.0.1:1"},
	} {
		t.Run(row.carrier, func(t *testing.T) {
			var gateways []*running
			for range 2 {
				gw := w.issue(t, gwID, "gw1.example")
				gateways = append(gateways, startFile(t, map[string]string{
					"gw.crt": string(gw.CertPEM), "gw.key": string(gw.KeyPEM), "ca.pem": string(w.ca.CertPEM), "culvert.yaml": fmt.Sprintf(replicaGateway, row.address, row.carrier, ""),
				}))
			}
			for _, g := range gateways {
				g.write(t, "culvert.yaml", fmt.Sprintf(replicaGateway, row.address, row.carrier, fmt.Sprintf(
					"replicas: {to: [%q, %q], protocol: %s, key: gw, trust: corp.example, ids: [%q]}\n", gateways[0].addrs[1], gateways[1].addrs[1], row.carrier, gwID)))
				g.source.Reload()
			}
			recipe := strings.Replace(w.recipe, w.gateway.addrs[0], gateways[0].addrs[0], 1) +
				fmt.Sprintf("    - {name: open.edge.example, to: %q}\n", w.service.Addr())
			w.connector(t, "spiffe://corp.example/ns/edge/sa/one", recipe)
			testnet.Eventually(t, patience, func() bool {
				list := gateways[1].Connectors()
				return len(list.Names) == 2 && len(list.Names[0].Replicas) == 1 && len(list.Names[1].Replicas) == 1
			}, "the other replica knows of the session")
			ask := func(name string, own ...tls.Certificate) error {
				ctx, cancel := context.WithTimeout(t.Context(), patience)
				defer cancel()
				d := &connect.Dialer{Proxy: gateways[1].addrs[0], TLS: &tls.Config{Certificates: own, InsecureSkipVerify: true}}
				c, err := d.DialContext(ctx, "tcp", name+":443")
				if err != nil {
					return err
				}
				defer c.Close()
				_ = c.SetDeadline(time.Now().Add(patience))
				inner := tls.Client(c, &tls.Config{ServerName: "cam.edge.example", RootCAs: w.ca.Pool(), Certificates: []tls.Certificate{w.client.TLS}})
				_, err = bufio.NewReader(inner).ReadString('\n')
				return err
			}
			if err := ask("cam.edge.example", front.TLS); err != nil {
				t.Errorf("a caller that policies allow: %v", err)
			}
			if err := ask("cam.edge.example", admin.TLS); err == nil {
				t.Error("a caller that policies deny: no error")
			}
			if err := ask("cam.edge.example"); err == nil {
				t.Error("a caller without an identity: no error")
			}
			if err := ask("open.edge.example"); err != nil {
				t.Errorf("a caller without an identity, where no policy is: %v", err)
			}
			list := gateways[1].Connectors()
			var out strings.Builder
			if err := printConnectors(&out, &list, time.Now()); err != nil || !strings.Contains(out.String(), "cam.edge.example has 1 session to replica "+gateways[0].Connectors().Replica) {
				t.Errorf("culvert connectors prints %q and %v", out.String(), err)
			}
		})
	}
}
