package tunnel

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math"
	"net/netip"
	"slices"
	"strings"
	"time"
)

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
// closes c, unless the stream was handed on. A Protocol that lets its clients in before
// they ask for anything says so to an h that is a PreambleEnder.
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

// A PreambleEnder is a Handler that holds connections to a deadline until their preamble is
// over. The first request ends it, too.
type PreambleEnder interface {
	// ExtendPreamble gives the connection d from its first byte on, where it would have
	// less: for what people do meanwhile. There is no more time while memory is short.
	ExtendPreamble(d time.Duration)

	// LimitRead has reads of the connection fail from t on, while the preamble lasts; the zero
	// Time lifts that. It changes nothing where the time for the preamble is over, or the
	// connection has to make room: its reads fail then whatever t is.
	LimitRead(t time.Time)

	// EndPreamble says that the client is let in, and has asked for nothing yet. It
	// lifts the read deadline.
	EndPreamble()
}

// A Drainer is a Protocol whose connections carry many requests. Drain asks
// them to take no more and to end with their last one; it does not wait.
type Drainer interface {
	Drain()
}

// A FirstSpeaker is a Protocol some of whose clients send nothing before the server has
// spoken. A connection to a listener that has it among others is its own where the client
// has sent nothing for Silence; a listener that has it alone serves each at once.
//
// Silence is not changed while the Protocol serves. It is heeded within 100 ms.
type FirstSpeaker interface {
	Silence() time.Duration
}

// firstSpeaker returns the Protocol of a connection that has sent nothing for so long, nil
// where it has to send something.
func firstSpeaker(protocols []Protocol, silent time.Duration) Protocol {
	for _, p := range protocols {
		if f, ok := p.(FirstSpeaker); ok && silent >= f.Silence() {
			return p
		}
	}
	return nil
}

// hasFirstSpeaker reports whether a connection that sends nothing may be served all the same.
func hasFirstSpeaker(protocols []Protocol) bool {
	return firstSpeaker(protocols, math.MaxInt64) != nil
}

// detectPreambles reports whether all of the protocols are PreambleDetectors, and none is
// alone and to speak first.
func detectPreambles(protocols []Protocol) bool {
	if len(protocols) == 1 && hasFirstSpeaker(protocols) {
		return false
	}
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

// A ConnHeader is the header that every connection of a Listener begins with,
// before any protocol: a proxy in front says there whose connection it passes
// on. A listener that has one requires it, and no other listener looks for it,
// because a client that may send one can claim any address.
//
// The header is part of the preamble: one deadline covers both, and a connection
// waits for both without a goroutine where all its protocols are
// PreambleDetectors.
type ConnHeader interface {
	// Trusts reports whether addr, a socket's peer, is a proxy in front. Any
	// other peer is refused as it comes. A proxy in front stands for many
	// clients: what it opens is charged to the client that it names, and no
	// limit on one client is held against the proxy.
	Trusts(addr netip.Addr) bool

	// Len returns the length of the header that prefix begins with: 0 where
	// that takes more bytes to say, and less than 0 where prefix begins with
	// none. It is pure.
	Len(prefix []byte) int

	// Read reads the header from c, discards it, and tells c of the client
	// with SetSource. The context it returns is the connection's from then
	// on. Its error is an *Error, after it has ended c.
	Read(ctx context.Context, c *Conn) (context.Context, error)
}

// SetSource says whose connection c is in truth. The requests made of it and
// their Outcomes have this source, and the connection is charged to it.
func (c *Conn) SetSource(source netip.AddrPort) {
	c.source = netip.AddrPortFrom(source.Addr().Unmap(), source.Port())
}

// fronted reports whether addr is a proxy in front of the listener.
func (ln *ListenerConfig) fronted(addr netip.Addr) bool {
	if ln.ConnHeader != nil {
		return ln.ConnHeader.Trusts(addr)
	}
	addr = addr.Unmap().WithZone("")
	return slices.ContainsFunc(ln.Proxies, func(r netip.Prefix) bool { return r.Contains(addr) })
}

// hasPreamble reports whether a connection that has sent prefix can be served without
// waiting, its ConnHeader included.
func (ln *ListenerConfig) hasPreamble(prefix []byte) bool {
	if ln.ConnHeader == nil {
		return hasPreamble(ln.Protocols, prefix)
	}
	switch n := ln.ConnHeader.Len(prefix); {
	case n < 0:
		return true
	case n == 0 || n > len(prefix):
		return false
	case n == len(prefix): // a protocol is asked about one byte at least
		return hasFirstSpeaker(ln.Protocols)
	default:
		return hasPreamble(ln.Protocols, prefix[n:])
	}
}

// readConnHeader reads the header where the listener has one, and returns the
// context to serve the connection with.
func (k *slot) readConnHeader() (context.Context, error) {
	p := k.config.ConnHeader
	if p == nil {
		return &k.ctx, nil
	}
	peer := k.Conn.source
	ctx, err := p.Read(&k.ctx, &k.Conn)
	if err != nil || k.Conn.source == peer {
		return ctx, err
	}
	if err := k.charge(k.Conn.source.Addr()); err != nil {
		_ = k.Abort()
		return nil, err
	}
	return ctx, nil
}

// A stranger is a protocol that a listener does not take and that is known by
// its first bytes, for the log to say what came and what to do about it.
type stranger struct {
	name   string // as people call it
	advice string
	is     func(b []byte) bool
}

const (
	adviceWeb = "it is no web server: use https:// and HTTP CONNECT"
	adviceOwn = "give it a port of its own: "
)

// strangers are asked in order.
var strangers = []stranger{
	{"SOCKS5", "add socks5 to its protocols", isSOCKS5},
	{"SOCKS4", "have the client use SOCKS5", func(b []byte) bool { return len(b) > 1 && b[0] == 4 && (b[1] == 1 || b[1] == 2) }},
	{"a PROXY header", "add proxyProtocol: {from: [...]} to the listener", begins("PROXY ", "\r\n\r\n\x00\r\nQUIT\n")},
	{"TLS", "add sni to its protocols", begins("\x16\x03")},
	{"SSH", adviceOwn + "service: NAME:22", begins("SSH-")},
	{"PostgreSQL", "add postgres to its protocols, or give it a port of its own: service: NAME:5432", func(b []byte) bool {
		// The length of the message, and then SSLRequest, GSSENCRequest or version 3.0.
		return len(b) >= 8 && b[0] == 0 && b[1] == 0 && slices.ContainsFunc([]string{"\x04\xd2\x16\x2f", "\x04\xd2\x16\x30", "\x00\x03\x00\x00"},
			func(s string) bool { return string(b[4:8]) == s })
	}},
	{"SMTP", adviceOwn + "service: NAME:25", begins("EHLO ", "HELO ")},
	{"Redis", adviceOwn + "service: NAME:6379", func(b []byte) bool {
		return len(b) > 3 && b[0] == '*' && b[1] >= '1' && b[1] <= '9' && bytes.Contains(b, []byte("\r\n$"))
	}},
	{"HTTP/2", "add connect-h2 to its protocols", begins("PRI * HTTP/2.0")},
	{"HTTP CONNECT", "add connect to its protocols", begins("CONNECT ")},
	{"HTTP", adviceWeb, begins("GET ", "POST ", "HEAD ", "PUT ", "OPTIONS ", "DELETE ", "PATCH ")},
}

// at says what came to a listener, and what to do about it.
func (s *stranger) at(listener string) string {
	return fmt.Sprintf("this is %s, which listener %s does not accept; %s", s.name, listener, s.advice)
}

// ForeignProtocol says which protocol a listener received in place of HTTP, and
// what to do about it. It returns "" where it does not know the protocol. Some
// protocols begin with words, as HTTP does.
func ForeignProtocol(listener string, b []byte) string {
	for i := range strangers {
		if s := &strangers[i]; !strings.HasPrefix(s.name, "HTTP") && s.is(b) {
			return s.at(listener)
		}
	}
	return ""
}

func begins(with ...string) func(b []byte) bool {
	return func(b []byte) bool {
		return slices.ContainsFunc(with, func(s string) bool { return bytes.HasPrefix(b, []byte(s)) })
	}
}

// isSOCKS5 reports whether b is the whole first message of SOCKS5 and no more.
func isSOCKS5(b []byte) bool { return len(b) > 2 && b[0] == 5 && len(b) == 2+int(b[1]) }

// unknownPreamble is the refusal of bytes that no protocol of a listener takes.
func unknownPreamble(listener string, b []byte) *Error {
	for i := range strangers {
		if s := &strangers[i]; s.is(b) {
			return &Error{Reason: BadPreamble, Err: errors.New(s.at(listener))}
		}
	}
	return Refusef(BadPreamble, "%d bytes that begin like no protocol of listener %s: %q", len(b), listener, b[:min(len(b), 16)])
}
