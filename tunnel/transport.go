package tunnel

import (
	"context"
	"net"
)

// A Transport opens connections to endpoints: directly or over next hops, with
// or without TLS. It does not change, and all requests that use it share it.
type Transport interface {
	// Dial connects to ep on behalf of req. The caller closes the connection.
	Dial(ctx context.Context, ep *Endpoint, req *Request) (net.Conn, error)

	// Check returns nil if ep may be dialed. It never waits.
	Check(ep *Endpoint) error

	// Info describes the transport for people, and says how it protects a stream.
	Info() TransportInfo
}

// A TransportInfo describes a Transport.
type TransportInfo struct {
	Hops     []string // the next hops, nearest first: "connect-h2 gw.example.com:443"
	Security Security // of what is between this gateway and the endpoint; the weakest hop counts
}

// Security says how a Transport protects what it carries.
type Security int

const (
	Plain          Security = iota // unencrypted, or to a server that is not verified
	ServerVerified                 // encrypted, to a server that is verified
	Mutual                         // ServerVerified, and this gateway shows a certificate or a token
)

func (s Security) String() string {
	switch s {
	case Plain:
		return "plain"
	case ServerVerified:
		return "server-verified"
	case Mutual:
		return "mutual"
	}
	return "unknown"
}
