package dns

import (
	"context"
	"net/netip"
	"strings"
	"time"

	"github.com/miekg/dns"

	"culvert.dev/tunnel"
)

const rcodeDrop = -1

// An exchange is one message and what is answered to it. It is used again for
// the next one, with its memory.
type exchange struct {
	s         *Server
	transport Transport
	from      netip.AddrPort
	view      string
	viaUDP    bool

	in  []byte // the message
	out []byte // the answer; empty if there is none

	q      query
	a      Answer
	extra  Answer
	addrs  []netip.Addr
	key    []byte
	missed bool                // the name may be the table's, and nobody knows yet: a no of others is not to be believed
	table  Names               // that is waited for Targets of; else nil
	zone   string              // of the name, then
	found  map[string]*finding // of Targets; nil as long as nobody looked
	aim    aim
	places *shares // of which the exchange has a place; nil for none
	merged []Addr
	begun  time.Time
	result Result
}

// take returns an exchange for a message from a client.
func (s *Server) take(t Transport, view string) *exchange {
	x := s.exchanges.Get().(*exchange)
	x.transport, x.view, x.viaUDP = t, view, t == UDP
	if cap(x.in) < maxQuery {
		x.in = make([]byte, maxQuery)
	}
	return x
}

func (s *Server) give(x *exchange) {
	if cap(x.out) > 4*maxQuery {
		x.out = nil
	}
	s.exchanges.Put(x)
}

// begin makes the answer to x.in, unless others have to be asked: then it is
// false, and finish must be called, which may wait. The listener's view is in
// x.view.
func (x *exchange) begin(from netip.AddrPort) (answered bool) {
	defer func() {
		if v := recover(); v != nil {
			x.panicked(v)
			answered = true
		}
	}()
	x.places = nil
	x.out, x.missed, x.table, x.found = x.out[:0], false, nil, nil
	x.from = netip.AddrPortFrom(from.Addr().Unmap().WithZone(""), from.Port())
	if x.s.Observe != nil {
		x.begun = time.Now()
	}
	if x.view == "" {
		x.view = x.s.view(x.from.Addr())
	}
	x.result = Result{Transport: x.transport, From: x.from, View: x.view, Rcode: rcodeDrop}
	if !x.fromSomebody() {
		x.result.Reason = tunnel.Prohibited
		return true
	}
	rcode := parseQuery(x.in, &x.q)
	x.q.pad = x.q.pad && (x.transport == TLS || x.transport == HTTPS) // elsewhere everybody can read it
	x.result.Type = Type(x.q.qtype)
	if x.viaUDP && x.s.rate != nil && !within(x.s.RecursionClients, x.from.Addr()) && !within(x.s.RateLimitExempt, x.from.Addr()) {
		if ok, slip := x.s.rate.take(x.from.Addr(), x.s.clock()); !ok {
			x.result.Reason = tunnel.Flood
			if slip && rcode == dns.RcodeSuccess {
				x.empty(bitTC, dns.RcodeSuccess)
			}
			return true
		}
	}
	switch {
	case rcode == drop:
		x.result.Reason = tunnel.BadRequest
	case rcode == dns.RcodeFormatError:
		x.refuse(rcode, tunnel.BadRequest)
	case rcode != dns.RcodeSuccess:
		x.refuse(rcode, tunnel.Unsupported)
	case x.q.version != 0:
		x.refuse(dns.RcodeBadVers, tunnel.Unsupported)
	case x.q.class != dns.ClassINET || x.q.qtype != dns.TypeANY && isMeta(x.q.qtype):
		x.refuse(dns.RcodeRefused, tunnel.Unsupported) // CHAOS's version.bind, transfers, TKEY
	default:
		return x.decide()
	}
	return true
}

// fromSomebody is false for sources that make two servers answer each other,
// by UDP: ports of services that answer anything, and our own socket.
func (x *exchange) fromSomebody() bool {
	if !x.viaUDP {
		return true
	}
	switch x.from.Port() {
	case 0, 7, 13, 17, 19, 37, 53, 123:
		return false
	}
	a := x.from.Addr()
	return !a.IsMulticast() && !a.IsUnspecified() && a != netip.AddrFrom4([4]byte{255, 255, 255, 255})
}

// isMeta reports whether no record has this type: RFC 6895 section 3.1.
func isMeta(t uint16) bool { return t == 0 || t == dns.TypeOPT || t >= 128 && t <= 255 }

// limit is how long the answer may be.
func (x *exchange) limit() int {
	if x.viaUDP {
		return min(x.q.size, udpSize)
	}
	return maxMessage
}

// empty answers without a record.
func (x *exchange) empty(flags uint16, rcode int, options ...ede) {
	var w writer
	w.begin(x.out, &x.q, flags, rcode, x.limit())
	x.out = w.end(rcode, options...)
	x.result.Rcode = rcode
}

// refuse answers with no more bytes than were sent.
func (x *exchange) refuse(rcode int, why tunnel.Reason) {
	x.result.Reason = why
	x.empty(0, rcode)
}

// fail answers SERVFAIL, and to those who understand it, why.
func (x *exchange) fail(why tunnel.Reason, option ede) {
	x.result.Reason = why
	x.empty(x.recursive(), dns.RcodeServerFailure, option)
}

func (x *exchange) recursive() uint16 {
	if x.mayRecurse() {
		return bitRA
	}
	return 0
}

func (x *exchange) mayRecurse() bool {
	return x.s.Forward != nil && within(x.s.RecursionClients, x.from.Addr())
}

// decide is begin for a well-formed question: the table's name, the zone's
// no, or somebody else's.
func (x *exchange) decide() bool {
	s := x.s
	zone, own := s.zones.of(x.q.name)
	if s.Forward != nil && own {
		// Of two zones that hold the name the inner one counts.
		if inner, ok := s.Forward.zoneOf(x.q.name); ok && len(inner) > len(zone) {
			own = false
		}
	}
	table, missing := s.table()
	x.a.reset()
	if table != nil {
		table.Answer(Question{Name: x.q.name, Type: Type(x.q.qtype), View: x.view, From: x.from.Addr()}, &x.a)
	}
	missing = missing || x.a.Status == Unknown
	switch {
	case own && missing:
		x.fail(tunnel.LookupError, 1+ede(dns.ExtendedErrorCodeNotReady))
	case x.a.Status == Exists:
		if !own {
			zone = x.q.name // a host by itself
		}
		return x.local(table, zone)
	case own && (x.a.Status == Above || x.q.name == zone): // it has a SOA, if nothing else
		x.a.reset()
		return x.local(table, zone) // true: there is nothing to look up
	case own:
		x.no(table, zone, dns.RcodeNameError)
	default:
		_, claimed := s.claimed.of(x.q.name)
		x.missed = missing && claimed
		return x.elsewhere()
	}
	return true
}

// no answers that a name or a type is not there.
func (x *exchange) no(table Names, zone string, rcode int) {
	var w writer
	w.begin(x.out, &x.q, bitAA|x.recursive(), rcode, x.limit())
	if !w.soa(inAuthority, zone, serial(table), x.s.noTL) {
		w.truncate()
	}
	x.out = w.end(rcode)
	x.result.Rcode, x.result.Source = rcode, FromTable
}

// serial changes when the table does.
func serial(table Names) uint32 {
	if table == nil {
		return 1
	}
	return uint32(table.Updated().Unix())
}

// local answers a name that exists with what x.a has. It is false if targets
// have to be looked up before.
func (x *exchange) local(table Names, zone string) bool {
	var w writer
	w.begin(x.out, &x.q, bitAA|x.recursive(), dns.RcodeSuccess, x.limit())
	x.aim = aimed
	ok := x.records(&w, table, zone)
	switch x.aim {
	case aimWaits:
		x.table, x.zone = table, zone
		return false
	case aimRefused:
		if x.viaUDP { // there is room for those who come by TCP, which are who they say
			x.result.Reason = tunnel.Overload
			x.empty(bitTC, dns.RcodeSuccess)
			return true
		}
		x.refuse(dns.RcodeRefused, tunnel.Overload)
		return true
	case aimFailed:
		x.fail(tunnel.LookupError, 1+ede(dns.ExtendedErrorCodeNetworkError))
		return true
	}
	if !ok {
		w.truncate()
	} else if w.counts[inAnswer] == 0 && !w.soa(inAuthority, zone, serial(table), x.s.noTL) {
		w.truncate()
	}
	x.out = w.end(dns.RcodeSuccess)
	x.result.Rcode, x.result.Source = dns.RcodeSuccess, FromTable
	return true
}

// elsewhere answers a name that is not the server's: by a refusal, from the
// cache, or not yet, and then it is false and the exchange has a place to
// wait in.
func (x *exchange) elsewhere() bool {
	switch {
	case !x.mayRecurse():
		x.refuse(dns.RcodeRefused, tunnel.Denied)
		return true
	case x.q.flags&bitRD == 0:
		// "Answer only from what you have" is asked to learn what others ask.
		x.refuse(dns.RcodeRefused, tunnel.Denied)
		return true
	case x.special():
		return true
	case x.q.qtype == dns.TypeANY:
		var w writer
		w.begin(x.out, &x.q, bitRA, dns.RcodeSuccess, x.limit())
		if !w.unspecific(x.s.ttl) {
			w.truncate()
		}
		x.out = w.end(dns.RcodeSuccess)
		x.result.Rcode = dns.RcodeSuccess
		return true
	}
	x.key = appendKey(x.key[:0], &x.q)
	if e, age, stale := x.s.Forward.known(x.key); e != nil {
		x.give(e, age, stale)
		return true
	}
	if !x.place(&x.s.forwards) {
		x.refuse(dns.RcodeRefused, tunnel.Overload)
		return true
	}
	return false
}

// place takes a place to wait in.
func (x *exchange) place(of *shares) bool {
	if !of.take(x.from.Addr()) {
		return false
	}
	x.places = of
	return true
}

// leave gives it back.
func (x *exchange) leave() {
	if x.places != nil {
		x.places.give(x.from.Addr())
		x.places = nil
	}
}

// panicked answers SERVFAIL, for all that is known of the question.
func (x *exchange) panicked(v any) {
	_ = recovered(x.s.Log, "a question", v)
	x.leave()
	x.table, x.found = nil, nil
	x.result.Rcode, x.result.Reason = rcodeDrop, tunnel.Internal
	if x.out = x.out[:0]; len(x.q.raw) > 0 {
		x.empty(0, dns.RcodeServerFailure)
	}
}

// finish asks others. It waits for two seconds at most.
func (x *exchange) finish(ctx context.Context) {
	defer x.leave()
	defer func() {
		if v := recover(); v != nil {
			x.panicked(v)
		}
	}()
	if x.table != nil {
		x.resolve(ctx)
		return
	}
	e, age, how := x.s.Forward.resolve(ctx, x.key, &x.q)
	switch {
	case e != nil:
		x.give(e, age, how == FromStale)
		x.result.Source = how
	case how == FromCache: // a failure, remembered or just seen
		x.fail(tunnel.LookupError, 1+ede(dns.ExtendedErrorCodeNoReachableAuthority))
	default:
		x.fail(tunnel.LookupTime, 1+ede(dns.ExtendedErrorCodeNetworkError))
	}
}

// give answers with what others said.
func (x *exchange) give(e *reply, age uint32, stale bool) {
	if x.missed && e.negative {
		x.fail(tunnel.LookupError, 1+ede(dns.ExtendedErrorCodeNotReady))
		return
	}
	if e.failed {
		x.fail(tunnel.LookupError, 1+ede(dns.ExtendedErrorCodeNoReachableAuthority))
		return
	}
	var w writer
	w.begin(x.out, &x.q, bitRA, e.rcode, x.limit())
	if !w.paste(e, age, stale) {
		w.truncate()
	}
	x.result.Source = FromCache
	var option ede
	if stale {
		x.result.Source, option = FromStale, 1+ede(dns.ExtendedErrorCodeStaleAnswer)
		if e.rcode == dns.RcodeNameError {
			option = 1 + ede(dns.ExtendedErrorCodeStaleNXDOMAINAnswer)
		}
	} else if e.stripped {
		x.result.Reason, option = tunnel.Prohibited, 1+ede(dns.ExtendedErrorCodeFiltered)
	}
	x.out = w.end(e.rcode, option)
	x.result.Rcode = e.rcode
}

// special answers names that no resolver is to be asked for: RFC 6761 for
// localhost and invalid, RFC 7686 for onion.
func (x *exchange) special() bool {
	top := x.q.name[strings.LastIndexByte(x.q.name, '.')+1:]
	switch top {
	case "localhost":
		x.a.reset()
		x.a.Addrs = append(x.a.Addrs, Addr{Addr: netip.AddrFrom4([4]byte{127, 0, 0, 1})}, Addr{Addr: netip.IPv6Loopback()})
		x.local(nil, top)
	case "invalid", "onion":
		x.no(nil, top, dns.RcodeNameError)
	default:
		return false
	}
	return true
}

// done tells what became of the message.
func (x *exchange) done() {
	defer func() {
		if v := recover(); v != nil {
			_ = recovered(x.s.Log, "an observer", v)
		}
	}()
	x.result.Size = len(x.out)
	if x.result.Reason != "" {
		x.s.complain.add(x.s.Log, &x.result, x.s.clock())
	}
	if x.s.Observe != nil {
		x.result.Took = time.Since(x.begun)
		x.s.Observe(&x.result)
	}
}
