package tunnel

import "sync/atomic"

// An EndpointLoad counts the tunnels of one endpoint of a service: those that are open,
// and those that are being dialed. A Resolver makes it and hands it out in Endpoint.Load;
// the Router counts. The zero value is ready, and a nil one counts nothing. It is safe for
// concurrent use.
type EndpointLoad struct{ tunnels atomic.Int64 }

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
