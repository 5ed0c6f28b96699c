package tunnel

import (
	"encoding/binary"
	"math"
	"net/netip"
	"time"

	"culvert.dev/tunnel/internal/poll"
	"culvert.dev/tunnel/internal/relay"
)

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
	case Done, Reset, Idle, HalfClosed, Drain, Killed:
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

	requestID() uint64   // 0 where there is none
	serviceName() string // of the route; "" where there is none

	// outcome returns a new Outcome of all that is known before the end, nil where
	// nothing is.
	outcome() *Outcome

	age() time.Duration // since the request began; only where there is an outcome
}

// A tunnelInfo is the record of nearly every request: a gateway is mostly tunnels at
// rest, and they are mostly this. The Outcome is made from it on demand.
type tunnelInfo struct {
	router *Router
	lease  lease

	id               uint64
	start            int64 // unix nanoseconds
	began            int64 // poll.Clock of the same moment
	waited           time.Duration
	dialed, dialTime microseconds // until the client heard yes, and the dial alone
	source, addr     compactAddr  // the client's, the endpoint's
	multiplexed      bool         // the way to the endpoint takes no descriptor
	host             string       // the endpoint's DNS name
	proto            string
	listener         string
	target           string
	service          string
	pattern          string
	alpn             []string
}

// A largeInfo is the record of a request that a tunnelInfo cannot hold.
type largeInfo struct {
	tunnelInfo
	whole Outcome
}

// A carriedInfo is the record of a Tunnel that did not come from a Router.
type carriedInfo struct {
	relay *Relay
	about *Outcome // may be nil
	ended func(End)
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

// newRecord returns what is to be kept of o, whose request is about to be carried to
// the endpoint that was dialed.
func (r *Router) newRecord(o *Outcome, dialed Attempt, multiplexed bool, l lease) record {
	ep := dialed.Endpoint.reached()
	source, sourceFits := compact(o.Source)
	addr, addrFits := compact(ep.Addr)
	info := tunnelInfo{
		router: r, lease: l, id: o.ID, start: o.Start.UnixNano(), began: poll.Clock() - int64(time.Since(o.Start)),
		waited: o.Waited, dialed: toMicroseconds(o.Dialed), dialTime: toMicroseconds(dialed.Took),
		source: source, addr: addr, multiplexed: multiplexed, host: ep.Host,
		proto: o.Proto, listener: o.Listener, target: o.Target, service: o.Service, pattern: o.Pattern, alpn: o.ALPN,
	}
	if info.target == info.pattern {
		info.target = info.pattern // the table's string does for both
	}
	if sourceFits && addrFits && o.Peer == (Peer{}) && o.Unverified == nil && len(o.Attempts) == 0 {
		return &info
	}
	large := &largeInfo{tunnelInfo: info, whole: *o}
	large.whole.Endpoint = ep.String()
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

func (rec *tunnelInfo) serviceName() string { return rec.service }
func (rec *carriedInfo) serviceName() string {
	if rec.about == nil {
		return ""
	}
	return rec.about.Service
}

func (rec *tunnelInfo) age() time.Duration  { return time.Duration(poll.Clock() - rec.began) }
func (rec *carriedInfo) age() time.Duration { return time.Since(rec.about.Start) }

func (rec *tunnelInfo) outcome() *Outcome {
	ep := Endpoint{Addr: rec.addr.addrPort(), Host: rec.host}
	return &Outcome{
		ID: rec.id, Start: time.Unix(0, rec.start), Proto: rec.proto, Listener: rec.listener, Source: rec.source.addrPort(),
		Target: rec.target, ALPN: rec.alpn, Service: rec.service, Pattern: rec.pattern, Endpoint: ep.String(),
		Attempts: []Attempt{{Endpoint: ep, Took: rec.dialTime.duration()}}, Waited: rec.waited, Dialed: rec.dialed.duration(),
	}
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

// Ended implements relay.Owner.
func (rec *tunnelInfo) Ended(e End) { rec.end(rec.outcome(), e) }

// Ended implements relay.Owner.
func (rec *largeInfo) Ended(e End) { rec.end(rec.outcome(), e) }

// Ended implements relay.Owner.
func (rec *carriedInfo) Ended(e End) {
	defer rec.relay.open.remove(rec.serviceName())
	rec.ended(e)
}

// end gives back what the tunnel had taken, and reports its Outcome, which is o with
// its end.
func (rec *tunnelInfo) end(o *Outcome, e End) {
	defer rec.router.Relay.open.remove(rec.service)
	if rec.lease.stream {
		early := e.ByClient && e.Out == 0 && rec.age()-rec.waited-rec.dialed.duration() < earlyAbort
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
