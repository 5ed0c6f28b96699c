package cluster

import (
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// network is a network namespace without a name; it ends when it is closed and
// its last process has ended. A nil one is that of the sandbox.
type network struct {
	fd       *os.File
	hostname string // of programs that start in it
	veth     string // its end in the sandbox
}

var vethSerial atomic.Int64

// newNetwork makes a namespace that is plugged into a bridge of the sandbox,
// with one address of each prefix and the gateways as default routes.
func newNetwork(hostname, bridge string, addrs, gateways []netip.Prefix) (*network, error) {
	n := &network{hostname: hostname}
	// The thread ends with its namespace: the goroutine never unlocks it.
	err := onThread(func() error {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return err
		}
		var err error
		n.fd, err = os.Open("/proc/thread-self/ns/net")
		if err != nil {
			return err
		}
		// As container runtimes do, so that programs without root can serve 443.
		return os.WriteFile("/proc/sys/net/ipv4/ip_unprivileged_port_start", []byte("0"), 0o644)
	})
	if err != nil {
		return nil, fmt.Errorf("making a network namespace: %w", err)
	}
	n.veth = fmt.Sprintf("veth%d", vethSerial.Add(1))
	there := fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), n.fd.Fd())
	err = ip(
		fmt.Sprintf("link add %s type veth peer name eth0 netns %s", n.veth, there),
		fmt.Sprintf("link set %s master %s up", n.veth, bridge),
		// So that a pod reaches itself by the address of its Service, also where bridges ask nftables.
		fmt.Sprintf("link set %s type bridge_slave hairpin on", n.veth),
	)
	runtime.KeepAlive(n.fd)
	if err != nil {
		n.close()
		return nil, err
	}
	lines := []string{"link set lo up"}
	for _, a := range addrs {
		lines = append(lines, fmt.Sprintf("addr add %s dev eth0%s", a, nodad(a)))
	}
	lines = append(lines, "link set eth0 up")
	for _, g := range gateways {
		lines = append(lines, fmt.Sprintf("route add default via %s", g.Addr()))
	}
	if err := n.do(func() error { return ip(lines...) }); err != nil {
		n.close()
		return nil, err
	}
	return n, nil
}

// do calls f on a thread in the namespace: what f starts and opens is in it.
func (n *network) do(f func() error) error {
	if n == nil {
		return f()
	}
	return onThread(func() error {
		if err := unix.Setns(int(n.fd.Fd()), unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("entering the network namespace of %s: %w", n.hostname, err)
		}
		// A host name of its own: replicas tell themselves apart by it.
		if err := unix.Unshare(unix.CLONE_NEWUTS); err != nil {
			return err
		}
		if err := unix.Sethostname([]byte(n.hostname)); err != nil {
			return err
		}
		return f()
	})
}

// close unplugs the namespace.
func (n *network) close() {
	if n == nil {
		return
	}
	n.fd.Close()
	_ = ip("link del " + n.veth) // gone already, if the namespace was faster
}

// onThread calls f on a thread of the kernel that ends afterwards.
func onThread(f func() error) error {
	result := make(chan error)
	go func() {
		runtime.LockOSThread()
		result <- f()
	}()
	return <-result
}

// ip runs lines of ip(8), all in one process.
func ip(lines ...string) error {
	cmd := exec.Command("ip", "-batch", "-")
	cmd.Stdin = strings.NewReader(strings.Join(lines, "\n") + "\n")
	out, err := cmd.CombinedOutput()
	if err != nil {
		return fmt.Errorf("ip -batch %q: %w: %s", lines, err, strings.TrimSpace(string(out)))
	}
	return nil
}

// nodad lets an address of IPv6 be used at once.
func nodad(p netip.Prefix) string {
	if p.Addr().Is6() {
		return " nodad"
	}
	return ""
}

// newBridge makes the switch of a cluster, with the sandbox's addresses on it.
func newBridge(name string, addrs ...netip.Prefix) error {
	// An address of its own: a bridge's else changes with the pods plugged into it.
	b := addrs[0].Addr().AsSlice()
	mac := fmt.Sprintf("02:00:%02x:%02x:%02x:%02x", b[0], b[1], b[2], b[3])
	lines := []string{"link add " + name + " address " + mac + " type bridge", "link set " + name + " up"}
	for _, a := range addrs {
		lines = append(lines, fmt.Sprintf("addr add %s dev %s%s", a, name, nodad(a)))
	}
	return ip(lines...)
}

// forward says whether packets that come by an interface are routed on.
func forward(dev string, yes bool) error {
	value := "0"
	if yes {
		value = "1"
	}
	return os.WriteFile("/proc/sys/net/ipv4/conf/"+dev+"/forwarding", []byte(value), 0o644)
}

// nth is the address with number n of a prefix.
func nth(p netip.Prefix, n int) netip.Addr {
	b := p.Masked().Addr().AsSlice()
	for i := len(b) - 1; n > 0; i-- {
		n += int(b[i])
		b[i] = byte(n)
		n >>= 8
	}
	a, _ := netip.AddrFromSlice(b)
	return a
}
