package upstream

import (
	"context"
	"errors"
	"io"
	"net"
	"time"

	"culvert.dev/internal/postgres"
	"culvert.dev/tunnel"
)

const (
	// firstBytesTimeout is how long a client may send nothing, or too little to be known. After
	// it the gateway speaks TLS: it is most likely a protocol in which the server speaks first.
	firstBytesTimeout = 5 * time.Second

	// decidedTimeout limits the handshakes after that.
	decidedTimeout = 10 * time.Second
)

// A passingLayer speaks TLS for clients that do not, and lets the TLS of the others pass: their
// first bytes decide, once they have heard yes. Nothing but TLS goes to the service.
type passingLayer struct {
	tls Layer

	// answersPostgres says that clients may ask for TLS by an SSLRequest, and asksPostgres that
	// the service wants one.
	answersPostgres, asksPostgres bool
}

// Handshake implements Layer.
func (p *passingLayer) Handshake(_ context.Context, c net.Conn, ep *tunnel.Endpoint, req *tunnel.Request) (net.Conn, error) {
	return &undecided{Conn: c, layer: p, ep: ep, req: req}, nil
}

func (p *passingLayer) security() tunnel.Security {
	if s, ok := p.tls.(interface{ security() tunnel.Security }); ok {
		return s.security()
	}
	return tunnel.Plain
}

// An undecided is a connection to a service on which nothing was said.
type undecided struct {
	net.Conn
	layer *passingLayer
	ep    *tunnel.Endpoint
	req   *tunnel.Request
}

var errUndecided = errors.New("gateway: the first bytes of the client have not decided yet whether the gateway speaks TLS")

// Read and Write implement net.Conn: a caller that knows nothing of Decide sends nothing in
// plaintext.
func (u *undecided) Read([]byte) (int, error)  { return 0, errUndecided }
func (u *undecided) Write([]byte) (int, error) { return 0, errUndecided }

// Decide implements tunnel.Undecided.
func (u *undecided) Decide(ctx context.Context, client tunnel.Stream) (_ tunnel.Stream, server net.Conn, err error) {
	conn := u.Conn
	defer func() {
		if err != nil && conn != nil {
			_ = conn.Close()
		}
	}()
	passes := false
	if client != nil {
		if client, passes, err = u.look(ctx, client); err != nil {
			return nil, nil, err
		}
	}
	ctx, cancel := context.WithTimeout(ctx, decidedTimeout)
	defer cancel()
	var layers []Layer
	if u.layer.asksPostgres {
		layers = append(layers, postgres.Layer{})
	}
	if !passes {
		layers = append(layers, u.layer.tls)
	}
	for _, layer := range layers {
		if conn, err = layer.Handshake(ctx, conn, u.ep, u.req); err != nil { // which has closed it
			return nil, nil, err
		}
	}
	return client, conn, nil
}

// look reports whether the client begins TLS, and returns it with its first bytes back.
func (u *undecided) look(ctx context.Context, client tunnel.Stream) (_ tunnel.Stream, passes bool, err error) {
	late := time.Now().Add(firstBytesTimeout)
	asked, refusedGSS := false, false
	for {
		first, err := tunnel.ReadFirst(ctx, client, time.Until(late), u.enough)
		if err != nil && err != io.EOF {
			return nil, false, err
		}
		passes := len(first) >= helloStart && tunnel.MayBeTLS(first)
		if asked && !passes {
			return nil, false, tunnel.Refusef(tunnel.Insecure, "postgres: the client asked for TLS, and began with %q, which is no TLS", first[:min(len(first), 16)])
		}
		code := byte(0)
		if u.layer.answersPostgres && !passes {
			code = postgres.AnswerTo(first)
		}
		if code == 'N' && refusedGSS {
			return nil, false, tunnel.Refusef(tunnel.BadPreamble, "postgres: the client asks for GSSAPI encryption again")
		}
		if code == 0 {
			return tunnel.Begun(client, first), passes, nil
		}
		if len(first) > postgres.RequestSize {
			// Bytes before the answer could be anybody's: CVE-2021-23214.
			return nil, false, tunnel.Refusef(tunnel.BadPreamble, "postgres: %d bytes follow the request for TLS before its answer", len(first)-postgres.RequestSize)
		}
		if _, err := client.Write([]byte{code}); err != nil {
			return nil, false, &tunnel.Error{Reason: tunnel.Gone, Err: err}
		}
		asked, refusedGSS = asked || code == 'S', refusedGSS || code == 'N'
		late = time.Now().Add(firstBytesTimeout)
	}
}

// helloStart is how many bytes say that a client begins TLS.
const helloStart = 6

// enough reports whether first says what the client begins with.
func (u *undecided) enough(first []byte) bool {
	if len(first) > 0 && u.layer.answersPostgres && first[0] == 0 {
		return len(first) >= postgres.RequestSize
	}
	return len(first) >= helloStart || !tunnel.MayBeTLS(first)
}

var _ tunnel.Undecided = (*undecided)(nil)
