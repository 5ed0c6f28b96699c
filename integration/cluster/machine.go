package cluster

import (
	"fmt"
	"net/netip"
	"testing"
	"time"
)

// A Machine is a host beside a cluster, with a network of its own: it reaches the
// API server and Cluster.GatewayAddresses and no pod, as one of another data center
// does. The sandbox, and what is in it, reach the machine.
type Machine struct {
	Addr netip.Addr

	c   *Cluster
	net *network
}

// NewMachine makes a machine, which is there until the test ends. A cluster has one.
func (c *Cluster) NewMachine(t testing.TB) *Machine {
	t.Helper()
	bridge := fmt.Sprintf("machines%d", c.index+1)
	subnet := netip.PrefixFrom(netip.AddrFrom4([4]byte{172, 30, byte(c.index)}), 24)
	host, m := nth(subnet, 1), &Machine{Addr: nth(subnet, 2), c: c}
	if err := newBridge(bridge, netip.PrefixFrom(host, 24)); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := ip("link del " + bridge); err != nil {
			t.Error(err)
		}
	})
	err := forward(bridge, false)
	if err == nil {
		m.net, err = newNetwork("machine", bridge, []netip.Prefix{netip.PrefixFrom(m.Addr, 24)}, []netip.Prefix{netip.PrefixFrom(host, 32)})
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(m.net.close)
	return m
}

// RunCulvert is Cluster.RunCulvert on the machine, where culvert reaches no more
// than that does.
func (m *Machine) RunCulvert(t testing.TB, args ...string) *Process {
	t.Helper()
	p := m.c.runIn(t, m.net, Program("culvert"), args...)
	t.Cleanup(func() { p.Stop(5 * time.Second) }) // as long as it has a network
	return p
}

// Do calls f on a thread that is on the machine, as Cluster.InPod does.
func (m *Machine) Do(f func() error) error { return m.net.do(f) }
