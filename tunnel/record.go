package tunnel

import (
	"encoding/binary"
	"net/netip"
	"time"
)

// A record is what the Relay keeps of a tunnel's request until its end: a
// gateway is mostly tunnels at rest, and they are mostly this. The Outcome is
// made of it when somebody asks.
type record struct {
	router *Router // nil for a Tunnel that did not come from one
	lease  lease
	rare   *rare // nil for nearly all

	id             uint64
	start          int64 // unix nanoseconds
	began          int64 // clock of the same moment
	waited, dialed time.Duration
	took           time.Duration // the dial alone
	source, addr   packed        // the client's, the endpoint's
	multiplexed    bool          // the way to the endpoint takes no descriptor
	host           string        // the endpoint's DNS name
	proto          string
	listener       string
	target         string
	service        string
	pattern        string
	alpn           []string
}

// A rare is what only few tunnels have.
type rare struct {
	whole *Outcome  // instead of the record, where that can't hold it
	ended func(End) // of a Tunnel that did not come from a Router
}

// A packed is a netip.AddrPort without a zone, in 19 bytes instead of 32.
type packed struct {
	ip   [16]byte
	port [2]byte // big endian: a number would be a byte more
	bits uint8   // 32, 128, or 0 for none
}

// pack is false where ap has a zone.
func pack(ap netip.AddrPort) (p packed, ok bool) {
	binary.BigEndian.PutUint16(p.port[:], ap.Port())
	if !ap.Addr().IsValid() {
		return p, true
	}
	p.ip, p.bits = ap.Addr().As16(), uint8(ap.Addr().BitLen())
	return p, ap.Addr().Zone() == ""
}

func (p packed) addrPort() netip.AddrPort {
	port := binary.BigEndian.Uint16(p.port[:])
	switch p.bits {
	case 0:
		return netip.AddrPortFrom(netip.Addr{}, port)
	case 32:
		return netip.AddrPortFrom(netip.AddrFrom4([4]byte(p.ip[12:])), port)
	}
	return netip.AddrPortFrom(netip.AddrFrom16(p.ip), port)
}

// record returns what is to be kept of o, whose request is about to be carried
// to ep.
func (r *Router) record(o *Outcome, ep Endpoint, took time.Duration, l lease) record {
	rec := record{
		router: r, lease: l, id: o.ID, start: o.Start.UnixNano(), began: clock() - int64(time.Since(o.Start)),
		waited: o.Waited, dialed: o.Dialed, took: took, host: ep.Host,
		proto: o.Proto, listener: o.Listener, target: o.Target, service: o.Service, pattern: o.Pattern, alpn: o.ALPN,
	}
	if rec.target == rec.pattern {
		rec.target = rec.pattern // the table's string does for both
	}
	var fits, fits2 bool
	rec.source, fits = pack(o.Source)
	rec.addr, fits2 = pack(ep.Addr)
	if !fits || !fits2 || o.Peer != (Peer{}) || o.Unverified != nil || len(o.Attempts) > 0 {
		whole := *o
		whole.Endpoint = ep.String()
		whole.Attempts = append(whole.Attempts, Attempt{Endpoint: ep, Took: took})
		rec.rare = &rare{whole: &whole}
	}
	return rec
}

// outcome returns a new Outcome of all that is known before the end, nil where
// nothing is.
func (rec *record) outcome() *Outcome {
	if rec.rare != nil {
		if rec.rare.whole == nil {
			return nil
		}
		o := *rec.rare.whole
		return &o
	}
	ep := Endpoint{Addr: rec.addr.addrPort(), Host: rec.host}
	return &Outcome{
		ID: rec.id, Start: time.Unix(0, rec.start), Proto: rec.proto, Listener: rec.listener, Source: rec.source.addrPort(),
		Target: rec.target, ALPN: rec.alpn, Service: rec.service, Pattern: rec.pattern, Endpoint: ep.String(),
		Attempts: []Attempt{{Endpoint: ep, Took: rec.took}}, Waited: rec.waited, Dialed: rec.dialed,
	}
}

// number returns the request's ID, 0 where there is none.
func (rec *record) number() uint64 {
	if rec.rare != nil && rec.rare.whole != nil {
		return rec.rare.whole.ID
	}
	return rec.id
}

// age returns how long ago the request began.
func (rec *record) age() time.Duration {
	if rec.router == nil {
		return time.Since(rec.rare.whole.Start)
	}
	return time.Duration(clock() - rec.began)
}

// end tells of the end, gives back what the tunnel had taken, and lets relay
// forget it.
func (rec *record) end(relay *Relay, e End) {
	defer relay.open.Add(-1)
	if rec.router == nil {
		rec.rare.ended(e)
		return
	}
	if rec.lease.stream {
		early := e.byClient && e.Out == 0 && rec.age()-rec.waited-rec.dialed < earlyAbort
		rec.lease.client.aborted(early, time.Now())
	}
	rec.router.giveBack(&rec.lease, rec.multiplexed)
	o := rec.outcome()
	o.Reason, o.Err, o.BytesIn, o.BytesOut = e.Reason, e.Err, e.In, e.Out
	o.Lasted = rec.age()
	rec.router.tell(o)
}
