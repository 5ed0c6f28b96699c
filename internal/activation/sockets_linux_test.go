package activation

import (
	"errors"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
)

// asChild says that the test binary is the process that sockets are passed to.
const asChild = "CULVERT_TEST_ACTIVATED"

// Each socket is found by its name, again after it was closed, and what can't be used is
// refused.
func TestPassedSockets(t *testing.T) {
	if os.Getenv(asChild) != "" {
		usePassed(t)
		return
	}
	path := filepath.Join(t.TempDir(), "s")
	tcp, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	defer tcp.Close()
	local, err := net.Listen("unix", path)
	must(t, err)
	defer local.Close()
	udp, err := net.ListenPacket("udp", "127.0.0.1:0")
	must(t, err)
	defer udp.Close()
	client, err := net.Dial("tcp", tcp.Addr().String())
	must(t, err)
	defer client.Close()
	plain, err := os.Open(os.DevNull)
	must(t, err)
	defer plain.Close()
	files := []*os.File{plain}
	for _, s := range []interface{ File() (*os.File, error) }{
		tcp.(*net.TCPListener), local.(*net.UnixListener), udp.(*net.UDPConn), client.(*net.TCPConn), tcp.(*net.TCPListener), tcp.(*net.TCPListener),
	} {
		f, err := s.File()
		must(t, err)
		defer f.Close()
		files = append(files, f)
	}
	cmd := exec.Command("/bin/sh", "-c", `LISTEN_PID=$$ exec "$0" "$@"`, os.Args[0], "-test.run=^TestPassedSockets$", "-test.v")
	cmd.Env = append(os.Environ(), asChild+"="+path, "LISTEN_FDS="+strconv.Itoa(len(files)), "LISTEN_FDNAMES=file:web:local:udp:connected:twice:twice")
	cmd.ExtraFiles = files
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
}

func usePassed(t *testing.T) {
	s := FromEnvironment()
	if out, err := exec.Command("/bin/sh", "-c", "env | grep ^LISTEN_; readlink /proc/self/fd/* | grep socket:").Output(); len(out) > 0 {
		t.Errorf("a child has %s (%v)", out, err)
	}
	for range 3 {
		for name, network := range map[string]string{"web": "tcp", "local": "unix"} {
			ln, err := s.Listen(name)
			must(t, err)
			if _, err := s.Listen(name); !errors.Is(err, syscall.EADDRINUSE) || !strings.Contains(err.Error(), "another listener uses it") {
				t.Errorf("the second listener of %s: %v", name, err)
			}
			c, err := net.Dial(network, ln.Addr().String())
			must(t, err)
			_, err = io.WriteString(c, "x")
			must(t, err)
			// It may be that of the test outside, which waits in the queue from the beginning.
			accepted, err := ln.Accept()
			must(t, err)
			_ = accepted.Close()
			_ = c.Close()
			must(t, ln.Close())
			s.Release(name)
		}
	}
	if _, err := os.Lstat(os.Getenv(asChild)); err != nil {
		t.Errorf("the file of systemd is gone: %v", err)
	}
	for name, want := range map[string]string{
		"file":      "it is not a socket",
		"udp":       "it is not a stream socket",
		"connected": "it accepts no connections",
		"twice":     "several sockets of this name",
		"other":     `no socket of this name was passed: the names are "file", "web", "local", "udp", "connected", "twice", "twice"`,
	} {
		if _, err := s.Listen(name); err == nil || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), strconv.Quote(name)) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
