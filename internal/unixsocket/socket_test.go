//go:build unix

package unixsocket

import (
	"errors"
	"io/fs"
	"net"
	"os"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"culvert.dev/internal/testnet"
	"culvert.dev/tunnel"
)

func TestMain(m *testing.M) {
	if path := os.Getenv(childSocket); path != "" {
		connectAsChild(path)
	}
	testnet.GoroutinesEnd(m)
}

func open(t *testing.T, c Config) net.Listener {
	t.Helper()
	ln, err := Listen(t.Context(), c)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = ln.Close() })
	return ln
}

// The file has its mode whatever the mask of the process is, and its group.
func TestModeAndGroup(t *testing.T) {
	t.Chdir(t.TempDir()) // whose own name may be too long for a socket
	groups, err := os.Getgroups()
	if err != nil {
		t.Fatal(err)
	}
	gid := append([]int{os.Getgid()}, groups...)[len(groups)] // the last one, to be another where there are several
	for i, mode := range []fs.FileMode{0, 0o600, 0o660, 0o666, 0o222} {
		path := "s" + strconv.Itoa(i)
		open(t, Config{Path: path, Mode: mode, Group: strconv.Itoa(gid)})
		info, err := os.Lstat(path)
		if err != nil {
			t.Fatal(err)
		}
		want := mode
		if want == 0 {
			want = 0o600
		}
		if info.Mode() != fs.ModeSocket|want {
			t.Errorf("mode %v: got %v, want a socket with %v", mode, info.Mode(), want)
		}
		if got := int(info.Sys().(*syscall.Stat_t).Gid); got != gid {
			t.Errorf("got group %d, want %d", got, gid)
		}
	}
}

func TestGroupThatIsNotThere(t *testing.T) {
	t.Chdir(t.TempDir())
	ln, err := Listen(t.Context(), Config{Path: "s", Group: "no group of this name"})
	if err == nil || !strings.Contains(err.Error(), "there is no group") {
		t.Errorf("got %v, %v", ln, err)
	}
	if _, err := os.Lstat("s"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("got %v, want no file", err)
	}
}

// What cannot be opened because somebody listens there is in use, as a port is.
func TestInUse(t *testing.T) {
	t.Chdir(t.TempDir())
	ln := open(t, Config{Path: "s"})
	if _, err := Listen(t.Context(), Config{Path: "s"}); !errors.Is(err, syscall.EADDRINUSE) || !strings.Contains(err.Error(), "another process serves there") {
		t.Errorf("got %v, want that the path is in use", err)
	}
	if err := ln.Close(); err != nil {
		t.Error(err)
	}
	open(t, Config{Path: "s"})
}

// The process at the other end is known, and stays the one that has connected.
func TestProcess(t *testing.T) {
	if runtime.GOOS != "linux" && runtime.GOOS != "darwin" {
		return // it is not known there
	}
	t.Chdir(t.TempDir())
	ln := open(t, Config{Path: "s"})
	client, err := net.Dial("unix", "s")
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	c, err := ln.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	p, ok := c.(tunnel.LocalConn).Process()
	want := tunnel.Process{UID: uint32(os.Getuid()), GID: uint32(os.Getgid()), PID: os.Getpid()}
	if !ok || p != want {
		t.Errorf("got %+v, %v, want %+v", p, ok, want)
	}
}

// connectAsChild is what a child process does: it connects, and stays until it is killed or
// its parent closes the connection.
func connectAsChild(path string) {
	c, err := net.Dial("unix", path)
	if err != nil {
		println(err.Error())
		os.Exit(1)
	}
	_, _ = c.Read(make([]byte, 1))
	os.Exit(0)
}

const childSocket = "CULVERT_TEST_SOCKET"
