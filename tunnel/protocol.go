package tunnel

import "context"

// A Verdict is what a Protocol says of the first bytes of a connection.
type Verdict int

const (
	No   Verdict = iota // not this protocol, whatever comes
	More                // can't tell yet
	Yes                 // this protocol, even if it turns out malformed
)

// A Protocol is one way for a client to say where its stream should go.
//
// Sniff looks at the first bytes of a connection; it is pure, sees at least
// one byte, and answers the same for the same bytes.
//
// ServeConn reads the preamble from c and calls h once for every request on
// it. It returns when it has nothing more to do with c: at once after the
// handler returned for a protocol of one request, at the connection's end for
// one that carries many. It returns an error where the connection ended
// without a request: an *Error that names the Reason, after it has said so to
// the client in its own words. The read deadline of c is set by the Server
// and covers the whole preamble: ServeConn does not extend it. The Server
// closes c, unless the stream was handed on.
type Protocol interface {
	Name() string
	Sniff(prefix []byte) Verdict
	ServeConn(ctx context.Context, c *Conn, h Handler) error
}

// A Judge is a Protocol that can tell from its first bytes whether ServeConn
// would have to wait for more. Complete is pure and errs on the side of yes.
// Connections of such protocols wait without a goroutine.
type Judge interface {
	Complete(prefix []byte) bool
}

// A Drainer is a Protocol whose connections carry many requests. Drain asks
// them to take no more and to end with their last one; it does not wait.
type Drainer interface {
	Drain()
}

// judgeable reports whether all of the protocols are Judges.
func judgeable(protocols []Protocol) bool {
	for _, p := range protocols {
		if _, ok := p.(Judge); !ok {
			return false
		}
	}
	return true
}

// settled reports whether a connection that has sent prefix can be served
// without waiting: whose it is has been decided, and its preamble is complete.
// It is called on a loop, which serves others, too. So a panic is for whoever
// serves the connection to meet again.
func settled(protocols []Protocol, prefix []byte) (yes bool) {
	defer func() {
		if recover() != nil {
			yes = true
		}
	}()
	p, decided := protocols[0], len(protocols) == 1
	if !decided {
		p, decided = sniff(protocols, prefix)
	}
	return decided && (p == nil || p.(Judge).Complete(prefix))
}

// sniff asks the protocols whose prefix is. Where that is decided, a nil
// Protocol stands for nobody's.
func sniff(protocols []Protocol, prefix []byte) (p Protocol, decided bool) {
	decided = true
	for _, p := range protocols {
		switch p.Sniff(prefix) {
		case Yes:
			return p, true
		case More:
			decided = false
		}
	}
	return nil, decided || len(prefix) >= maxSniff
}

// Fixed is the Protocol of a port per service: every connection asks for the
// same destination, without a byte read, so the server may speak first.
type Fixed struct {
	To   Name
	Port uint16
}

// Name returns "tcp".
func (*Fixed) Name() string { return "tcp" }

// Sniff says Yes to anything.
func (*Fixed) Sniff([]byte) Verdict { return Yes }

// ServeConn makes the one Request.
func (f *Fixed) ServeConn(ctx context.Context, c *Conn, h Handler) error {
	req := c.NewRequest("tcp")
	req.Name, req.Port = f.To, f.Port
	h.ServeTunnel(ctx, req)
	return nil
}
