package unixsocket

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

	"culvert.dev/tunnel"
)

// Supported reports whether this system has sockets whose files say who may connect.
const Supported = supported

// Prefix begins the address of a socket: "unix:/run/culvert/proxy.sock".
const Prefix = "unix:"

// maxPath is the longest path of a socket, in bytes, that every system takes: macOS has
// room for 104 with the NUL, Linux for 108.
const maxPath = 103

// A Config says where to listen, and who may connect.
type Config struct {
	Path  string      // of the file; "@name" for an abstract socket
	Mode  fs.FileMode // permission bits of the file; 0 means 0600. None of an abstract socket
	Group string      // name or number of the file's group; "" leaves it to the system
}

// Path returns the path of an address of the form unix:PATH.
func Path(address string) (path string, ok bool) { return strings.CutPrefix(address, Prefix) }

// IsAbstract reports whether path is that of an abstract socket.
func IsAbstract(path string) bool { return strings.HasPrefix(path, "@") }

// CheckPath returns an error if path can't be that of a file of a socket.
func CheckPath(path string) error {
	switch {
	case !Supported:
		return errors.New("this system cannot restrict a socket to some users: listen on 127.0.0.1")
	case path == "":
		return errors.New("want unix:PATH")
	case IsAbstract(path) || strings.ContainsRune(path, 0):
		// Linux would take it for an abstract socket, which everybody may connect to.
		return errors.New("want the path of a file")
	case len(path) > maxPath:
		return fmt.Errorf("the path of a socket has %d bytes, limit %d", len(path), maxPath)
	}
	return nil
}

// Listen opens a socket.
//
// The file of one that is left over from a process that is gone is replaced. It is an
// error where somebody listens at the path, or the file is no socket. The listener's Close
// removes the file, unless it is another's by then.
func Listen(ctx context.Context, c Config) (net.Listener, error) {
	fail := func(err error) (net.Listener, error) {
		return nil, fmt.Errorf("socket %q: %w", c.Path, err)
	}
	if c.Mode == 0 {
		c.Mode = 0o600
	}
	if IsAbstract(c.Path) {
		ln, err := listenAbstract(ctx, c.Path)
		if err != nil {
			return fail(err)
		}
		return &listener{UnixListener: ln}, nil
	}
	gid := -1
	if c.Group != "" {
		var err error
		if gid, err = lookupGroup(c.Group); err != nil {
			return fail(err)
		}
	}
	if err := clear(ctx, c.Path); err != nil {
		return fail(err)
	}
	ln, err := bind(c.Path, c.Mode, gid)
	if err != nil {
		return fail(err)
	}
	made, err := os.Lstat(c.Path)
	if err != nil {
		_ = ln.Close()
		return fail(err)
	}
	return &listener{UnixListener: ln, path: c.Path, made: made}, nil
}

// Adopt returns a listener at a socket that another program has opened, and that goes on
// being that program's: Close leaves its file.
func Adopt(ln *net.UnixListener) net.Listener { return &listener{UnixListener: ln} }

// errServed is the error of a path at which somebody listens.
var errServed = inUseError{errors.New("another process serves there")}

// An inUseError is syscall.EADDRINUSE in words of its own.
type inUseError struct{ error }

func (inUseError) Unwrap() error { return syscall.EADDRINUSE }

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
		return errServed
	case errors.Is(err, fs.ErrNotExist):
		return nil // it was on its way out
	case !errors.Is(err, syscall.ECONNREFUSED):
		return fmt.Errorf("the file exists, and it cannot be determined whether a process serves there: %w", err)
	}
	return os.Remove(path)
}

// A listener removes its file when it is closed.
type listener struct {
	*net.UnixListener
	path string // "" for an abstract socket, and one of another program
	made fs.FileInfo
	once sync.Once
}

func (l *listener) Accept() (net.Conn, error) {
	c, err := l.AcceptUnix()
	if err != nil {
		return nil, err
	}
	conn := &Conn{UnixConn: c}
	conn.process, conn.known = credentials(c)
	return conn, nil
}

func (l *listener) Close() error {
	l.once.Do(func() {
		if l.path == "" {
			return
		}
		if now, err := os.Lstat(l.path); err == nil && os.SameFile(now, l.made) {
			_ = os.Remove(l.path)
		}
	})
	return l.UnixListener.Close()
}

// A Conn is an accepted connection. It implements tunnel.LocalConn.
type Conn struct {
	*net.UnixConn
	process tunnel.Process
	known   bool
}

var _ tunnel.LocalConn = (*Conn)(nil)

// Process implements tunnel.LocalConn.
func (c *Conn) Process() (tunnel.Process, bool) { return c.process, c.known }
