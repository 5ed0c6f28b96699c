//go:build unix

package admin

import (
	"context"
	"errors"
	"io/fs"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func listen(t *testing.T, addr string) net.Listener {
	t.Helper()
	ln, err := Listen(t.Context(), addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = ln.Close() })
	return ln
}

// stale leaves a socket at path as a process does that is killed.
func stale(t *testing.T, path string) {
	t.Helper()
	ln, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	ln.SetUnlinkOnClose(false)
	_ = ln.Close()
}

// fileMode is the mode that a new file gets that asks for all there is.
func fileMode(t *testing.T, name string) fs.FileMode {
	t.Helper()
	if err := os.WriteFile(name, nil, 0o777); err != nil {
		t.Fatal(err)
	}
	info, err := os.Stat(name)
	if err != nil {
		t.Fatal(err)
	}
	return info.Mode()
}

func TestASocketIsForItsOwner(t *testing.T) {
	t.Chdir(t.TempDir()) // whose own name may be too long for a socket
	before := fileMode(t, "before")
	ln := listen(t, "unix:admin.sock")
	info, err := os.Lstat("admin.sock")
	if err != nil || info.Mode() != fs.ModeSocket|0o600 {
		t.Errorf("got %v, %v, want a socket of mode 0600", info.Mode(), err)
	}
	if after := fileMode(t, "after"); after != before {
		t.Errorf("a file made after it has mode %v, one before it %v: the mask was not put back", after, before)
	}
	for range 2 { // closing twice is an error, and harmless
		_ = ln.Close()
	}
	if _, err := os.Lstat("admin.sock"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("after Close: %v, want no file", err)
	}
}

func TestASocketThatIsLeftOverIsReplaced(t *testing.T) {
	t.Chdir(t.TempDir())
	stale(t, "admin.sock")
	ln := listen(t, "unix:admin.sock")
	c, err := net.Dial("unix", "admin.sock")
	if err != nil {
		t.Fatal(err)
	}
	_ = c.Close()
	// And not while somebody listens.
	if _, err := Listen(t.Context(), "unix:admin.sock"); err == nil || !strings.Contains(err.Error(), "another process serves there") {
		t.Errorf("a second listener: %v", err)
	}
	if _, err := os.Lstat("admin.sock"); err != nil {
		t.Errorf("the first one's socket: %v", err)
	}
	// One that someone else has put there by now stays.
	if err := os.Remove("admin.sock"); err != nil {
		t.Fatal(err)
	}
	stale(t, "admin.sock")
	_ = ln.Close()
	if _, err := os.Lstat("admin.sock"); err != nil {
		t.Errorf("the successor's socket: %v", err)
	}
}

func TestASocketIsNotPutInPlaceOfOtherThings(t *testing.T) {
	t.Chdir(t.TempDir())
	if err := os.WriteFile("file", []byte("precious"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir("folder", 0o700); err != nil {
		t.Fatal(err)
	}
	stale(t, "socket")
	if err := os.Symlink("socket", "link"); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct{ path, want string }{
		{"file", "is not a socket"}, {"folder", "is not a socket"}, {"link", "is not a socket"}, {"none/admin.sock", "no such file"}, {"file/admin.sock", "not a directory"},
	} {
		if ln, err := Listen(t.Context(), "unix:"+tt.path); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: got %v, %v, want %q", tt.path, ln, err, tt.want)
		}
	}
	if got, err := os.ReadFile("file"); string(got) != "precious" {
		t.Errorf("the file has %q, %v", got, err)
	}
}

func TestCheckAddrOfSockets(t *testing.T) {
	for addr, good := range map[string]bool{
		"unix:/run/culvert/admin.sock":     true,
		"unix:admin.sock":                  true,
		"unix:" + strings.Repeat("a", 103): true,
		"unix:" + strings.Repeat("a", 104): false,
		"unix:":                            false,
		"unix:@admin":                      false, // abstract: anybody's
		"unix:\x00admin":                   false,
		"unix:/run/\x00":                   false,
		"unix":                             false,
		"UNIX:/run/culvert/admin.sock":     false,
		filepath.Join(string(filepath.Separator), "a", "b"): false,
	} {
		if err := CheckAddr(addr, false); (err == nil) != good {
			t.Errorf("CheckAddr(%q) = %v, want accepted: %v", addr, err, good)
		}
	}
}

// By a real socket tunnels can be closed; by real TCP they can't.
func TestServeTellsASocketFromTCP(t *testing.T) {
	t.Chdir(t.TempDir())
	a, f := withTunnels()
	ctx, cancel := context.WithCancel(t.Context())
	served := make(chan error, 1)
	ln := listen(t, "unix:admin.sock")
	go func() { served <- a.Serve(ctx, ln) }()
	addr, _ := serve(t, a)
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, to string) (net.Conn, error) {
		if to == "localhost:80" {
			return new(net.Dialer).DialContext(ctx, "unix", "admin.sock")
		}
		return new(net.Dialer).DialContext(ctx, "tcp", to)
	}}}
	for _, tt := range []struct {
		host string
		want int
	}{{addr, 403}, {"localhost", 204}, {"localhost", 404}} {
		r, err := http.NewRequestWithContext(ctx, "DELETE", "http://"+tt.host+"/tunnels/1", nil)
		if err != nil {
			t.Fatal(err)
		}
		resp, err := client.Do(r)
		if err != nil {
			t.Fatal(err)
		}
		_ = resp.Body.Close()
		if resp.StatusCode != tt.want {
			t.Errorf("DELETE by %s: %d, want %d", tt.host, resp.StatusCode, tt.want)
		}
	}
	if len(f.closed) != 1 {
		t.Errorf("closed %v, want tunnel 1", f.closed)
	}
	cancel()
	if err := <-served; err != nil {
		t.Error(err)
	}
	if _, err := os.Lstat("admin.sock"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("after Serve: %v, want no socket", err)
	}
}
