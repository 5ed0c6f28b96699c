package tunnel

import (
	"cmp"
	"encoding/binary"
	"errors"
	"math"
	"net/netip"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"culvert.dev/tunnel/internal/poll"
	"culvert.dev/tunnel/internal/relay"
)

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
	at() string         // the listener of the request
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
	multiplexed      bool         // the way to the endpoint takes no descriptor
	flags            recordFlags
	source, addr     compactAddr // the client's, the endpoint's
	host             string      // the endpoint's DNS name
	proto            string
	listener         string
	target           string
	pattern          string
	alpn             []string
}

// recordFlags are what is kept of a request by one bit.
type recordFlags uint8

const (
	fromListenerOnly recordFlags = 1 << iota // Request.ListenerOnly
	deferredIdentity                         // Request.DeferIdentity
	tlsEnded                                 // Request.TLS is not nil
	insecureEndpoint                         // Endpoint.Insecure
)

func flagsOf(req *Request, insecure bool) (f recordFlags) {
	if req.ListenerOnly {
		f |= fromListenerOnly
	}
	if req.DeferIdentity {
		f |= deferredIdentity
	}
	if req.TLS != nil {
		f |= tlsEnded
	}
	if insecure {
		f |= insecureEndpoint
	}
	return f
}

// An identifiedInfo is the record of a request whose caller is known, or that a policy has
// decided.
type identifiedInfo struct {
	loadedInfo
	caller Peer
	policy *PolicyDecision
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
		localPort: req.LocalPort, multiplexed: multiplexed, flags: flagsOf(req, dialed.Endpoint.Insecure),
		source: source, addr: addr, host: ep.Host,
		proto: o.Proto, listener: o.Listener, target: o.Target, pattern: o.Pattern, alpn: o.ALPN,
	}
	if info.target == info.pattern {
		info.target = info.pattern // the table's string does for both
	}
	load := dialed.Endpoint.Load
	told := load.watcher() == nil
	if sourceFits && addrFits && o.Process == nil && o.Unverified == nil && len(o.Attempts) == 0 {
		switch {
		case o.Peer != (Peer{}) || o.Policy != nil:
			known := &identifiedInfo{loadedInfo: loadedInfo{tunnelInfo: info, load: load}, caller: o.Peer, policy: o.Policy}
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

func (rec *tunnelInfo) at() string { return rec.listener }
func (rec *carriedInfo) at() string {
	if rec.about == nil {
		return ""
	}
	return rec.about.Listener
}

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
		Target: rec.target, ALPN: rec.alpn, Service: rec.lease.load.key.route, Pattern: rec.pattern, Endpoint: ep.String(), Insecure: rec.flags&insecureEndpoint != 0,
		Attempts: []Attempt{{Endpoint: ep, Took: rec.dialTime.duration()}}, Waited: rec.waited.duration(), Dialed: rec.dialed.duration(),
	}
}

func (rec *identifiedInfo) outcome() *Outcome {
	o := rec.loadedInfo.outcome()
	o.Peer, o.Policy = rec.caller, rec.policy
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
	v.Source, v.Process, v.Peer, v.Target = o.Source, o.Process, o.Peer, o.Target
	v.Service, v.Pattern, v.Endpoint = o.Service, o.Pattern, o.Endpoint
}

func (rec *tunnelInfo) request(req *Request) (Route, bool) {
	*req = Request{
		Proto: rec.proto, Listener: rec.listener, LocalPort: rec.localPort, ListenerOnly: rec.flags&fromListenerOnly != 0, DeferIdentity: rec.flags&deferredIdentity != 0,
		ALPN: rec.alpn, Source: rec.source.addrPort(), Start: time.Unix(0, rec.start),
	}
	req.setTarget(rec.target)
	if rec.flags&tlsEnded != 0 {
		req.TLS = &someEndedTLS
	}
	key := rec.lease.load.key
	return Route{Service: key.route, Backend: cmp.Or(key.backend, key.route), Pattern: rec.pattern, Endpoints: []Endpoint{rec.endpoint()}}, true
}

func (rec *identifiedInfo) request(req *Request) (Route, bool) {
	route, ok := rec.loadedInfo.request(req)
	req.Peer = rec.caller
	return route, ok
}

func (rec *largeInfo) request(req *Request) (Route, bool) {
	route, ok := rec.loadedInfo.request(req)
	req.Peer, req.Source, req.Process, req.Unverified = rec.whole.Peer, rec.whole.Source, rec.whole.Process, rec.whole.Unverified
	route.Endpoints = []Endpoint{rec.whole.Attempts[len(rec.whole.Attempts)-1].Endpoint}
	return route, ok
}

func (*carriedInfo) request(*Request) (Route, bool) { return Route{}, false }

// someEndedTLS stands for TLS of which nothing is kept but that it was ended.
var someEndedTLS EndedTLS

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
