//go:build unix

package command

import (
	"context"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// The service manager hears when the gateway serves, reads its file again and
// drains.
func TestTheServiceManagerIsTold(t *testing.T) {
	dir, err := os.MkdirTemp("", "notify") // short enough for a socket
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	socket := filepath.Join(dir, "s")
	pc, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: socket, Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	defer pc.Close()
	t.Setenv("NOTIFY_SOCKET", socket)
	config := filepath.Join(dir, "culvert.yaml")
	if err := os.WriteFile(config, []byte("servicePorts: {range: 20000-20999, state: ports.json}\nservices: []\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	hears := func(want string) {
		t.Helper()
		_ = pc.SetReadDeadline(time.Now().Add(20 * time.Second))
		b := make([]byte, 100)
		n, err := pc.Read(b)
		if err != nil || string(b[:n]) != want {
			t.Fatalf("heard %q, %v, want %q", b[:n], err, want)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	done := make(chan error, 1)
	now := make(chan struct{})
	go func() {
		done <- runGateway(ctx, now, io.Discard, &gatewayOptions{sourceOptions: sourceOptions{config: config}})
	}()
	hears("READY=1")
	if err := syscall.Kill(os.Getpid(), syscall.SIGHUP); err != nil {
		t.Fatal(err)
	}
	hears("RELOADING=1")
	hears("READY=1")
	cancel()
	hears("STOPPING=1")
	close(now)
	if err := <-done; err != nil {
		t.Error(err)
	}
	t.Setenv("NOTIFY_SOCKET", strings.Repeat("a", 10))
	notify(notifyReady) // to nobody
}
