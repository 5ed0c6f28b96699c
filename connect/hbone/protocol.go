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

// A Protocol is the server side of HBONE, for connections whose Peer has been verified:
// a client without one is refused. The Handler decides what may be reached, by name or
// by address.
//
// Its fields are not to be changed once it serves. It must not be copied.
type Protocol struct {
	// Via, CurrentVia, ProxyName, Streams and Idle are those of h2.Protocol.
	Via        string
	CurrentVia func() string
	ProxyName  string
	Streams    int
	Idle       time.Duration

	Delegate connect.DelegateFunc // that of connect.Protocol

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
		p.h2.ProxyName, p.h2.Streams, p.h2.Idle = p.ProxyName, p.Streams, p.Idle
		p.h2.Service = &service{plain: connect.Protocol{Via: p.Via, CurrentVia: p.CurrentVia, Delegate: p.Delegate}}
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

// A service is plain CONNECT with the fields and the statuses of HBONE.
type service struct{ plain connect.Protocol }

// Name implements connect.Service.
func (*service) Name() string { return "hbone" }

// AdmitList implements connect.Service. It also requires a verified certificate.
func (s *service) AdmitList(ctx context.Context, req *tunnel.Request, list *connect.HeaderList) (context.Context, connect.Fields, error) {
	verified := req.Peer.Method == "mtls" // whomever a gateway states
	ctx, fields, err := s.plain.AdmitList(ctx, req, list)
	if err != nil {
		return ctx, nil, err
	}
	if !verified {
		return ctx, nil, tunnel.Refusef(tunnel.NoAuth, "hbone: the client has no certificate that was verified")
	}
	req.Unverified = connect.UnverifiedHeaders(list.Fields)
	return ctx, fields, nil
}

// Refusal implements connect.Service. Its statuses are those of ztunnel, in place of
// HTTP's finer ones: 400 for a request that cannot succeed, 401 for one that is not
// allowed, and 503 for a destination that cannot be reached, so that a client knows which
// of them to try again.
func (s *service) Refusal(req *tunnel.Request, err error) connect.Refusal {
	r := s.plain.Refusal(req, err)
	switch r.Reason {
	case tunnel.BadRequest, tunnel.Prohibited, tunnel.Loop:
		r.Status = http.StatusBadRequest
	case tunnel.NoAuth, tunnel.NotExposed, tunnel.Denied, tunnel.Insecure:
		r.Status = http.StatusUnauthorized
	case tunnel.NoRoute, tunnel.NoEndpoint, tunnel.LookupError, tunnel.LookupTime, tunnel.DialFailed, tunnel.DialTimeout:
		r.Status = http.StatusServiceUnavailable
	}
	return r
}
