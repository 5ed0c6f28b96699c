package activation

import (
	"errors"
	"fmt"
	"net"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
)

// Prefix begins the address of a socket: "fd:web".
const Prefix = "fd:"

// Name returns the name of an address of the form fd:NAME.
func Name(address string) (name string, ok bool) { return strings.CutPrefix(address, Prefix) }

// Sockets are those that were passed to this process. A nil one has none. Its methods may
// be called at the same time.
type Sockets struct {
	names []string // of the descriptors, from firstFD
	err   error    // why they can't be used

	mu   sync.Mutex
	used map[string]bool
}

// Listen returns a listener at the socket of a name: a *net.TCPListener or a
// *net.UnixListener, which is the caller's to close. A socket has one listener at a time:
// the next Listen needs Release. The file of a Unix socket is not removed by Close, as it
// is systemd's.
func (s *Sockets) Listen(name string) (net.Listener, error) {
	ln, err := s.listen(name)
	if err != nil {
		return nil, fmt.Errorf("socket %q of systemd: %w", name, err)
	}
	return ln, nil
}

func (s *Sockets) listen(name string) (net.Listener, error) {
	switch {
	case s == nil || s.err == nil && len(s.names) == 0:
		return nil, fmt.Errorf("no sockets were passed to this process: start it by a socket unit with FileDescriptorName=%s", name)
	case s.err != nil:
		return nil, fmt.Errorf("the passed sockets cannot be used: %w", s.err)
	}
	at := slices.Index(s.names, name)
	if at < 0 {
		return nil, fmt.Errorf("no socket of this name was passed: the names are %s", s.list())
	}
	if slices.Contains(s.names[at+1:], name) {
		return nil, errors.New("several sockets of this name were passed: give each one a socket unit and a FileDescriptorName of its own")
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.used[name] {
		return nil, errUsed
	}
	ln, err := open(firstFD+at, name)
	if err != nil {
		return nil, err
	}
	s.used[name] = true
	return ln, nil
}

// Release says that the listener at the socket of a name is closed.
func (s *Sockets) Release(name string) {
	if s == nil {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.used, name)
}

// list returns the names, for people.
func (s *Sockets) list() string {
	const most = 10
	var all []string
	for i, name := range s.names {
		if i == most {
			all = append(all, fmt.Sprintf("%d more", len(s.names)-most))
			break
		}
		all = append(all, strconv.Quote(name))
	}
	return strings.Join(all, ", ")
}

// errUsed is the error of a socket that has a listener.
var errUsed = usedError{errors.New("another listener uses it")}

// A usedError is syscall.EADDRINUSE in words of its own.
type usedError struct{ error }

func (usedError) Unwrap() error { return syscall.EADDRINUSE }
