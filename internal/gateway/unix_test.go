//go:build unix

package gateway

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"culvert.dev/internal/testnet"
	"culvert.dev/policy"
	"culvert.dev/registry"
	"culvert.dev/tunnel"
)

// socketFolder returns a folder whose name is short enough for sockets.
func socketFolder(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "culvert")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}

// unixListener makes a listener at a Unix socket as the configuration file has it.
func unixListener(path string, protocols ...string) *registry.Listener {
	return &registry.Listener{
		Name: "unix:" + path, Protocol: registry.Streams, Unix: &registry.UnixSocket{Path: path, Mode: 0o600},
		Settings: &registry.ListenerSettings{Protocols: protocols},
	}
}

// connectUnix asks for svc.test:443 by CONNECT at a Unix socket.
func connectUnix(t *testing.T, path string) (net.Conn, int) {
	t.Helper()
	c, err := net.Dial("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	_ = c.SetDeadline(time.Now().Add(patience))
	fmt.Fprint(c, "CONNECT svc.test:443 HTTP/1.1\r\nHost: svc.test:443\r\n\r\n")
	answer, err := http.ReadResponse(bufio.NewReaderSize(c, 16), &http.Request{Method: "CONNECT"})
	if err != nil {
		t.Fatal(err)
	}
	return c, answer.StatusCode
}

func modeOf(t *testing.T, path string) fs.FileMode {
	t.Helper()
	info, err := os.Lstat(path)
	if err != nil {
		t.Fatal(err)
	}
	return info.Mode()
}

func isGone(path string) bool {
	_, err := os.Lstat(path)
	return errors.Is(err, fs.ErrNotExist)
}

// A listener at a Unix socket gets another mode, moves and goes, and its tunnels stand.
func TestUnixListenersFollowTheTable(t *testing.T) {
	dir := socketFolder(t)
	one, two := filepath.Join(dir, "one"), filepath.Join(dir, "two")
	svc := service(testnet.Echo(t).Addr())
	e := newEdge(t)
	noErrors := func(why string) {
		t.Helper()
		for name, err := range e.ListenerErrors() {
			if err != nil {
				t.Errorf("%s: %s: %v", why, name, err)
			}
		}
	}
	var all []net.Conn
	open := func(path string) {
		t.Helper()
		c, status := connectUnix(t, path)
		if status != http.StatusOK {
			t.Fatalf("got status %d at %s", status, path)
		}
		all = append(all, c)
		for _, c := range all {
			works(t, c)
		}
	}
	l := unixListener(one, "connect")
	e.configure(svc, l)
	noErrors("the first")
	if got := modeOf(t, one); got != fs.ModeSocket|0o600 {
		t.Errorf("got mode %v, want 0600", got)
	}
	open(one)
	if s := e.Status().Listeners; len(s) != 1 || s[0].Address != "unix:"+one || s[0].Configured != "unix:"+one {
		t.Errorf("the status is %+v", s)
	}

	other := unixListener(one, "connect")
	other.Unix.Mode = 0o660
	e.configure(svc, other)
	noErrors("another mode")
	if got := modeOf(t, one); got != fs.ModeSocket|0o660 {
		t.Errorf("got mode %v, want 0660", got)
	}
	open(one)

	moved := unixListener(two, "connect")
	moved.Unix.Mode = 0o660
	e.configure(svc, moved)
	noErrors("another path")
	if !isGone(one) {
		t.Error("the old file is still there")
	}
	open(two)

	e.configure(svc, changed(moved, func(s *registry.ListenerSettings) { s.Protocols = []string{"connect", "socks5"} }))
	noErrors("more protocols")
	open(two)

	e.configure(svc)
	if !isGone(two) {
		t.Error("the file of a listener that is gone is still there")
	}
	for _, c := range all {
		works(t, c)
	}
}

// The path of a listener that another program has is tried again, and the file of one that
// another program has taken is left alone.
func TestUnixListenerBesideOthers(t *testing.T) {
	t.Parallel()
	dir := socketFolder(t)
	path := filepath.Join(dir, "s")
	svc := service(testnet.Echo(t).Addr())
	e := newEdge(t)
	theirs, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	l := unixListener(path, "connect")
	e.configure(svc, l)
	if err := e.ListenerErrors()[l.Name]; err == nil || !strings.Contains(err.Error(), "another process serves there") {
		t.Errorf("got %v, want that another process serves there", err)
	}
	if isGone(path) {
		t.Fatal("the file of the other program is gone")
	}
	_ = theirs.Close()
	testnet.Eventually(t, soon, func() bool { return e.ListenerErrors()[l.Name] == nil }, "it is tried again")
	c, _ := connectUnix(t, path)
	works(t, c)

	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	theirs, err = net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer theirs.Close()
	e.configure(svc)
	if isGone(path) {
		t.Error("the file of another program was removed")
	}
}

// The user of a process that connects to a Unix socket is the caller where the listener
// says so: policies select it, and the log and the lists have it.
func TestPeerCredentials(t *testing.T) {
	t.Parallel()
	if runtime.GOOS != "linux" && runtime.GOOS != "darwin" {
		return // they are not known there
	}
	dir := socketFolder(t)
	path := filepath.Join(dir, "s")
	svc := service(testnet.Echo(t).Addr())
	e := newEdge(t)
	me := "uid:" + strconv.Itoa(os.Getuid())
	allow := func(users ...string) []*policy.Policy {
		return []*policy.Policy{{Name: "users", Rules: []policy.Rule{{Sources: &[]policy.Source{{Users: users}}}}}}
	}
	l := changed(unixListener(path, "connect"), func(s *registry.ListenerSettings) { s.PeerCredentials = true })
	set := func(l *registry.Listener, policies []*policy.Policy) {
		t.Helper()
		e.say(registry.Snapshot{Services: []*registry.Service{svc}, Listeners: []*registry.Listener{l}, Policies: policies})
	}
	source := fmt.Sprintf("unix:uid=%d,pid=%d", os.Getuid(), os.Getpid())

	set(l, allow(me))
	c, status := connectUnix(t, path)
	if status != http.StatusOK {
		t.Fatalf("got status %d", status)
	}
	works(t, c)
	live := slices.Collect(e.relay.List())
	if len(live) != 1 || live[0].Peer.ID != me || live[0].Peer.Method != "unix" || live[0].Process == nil || live[0].Process.String() != source {
		t.Errorf("got tunnels %+v", live)
	}
	if gid := live[0].Peer.Auth.Claims["gid"]; !slices.Equal(gid, []string{strconv.Itoa(os.Getgid())}) {
		t.Errorf("got claim gid %q", gid)
	}
	if use := e.loops.Budget.Clients().Most(5); len(use) == 0 || use[0].Name != me || use[0].Tunnels != 1 {
		t.Errorf("got accounts %+v, want that %s is charged", use, me)
	}

	// Another user is allowed: the tunnel ends, and there is no other.
	set(l, allow("uid:4294967294"))
	if _, err := io.ReadFull(c, make([]byte, 1)); err == nil {
		t.Error("the tunnel still stands")
	}
	e.logs("reason=revoked", "source=\""+source+"\"", "peer="+me, "peer_method=unix")
	if _, status := connectUnix(t, path); status != http.StatusForbidden {
		t.Errorf("got status %d, want 403", status)
	}
	e.logs("reason=denied", "source=\""+source+"\"")

	// Without peer credentials nobody is known, and the log still has the process.
	set(unixListener(path, "connect"), allow(me))
	if _, status := connectUnix(t, path); status != http.StatusForbidden {
		t.Errorf("without peerCredentials: got status %d, want 403", status)
	}
	e.logs("reason=denied", "a caller without an identity", "source=\""+source+"\"")
}

// Limits of one client hold for each user of Unix sockets.
func TestUnixListenerLimits(t *testing.T) {
	dir := socketFolder(t)
	path := filepath.Join(dir, "s")
	e := newEdgeOf(t, Config{Limits: tunnel.Limits{MaxConnectionsPerClient: 2}})
	e.configure(service(testnet.Echo(t).Addr()), unixListener(path, "connect"))
	for i, want := range []int{http.StatusOK, http.StatusOK} {
		if _, status := connectUnix(t, path); status != want {
			t.Fatalf("%d: got status %d, want %d", i, status, want)
		}
	}
	c, err := net.Dial("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(patience))
	if n, err := c.Read(make([]byte, 1)); n != 0 || err == nil {
		t.Errorf("a third connection: read %d bytes, %v", n, err)
	}
	e.logs("reason=overload", "maxConnectionsPerClient")
}
