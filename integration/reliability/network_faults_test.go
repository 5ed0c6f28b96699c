//go:build linux && netns

// These tests need root, ip and nft; "make test" runs them beside the others.

package reliability

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os/exec"
	"slices"
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
	s.begin(t)
	return s
}

// newWiredSites is newSites with Wires between them.
func newWiredSites(t *testing.T) (s *sites, fate func(func(size int) netns.Fate)) {
	t.Helper()
	s = &sites{west: netns.New(t, "west"), east: netns.New(t, "east")}
	one := netns.NewWire(t, s.west, "10.9.5.1/24", s.east, "10.9.5.2/24")
	two := netns.NewWire(t, s.west, "10.9.6.1/24", s.east, "10.9.6.2/24")
	s.begin(t)
	return s, func(f func(int) netns.Fate) {
		t.Logf("so far %+v and %+v", one.Stats(), two.Stats())
		one.SetFate(f)
		two.SetFate(f)
	}
}

// begin starts the gateways and the service.
func (s *sites) begin(t *testing.T) {
	t.Helper()
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
		var c net.Conn
		var err error
		for range 5 { // three packets that are lost in a row take longer than a dial may
			if c, err = s.open(t, wayOutName(i)); err == nil {
				break
			}
			t.Logf("%s: %v", way.name, err)
		}
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
			ns.Drop(t, "iifname \"veth*\" numgen random mod 100 < 5")
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
		if n := s.near.metric("culvert_dials_without_port_total"); n < 1 {
			t.Errorf("%v dials without a port are counted, want 1 at least", n)
		}
		if len(filled) != ports || said.code != byConnect.code["overload"] || said.after > testnet.Deadline(time.Second) {
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

// found is how long it may take until a tunnel is reset whose bytes no longer arrive,
// though other packets may. HTTP/3 takes 30 to 50 s mostly.
const found = 90 * time.Second

// What packets come to on their way: late and in another order, twice, with a bit
// that is wrong, not at all for longer than any peer is waited for, or never where
// they are large. Bytes arrive exactly by every way out or the tunnel is reset, and
// new tunnels work.
func TestBadNetwork(t *testing.T) {
	t.Parallel()
	s, fate := newWiredSites(t)
	random := rand.New(rand.NewPCG(3, 4))
	one := func(in int) bool { return random.IntN(in) == 0 }
	t.Run("packets come late, in another order, twice, and spoiled", func(t *testing.T) {
		standing := s.all(t)
		fate(func(int) netns.Fate {
			f := netns.Fate{After: 20 * time.Millisecond, Twice: one(50), Spoil: one(100)}
			if one(10) {
				f.After += time.Duration(random.IntN(20)) * time.Millisecond
			}
			return f
		})
		exact(t, append(s.all(t), standing...), 128<<10)
		fate(nil)
	})
	t.Run("large packets are lost without a word", func(t *testing.T) {
		for _, ns := range []*netns.NS{s.west, s.east} { // or the kernel's TCP never finds out, or late
			if out, err := ns.Command(t.Context(), "sysctl", "-qw", "net.ipv4.tcp_mtu_probing=1", "net.ipv4.tcp_retries1=1").CombinedOutput(); err != nil {
				t.Fatalf("sysctl: %v: %s", err, out)
			}
		}
		defer fate(nil)
		standing := s.all(t)
		exact(t, standing, 64<<10) // by packets as large as the path takes
		fate(func(size int) netns.Fate { return netns.Fate{Lost: size > 1400} })
		var wg sync.WaitGroup
		i := slices.IndexFunc(standing, func(h held) bool { return h.name == "connect-h3" })
		stuck := standing[i]
		standing = slices.Delete(standing, i, i+1)
		wg.Go(func() { // a connection of HTTP/3 has found out once how large packets may be
			began := time.Now()
			_ = stuck.conn.SetDeadline(began.Add(found))
			_, _ = stuck.conn.Write(make([]byte, 64<<10))
			_, err := io.Copy(io.Discard, stuck.conn)
			t.Logf("%s: %v after %v", stuck.name, err, time.Since(began).Round(time.Second))
			if !wasReset(err) {
				t.Errorf("%s: it ended with %v, want a reset within %v", stuck.name, err, found)
			}
		})
		exact(t, standing, 64<<10)
		wg.Wait()
		// The kernel takes longer to find out than a dial may with TLS that is begun:
		// by these none is, or by small packets.
		var fresh []held
		for i, way := range waysOut {
			if !slices.Contains([]string{"connect", "connect-h2", "connect-h3", "websocket", "socks5"}, way.name) {
				continue
			}
			c, err := s.open(t, wayOutName(i))
			if err != nil {
				t.Fatalf("%s: %v", way.name, err)
			}
			defer c.Close()
			fresh = append(fresh, held{way.name, c})
		}
		exact(t, fresh, 64<<10)
	})
	t.Run("nothing arrives for longer than anybody is waited for", func(t *testing.T) {
		standing := s.all(t)
		began := time.Now()
		fate(func(int) netns.Fate { return netns.Fate{Lost: true} })
		var wg sync.WaitGroup
		for _, h := range standing {
			wg.Go(func() {
				_ = h.conn.SetDeadline(began.Add(found))
				_, _ = io.WriteString(h.conn, "is anybody there?")
				_, err := io.Copy(io.Discard, h.conn)
				if took := time.Since(began); !wasReset(err) {
					t.Errorf("%s: after %v it ended with %v, want a reset within %v", h.name, took.Round(time.Second), err, found)
				}
			})
		}
		wg.Wait()
		t.Logf("the last was reset after %v", time.Since(began).Round(time.Second))
		testnet.Eventually(t, patience, func() bool { return s.near.metric("culvert_tunnels_open") == 0 }, "the gateway has no tunnel")
		fate(nil)
		healed := time.Now()
		exact(t, s.all(t), 64<<10)
		t.Logf("new tunnels by every way out %v after", time.Since(healed).Round(time.Millisecond))
	})
}
