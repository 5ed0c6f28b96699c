package tunnel

import (
	"encoding/binary"
	"net/netip"
	"time"
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

// tunnelInfo is what the Relay keeps of a tunnel's request until its end: a
// gateway is mostly tunnels at rest, and they are mostly this. The Outcome is
// made from it on demand.
type tunnelInfo struct {
	router *Router // nil for a Tunnel that did not come from one
	lease  lease
	extra  *extraInfo // nil for nearly all

	id             uint64
	start          int64 // unix nanoseconds
	began          int64 // clock of the same moment
	waited, dialed time.Duration
	dialTime       time.Duration // the dial alone
	source, addr   compactAddr   // the client's, the endpoint's
	multiplexed    bool          // the way to the endpoint takes no descriptor
	host           string        // the endpoint's DNS name
	proto          string
	listener       string
	target         string
	service        string
	pattern        string
	alpn           []string
}

// extraInfo is what only few tunnels have.
type extraInfo struct {
	whole *Outcome  // instead of the tunnelInfo, where that can't hold it
	ended func(End) // of a Tunnel that did not come from a Router
}

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

// tunnelInfo returns what is to be kept of o, whose request is about to be carried
// to ep.
func (r *Router) tunnelInfo(o *Outcome, ep Endpoint, took time.Duration, l lease) tunnelInfo {
	rec := tunnelInfo{
		router: r, lease: l, id: o.ID, start: o.Start.UnixNano(), began: clock() - int64(time.Since(o.Start)),
		waited: o.Waited, dialed: o.Dialed, dialTime: took, host: ep.Host,
		proto: o.Proto, listener: o.Listener, target: o.Target, service: o.Service, pattern: o.Pattern, alpn: o.ALPN,
	}
	if rec.target == rec.pattern {
		rec.target = rec.pattern // the table's string does for both
	}
	var fits, fits2 bool
	rec.source, fits = compact(o.Source)
	rec.addr, fits2 = compact(ep.Addr)
	if !fits || !fits2 || o.Peer != (Peer{}) || o.Unverified != nil || len(o.Attempts) > 0 {
		whole := *o
		whole.Endpoint = ep.String()
		whole.Attempts = append(whole.Attempts, Attempt{Endpoint: ep, Took: took})
		rec.extra = &extraInfo{whole: &whole}
	}
	return rec
}

// outcome returns a new Outcome of all that is known before the end, nil where
// nothing is.
func (rec *tunnelInfo) outcome() *Outcome {
	if rec.extra != nil {
		if rec.extra.whole == nil {
			return nil
		}
		o := *rec.extra.whole
		return &o
	}
	ep := Endpoint{Addr: rec.addr.addrPort(), Host: rec.host}
	return &Outcome{
		ID: rec.id, Start: time.Unix(0, rec.start), Proto: rec.proto, Listener: rec.listener, Source: rec.source.addrPort(),
		Target: rec.target, ALPN: rec.alpn, Service: rec.service, Pattern: rec.pattern, Endpoint: ep.String(),
		Attempts: []Attempt{{Endpoint: ep, Took: rec.dialTime}}, Waited: rec.waited, Dialed: rec.dialed,
	}
}

// requestID returns the request's ID, 0 where there is none.
func (rec *tunnelInfo) requestID() uint64 {
	if rec.extra != nil && rec.extra.whole != nil {
		return rec.extra.whole.ID
	}
	return rec.id
}

// age returns how long ago the request began.
func (rec *tunnelInfo) age() time.Duration {
	if rec.router == nil {
		return time.Since(rec.extra.whole.Start)
	}
	return time.Duration(clock() - rec.began)
}

// end tells of the end, gives back what the tunnel had taken, and lets relay
// forget it.
func (rec *tunnelInfo) end(relay *Relay, e End) {
	defer relay.open.Add(-1)
	if rec.router == nil {
		rec.extra.ended(e)
		return
	}
	if rec.lease.stream {
		early := e.byClient && e.Out == 0 && rec.age()-rec.waited-rec.dialed < earlyAbort
		rec.lease.client.countTunnelEnd(early, time.Now())
	}
	rec.router.giveBack(&rec.lease, rec.multiplexed)
	o := rec.outcome()
	o.Reason, o.Err, o.BytesIn, o.BytesOut = e.Reason, e.Err, e.In, e.Out
	o.Lasted = rec.age()
	rec.router.report(o)
}
