//go:build linux

package reliability

import (
	"bufio"
	"context"
	"flag"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"culvert.dev/internal/testnet"
)

// idleTunnels is how many tunnels TestIdleTunnels holds. One process may have
// 20,000 descriptors on the machines this runs on, and a tunnel takes two.
var idleTunnels = flag.Int("tunnels", 9000, "idle tunnels to hold")

// oneClient is how many tunnels of one address TestManyTunnelsOfOneClient holds,
// of a gateway whose descriptors they nearly take.
var oneClient = flag.Int("one-client", 400, "tunnels of one address to hold")

// volume is what the chaos pair moves by each of the ways of eachWay, in MiB,
// and volumeEach what it moves by each of all others, in and out.
var (
	volume     = flag.Int64("volume", 128, "MiB for the chaos pair to move by TLS and by CONNECT each")
	volumeEach = flag.Int64("volume-each", 8, "MiB for it to move by each of the other ways, in and out")
)

// idleStreams is how many tunnels TestIdleStreams holds, 100 on a connection. The
// gateway and the service take a descriptor for each.
var idleStreams = flag.Int("idle-streams", 5000, "idle tunnels to hold, 100 on a connection and over 50 at least")

// idleOnward is how many TestIdleStreamsOnward holds, where only the gateways
// behind and their services do.
var idleOnward = flag.Int("idle-onward", 2000, "idle tunnels to hold that go on to other gateways, likewise")

// shortTunnels is how many TestShortTunnelsLeaveNothing opens and ends.
var shortTunnels = flag.Int("short-tunnels", 20_000, "short tunnels to open and end")

// muteTunnels is how many TestMuteTunnelsInASmallCgroup opens by each carrier.
var muteTunnels = flag.Int("mute", 300, "tunnels to write into by each carrier, whose service does not read")

// roleVar makes the test binary a backend process instead of running tests.
const roleVar = "CULVERT_RELIABILITY_ROLE"

func TestMain(m *testing.M) {
	if role := os.Getenv(roleVar); role != "" {
		os.Exit(play(role))
	}
	if _, err := program(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	testnet.Parallel(32)
	testnet.Main(m)
}

var (
	program     = sync.OnceValues(func() (string, error) { return build("culvert", "CGO_ENABLED=0") }) // as the image is built
	raceProgram = sync.OnceValues(func() (string, error) { return build("culvert-race", "CGO_ENABLED=1", "-race") })
)

// build compiles the gateway beside the test binary, where "go test" removes
// it, with a variable for "go build" and its flags.
func build(name, env string, flags ...string) (string, error) {
	self, err := os.Executable()
	if err != nil {
		return "", err
	}
	out := filepath.Join(filepath.Dir(self), name)
	cmd := exec.Command("go", append(append([]string{"build", "-tags", buildTags, "-ldflags", "-s -w", "-o", out}, flags...), "./cmd/culvert")...)
	cmd.Dir, cmd.Env = "../..", append(os.Environ(), env)
	if text, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("build the gateway: %w\n%s", err, text)
	}
	return out, nil
}

// play is the life of a backend process: it says where it listens, serves,
// and ends when its standard input does, that is, with its parent.
func play(role string) int {
	if role == "ballast" {
		return ballast()
	}
	serve := map[string]func(plain){
		"echo":    func(c plain) { _, _ = io.CopyBuffer(c, c, make([]byte, 1<<10)); _ = c.CloseWrite() },
		"discard": func(c plain) { _, _ = io.Copy(io.Discard, c) },
		"flood":   flood,
		"deaf":    func(plain) { select {} }, // until its process ends
		"mute":    func(plain) { select {} },
	}[role]
	var lc net.ListenConfig
	if role == "mute" {
		// Loopback's own segments would let each sender queue megabytes in the
		// kernel, which has one limit for all.
		lc.Control = func(_, _ string, c syscall.RawConn) error {
			return c.Control(func(fd uintptr) {
				_ = syscall.SetsockoptInt(int(fd), syscall.IPPROTO_TCP, syscall.TCP_MAXSEG, 1400)
				_ = syscall.SetsockoptInt(int(fd), syscall.SOL_SOCKET, syscall.SO_RCVBUF, 4<<10)
			})
		}
	}
	ln, err := lc.Listen(context.Background(), "tcp", "127.0.0.1:0")
	if err != nil || serve == nil {
		fmt.Fprintln(os.Stderr, "backend:", role, err)
		return 1
	}
	fmt.Println(ln.Addr())
	go func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				serve(plain{c.(*net.TCPConn)})
			}()
		}
	}()
	_, _ = io.Copy(io.Discard, os.Stdin)
	return 0
}

// ballast holds as many MiB more as each line of standard input says.
func ballast() int {
	held := 0
	for in := bufio.NewScanner(os.Stdin); in.Scan(); {
		n, err := strconv.Atoi(in.Text())
		if err != nil {
			fmt.Fprintln(os.Stderr, "ballast:", err)
			return 1
		}
		// By the kernel: what this program wrote would count again, several
		// times over, where it looks for races.
		if _, err := syscall.Mmap(-1, 0, n<<20, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_ANON|syscall.MAP_PRIVATE|syscall.MAP_POPULATE); err != nil {
			fmt.Fprintln(os.Stderr, "ballast:", err)
			return 1
		}
		held += n
		fmt.Println(held)
	}
	return 0
}

// flood sends without end. What it has under way is little, or thousands of
// them would take the kernel's memory for sockets.
func flood(c plain) {
	_ = c.tcp.SetWriteBuffer(16 << 10)
	p := make([]byte, 16<<10)
	for {
		if _, err := c.Write(p); err != nil {
			return
		}
	}
}

// plain hides TCPConn's ReadFrom and WriteTo: splicing would hold two pipes
// for each of thousands of connections.
type plain struct{ tcp *net.TCPConn }

func (p plain) Read(b []byte) (int, error)  { return p.tcp.Read(b) }
func (p plain) Write(b []byte) (int, error) { return p.tcp.Write(b) }
func (p plain) CloseWrite() error           { return p.tcp.CloseWrite() }
func (p plain) Close() error                { return p.tcp.Close() }

// A backend is a process that plays a role.
type backend struct {
	addr string
	cmd  *exec.Cmd
}

// startBackend starts one that ends with the test.
func startBackend(t *testing.T, role string) *backend {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	b := &backend{cmd: exec.Command(self)}
	b.cmd.Env = append(os.Environ(), roleVar+"="+role)
	b.cmd.Stderr = os.Stderr
	stdin, err := b.cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	stdout, err := b.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := b.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = stdin.Close()
		_ = b.cmd.Wait()
	})
	line, err := bufio.NewReader(stdout).ReadString('\n')
	if err != nil {
		t.Fatalf("backend process %s: %v", role, err)
	}
	b.addr = strings.TrimSpace(line)
	return b
}

// keepAsking has a client, the given one, ask for a service by its name again and again until stop
// is called, and counts the requests that were served. One that fails is an error of the test.
func (g *gateway) keepAsking(t *testing.T, name string, client int) (served *atomic.Int64, stop func()) {
	served = new(atomic.Int64)
	ctx, cancel := context.WithCancel(t.Context())
	var asking sync.WaitGroup
	asking.Go(func() {
		for {
			select {
			case <-ctx.Done():
				return
			case <-time.After(5 * time.Millisecond):
			}
			c, err := g.dial(client)
			if err == nil {
				err = bySNI.enter(c, name)
				_ = c.Close()
			}
			if err != nil {
				t.Errorf("a client of %s, after %d requests: %v", name, served.Load(), err)
				return
			}
			served.Add(1)
		}
	})
	return served, func() { cancel(); asking.Wait() }
}
