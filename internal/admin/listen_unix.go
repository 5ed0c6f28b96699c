//go:build unix

package admin

import (
	"context"
	"net"
	"sync"
	"syscall"
)

const sockets = true // CheckAddr takes unix:PATH

var maskMu sync.Mutex // one at a time: the mask is the process's

// listenPrivately listens at path for the owner of this process alone. A mode
// that is set after the file is made comes too late for who connects at once,
// so it is made with it. A file that another goroutine makes in that moment is
// for its owner only, too.
func listenPrivately(ctx context.Context, path string) (*net.UnixListener, error) {
	maskMu.Lock()
	defer maskMu.Unlock()
	old := syscall.Umask(0o177)
	defer syscall.Umask(old)
	ln, err := new(net.ListenConfig).Listen(ctx, "unix", path)
	if err != nil {
		return nil, err
	}
	return ln.(*net.UnixListener), nil
}
