package tunnel

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"net/netip"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"culvert.dev/tunnel/internal/poll"
	"culvert.dev/tunnel/internal/relay"
)

// A Reason says in one word why a request was refused or how a tunnel ended.
// The same word stands in the log line, the metric label, the wire answer and
// in "culvert explain". The set is closed: see Reasons.
type Reason = relay.Reason

// How a connection ends before it has asked for anything.
const (
	NoHello      Reason = "no-hello"      // the client left without sending a byte
	HelloTimeout Reason = "hello-timeout" // the preamble was not complete in time
	BadPreamble  Reason = "bad-preamble"  // no protocol of the listener begins like this
	BadHello     Reason = "bad-hello"     // TLS, but not a ClientHello that can be parsed
	BadRequest   Reason = "bad-request"   // a malformed request head or authority
	BadMethod    Reason = "bad-method"    // HTTP, but not CONNECT
	TooLarge     Reason = "too-large"     // a request head over its limit
	Gone         Reason = "gone"          // the client left in the middle of its preamble
	Overload     Reason = "overload"      // a limit on connections, tunnels, descriptors or memory is reached
	Flood        Reason = "flood"         // far more HTTP/2 or HTTP/3 frames than bytes: resets, pings, settings
)

// Why a request is refused.
const (
	NoSNI       Reason = "no-sni"       // the ClientHello has no name, or an address for one
	NoAuth      Reason = "no-auth"      // credentials are required, and missing or wrong
	NoRoute     Reason = "no-route"     // no service has this name and port
	NotExposed  Reason = "not-exposed"  // the service is private, or not for this client
	Denied      Reason = "denied"       // policy says no
	Prohibited  Reason = "prohibited"   // the address is one that the gateway never dials
	Insecure    Reason = "insecure"     // plaintext would cross to another network without mutual TLS
	Loop        Reason = "loop"         // the route leads back to this gateway
	NoEndpoint  Reason = "no-endpoint"  // the service has no endpoint that can be dialed
	LookupError Reason = "dns-failed"   // the endpoint's DNS name has no address
	LookupTime  Reason = "dns-timeout"  // the endpoint's DNS name was not resolved in time
	DialFailed  Reason = "dial-failed"  // no endpoint accepted the connection
	DialTimeout Reason = "dial-timeout" // no endpoint answered in time
	Unsupported Reason = "unsupported"  // a part of the protocol that this gateway does not support
	Internal    Reason = "internal"     // a fault of the gateway itself
)

// How a tunnel ends.
const (
	Done       Reason = "done"        // both sides closed in order
	Reset      Reason = "reset"       // one side aborted, and the other was aborted too
	Idle       Reason = "idle"        // no byte for the idle limit
	HalfClosed Reason = "half-closed" // one side closed, and the other was silent for the limit
	Drain      Reason = "drain"       // the gateway is stopping
	Killed     Reason = "killed"      // closed by an operator
	Revoked    Reason = "revoked"     // policy, or the end of a credential, no longer allows what it allowed
)

// Reasons lists every Reason, in the order of a tunnel's life.
func Reasons() []Reason {
	return []Reason{
		NoHello, HelloTimeout, BadPreamble, BadHello, BadRequest, BadMethod, TooLarge, Gone, Overload, Flood,
		NoSNI, NoAuth, NoRoute, NotExposed, Denied, Prohibited, Insecure, Loop, NoEndpoint, LookupError, LookupTime,
		DialFailed, DialTimeout, Unsupported, Internal,
		Done, Reset, Idle, HalfClosed, Drain, Killed, Revoked,
	}
}

// An Error is a refusal: a Reason for machines and for the wire, and Err for
// the log, which says what was asked, what happened and what to do.
type Error struct {
	Reason Reason
	Err    error

	// BehindHop says that a next hop has answered: what failed is behind it, and
	// the hop itself works. Final says that it has refused the request itself, so
	// that no other endpoint is tried.
	BehindHop bool
	Final     bool
}

// Refusef makes an *Error.
func Refusef(r Reason, format string, args ...any) *Error {
	return &Error{Reason: r, Err: fmt.Errorf(format, args...)}
}

// HopRefusedf makes the *Error of a refusal by a next hop. It is final where any
// other hop would refuse the request for the same Reason.
func HopRefusedf(r Reason, format string, args ...any) *Error {
	e := Refusef(r, format, args...)
	e.BehindHop = true
	switch r {
	case NoRoute, NotExposed, Denied, Prohibited, Insecure, Loop, BadRequest, TooLarge:
		e.Final = true
	}
	return e
}

func (e *Error) Error() string { return e.Err.Error() }
func (e *Error) Unwrap() error { return e.Err }

// ReasonOf returns the Reason err carries, Internal for an error without one
// and Done for nil.
func ReasonOf(err error) Reason {
	if err == nil {
		return Done
	}
	var e *Error
	switch {
	case errors.As(err, &e):
		return e.Reason
	case errors.Is(err, context.DeadlineExceeded):
		return DialTimeout
	}
	return Internal
}

// A Panic is the error that a panic becomes in a goroutine that serves one
// connection or one tunnel: that ends, and nothing else. Whoever reports the end
// logs the stack.
type Panic = relay.Panic

// Caught makes a Panic of what recover has returned, in the deferred function
// that called it.
func Caught(v any) *Panic { return relay.Caught(v) }

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
	Insecure   bool            // Endpoint.Insecure of the one that was reached
	Policy     *PolicyDecision // of the route; nil where no policy is about it

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
	case Done, Reset, Idle, HalfClosed, Drain, Killed, Revoked:
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

// A record is what the Relay keeps of a tunnel's request until its end.
type record interface {
	relay.Owner

	requestID() uint64       // 0 where there is none
	countedIn() *serviceLoad // of the route; that of the service "" where there is none

	// outcome returns a new Outcome of all that is known before the end, nil where
	// nothing is.
	outcome() *Outcome

	// describe fills in what is known of the request, and nothing that changes.
	describe(*Live)

	// request returns the request as it was decided, and where it leads. It is false
	// where there was none.
	request(*Request) (Route, bool)

	peer() Peer         // of the request
	age() time.Duration // since the request began; only where there is an outcome
}

// A tunnelInfo is the record of nearly every request: a gateway is mostly tunnels at
// rest, and they are mostly this. The Outcome is made from it on demand.
type tunnelInfo struct {
	router *Router
	lease  lease

	id               uint64
	start            int64        // unix nanoseconds
	began            int64        // poll.Clock of the same moment
	waited           microseconds // as in the Outcome
	dialed, dialTime microseconds // until the client heard yes, and the dial alone
	localPort        uint16       // of the listener
	listenerOnly     bool         // as in the Request
	multiplexed      bool         // the way to the endpoint takes no descriptor
	insecure         bool         // Endpoint.Insecure
	source, addr     compactAddr  // the client's, the endpoint's
	host             string       // the endpoint's DNS name
	proto            string
	listener         string
	target           string
	pattern          string
	alpn             []string
}

// An identifiedInfo is the record of a request whose caller is known.
type identifiedInfo struct {
	loadedInfo
	caller Peer
}

// A largeInfo is the record of a request that none of the others can hold.
type largeInfo struct {
	loadedInfo
	whole Outcome
}

// A loadedInfo is a tunnelInfo of an endpoint whose tunnels are counted.
type loadedInfo struct {
	tunnelInfo
	load *EndpointLoad // may be nil in an identifiedInfo and a largeInfo
	told atomic.Bool   // load's watcher knows how the tunnel has begun, or there is none
}

// A carriedInfo is the record of a Tunnel that did not come from a Router.
type carriedInfo struct {
	relay *Relay
	about *Outcome // may be nil
	load  *serviceLoad
	ended func(End)
}

// newCarriedInfo returns the record of t, which counts as a connection until it ends.
func (r *Relay) newCarriedInfo(t *Tunnel) carriedInfo {
	var k loadKey
	if t.About != nil {
		k.route = t.About.Service
	}
	load, _ := r.loads.take(k, nil) // without limits nothing is refused
	return carriedInfo{relay: r, about: t.About, load: load, ended: t.Ended}
}

// microseconds is a duration in half the space, of an hour at most.
type microseconds uint32

func toMicroseconds(d time.Duration) microseconds {
	return microseconds(min(max(d.Microseconds(), 0), math.MaxUint32))
}

func (m microseconds) duration() time.Duration { return time.Duration(m) * time.Microsecond }

// A compactAddr is a netip.AddrPort without a zone, in 19 bytes instead of 32.
type compactAddr struct {
	ip   [16]byte
	port [2]byte // big endian: a number would be a byte more
	bits uint8   // 32, 128, or 0 for none
}

// compact is false where ap has a zone.
func compact(ap netip.AddrPort) (p compactAddr, ok bool) {
	binary.BigEndian.PutUint16(p.port[:], ap.Port())
	if !ap.Addr().IsValid() {
		return p, true
	}
	p.ip, p.bits = ap.Addr().As16(), uint8(ap.Addr().BitLen())
	return p, ap.Addr().Zone() == ""
}

func (p compactAddr) addrPort() netip.AddrPort {
	port := binary.BigEndian.Uint16(p.port[:])
	switch p.bits {
	case 0:
		return netip.AddrPortFrom(netip.Addr{}, port)
	case 32:
		return netip.AddrPortFrom(netip.AddrFrom4([4]byte(p.ip[12:])), port)
	}
	return netip.AddrPortFrom(netip.AddrFrom16(p.ip), port)
}

// newRecord returns what is to be kept of req and of o, whose tunnel is about to be
// carried to the endpoint that was dialed.
func (r *Router) newRecord(req *Request, o *Outcome, dialed Attempt, multiplexed bool, l lease) record {
	ep := dialed.Endpoint.reached()
	source, sourceFits := compact(o.Source)
	addr, addrFits := compact(ep.Addr)
	info := tunnelInfo{
		router: r, lease: l, id: o.ID, start: o.Start.UnixNano(), began: poll.Clock() - int64(time.Since(o.Start)),
		waited: toMicroseconds(o.Waited), dialed: toMicroseconds(o.Dialed), dialTime: toMicroseconds(dialed.Took),
		localPort: req.LocalPort, listenerOnly: req.ListenerOnly, multiplexed: multiplexed, insecure: dialed.Endpoint.Insecure,
		source: source, addr: addr, host: ep.Host,
		proto: o.Proto, listener: o.Listener, target: o.Target, pattern: o.Pattern, alpn: o.ALPN,
	}
	if info.target == info.pattern {
		info.target = info.pattern // the table's string does for both
	}
	load := dialed.Endpoint.Load
	told := load.watcher() == nil
	if sourceFits && addrFits && o.Unverified == nil && o.Policy == nil && len(o.Attempts) == 0 {
		switch {
		case o.Peer != (Peer{}):
			known := &identifiedInfo{loadedInfo: loadedInfo{tunnelInfo: info, load: load}, caller: o.Peer}
			known.told.Store(told)
			return known
		case load != nil:
			loaded := &loadedInfo{tunnelInfo: info, load: load}
			loaded.told.Store(told)
			return loaded
		}
		small := info // which alone is on the heap then
		return &small
	}
	large := &largeInfo{loadedInfo: loadedInfo{tunnelInfo: info, load: load}, whole: *o}
	large.told.Store(told)
	large.whole.Endpoint, large.whole.Insecure = ep.String(), dialed.Endpoint.Insecure
	large.whole.Attempts = append(large.whole.Attempts, dialed)
	return large
}

func (rec *tunnelInfo) requestID() uint64 { return rec.id }
func (rec *carriedInfo) requestID() uint64 {
	if rec.about == nil {
		return 0
	}
	return rec.about.ID
}

func (rec *tunnelInfo) countedIn() *serviceLoad  { return rec.lease.load }
func (rec *carriedInfo) countedIn() *serviceLoad { return rec.load }

func (rec *tunnelInfo) age() time.Duration  { return time.Duration(poll.Clock() - rec.began) }
func (rec *carriedInfo) age() time.Duration { return time.Since(rec.about.Start) }

func (*tunnelInfo) peer() Peer         { return Peer{} }
func (rec *identifiedInfo) peer() Peer { return rec.caller }
func (rec *largeInfo) peer() Peer      { return rec.whole.Peer }
func (rec *carriedInfo) peer() Peer {
	if rec.about == nil {
		return Peer{}
	}
	return rec.about.Peer
}

func (rec *tunnelInfo) endpoint() Endpoint {
	return Endpoint{Addr: rec.addr.addrPort(), Host: rec.host}
}

func (rec *tunnelInfo) outcome() *Outcome {
	ep := rec.endpoint()
	return &Outcome{
		ID: rec.id, Start: time.Unix(0, rec.start), Proto: rec.proto, Listener: rec.listener, Source: rec.source.addrPort(),
		Target: rec.target, ALPN: rec.alpn, Service: rec.lease.load.key.route, Pattern: rec.pattern, Endpoint: ep.String(), Insecure: rec.insecure,
		Attempts: []Attempt{{Endpoint: ep, Took: rec.dialTime.duration()}}, Waited: rec.waited.duration(), Dialed: rec.dialed.duration(),
	}
}

func (rec *identifiedInfo) outcome() *Outcome {
	o := rec.loadedInfo.outcome()
	o.Peer = rec.caller
	return o
}

func (rec *largeInfo) outcome() *Outcome {
	o := rec.whole
	return &o
}

func (rec *carriedInfo) outcome() *Outcome {
	if rec.about == nil {
		return nil
	}
	o := *rec.about
	return &o
}

func (rec *tunnelInfo) describe(v *Live) {
	v.ID, v.Start, v.Age, v.Proto, v.Listener = rec.id, time.Unix(0, rec.start), rec.age(), rec.proto, rec.listener
	v.Source, v.Target = rec.source.addrPort(), rec.target
	v.Service, v.Pattern, v.Endpoint = rec.lease.load.key.route, rec.pattern, rec.endpoint().String()
}

func (rec *identifiedInfo) describe(v *Live) {
	rec.loadedInfo.describe(v)
	v.Peer = rec.caller
}

func (rec *largeInfo) describe(v *Live) { v.describe(&rec.whole, rec.age()) }
func (rec *carriedInfo) describe(v *Live) {
	if rec.about != nil {
		v.describe(rec.about, rec.age())
	}
}

// describe fills in what o says.
func (v *Live) describe(o *Outcome, age time.Duration) {
	v.ID, v.Start, v.Age, v.Proto, v.Listener = o.ID, o.Start, age, o.Proto, o.Listener
	v.Source, v.Peer, v.Target = o.Source, o.Peer, o.Target
	v.Service, v.Pattern, v.Endpoint = o.Service, o.Pattern, o.Endpoint
}

func (rec *tunnelInfo) request(req *Request) (Route, bool) {
	*req = Request{
		Proto: rec.proto, Listener: rec.listener, LocalPort: rec.localPort, ListenerOnly: rec.listenerOnly,
		ALPN: rec.alpn, Source: rec.source.addrPort(), Start: time.Unix(0, rec.start),
	}
	req.setTarget(rec.target)
	key := rec.lease.load.key
	return Route{Service: key.route, Backend: key.backend, Pattern: rec.pattern, Endpoints: []Endpoint{rec.endpoint()}}, true
}

func (rec *identifiedInfo) request(req *Request) (Route, bool) {
	route, ok := rec.loadedInfo.request(req)
	req.Peer = rec.caller
	return route, ok
}

func (rec *largeInfo) request(req *Request) (Route, bool) {
	route, ok := rec.loadedInfo.request(req)
	req.Peer, req.Source, req.Unverified = rec.whole.Peer, rec.whole.Source, rec.whole.Unverified
	route.Endpoints = []Endpoint{rec.whole.Attempts[len(rec.whole.Attempts)-1].Endpoint}
	return route, ok
}

func (*carriedInfo) request(*Request) (Route, bool) { return Route{}, false }

// setTarget undoes Request.Target.
func (r *Request) setTarget(target string) {
	if ap, err := netip.ParseAddrPort(target); err == nil {
		r.Addr, r.Port = ap.Addr(), ap.Port()
		return
	}
	if addr, err := netip.ParseAddr(target); err == nil {
		r.Addr = addr
		return
	}
	host, port, found := strings.Cut(target, ":")
	if found {
		n, _ := strconv.ParseUint(port, 10, 16)
		r.Port = uint16(n)
	}
	r.Name, _ = ParseName(host)
}

// Ended implements relay.Owner.
func (rec *tunnelInfo) Ended(e End) { rec.end(rec.outcome(), e) }

// Ended implements relay.Owner.
func (rec *loadedInfo) Ended(e End) {
	rec.watchEnd(e)
	rec.load.add(-1)
	rec.end(rec.outcome(), e)
}

// Ended implements relay.Owner.
func (rec *identifiedInfo) Ended(e End) {
	rec.watchEnd(e)
	rec.load.add(-1)
	rec.end(rec.outcome(), e)
}

// Ended implements relay.Owner.
func (rec *largeInfo) Ended(e End) {
	rec.watchEnd(e)
	rec.load.add(-1)
	rec.end(rec.outcome(), e)
}

// Ended implements relay.Owner.
func (rec *carriedInfo) Ended(e End) {
	defer rec.relay.loads.closed(rec.load)
	rec.load.leave()
	rec.ended(e)
}

// end gives back what the tunnel had taken, and reports its Outcome, which is o with
// its end.
func (rec *tunnelInfo) end(o *Outcome, e End) {
	defer rec.router.Relay.loads.closed(rec.lease.load)
	if rec.lease.stream {
		early := e.ByClient && e.Out == 0 && rec.age()-rec.waited.duration()-rec.dialed.duration() < earlyAbort
		rec.lease.client.countTunnelEnd(early, time.Now())
	}
	rec.router.giveBack(&rec.lease, rec.multiplexed)
	o.Reason, o.Err, o.BytesIn, o.BytesOut = e.Reason, e.Err, e.In, e.Out
	o.Lasted = rec.age()
	rec.router.report(o)
}

// Answered implements relay.Owner: the ClientHello has its answer.
func (rec *tunnelInfo) Answered() {
	if rec.lease.hello != 0 {
		rec.router.answered(&rec.lease)
	}
}

// Answered implements relay.Owner.
func (*carriedInfo) Answered() {}

// Answered implements relay.Owner.
func (rec *loadedInfo) Answered() {
	rec.tunnelInfo.Answered()
	if !rec.told.Load() && !rec.told.Swap(true) {
		rec.load.Watcher.Answered()
	}
}

// ServiceEnded implements relay.Owner.
func (*tunnelInfo) ServiceEnded(error) {}

// ServiceEnded implements relay.Owner.
func (*carriedInfo) ServiceEnded(error) {}

var errNoAnswer = errors.New("it closed the connection in place of an answer to the ClientHello")

// ServiceEnded implements relay.Owner. A service that closes in order may have nothing
// to say, unless it was asked by a ClientHello.
func (rec *loadedInfo) ServiceEnded(err error) {
	if rec.told.Load() {
		return
	}
	if err == nil && rec.lease.hello != 0 {
		err = errNoAnswer
	}
	if err != nil && !rec.told.Swap(true) {
		rec.load.Watcher.Unanswered(err)
	}
}

// watchEnd tells the watcher of a session, which has an answer in the end or none.
func (rec *loadedInfo) watchEnd(e End) {
	if e.Out > 0 && !rec.told.Swap(true) {
		rec.load.Watcher.Answered()
	}
}

// ChargedTo implements relay.Owner: it returns the client's account, or that of the
// client's /48. Behind a proxy in front, which stands for many clients, and without a
// client each tunnel is by itself.
func (rec *tunnelInfo) ChargedTo() (key any, name string) {
	c := rec.lease.client
	switch {
	case c == nil:
		return rec, ""
	case rec.lease.exempt:
		return rec, c.name
	case c.site != nil:
		c = c.site
	}
	return c, c.name
}

// ChargedTo implements relay.Owner.
func (rec *carriedInfo) ChargedTo() (key any, name string) { return rec, "" }
