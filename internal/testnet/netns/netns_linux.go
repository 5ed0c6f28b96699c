package netns

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
)

// A NS is a network namespace with its loopback interface up.
type NS struct {
	Name string // as ip(8) knows it, unique on the machine

	links atomic.Int32
}

var serial atomic.Int32

// New makes a namespace that is deleted when the test ends. The label is a
// short word that helps to recognise it.
func New(t testing.TB, label string) *NS {
	t.Helper()
	ns := &NS{Name: fmt.Sprintf("cv%d-%d-%s", os.Getpid(), serial.Add(1), label)}
	run(t, "ip", "netns", "add", ns.Name)
	t.Cleanup(func() { run(t, "ip", "netns", "del", ns.Name) })
	ns.ip(t, "link", "set", "lo", "up")
	return ns
}

// Link joins two namespaces by a pair of interfaces with the given addresses,
// each with its prefix length. It returns the interfaces' names.
func Link(t testing.TB, a *NS, aAddr string, b *NS, bAddr string) (aIf, bIf string) {
	t.Helper()
	aIf, bIf = a.nextIf(), b.nextIf()
	run(t, "ip", "link", "add", aIf, "netns", a.Name, "type", "veth", "peer", "name", bIf, "netns", b.Name)
	a.configure(t, aIf, aAddr)
	b.configure(t, bIf, bAddr)
	return aIf, bIf
}

func (ns *NS) nextIf() string { return fmt.Sprintf("veth%d", ns.links.Add(1)-1) }

func (ns *NS) configure(t testing.TB, dev, addr string) {
	t.Helper()
	args := []string{"addr", "add", addr, "dev", dev}
	if strings.Contains(addr, ":") {
		args = append(args, "nodad") // or the address is unusable for a second
	}
	ns.ip(t, args...)
	ns.ip(t, "link", "set", dev, "up")
}

// Route sends traffic for a prefix ("default" for all) by way of a neighbour.
func (ns *NS) Route(t testing.TB, prefix, via string) {
	t.Helper()
	ns.ip(t, "route", "add", prefix, "via", via)
}

// SetLink takes an interface down or up again.
func (ns *NS) SetLink(t testing.TB, dev string, up bool) {
	t.Helper()
	state := "down"
	if up {
		state = "up"
	}
	ns.ip(t, "link", "set", dev, state)
}

// SetMTU sets an interface's MTU in bytes.
func (ns *NS) SetMTU(t testing.TB, dev string, mtu int) {
	t.Helper()
	ns.ip(t, "link", "set", dev, "mtu", fmt.Sprint(mtu))
}

// Drop silently drops packets that come in and match an nft expression, such
// as "tcp dport 443" or "numgen random mod 100 < 3". Undrop ends it.
func (ns *NS) Drop(t testing.TB, match string) {
	t.Helper()
	ns.rule(t, match+" drop")
}

// Reject is Drop, but TCP senders get a reset at once.
func (ns *NS) Reject(t testing.TB, match string) {
	t.Helper()
	ns.rule(t, match+" reject with tcp reset")
}

const table = "culvert_test"

func (ns *NS) rule(t testing.TB, rule string) {
	t.Helper()
	ns.nft(t, "add table inet "+table)
	ns.nft(t, "add chain inet "+table+" in { type filter hook input priority 0 ; }")
	ns.nft(t, "add rule inet "+table+" in "+rule)
}

// Undrop removes all rules of Drop and Reject. There must be some.
func (ns *NS) Undrop(t testing.TB) {
	t.Helper()
	ns.nft(t, "delete table inet "+table)
}

func (ns *NS) ip(t testing.TB, args ...string) {
	t.Helper()
	run(t, "ip", append([]string{"-n", ns.Name}, args...)...)
}

func (ns *NS) nft(t testing.TB, rule string) {
	t.Helper()
	run(t, "ip", "netns", "exec", ns.Name, "nft", rule)
}

func run(t testing.TB, name string, args ...string) {
	t.Helper()
	if out, err := exec.Command(name, args...).CombinedOutput(); err != nil {
		t.Fatalf("netns: %s %s: %v: %s", name, strings.Join(args, " "), err, out)
	}
}

// Command prepares a program to run inside the namespace.
func (ns *NS) Command(ctx context.Context, name string, args ...string) *exec.Cmd {
	return exec.CommandContext(ctx, "ip", append([]string{"netns", "exec", ns.Name, name}, args...)...)
}

// Do calls f on a thread inside the namespace. Sockets that f makes itself
// stay in the namespace for good; goroutines that it starts are outside.
func (ns *NS) Do(f func() error) error {
	dir, err := os.Open("/run/netns/" + ns.Name)
	if err != nil {
		return fmt.Errorf("netns: %w", err)
	}
	defer dir.Close()
	trap, err := setns()
	if err != nil {
		return err
	}
	done := make(chan error, 1)
	go func() {
		// Never unlocked: the thread ends with the goroutine, so that no
		// other one is put on a thread that is in the wrong namespace.
		runtime.LockOSThread()
		if _, _, errno := syscall.RawSyscall(trap, dir.Fd(), syscall.CLONE_NEWNET, 0); errno != 0 {
			done <- fmt.Errorf("netns: enter %s: %w", ns.Name, errno)
			return
		}
		done <- f()
	}()
	return <-done
}

// setns returns the number of the system call, which package syscall lacks.
func setns() (uintptr, error) {
	switch runtime.GOARCH {
	case "amd64":
		return 308, nil
	case "arm64", "riscv64", "loong64":
		return 268, nil
	case "386":
		return 346, nil
	case "arm":
		return 375, nil
	}
	return 0, errors.New("netns: no setns on " + runtime.GOARCH)
}

// Listen listens inside the namespace. The listener can be used anywhere, and
// the caller closes it.
func (ns *NS) Listen(network, addr string) (ln net.Listener, err error) {
	err = ns.Do(func() error {
		ln, err = net.Listen(network, addr)
		return err
	})
	return ln, err
}

// Dial connects from inside the namespace. addr is an IP address and a port: a
// name would be looked up outside.
func (ns *NS) Dial(ctx context.Context, network, addr string) (c net.Conn, err error) {
	err = ns.Do(func() error {
		var d net.Dialer
		c, err = d.DialContext(ctx, network, addr)
		return err
	})
	return c, err
}
