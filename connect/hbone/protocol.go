package hbone

import (
	"context"
	"net/http"
	"sync"
	"time"

	"culvert.dev/connect"
	"culvert.dev/connect/h2"
	"culvert.dev/tunnel"
)

// DefaultPort is where HBONE is spoken.
const DefaultPort = 15008

// A Protocol is the server side of HBONE, for connections whose Peer has been
// verified: who has none is refused. What may be reached is the Handler's to
// say, by name or by address.
//
// Its fields are not to be changed once it serves. It must not be copied.
type Protocol struct {
	// Via, ProxyName, Streams and Idle are those of h2.Protocol.
	Via       string
	ProxyName string
	Streams   int
	Idle      time.Duration

	once sync.Once
	h2   h2.Protocol
}

var (
	_ tunnel.Protocol         = (*Protocol)(nil)
	_ tunnel.PreambleDetector = (*Protocol)(nil)
	_ tunnel.Drainer          = (*Protocol)(nil)
)

func (p *Protocol) inner() *h2.Protocol {
	p.once.Do(func() {
		p.h2.Label, p.h2.Via, p.h2.ProxyName, p.h2.Streams, p.h2.Idle = p.Name(), p.Via, p.ProxyName, p.Streams, p.Idle
		p.h2.Head, p.h2.Status = head, status
	})
	return &p.h2
}

// Name returns "hbone".
func (*Protocol) Name() string { return "hbone" }

// Sniff says Yes to the preface of HTTP/2.
func (p *Protocol) Sniff(b []byte) tunnel.Verdict { return p.inner().Sniff(b) }

// HasPreamble implements tunnel.PreambleDetector.
func (p *Protocol) HasPreamble(prefix []byte) bool { return p.inner().HasPreamble(prefix) }

// Drain asks every connection to end with the last tunnel it has.
func (p *Protocol) Drain() { p.inner().Drain() }

// ServeConn implements tunnel.Protocol, as that of h2.Protocol does.
func (p *Protocol) ServeConn(ctx context.Context, c *tunnel.Conn, h tunnel.Handler) error {
	return p.inner().ServeConn(ctx, c, h)
}

// head judges a request that h2 has found right, and notes what it says.
func head(_ context.Context, req *tunnel.Request, head *h2.Head) error {
	if req.Peer.Method != "mtls" {
		return tunnel.Refusef(tunnel.NoAuth, "hbone: the client has no certificate that was verified")
	}
	req.Unverified = unverified(head.Fields)
	return nil
}

// status is what ztunnel says in place of HTTP's finer answers: 400 for what
// can't be meant, 401 for what may not be, 503 for what can't be reached, so
// that a client knows which of them to try again.
func status(r connect.Refusal) int {
	switch r.Reason {
	case tunnel.BadRequest, tunnel.Prohibited, tunnel.Loop:
		return http.StatusBadRequest
	case tunnel.NoAuth, tunnel.NotExposed, tunnel.Denied, tunnel.Insecure:
		return http.StatusUnauthorized
	case tunnel.NoRoute, tunnel.NoEndpoint, tunnel.LookupError, tunnel.LookupTime, tunnel.DialFailed, tunnel.DialTimeout:
		return http.StatusServiceUnavailable
	}
	return r.Status
}
