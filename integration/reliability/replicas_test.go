//go:build linux

package reliability

import (
	"bufio"
	"context"
	"crypto/tls"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"culvert.dev/internal/testca"
	"culvert.dev/internal/testnet"
)

// replicasConfig is that of a gateway with a replica: both have the same but for their
// addresses.
const replicasConfig = `cluster: replicated
listeners:
  - address: "%[1]s"
    protocols: [sni]
    tls:
      - {names: [gw.example], key: gw, trust: carry.test, protocols: [connect, connect-h2]}
identity:
  keys:
    gw: {certificateFile: gw.crt, keyFile: gw.key}
    edge: {certificateFile: edge.crt, keyFile: edge.key}
  trust:
    carry.test: {caFile: ca.pem}
admin: "%[2]s"
log: {format: json, level: debug}
policies:
  - name: edge-may-register
    verb: register
    action: allow
    targets: {names: ["*.edge.example"]}
    rules:
      - sources: [{spiffe: ["spiffe://carry.test/edge"]}]
replicas:
  to: ["%[3]s", "%[4]s"]
  serverName: gw.example
  key: gw
  trust: carry.test
  ids: ["spiffe://carry.test/gw"]
services: []
`

// connectorConfig is that of a connector with a name on some gateways.
const connectorConfig = `cluster: %[1]s
identity:
  keys:
    edge: {certificateFile: edge.crt, keyFile: edge.key}
  trust:
    carry.test: {caFile: ca.pem}
admin: "%[2]s"
log: {format: json}
reverse:
  to: %[3]s
  key: edge
  trust: carry.test
  serverName: gw.example
  expose:
    - {name: %[1]s.edge.example, to: "%[4]s"}
`

// writeKeys puts the keys of gateways and connectors beside the configuration of g.
func (g *gateway) writeKeys(ca *testca.CA, gw, edge *testca.Pair) {
	g.t.Helper()
	for name, content := range map[string][]byte{
		"ca.pem": ca.CertPEM, "gw.crt": gw.CertPEM, "gw.key": gw.KeyPEM, "edge.crt": edge.CertPEM, "edge.key": edge.KeyPEM,
	} {
		if err := os.WriteFile(filepath.Join(filepath.Dir(g.config), name), content, 0o600); err != nil {
			g.t.Fatal(err)
		}
	}
}

// sessionsFor returns how many sessions g has for a name itself, and how many replicas have
// one.
func (g *gateway) sessionsFor(name string) (own, elsewhere int) {
	_, body, err := g.get("/connectors")
	var list struct {
		Names []struct {
			Name     string
			Sessions int
			Replicas []struct{ Sessions int }
		}
	}
	if err != nil || json.Unmarshal([]byte(body), &list) != nil {
		return 0, 0
	}
	for _, n := range list.Names {
		if n.Name == name {
			own = n.Sessions
			for _, r := range n.Replicas {
				elsewhere += r.Sessions
			}
		}
	}
	return own, elsewhere
}

// A connBalancer passes connections on to the first of its servers that answers.
type connBalancer struct{ servers []string }

func (b *connBalancer) serve(t *testing.T) string {
	t.Helper()
	ln := testnet.Listen(t)
	var serving sync.WaitGroup
	serving.Go(func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			serving.Go(func() {
				defer c.Close()
				for _, to := range b.servers {
					s, err := net.DialTimeout("tcp", to, time.Second)
					if err != nil {
						continue
					}
					serving.Go(func() {
						_, _ = io.Copy(s, c)
						_ = s.Close()
					})
					_, _ = io.Copy(c, s)
					_ = s.Close()
					return
				}
			})
		}
	})
	t.Cleanup(func() {
		_ = ln.Close()
		serving.Wait()
	})
	return ln.Addr().String()
}

// noticed is until a kill is: a second, and more for the kernel of a busy machine that ends the
// process.
const noticed = 3 * time.Second

// Of two replicas under load one is killed. Connectors have a session to both, or to the one
// that is killed alone, by a balancer. Clients ask the one that is left, or whichever of the
// two answers. Once the kill is noticed, no new request fails.
func TestAReplicaIsKilled(t *testing.T) {
	ca, _ := newCA(t)
	issue := func(o testca.Options) *testca.Pair {
		pair, err := ca.Issue(o)
		if err != nil {
			t.Fatal(err)
		}
		return pair
	}
	gw := issue(testca.Options{SPIFFEID: "spiffe://carry.test/gw", DNSNames: []string{"gw.example"}})
	edge := issue(testca.Options{SPIFFEID: "spiffe://carry.test/edge"})
	cam := issue(testca.Options{SPIFFEID: "spiffe://carry.test/cam", DNSNames: []string{"both.edge.example", "one.edge.example", "left.edge.example"}})

	service := tls.NewListener(testnet.Listen(t), &tls.Config{Certificates: []tls.Certificate{cam.TLS}})
	var serving sync.WaitGroup
	serving.Go(func() {
		for {
			c, err := service.Accept()
			if err != nil {
				return
			}
			serving.Go(func() {
				_ = c.SetDeadline(time.Now().Add(patience))
				_, _ = io.WriteString(c, "hello\n")
				_ = c.Close()
			})
		}
	})
	t.Cleanup(func() {
		_ = service.Close()
		serving.Wait()
	})

	gateways := []*gateway{prepare(t, options{}), prepare(t, options{})}
	for _, g := range gateways {
		g.writeKeys(ca, gw, edge)
		g.write(fmt.Sprintf(replicasConfig, g.addr, g.admin, gateways[0].addr, gateways[1].addr))
		g.begin()
	}
	victim, left := gateways[0], gateways[1]
	balancer := &connBalancer{servers: []string{victim.addr, left.addr}}
	for name, to := range map[string]string{
		"both": fmt.Sprintf("[%q, %q]", victim.addr, left.addr), "one": fmt.Sprintf("%q", balancer.serve(t)), "left": fmt.Sprintf("%q", left.addr),
	} {
		c := prepare(t, options{})
		c.writeKeys(ca, gw, edge)
		c.write(fmt.Sprintf(connectorConfig, name, c.admin, to, service.Addr()))
		c.run()
	}
	testnet.Eventually(t, patience, func() bool {
		both, bothElsewhere := left.sessionsFor("both.edge.example")
		one, oneElsewhere := left.sessionsFor("one.edge.example")
		_, leftElsewhere := victim.sessionsFor("left.edge.example")
		return both == 1 && bothElsewhere == 1 && one == 0 && oneElsewhere == 1 && leftElsewhere == 1
	}, "the replicas know of all sessions")

	ask := func(name string, addrs ...string) (err error) {
		for _, at := range addrs { // as a client does with the addresses of a name
			d := tls.Dialer{Config: &tls.Config{ServerName: name, RootCAs: ca.Pool()}}
			ctx, cancel := context.WithTimeout(context.Background(), patience)
			c, dialErr := d.DialContext(ctx, "tcp", at)
			cancel()
			if err = dialErr; err != nil {
				continue
			}
			_ = c.SetDeadline(time.Now().Add(patience))
			_, err = bufio.NewReader(c).ReadString('\n')
			_ = c.Close()
			if err == nil {
				return nil
			}
		}
		return err
	}
	// Before the kill every name is reached by each replica.
	names := []string{"both.edge.example", "one.edge.example", "left.edge.example"}
	for _, name := range names {
		for _, g := range gateways {
			if err := ask(name, g.addr); err != nil {
				t.Fatalf("%s by %s: %v", name, g.addr, err)
			}
		}
	}

	type failure struct {
		what  string
		began time.Time
		err   error
	}
	var mu sync.Mutex
	var failures []failure
	var asked atomic.Int64
	var asking sync.WaitGroup
	stop := make(chan struct{})
	for _, name := range names {
		for what, addrs := range map[string][]string{"of the replica that is left": {left.addr}, "of either replica": {victim.addr, left.addr}} {
			asking.Go(func() {
				for {
					select {
					case <-stop:
						return
					case <-time.After(10 * time.Millisecond):
					}
					began := time.Now()
					err := ask(name, addrs...)
					asked.Add(1)
					if err != nil {
						mu.Lock()
						failures = append(failures, failure{name + " " + what, began, err})
						mu.Unlock()
					}
				}
			})
		}
	}
	testnet.Eventually(t, patience, func() bool { return asked.Load() > 60 }, "requests are under way")
	victim.killed = true
	victim.signal(syscall.SIGKILL)
	killed := time.Now()
	before := asked.Load()
	testnet.Eventually(t, patience, func() bool { return time.Since(killed) > noticed+3*time.Second && asked.Load() > before+120 }, "requests go on")
	close(stop)
	asking.Wait()
	late := slices.DeleteFunc(slices.Clone(failures), func(f failure) bool { return f.began.Before(killed.Add(noticed)) })
	for _, f := range late {
		t.Errorf("%s, %v after the kill: %v", f.what, f.began.Sub(killed), f.err)
	}
	t.Logf("%d requests, %d of them after the kill; %d failed, all but %d within %v of it", asked.Load(), asked.Load()-before, len(failures), len(late), noticed)
	if own, _ := left.sessionsFor("one.edge.example"); own != 1 {
		t.Errorf("the connector with one session has %d to the replica that is left, want 1", own)
	}
}
