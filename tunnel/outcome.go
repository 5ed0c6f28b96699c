package tunnel

import (
	"net/netip"
	"time"
)

// An Outcome is all there is to say about one request, once, at its end. The
// log line and the metrics are made from it and nowhere else.
type Outcome struct {
	ID         uint64 // of the request, unique in this process; 0 where a connection ended without one
	Start      time.Time
	Proto      string // "" where no protocol was recognised
	Listener   string
	Source     netip.AddrPort
	Peer       Peer
	Unverified *UnverifiedHeaders // nil for nothing
	Target     string             // as asked, at most 253 bytes and a port; "" where nothing was asked
	ALPN       []string
	Service    string // of the route; "" where there is none
	Pattern    string // of the route
	Endpoint   string // the one that was reached
	Attempts   []Attempt

	Reason Reason
	Err    error // for people; nil after an orderly end

	Waited   time.Duration // from accept to the request: the client's time
	Dialed   time.Duration // from the request to the client's yes
	Lasted   time.Duration // from accept to the end
	BytesIn  int64         // from the client to the service
	BytesOut int64         // from the service to the client
}

// Carried reports whether a tunnel stood, as opposed to a refusal.
func (o *Outcome) Carried() bool {
	switch o.Reason {
	case Done, Reset, Idle, HalfClosed, Drain, Killed:
		return o.Endpoint != ""
	}
	return false
}

// An Attempt is one dial.
type Attempt struct {
	Endpoint Endpoint
	Took     time.Duration
	Err      error // nil for the one that worked
}
