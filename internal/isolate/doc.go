// Package isolate runs a program in a network namespace of its own, in which everything is
// captured: its connections and its DNS come to sockets that this process has, and nothing
// else leaves. The network of the host stays as it is. It needs no privileges where the system
// lets users have namespaces.
//
//	cmd := exec.Command(os.Args[0], "isolated", "curl", "https://db.shop.example")
//	sockets, err := isolate.Start(cmd) // "isolated" calls isolate.Enter
//	serve(sockets)
//	err = cmd.Wait()
//
// It is for Linux. Elsewhere Start fails with an Unavailable.
package isolate

import "net"

// Sockets are those of the namespace. The caller closes them.
type Sockets struct {
	Captured   []net.Listener // of TCP: tunnel.OriginalDestination has where to
	DNS        []*net.UDPConn // questions, wherever they were sent
	DNSOverTCP []net.Listener
	IPv6       bool // the namespace has IPv6
}

// Close closes all of them.
func (s *Sockets) Close() {
	for _, ln := range s.Captured {
		_ = ln.Close()
	}
	for _, c := range s.DNS {
		_ = c.Close()
	}
	for _, ln := range s.DNSOverTCP {
		_ = ln.Close()
	}
}

// An Unavailable is the error of a system that has no namespaces for this user.
type Unavailable struct{ Err error }

func (e *Unavailable) Error() string { return e.Err.Error() }
func (e *Unavailable) Unwrap() error { return e.Err }

// Exit codes of Enter, as of env(1).
const (
	CannotRun = 126
	NotFound  = 127
	NotSetUp  = 125
)
