package tunnel

import (
	"context"
	"errors"
	"io"
	"net"
	"net/netip"
	"strconv"
	"strings"
	"time"

	"culvert.dev/tunnel/internal/relay"
)

// A Request is one client's wish to reach one destination. A Protocol makes
// it; a Handler answers it, once.
type Request struct {
	Proto        string             // the protocol that made it: "sni", "connect", "tcp"
	Listener     string             // the address of the listener, as configured
	Name         Name               // where to, as asked and normalised; zero where the client asked by address
	Addr         netip.Addr         // where to, where the client asked by address; otherwise invalid
	Port         uint16             // as asked; 0 where the protocol carries none (SNI)
	LocalPort    uint16             // the port of the listener
	ListenerOnly bool               // only routes of the section that Listener names may serve the request
	RequireTLS   bool               // it came in the clear to a listener that requires TLS: what the client sends must begin as TLS
	ALPN         []string           // what the client offers inside, where it can be seen; at most MaxALPN
	Source       netip.AddrPort     // the socket's peer, or what a trusted hop said of it
	Process      *Process           // that connected, of a client on this machine that came by a Unix socket; nil for others. It is not changed
	Peer         Peer               // the verified identity of the caller on this hop; zero if none
	Unverified   *UnverifiedHeaders // what the caller says of itself; nil for nothing
	Start        time.Time          // when the client's connection, or its stream on one, began
	TLS          *EndedTLS          // TLS that was ended around the request; nil for none. It is not changed

	// DeferIdentity leaves what policy says of identities to the service, where the
	// caller has none that this gateway can see.
	DeferIdentity bool

	// PassedOn says that another replica of this gateway, whose certificate was verified, has
	// decided about the request and passed it on. It goes no further than this one.
	PassedOn bool

	// StatedSource is the address of the client as another gateway states it, whose certificate was
	// verified. Nothing is decided by it; it becomes the Source where that gateway is a replica.
	StatedSource netip.AddrPort

	// Hello is the Fingerprint of the TLS ClientHello that is passed on as it
	// came, and 0 for all else.
	Hello uint32

	// FirstBytes are what the stream of Accept begins with, as the client sent it, for a
	// Transport that can send them along with its own request. They may be the beginning of
	// more, and are valid until the dial is over. Nil where they are not known.
	FirstBytes []byte

	// Datagrams is what dials endpoints without a Transport where the client asks for
	// datagrams, and nil where it asks for a stream. Where ServeTunnel is to carry them,
	// it returns DatagramConns, and so does Accept. Router.Open leaves that to its caller.
	Datagrams Dialer

	// Accept tells the client yes and returns its stream. Only now may bytes
	// flow. The stream belongs to the caller of Accept. Where Accept fails the
	// client is gone: it has no stream to hand over and nobody to refuse.
	Accept func() (Stream, error)

	// Refuse tells the client no, in its protocol's own words, and ends its
	// stream. Exactly one of Accept and Refuse is called, once.
	Refuse func(error)

	slot *slot // the connection's place in the Server; nil for a request made elsewhere
}

// Host returns the destination without its port, as a client would write it.
func (r *Request) Host() string {
	if r.Addr.IsValid() {
		return r.Addr.String()
	}
	return r.Name.String()
}

// Target returns the destination for logs: "host:port", or "host" where the
// protocol carries no port.
func (r *Request) Target() string {
	if r.Port == 0 {
		return r.Host()
	}
	return net.JoinHostPort(r.Host(), strconv.Itoa(int(r.Port)))
}

// MaxALPN is how many ALPN protocols a Request tells of, the client's first choices.
const MaxALPN = 32

// A Peer is who the caller proved to be on this hop. It never comes from
// anything that was not verified.
type Peer struct {
	ID     string    // "spiffe://corp.example/ns/shop/sa/api", "alice", "dns:a.example"
	Method string    // "mtls", "basic", "bearer", "jwt", "ssh", "unix"; "" means no identity
	Auth   *AuthInfo // what the ID rests on; nil where there is nothing but the ID
}

// WithActor returns p with a beside it, as the Actor, unless a is nobody. It changes
// nothing that other Peers share.
func (p Peer) WithActor(a Peer) Peer {
	if a.Method == "" {
		return p
	}
	var info AuthInfo
	if p.Auth != nil {
		info = *p.Auth
	}
	info.Actor = &a
	p.Auth = &info
	return p
}

// AuthInfo is what an identity rests on, and what policy can decide by. One is
// shared by all streams of a connection, and is not changed once it is in a Request. It
// is kept for as long as a tunnel lives, so it holds no certificates: see EndedTLS.
type AuthInfo struct {
	// TrustDomain is that of a SPIFFE id, or of a service account. Namespace and ServiceAccount are those of a
	// workload of Kubernetes, in whichever form its mesh writes them. Each is empty
	// where the credential has none.
	TrustDomain, Namespace, ServiceAccount string

	// Claims are those of a token that the configuration asks for, each with its values.
	Claims map[string][]string

	Issuer  string    // of a token, as the configuration calls it; "" for other credentials
	Expires time.Time // when the credential does; zero where it does not

	// Evidence is what the identity was proved by, where that can be taken back. Nil where
	// it can't.
	Evidence Evidence

	// Actor is the nearer peer: the gateway that stated this identity, or who the
	// client certificate beside a token names. Nil for nobody.
	Actor *Peer
}

// An Evidence is what an identity was proved by: a certificate that may be revoked, another
// gateway that may no longer state who its callers are.
type Evidence interface {
	// Revoked returns why it proves nothing any more, nil while it does. It is asked for
	// each request and, after changes, for each tunnel, by several goroutines at once.
	Revoked() error
}

// Revoked returns why p, or an Actor of it, is no longer who it was, nil while it is.
func (p *Peer) Revoked() error {
	for ; p != nil && p.Auth != nil; p = p.Auth.Actor {
		if p.Auth.Evidence == nil {
			continue
		}
		if err := p.Auth.Evidence.Revoked(); err != nil {
			return Refusef(Revoked, "%s is revoked: %w", p.ID, err)
		}
	}
	return nil
}

// A Process is what the system says of the process that has connected to a Unix socket, as
// it was at that moment. The socket may be in the hands of others by now.
type Process struct {
	UID, GID uint32 // in the user namespace of this process
	PID      int    // 0 where the system does not tell it; it may have become the number of another process
}

// String returns p as logs have it: "unix:uid=1000,pid=4711".
func (p *Process) String() string {
	s := p.User()
	if p.PID != 0 {
		s += ",pid=" + strconv.Itoa(p.PID)
	}
	return s
}

// User returns whose process p is: "unix:uid=1000".
func (p *Process) User() string { return "unix:uid=" + strconv.FormatUint(uint64(p.UID), 10) }

// Peer returns the identity of the user whose process p is: "uid:1000". The claim "gid" is
// the number of its group.
func (p *Process) Peer() Peer {
	return Peer{
		ID: UserID + strconv.FormatUint(uint64(p.UID), 10), Method: "unix",
		Auth: &AuthInfo{Claims: map[string][]string{"gid": {strconv.FormatUint(uint64(p.GID), 10)}}},
	}
}

// UserID begins the ID of a Peer whose Method is "unix": the number of a user follows. Peers
// of other methods that have such an ID are none of these users.
const UserID = "uid:"

// A LocalConn is a connection of a client on this machine.
type LocalConn interface {
	net.Conn

	// Process returns the process that connected. It is false where that is not known.
	Process() (Process, bool)
}

// UnverifiedHeaders are what a caller says of itself and of where it comes
// from, and nobody has verified. They are for logs and for the next hop, and
// never for a decision. The protocol that read them bounds the length of each.
// They are not changed once they are in a Request.
type UnverifiedHeaders struct {
	Trace     string // traceparent, W3C Trace Context
	Baggage   string // baggage, W3C: the workload's names
	Forwarded string // forwarded, RFC 7239: whom the caller speaks for
}

// A Handler answers requests. ServeTunnel calls exactly one of req.Accept and
// req.Refuse. After Accept it may return while the tunnel lives on: the Relay
// owns it then.
type Handler interface {
	ServeTunnel(ctx context.Context, req *Request)
}

// A Refuser is a Handler that wants to know how requests ended which never
// reached it or which it did not get to answer, so that each has its line in
// the log. It is for a Protocol of many requests: one of a single request says
// it by ServeConn's error. The client has heard.
type Refuser interface {
	// Refused is for a request that the Protocol refused by itself.
	Refused(req *Request, err error)

	// Panicked is for one whose ServeTunnel panicked with v. It is called by
	// the function that recovered, so that the stack can be logged.
	Panicked(req *Request, v any)
}

// A HandlerFunc is a Handler made of a function.
type HandlerFunc func(ctx context.Context, req *Request)

// ServeTunnel calls f.
func (f HandlerFunc) ServeTunnel(ctx context.Context, req *Request) { f(ctx, req) }

// A Stream is one side of a tunnel. CloseWrite sends the end of the stream
// and leaves the other direction open; it returns an error that wraps
// errors.ErrUnsupported where the carrier cannot.
type Stream interface {
	net.Conn
	CloseWrite() error
}

// An Aborter is a Stream that can end with an error its peer can tell from an
// orderly end: a TCP reset, an HTTP/2 RST_STREAM. A Stream without it is
// closed.
type Aborter interface {
	Abort() error
}

// Abort ends c so that its peer can tell it from an orderly end, if c is an Aborter or
// a TCP connection.
func Abort(c io.Closer) error { return relay.Abort(c) }

// A ReasonAborter is an Aborter whose carrier can tell the peer why the stream
// ends.
type ReasonAborter interface {
	AbortWithReason(why Reason) error
}

// An AbortDetector is a Stream that notices, while nobody reads it, that its peer
// has aborted it. Broken returns why what is written from now on can't arrive. It
// is nil while that could arrive, and after CloseWrite; it wraps net.ErrClosed
// where the peer has ended its own stream in order and wants no more of this one.
// Broken does not block and may be called at any time. The Relay asks it of a
// side that has ended, and of one that may be hidden behind a blocked write.
type AbortDetector interface {
	Broken() error
}

// An Unwrapper is a Stream around a net.Conn that it does not translate.
// Unwrap hands over the net.Conn and the bytes already read from it; the
// Stream must not be used again. It lets the Relay move bytes in the kernel.
type Unwrapper interface {
	Unwrap() (c net.Conn, early []byte)
}

// A Waiter is a Stream that can be waited for without a goroutine in its Read, and
// without what only a Read needs, such as a buffer. There is no other way for a Stream
// to wait; the Relay needs it to hold an idle tunnel without a stack and a buffer.
//
// WaitRead reports whether the caller is to call Read: it would return at once, with
// bytes, the end or an error; or something came a moment ago, and to wait costs the
// Stream more than a Read. Otherwise wake is called once a Read would return: for
// bytes, the end, an error or Close. wake may be called once too often, on any
// goroutine and under any lock; it does not block and does not use the Stream. Of
// several calls of WaitRead the last one counts, and the wakes of others may be called
// as well. It is called between two Reads.
//
// A Stream that stands on another one, which its method NetConn returns, need not call
// wake: the caller waits for that one, too, and then calls Read.
type Waiter interface {
	WaitRead(wake func()) (ready bool)
}

// A Pusher is a Waiter that gives the bytes that come to the caller of WaitPush, where that is
// faster than to have it Read.
//
// WaitPush is WaitRead, whose wake may then be preceded by calls of push: with bytes that a Read
// would return next, in one or several slices that are not empty, on a goroutine that others wait for
// and under no lock. push returns how many it has taken; to the Stream they are read and passed on, and
// it keeps the rest for Read. push does not block and does not keep or change what it is given. It may
// call WaitPush. It may be called once too often, as wake, and then takes nothing.
type Pusher interface {
	Waiter
	WaitPush(wake func(), push func(run [][]byte) (taken int)) (ready bool)
}

// A Puller is a Stream that takes the bytes of another connection from where they are, where that
// is faster than a Read and a Write.
//
// WriteFrom writes p, and then what source puts into the slices that it is given, until that is less
// than they have room for. It calls source from another goroutine, under no lock, and not after
// it has returned; source does not block. It returns how many bytes of p were taken, and is a Write
// in all else.
type Puller interface {
	WriteFrom(p []byte, source func(run [][]byte) int) (n int, err error)
}

// A Multiplexed connection has no descriptor of its own where IsMultiplexed is
// true: it is one of many streams on a connection whose descriptor the dialer of
// that connection has counted.
type Multiplexed interface {
	IsMultiplexed() bool
}

// isMultiplexed reports whether c is one of many streams on a connection.
func isMultiplexed(c net.Conn) bool {
	s, ok := c.(Multiplexed)
	return ok && s.IsMultiplexed()
}

// A Holder is a Stream that keeps bytes which have come and were not read. The Relay
// asks it when it looks for memory to free. Held may be called at any time.
type Holder interface {
	Held() int // bytes of memory
}

// A Dialer opens a connection to the next hop.
//
// One that also has DialEndpoint or DialRequest is asked by those: with the
// endpoint, whose address the route may name itself, and with the request.
type Dialer interface {
	DialContext(ctx context.Context, network, addr string) (net.Conn, error)
}

// A Resolver finds the route of a request from one snapshot of the table. It
// refuses with an *Error whose Reason is NoRoute, NotExposed, Denied, NoEndpoint,
// Prohibited, LookupError or LookupTime.
type Resolver interface {
	Resolve(ctx context.Context, req *Request) (Route, error)
}

// A Rechecker is a Resolver that may deny a request later than when it resolved it.
type Rechecker interface {
	// Generation returns that of the current table: Route.Generation of what is resolved
	// now.
	Generation() uint64

	// Recheck decides again, by the current table, whether req may have the one endpoint
	// of route, which was resolved by an earlier one. An error with the Reason Denied ends
	// the tunnel. It does not block, and keeps neither.
	Recheck(req *Request, route *Route) error
}

// A Route says where a request goes: every address is known, so that what is
// dialed is what was looked at.
type Route struct {
	Service           string         // the service's name, for logs, metrics and explain
	Backend           string         // the service whose limits hold, where Service is the name of a rule; "" means Service
	Pattern           string         // what matched: "svc.example.com", "*.example.com:443"
	Generation        uint64         // of the table it came from
	Endpoints         []Endpoint     // in the order to try
	IdleTimeout       time.Duration  // limit without a byte either way; 0 means the Relay's
	HalfClosedTimeout time.Duration  // limit half-closed and silent; 0 means the Relay's
	Limits            *ServiceLimits // nil means none

	// Report is told of every dial: nil for one that worked. May be nil.
	Report func(Endpoint, error)

	// Circuit returns why no stream goes to an endpoint: connections to it have failed again and
	// again. It is nil where they have not. due says that the endpoint may be dialed all the
	// same, as a trial, which is the caller's where take is true. Nil means that no endpoint has
	// failed.
	Circuit func(ep *Endpoint, take bool) (due bool, open error)

	// Policy is the decision that permits the request, or denies it; nil where no
	// policy is about it.
	Policy *PolicyDecision

	// Balancer has put Endpoints in their order; nil where they take turns.
	Balancer Balancer
}

// A PolicyDecision says which policy has decided on a request. It is not changed once
// it is in a Route.
type PolicyDecision struct {
	Allowed bool
	Policy  string // the name of the policy; "" where only policies in dry run are about the request
	Origin  string // who says so, for people
	Rule    int    // the index of the rule; -1 where the policy allows others only
	Step    string // of the order of evaluation: "admin deny", "namespace allow"

	// Admitted and Endpoints say how many endpoints of how many the caller may connect
	// to, where policies select endpoints; otherwise they are 0.
	Admitted, Endpoints int

	DryRun *PolicyDecision // if policies in dry run were enforced; nil where that is the same
}

// A Balancer chooses among the endpoints of a service.
type Balancer interface {
	// Chosen is told of the endpoint that req goes to, once it is dialed. It must not
	// block.
	Chosen(req *Request, ep *Endpoint)
}

// An Endpoint is one address that serves a service. Behind a Transport over next
// hops it may be a Host and the port of Addr, whose address is known elsewhere only.
type Endpoint struct {
	Addr netip.AddrPort
	Host string // the DNS name Addr came from; "" where the address was written

	// Named says that the route names this very address, so the Guard lets
	// loopback and link-local ones through.
	Named bool

	// Datagrams says that the endpoint is asked for datagrams: whether it answers says nothing of
	// TCP at its address.
	Datagrams bool

	// Transport dials the endpoint; nil means the Router's Dialer.
	Transport Transport

	// HealthKey is what failures of the endpoint are counted under: the next hop
	// where there is one, or what is asked for, HealthKeyBehind, and the hops to it. ""
	// means Addr.
	HealthKey string

	// Load counts the endpoint's tunnels and dials; nil where nobody needs that.
	Load *EndpointLoad

	// TLSOnly says why nothing but TLS may be carried to the endpoint, and is nil
	// where anything may. What a client sends is then looked at before the first
	// byte of it leaves. What does not begin as TLS is refused with that error.
	TLSOnly error

	// Insecure says that the configuration permits plaintext to the endpoint, although
	// its transport is not Mutual. The Outcome has it.
	Insecure bool
}

// HealthKeyBehind is in a HealthKey between what is asked for and the hops to it.
const HealthKeyBehind = " behind "

// reached returns e as the log has it: where it is behind a next hop, that hop.
func (e Endpoint) reached() Endpoint {
	if e.HealthKey == "" {
		return e
	}
	hop := e.HealthKey
	if _, hops, ok := strings.Cut(hop, HealthKeyBehind); ok {
		hop = hops
	}
	if ap, err := netip.ParseAddrPort(hop); err == nil {
		return Endpoint{Addr: ap}
	}
	host, port, err := net.SplitHostPort(hop)
	if err != nil || strings.Contains(host, " ") { // hops of the endpoint's own, with their protocols
		return e
	}
	n, _ := strconv.ParseUint(port, 10, 16)
	return Endpoint{Host: host, Addr: netip.AddrPortFrom(netip.Addr{}, uint16(n))}
}

func (e Endpoint) String() string {
	if e.Host == "" {
		return e.Addr.String()
	}
	if !e.Addr.IsValid() {
		return net.JoinHostPort(e.Host, strconv.Itoa(int(e.Addr.Port())))
	}
	return e.Host + " (" + e.Addr.String() + ")"
}

// ErrServerClosed is what Serve returns after Shutdown or Close.
var ErrServerClosed = errors.New("tunnel: server closed")
