package command

import (
	"bufio"
	"context"
	"crypto/tls"
	"fmt"
	"net"
	"slices"
	"strings"
	"testing"
	"time"

	"culvert.dev/connect"
	"culvert.dev/internal/gateway"
	"culvert.dev/internal/testnet"
)

// replicaGateway is a gateway with other replicas: the names of its carrier, its address, and
// the part about the replicas.
const replicaGateway = `cluster: gw
listeners:
  - {address: "127.0.0.1:1", tls: {key: gw, trust: corp.example, clientCertificates: optional, protocols: [connect]}}
  - {address: "%s", tls: {key: gw, trust: corp.example, protocols: [%s]}}
  - {address: "127.0.0.3:1", protocols: [sni]}
  - {address: "127.0.0.4:1", protocols: [sni], unidentifiedCallers: defer}
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
  - {name: near, action: allow, targets: {names: [near.edge.example]}, rules: [{sources: [{cidrs: [127.0.5.0/24]}]}]}
  - {name: replicas, action: allow, targets: {names: [inside.edge.example]}, rules: [{sources: [{cidrs: [127.0.0.0/24]}]}]}
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

// A request that comes to a replica by the name in its ClientHello has no identity. Both replicas
// decide by the address of the client, not by that of the other replica, and where the listener
// leaves identities to the service, both do. Nobody but a replica can say where a client is.
func TestReplicasDecideByWhereClientsAre(t *testing.T) {
	w := newReverseWorld(t)
	const gwID = "spiffe://corp.example/ns/gw/sa/gw1"
	for _, carrier := range []string{"connect", "connect-h2", "hbone"} {
		t.Run(carrier, func(t *testing.T) {
			var gateways []*running
			for range 2 {
				gw := w.issue(t, gwID, "gw1.example")
				gateways = append(gateways, startFile(t, map[string]string{
					"gw.crt": string(gw.CertPEM), "gw.key": string(gw.KeyPEM), "ca.pem": string(w.ca.CertPEM), "culvert.yaml": fmt.Sprintf(replicaGateway, "127.0.0.2:1", carrier, ""),
				}))
			}
			for _, g := range gateways {
				g.write(t, "culvert.yaml", fmt.Sprintf(replicaGateway, "127.0.0.2:1", carrier, fmt.Sprintf(
					"replicas: {to: [%q, %q], protocol: %s, key: gw, trust: corp.example, ids: [%q]}\n", gateways[0].addrs[1], gateways[1].addrs[1], carrier, gwID)))
				g.source.Reload()
			}
			recipe := strings.Replace(w.recipe, w.gateway.addrs[0], gateways[0].addrs[0], 1)
			for _, name := range []string{"near", "inside", "open"} {
				recipe += fmt.Sprintf("    - {name: %s.edge.example, to: %q}\n", name, w.service.Addr())
			}
			w.connector(t, "spiffe://corp.example/ns/edge/sa/one", recipe)
			testnet.Eventually(t, patience, func() bool {
				names := gateways[1].Connectors().Names
				return len(names) == 4 && !slices.ContainsFunc(names, func(n gateway.ConnectorName) bool { return len(n.Replicas) != 1 })
			}, "the other replica knows of the session")
			// hello asks for a name, with the client's certificate, on a connection to a gateway.
			hello := func(c net.Conn, name string) error {
				defer c.Close()
				_ = c.SetDeadline(time.Now().Add(patience))
				inner := tls.Client(c, &tls.Config{ServerName: name, InsecureSkipVerify: true, Certificates: []tls.Certificate{w.client.TLS}})
				_, err := bufio.NewReader(inner).ReadString('\n')
				return err
			}
			for _, row := range []struct {
				from, name string
				listener   int // of the second replica
				want       bool
			}{
				{"127.0.5.1", "open", 2, true},
				{"127.0.5.1", "near", 2, true},
				{"127.0.6.1", "near", 2, false},
				{"127.0.0.1", "near", 2, false},
				{"127.0.0.1", "inside", 2, true},
				{"127.0.5.1", "inside", 2, false}, // where the replicas may
				{"127.0.5.1", "cam", 2, false},    // which asks for an identity
				{"127.0.5.1", "cam", 3, true},     // which the service sees
				{"127.0.6.1", "near", 3, false},
			} {
				d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(row.from)}}
				c, err := d.DialContext(t.Context(), "tcp", gateways[1].addrs[row.listener])
				if err != nil {
					t.Fatal(err)
				}
				if err := hello(c, row.name+".edge.example"); (err == nil) != row.want {
					t.Errorf("%s from %s at listener %d: got %v, want yes %v", row.name, row.from, row.listener, err, row.want)
				}
			}

			// A client that says it is elsewhere is where it is, at either replica.
			front := w.issue(t, frontID)
			for _, g := range gateways {
				for _, name := range []string{"near", "open"} {
					d := &connect.Dialer{Proxy: g.addrs[0], TLS: &tls.Config{Certificates: []tls.Certificate{front.TLS}, InsecureSkipVerify: true}, Header: func(context.Context, string) (connect.Fields, error) {
						return connect.Fields{{Name: connect.SourceField, Value: "127.0.5.1:4000"}}, nil
					}}
					c, err := d.DialContext(t.Context(), "tcp", name+".edge.example:443")
					if err == nil {
						err = hello(c, name+".edge.example")
					}
					if (err == nil) != (name == "open") {
						t.Errorf("%s by a client that says it is elsewhere: got %v", name, err)
					}
				}
			}
		})
	}
}
