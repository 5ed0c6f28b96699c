package connectudp

import (
	"context"
	"strings"
	"sync/atomic"

	"culvert.dev/connect"
	"culvert.dev/tunnel"
)

// protocolName is the :protocol of the requests.
const protocolName = "connect-udp"

// capsuleProtocol says that the stream has capsules, RFC 9297 section 3.4.
var capsuleProtocol = connect.Field{Name: "capsule-protocol", Value: "?1"}

// A Protocol is the proxy side: a connect.ExtendedService, whose requests are for
// datagrams. What may be reached is the Handler's to say, which is to be a tunnel.Router.
// Its fields are not to be changed once it serves.
type Protocol struct {
	// Protocol has the credentials that clients need and the pseudonym of this gateway.
	// They are those of a plain CONNECT; the credentials may also be in Authorization.
	connect.Protocol

	// Dialer opens connections to endpoints: tunnel.DatagramConns. It becomes
	// tunnel.Request.Datagrams and must not be nil.
	Dialer tunnel.Dialer

	// Dropped counts datagrams that were lost here; it may be nil.
	Dropped *atomic.Uint64

	Budget *tunnel.Budget // counts the bytes that wait to be sent; nil means no limit
}

var _ connect.ExtendedService = (*Protocol)(nil)

// Name returns "connect-udp".
func (*Protocol) Name() string { return protocolName }

// AdmitList implements connect.ExtendedService.
func (p *Protocol) AdmitList(ctx context.Context, req *tunnel.Request, list *connect.HeaderList) (context.Context, connect.Fields, error) {
	if s := strings.ToLower(list.Scheme); s != "http" && s != "https" {
		return nil, nil, badRequest("scheme %q, want https", tunnel.Clip(list.Scheme))
	}
	to, err := parsePath(list.Path)
	if err != nil {
		return nil, nil, err
	}
	ctx, err = p.Admit(ctx, req, to.String(), withCredentials(list.Fields))
	if err != nil {
		return nil, nil, err
	}
	req.Datagrams = p.Dialer
	return ctx, connect.Fields{capsuleProtocol}, nil
}

// withCredentials returns fields with their Authorization as Proxy-Authorization, where
// there is none: some clients take the proxy for an origin.
func withCredentials(fields connect.Fields) connect.Fields {
	if _, n := fields.Get("Proxy-Authorization"); n > 0 {
		return fields
	}
	out := fields
	for _, f := range fields {
		if strings.EqualFold(f.Name, "Authorization") {
			out = append(out[:len(out):len(out)], connect.Field{Name: "Proxy-Authorization", Value: f.Value})
		}
	}
	return out
}

// NewStream implements connect.ExtendedService: it returns a *Conn.
func (p *Protocol) NewStream(s tunnel.Stream, _ connect.Fields) tunnel.Stream {
	return newConn(s, p.Dropped, p.Budget)
}
