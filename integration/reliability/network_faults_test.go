//go:build linux && netns

// These tests need root, ip and nft; "make test" runs them beside the others.

package reliability

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"os/exec"
	"sync"
	"testing"
	"time"

	"culvert.dev/internal/testnet"
	"culvert.dev/internal/testnet/netns"
)

// Two sites are two namespaces, with a gateway in the one that leads to another in
// the other by every way out.
type sites struct {
	west, east *netns.NS
	links      [2]string // the devices in the west
	peers      [2]string // and those in the east
	near, far  *gateway
}

// parting is what has the service close its end.
const parting = "bye"

func newSites(t *testing.T) *sites {
	t.Helper()
	s := &sites{west: netns.New(t, "west"), east: netns.New(t, "east")}
	s.links[0], s.peers[0] = netns.Link(t, s.west, "10.9.5.1/24", s.east, "10.9.5.2/24")
	s.links[1], s.peers[1] = netns.Link(t, s.west, "10.9.6.1/24", s.east, "10.9.6.2/24")
	in := func(ns *netns.NS, ip string) options {
		return options{IP: ip, Wrap: []string{"ip", "netns", "exec", ns.Name}, Dial: ns.Dial}
	}
	const service = "10.9.5.2:9000"
	ln, err := s.east.Listen("tcp", service)
	if err != nil {
		t.Fatal(err)
	}
	var serving sync.WaitGroup
	t.Cleanup(func() {
		_ = ln.Close()
		serving.Wait()
	})
	serving.Go(func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			serving.Go(func() { echoUntil(c, parting) })
		}
	})
	ca, _ := newCA(t)
	s.far = everyWayOf(t, ca, "10.9.0.0/16", onlyService, in(s.east, "10.9.5.2"))
	s.far.serve("  - {names: [" + onlyService + ", \"*.out.test\"], endpoints: [\"" + service + "\"]}\n")
	outer := relayedOf(t, ca, s.far, in(s.east, "10.9.6.2"))
	s.near = withKeysOf(t, ca, in(s.west, "10.9.5.1"))
	s.near.serve(servicesOut(s.far, outer) + "  - {name: direct.test, endpoints: [\"" + service + "\"]}\n")
	return s
}

// echoUntil sends back what comes, to its end or to the word that ends it.
func echoUntil(c net.Conn, last string) {
	defer c.Close()
	p := make([]byte, 16<<10)
	for {
		n, err := c.Read(p)
		if bytes.Equal(p[:n], []byte(last)) {
			return
		}
		if _, werr := c.Write(p[:n]); err != nil || werr != nil {
			return
		}
	}
}

// open asks the gateway in the west for a tunnel.
func (s *sites) open(t *testing.T, name string) (net.Conn, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	// From the other side: the ports of the west are the gateway's.
	c, err := s.west.Dial(ctx, "tcp", s.near.addr)
	if err != nil {
		return nil, err
	}
	if err := byConnect.enter(c, name); err != nil {
		_ = c.Close()
		return nil, err
	}
	return c, nil
}

// all opens a tunnel by every way out.
func (s *sites) all(t *testing.T) (tunnels []held) {
	t.Helper()
	for i, way := range waysOut {
		c, err := s.open(t, wayOutName(i))
		if err != nil {
			t.Fatalf("%s: %v", way.name, err)
		}
		t.Cleanup(func() { _ = c.Close() })
		tunnels = append(tunnels, held{way.name, c})
	}
	return tunnels
}

// exact sends bytes through every tunnel at once and looks at what comes back.
func exact(t *testing.T, tunnels []held, size int) {
	t.Helper()
	const stream = testnet.Stream(11)
	began := time.Now()
	var wg sync.WaitGroup
	for _, h := range tunnels {
		wg.Go(func() {
			_ = h.conn.SetDeadline(time.Now().Add(2 * patience))
			defer h.conn.SetDeadline(time.Time{})
			wg.Go(func() {
				p := make([]byte, size)
				stream.Fill(p, 0)
				if _, err := h.conn.Write(p); err != nil {
					t.Errorf("%s: %v", h.name, err)
				}
			})
			p := make([]byte, size)
			n, err := io.ReadFull(h.conn, p)
			if err == nil {
				err = stream.Check(p, 0)
			}
			if err != nil {
				t.Errorf("%s: after %d of %d bytes: %v", h.name, n, size, err)
			}
		})
	}
	wg.Wait()
	t.Logf("%d KiB each way by %d tunnels in %v", size>>10, len(tunnels), time.Since(began).Round(time.Millisecond))
}

// What a network does to those who use it: tunnels between gateways stand it, by
// every way out.
func TestNetworkFaults(t *testing.T) {
	t.Parallel()
	s := newSites(t)
	t.Run("the path takes 1,280 bytes", func(t *testing.T) {
		mtu := func(n int) {
			for i := range s.links {
				s.west.SetMTU(t, s.links[i], n)
				s.east.SetMTU(t, s.peers[i], n)
			}
		}
		mtu(1280)
		defer mtu(1500)
		tunnels := s.all(t)
		exact(t, tunnels, 256<<10)
		for _, h := range tunnels {
			_ = h.conn.Close()
		}
	})
	tunnels := s.all(t)
	t.Run("packets are lost", func(t *testing.T) {
		for _, ns := range []*netns.NS{s.west, s.east} {
			ns.Drop(t, "iifname \"veth*\" numgen random mod 100 < 3")
			defer ns.Undrop(t)
		}
		exact(t, append(s.all(t), tunnels...), 128<<10)
	})
	t.Run("the link is down for ten seconds", func(t *testing.T) {
		// At rest for long enough that keepalives and PINGs are sent meanwhile.
		pause(t.Context(), 7*time.Second)
		for _, dev := range s.links {
			s.west.SetLink(t, dev, false)
		}
		pause(t.Context(), 10*time.Second)
		for _, dev := range s.links {
			s.west.SetLink(t, dev, true)
		}
		echoes(t, "after the link was down", tunnels)
		echoes(t, "opened after the link was down", s.all(t))
	})
	t.Run("no local port is left", func(t *testing.T) {
		const ports, first = 20, 41000
		run := func(value string) {
			if out, err := exec.Command("ip", "netns", "exec", s.west.Name, "sysctl", "-qw", "net.ipv4.ip_local_port_range="+value).CombinedOutput(); err != nil {
				t.Fatalf("sysctl: %v: %s", err, out)
			}
		}
		run(fmt.Sprintf("%d %d", first, first+ports-1))
		defer run("32768 60999")
		dial := func() (net.Conn, error) { // from a port that is none of them
			return s.east.Dial(t.Context(), "tcp", s.near.addr)
		}
		var filled []held
		var said refusal
		for len(filled) <= ports && said.code == 0 {
			c, err := dial()
			if err != nil {
				t.Fatal(err)
			}
			if _, err := c.Write(byConnect.preamble("direct.test")); err != nil {
				t.Fatal(err)
			}
			if expect(c, []byte(byConnect.yes)) == nil {
				t.Cleanup(func() { _ = c.Close() })
				filled = append(filled, held{"direct", c})
				continue
			}
			_ = c.Close()
			if c, err = dial(); err != nil {
				t.Fatal(err)
			}
			said = request(c, byConnect.preamble("direct.test"))
		}
		t.Logf("%d tunnels with %d ports, and then %v", len(filled), ports, said)
		if len(filled) != ports || said.code != byConnect.code["overload"] || said.after > time.Second {
			t.Errorf("%d tunnels with %d ports, and then %v; want as many, and 503 at once", len(filled), ports, said)
		}
		echoes(t, "with no port left", filled)
		// The service ends one first, and its port is free at once.
		if _, err := io.WriteString(filled[0].conn, parting); err != nil {
			t.Fatal(err)
		}
		_ = filled[0].conn.SetReadDeadline(time.Now().Add(patience))
		if n, err := filled[0].conn.Read(make([]byte, 1)); n > 0 || err != io.EOF {
			t.Fatalf("the service ends a tunnel: %d bytes, %v", n, err)
		}
		_ = filled[0].conn.Close()
		testnet.Eventually(t, patience, func() bool {
			c, err := dial()
			if err != nil {
				return false
			}
			defer c.Close()
			return byConnect.enter(c, "direct.test") == nil
		}, "a port that is free is used: the service was not to blame")
	})
}
