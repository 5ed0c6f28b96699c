package admin

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"strings"
	"sync"
	"syscall"
	"time"
)

// maxSocketPath is the longest path of a socket, in bytes, that every system
// takes: macOS has room for 104 with the NUL, Linux for 108.
const maxSocketPath = 103

// SocketPath returns the path of an admin address of the form unix:PATH.
func SocketPath(addr string) (path string, ok bool) { return strings.CutPrefix(addr, "unix:") }

// Listen opens the admin port at addr, HOST:PORT or unix:PATH, which CheckAddr
// has found good.
//
// A socket's file is for its owner only. One that is left over from a process
// that is gone is replaced; one that somebody listens at, and a file that is
// no socket, are an error. The listener's Close removes the file, unless it is
// another's by then.
func Listen(ctx context.Context, addr string) (net.Listener, error) {
	path, ok := SocketPath(addr)
	if !ok {
		ln, err := new(net.ListenConfig).Listen(ctx, "tcp", addr)
		if err != nil {
			return nil, fmt.Errorf("admin port: %w", err)
		}
		return ln, nil
	}
	if err := clear(ctx, path); err != nil {
		return nil, fmt.Errorf("admin socket %q: %w", path, err)
	}
	ln, err := listenPrivately(ctx, path)
	if err != nil {
		return nil, fmt.Errorf("admin socket: %w", err)
	}
	ln.SetUnlinkOnClose(false) // it would remove whatever has the name by then
	made, err := os.Lstat(path)
	if err != nil {
		_ = ln.Close()
		return nil, fmt.Errorf("admin socket: %w", err)
	}
	return &socketListener{UnixListener: ln, path: path, made: made}, nil
}

// clear removes a socket at path that nobody listens at.
func clear(ctx context.Context, path string) error {
	info, err := os.Lstat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return err
	case info.Mode().Type() != fs.ModeSocket:
		return errors.New("the file exists and is not a socket")
	}
	d := net.Dialer{Timeout: time.Second}
	c, err := d.DialContext(ctx, "unix", path)
	switch {
	case err == nil:
		_ = c.Close()
		return errors.New("another process serves there")
	case errors.Is(err, fs.ErrNotExist):
		return nil // it was on its way out
	case !errors.Is(err, syscall.ECONNREFUSED):
		return fmt.Errorf("the file exists, and it cannot be determined whether a process serves there: %w", err)
	}
	return os.Remove(path)
}

// A socketListener removes its file when it is closed.
type socketListener struct {
	*net.UnixListener
	path string
	made fs.FileInfo
	once sync.Once
}

func (l *socketListener) Close() error {
	l.once.Do(func() {
		if now, err := os.Lstat(l.path); err == nil && os.SameFile(now, l.made) {
			_ = os.Remove(l.path)
		}
	})
	return l.UnixListener.Close()
}
