package tunnel

import "sync/atomic"

// An EndpointLoad counts the tunnels of one endpoint of a service: those that are open,
// and those that are being dialed. A Resolver makes it and hands it out in Endpoint.Load;
// the Router counts. The zero value is ready, and a nil one counts nothing. It is safe for
// concurrent use.
type EndpointLoad struct {
	tunnels atomic.Int64

	// Watcher learns how the tunnels begin; nil for nobody. It is set before the
	// EndpointLoad is handed out.
	Watcher EndpointWatcher
}

// An EndpointWatcher learns whether an endpoint answers the tunnels to it. Of each tunnel
// at most one of its methods is called, by any goroutine, and it must not block. Route.Report
// is told of dials.
type EndpointWatcher interface {
	// Answered says that the endpoint has sent the first byte of a tunnel.
	Answered()

	// Unanswered says that the endpoint has aborted a tunnel before it sent a byte, or
	// closed it in place of an answer to a ClientHello, while the client was there.
	Unanswered(err error)
}

// Tunnels returns how many tunnels there are.
func (l *EndpointLoad) Tunnels() int64 {
	if l == nil {
		return 0
	}
	return l.tunnels.Load()
}

func (l *EndpointLoad) add(n int64) {
	if l != nil {
		l.tunnels.Add(n)
	}
}

// enter counts one more tunnel unless there are most already; 0 means no limit.
func (l *EndpointLoad) enter(most int64) bool {
	if l == nil {
		return true
	}
	for {
		n := l.tunnels.Load()
		if most > 0 && n >= most {
			return false
		}
		if l.tunnels.CompareAndSwap(n, n+1) {
			return true
		}
	}
}

// watcher returns who learns how tunnels begin, nil for nobody.
func (l *EndpointLoad) watcher() EndpointWatcher {
	if l == nil {
		return nil
	}
	return l.Watcher
}
