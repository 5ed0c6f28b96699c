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

// A PreambleDetector is a Protocol that can tell from the first bytes of a
// connection whether its preamble is complete, that is, whether ServeConn can
// read it without waiting. HasPreamble is pure. In doubt it says yes.
// Connections of such protocols wait for their preamble without a goroutine.
type PreambleDetector interface {
	HasPreamble(prefix []byte) bool
}

// A Drainer is a Protocol whose connections carry many requests. Drain asks
// them to take no more and to end with their last one; it does not wait.
type Drainer interface {
	Drain()
}

// detectPreambles reports whether all of the protocols are PreambleDetectors.
func detectPreambles(protocols []Protocol) bool {
	for _, p := range protocols {
		if _, ok := p.(PreambleDetector); !ok {
			return false
		}
	}
	return true
}

// hasPreamble reports whether a connection that has sent prefix can be served
// without waiting: its protocol is known, and its preamble is complete. It runs
// on an event loop, which serves other connections, too. A panic therefore counts
// as yes, and comes again where the connection is served.
func hasPreamble(protocols []Protocol, prefix []byte) (yes bool) {
	defer func() {
		if recover() != nil {
			yes = true
		}
	}()
	p, decided := protocols[0], len(protocols) == 1
	if !decided {
		p, decided = sniff(protocols, prefix)
	}
	return decided && (p == nil || p.(PreambleDetector).HasPreamble(prefix))
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

// Fixed is the Protocol of a listener whose connections all ask for the same
// destination: no byte of them is read, so the server may speak first.
type Fixed struct {
	To   Name
	Port uint16

	// Fill fills in the destination of each request in place of To and Port,
	// where it may change while the listener is served. May be nil.
	Fill func(*Request)
}

// Name returns "tcp".
func (*Fixed) Name() string { return "tcp" }

// Sniff says Yes to anything.
func (*Fixed) Sniff([]byte) Verdict { return Yes }

// ServeConn makes the one Request.
func (f *Fixed) ServeConn(ctx context.Context, c *Conn, h Handler) error {
	req := c.NewRequest(f.Name())
	f.Direct(req)
	h.ServeTunnel(ctx, req)
	return nil
}

// Direct fills in where req goes.
func (f *Fixed) Direct(req *Request) {
	if f.Fill != nil {
		f.Fill(req)
		return
	}
	req.Name, req.Port = f.To, f.Port
}
