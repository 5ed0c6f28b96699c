//go:build linux && netns

package capture

import (
	"errors"
	"net/netip"
	"os"
	"reflect"
	"testing"

	"culvert.dev/internal/testnet/netns"
)

func (r *rig) show(t *testing.T) []Status {
	t.Helper()
	var all []Status
	if err := r.Do(func() (err error) { all, err = Show(); return err }); err != nil {
		t.Fatal(err)
	}
	return all
}

// What is captured is read from the kernel, by whichever process.
func TestShow(t *testing.T) {
	r := newRig(t)
	if got := r.show(t); len(got) != 0 {
		t.Errorf("without a capture: %+v", got)
	}
	stay := Rules{Name: "pod", CIDRs: prefixes("240.0.0.0/4", "fd77::/16", "10.0.0.0/25", "10.0.0.128/26", "192.0.2.1/32", "192.0.2.3/32"), UIDs: []uint32{1000, 1001}, Except: prefixes("240.9.0.0/16", "255.0.0.0/8", "fd77::1/128"),
		ExceptUIDs: []uint32{1337}, Interfaces: []string{"veth0", "veth1"}, DNSPort: 5353, Stay: true}
	if err := r.install(t, stay).Close(); err != nil {
		t.Fatal(err)
	}
	c := r.install(t, Rules{VIPs: true, TransparentPort: r.rules.TransparentPort})
	if err := c.SetVIPs([]netip.Addr{netip.MustParseAddr("240.0.0.7"), netip.MustParseAddr("240.0.0.8"), netip.MustParseAddr("fd77::7")}); err != nil {
		t.Fatal(err)
	}
	all := r.install(t, Rules{Name: "all", All: true, Port: 9, ExceptUIDs: []uint32{0}, Except: prefixes("240.0.0.0/4")})
	program, err := os.ReadFile("/proc/self/comm")
	if err != nil {
		t.Fatal(err)
	}
	me := &Owner{PID: os.Getpid(), Program: string(program[:len(program)-1])}
	want := []Status{
		{Table: "culvert", Owner: me, Port: r.rules.Port, TransparentPort: r.rules.TransparentPort, ListensIPv4: true, ListensIPv6: true,
			VIPs: []string{"240.0.0.7", "240.0.0.8", "fd77::7"}, ExceptMark: Mark},
		{Name: "all", Table: "culvert-all", Owner: me, Port: 9, All: true, ExceptUIDs: []uint32{0}, ExceptCIDRs: []string{"240.0.0.0/4"}},
		{Name: "pod", Table: "culvert-pod", Port: r.rules.Port, ListensIPv4: true, ListensIPv6: true, DNSPort: 5353, CIDRs: []string{"10.0.0.0-10.0.0.191", "192.0.2.1", "192.0.2.3", "240.0.0.0/4", "fd77::/16"},
			UIDs: []uint32{1000, 1001}, ExceptCIDRs: []string{"240.9.0.0/16", "255.0.0.0/8", "fd77::1"}, ExceptUIDs: []uint32{1337}, ExceptMark: Mark, Interfaces: []string{"veth0", "veth1"}},
	}
	if got := r.show(t); !reflect.DeepEqual(got, want) {
		t.Errorf("got\n%+v\nwant\n%+v", got, want)
	}
	if err := errors.Join(c.Close(), all.Close()); err != nil {
		t.Error(err)
	}
	if got := r.show(t); !reflect.DeepEqual(got, want[2:]) {
		t.Errorf("without those of the process: got\n%+v\nwant\n%+v", got, want[2:])
	}
}

// What this host routes for a neighbour comes to the address that the host has there, by the
// interfaces that the rules name alone.
func TestRoutedWithoutTProxy(t *testing.T) {
	r := newRig(t)
	var clients []*netns.NS
	for _, net := range []string{"8", "7"} {
		client := netns.New(t, "client")
		netns.Link(t, client, "10."+net+".0.2/24", r.NS, "10."+net+".0.1/24")
		netns.Link(t, client, "fd0"+net+"::2/64", r.NS, "fd0"+net+"::1/64")
		client.Route(t, "default", "10."+net+".0.1")
		client.Route(t, "fd00::/8", "fd0"+net+"::1")
		r.beside.Route(t, "10."+net+".0.0/24", "10.9.0.1")
		r.beside.Route(t, "fd0"+net+"::/64", "fd09::1")
		clients = append(clients, client)
	}
	if out, err := r.Command(t.Context(), "sysctl", "-w", "net.ipv4.ip_forward=1", "net.ipv6.conf.all.forwarding=1").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	rules := r.serve(t, "captured ", "::")
	rules.TransparentPort, rules.CIDRs, rules.Interfaces = 0, prefixes("240.0.0.0/4", "fd77::/16"), []string{"veth2", "veth3"}
	r.install(t, rules)
	expect(t, "a neighbour", dial(t, clients[0], "240.0.0.7:5432"), "captured 240.0.0.7:5432")
	expect(t, "a neighbour by IPv6", dial(t, clients[0], "[fd77::7]:5432"), "captured [fd77::7]:5432")
	for _, addr := range []string{"240.0.0.7:5432", "[fd77::7]:5432"} {
		expect(t, "by another interface", dial(t, clients[1], addr), "refused")
	}
	expect(t, "this host", dial(t, r.NS, "240.0.0.7:5432"), "captured 240.0.0.7:5432")
}
