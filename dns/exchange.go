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

// An exchange is one message and its answer. It is reused for others, with its
// memory.
type exchange struct {
	s         *Server
	rules     *rules // that held as the message came
	transport Transport
	from      netip.AddrPort
	view      string
	viaUDP    bool

	in  []byte // the message
	out []byte // the answer; empty if there is none

	q           query
	a           Answer
	extra       Answer
	addrs       []netip.Addr
	key         []byte
	unknown     bool                   // the name may be the table's, which is not complete yet: a negative answer of others is not believed
	table       Names                  // whose Targets are waited for; else nil
	zone        string                 // of the name, then
	found       map[string]*hostLookup // of Targets; nil as long as nobody looked
	targetState targetState
	slots       *shares // in which the exchange has a slot to wait; nil for none
	merged      []Addr
	begun       time.Time
	result      Result
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

// begin makes the answer to x.in, unless others have to be asked: then it returns
// false, and finish must be called, which may wait. The listener's view is in
// x.view.
func (x *exchange) begin(from netip.AddrPort) (answered bool) {
	defer func() {
		if v := recover(); v != nil {
			x.panicked(v)
			answered = true
		}
	}()
	x.slots, x.rules = nil, x.s.rules.Load()
	x.out, x.unknown, x.table, x.found = x.out[:0], false, nil, nil
	x.from = netip.AddrPortFrom(from.Addr().Unmap().WithZone(""), from.Port())
	if x.s.Observe != nil {
		x.begun = time.Now()
	}
	if x.view == "" {
		x.view = x.s.view(x.from.Addr())
	}
	x.result = Result{Transport: x.transport, From: x.from, View: x.view, Rcode: rcodeDrop}
	if !x.validSource() {
		x.result.Reason = tunnel.Prohibited
		return true
	}
	rcode := parseQuery(x.in, &x.q)
	x.q.pad = x.q.pad && (x.transport == TLS || x.transport == HTTPS) // elsewhere everybody can read it
	x.result.Type = Type(x.q.qtype)
	if x.viaUDP && x.rules.rate != nil && !within(x.rules.recursionClients, x.from.Addr()) && !within(x.rules.exempt, x.from.Addr()) {
		if ok, slip := x.rules.rate.take(x.from.Addr(), x.s.clock()); !ok {
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

// validSource returns false for sources that would make two servers answer each other
// by UDP: ports of services that answer any datagram, and our own socket.
func (x *exchange) validSource() bool {
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

// limit returns how many bytes the answer may have.
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

// fail answers SERVFAIL, with an extended error for clients with EDNS.
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
	return x.rules.forward != nil && within(x.rules.recursionClients, x.from.Addr())
}

// decide answers a well-formed question: from the table, with NXDOMAIN for a name in
// a zone of its own, or by forwarding.
func (x *exchange) decide() bool {
	s, rules := x.s, x.rules
	zone, own := rules.zones.of(x.q.name)
	if rules.forward != nil && own {
		// Of two zones that hold the name the inner one counts.
		if inner, ok := rules.forward.zoneOf(x.q.name); ok && len(inner) > len(zone) {
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
		_, claimed := rules.claimed.of(x.q.name)
		x.unknown = missing && claimed
		return x.elsewhere()
	}
	return true
}

// no answers that a name does not exist.
func (x *exchange) no(table Names, zone string, rcode int) {
	var w writer
	w.begin(x.out, &x.q, bitAA|x.recursive(), rcode, x.limit())
	if !w.soa(inAuthority, zone, serial(table), x.rules.negativeTTL) {
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

// local answers a name that exists with the records of x.a. It returns false if
// targets have to be looked up before.
func (x *exchange) local(table Names, zone string) bool {
	var w writer
	w.begin(x.out, &x.q, bitAA|x.recursive(), dns.RcodeSuccess, x.limit())
	x.targetState = targetsReady
	ok := x.records(&w, table, zone)
	switch x.targetState {
	case targetsPending:
		x.table, x.zone = table, zone
		return false
	case targetsRefused:
		if x.viaUDP { // clients by TCP, whose address is proven, have slots of their own
			x.result.Reason = tunnel.Overload
			x.empty(bitTC, dns.RcodeSuccess)
			return true
		}
		x.refuse(dns.RcodeRefused, tunnel.Overload)
		return true
	case targetsFailed:
		x.fail(tunnel.LookupError, 1+ede(dns.ExtendedErrorCodeNetworkError))
		return true
	}
	if !ok {
		w.truncate()
	} else if w.counts[inAnswer] == 0 && !w.soa(inAuthority, zone, serial(table), x.rules.negativeTTL) {
		w.truncate()
	}
	x.out = w.end(dns.RcodeSuccess)
	x.result.Rcode, x.result.Source = dns.RcodeSuccess, FromTable
	return true
}

// elsewhere answers a name that is not the server's, by a refusal or from the cache.
// It returns false if upstreams have to be asked; then the exchange has a slot to wait
// in.
func (x *exchange) elsewhere() bool {
	switch {
	case !x.mayRecurse():
		x.refuse(dns.RcodeRefused, tunnel.Denied)
		return true
	case x.q.flags&bitRD == 0:
		// A question for cached answers alone serves to find out what others ask.
		x.refuse(dns.RcodeRefused, tunnel.Denied)
		return true
	case x.special():
		return true
	case x.q.qtype == dns.TypeANY:
		var w writer
		w.begin(x.out, &x.q, bitRA, dns.RcodeSuccess, x.limit())
		if !w.unspecific(x.rules.ttl) {
			w.truncate()
		}
		x.out = w.end(dns.RcodeSuccess)
		x.result.Rcode = dns.RcodeSuccess
		return true
	}
	x.key = appendKey(x.key[:0], &x.q)
	if e, age, stale := x.rules.forward.fromCache(x.key); e != nil {
		x.give(e, age, stale)
		return true
	}
	if !x.takeSlot(&x.s.forwards) {
		x.refuse(dns.RcodeRefused, tunnel.Overload)
		return true
	}
	return false
}

// takeSlot takes a place to wait in.
func (x *exchange) takeSlot(of *shares) bool {
	if !of.take(x.from.Addr()) {
		return false
	}
	x.slots = of
	return true
}

// releaseSlot gives it back.
func (x *exchange) releaseSlot() {
	if x.slots != nil {
		x.slots.give(x.from.Addr())
		x.slots = nil
	}
}

// panicked answers SERVFAIL, as far as the question is known.
func (x *exchange) panicked(v any) {
	_ = recovered(x.s.Log, "a question", v)
	x.releaseSlot()
	x.table, x.found = nil, nil
	x.result.Rcode, x.result.Reason = rcodeDrop, tunnel.Internal
	if x.out = x.out[:0]; len(x.q.raw) > 0 {
		x.empty(0, dns.RcodeServerFailure)
	}
}

// finish asks others and makes the answer. It waits for two seconds at most.
func (x *exchange) finish(ctx context.Context) {
	defer x.releaseSlot()
	defer func() {
		if v := recover(); v != nil {
			x.panicked(v)
		}
	}()
	if x.table != nil {
		x.resolve(ctx)
		return
	}
	e, age, how := x.rules.forward.resolve(ctx, x.key, &x.q)
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

// give answers with a reply of an upstream.
func (x *exchange) give(e *reply, age uint32, stale bool) {
	if x.unknown && e.negative {
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

// special answers names for which no resolver may be asked: localhost and invalid by
// RFC 6761, onion by RFC 7686, and the names that are the gateway's own by RFC 9476.
func (x *exchange) special() bool {
	if n, err := tunnel.ParseName(x.q.name); err == nil && n.IsReserved() {
		x.no(nil, tunnel.ReservedZone, dns.RcodeNameError)
		return true
	}
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

// done reports the message and its answer.
func (x *exchange) done() {
	defer func() {
		if v := recover(); v != nil {
			_ = recovered(x.s.Log, "an observer", v)
		}
	}()
	x.result.Size = len(x.out)
	if x.result.Reason != "" {
		x.s.refusals.add(x.s.Log, &x.result, x.s.clock())
	}
	if x.s.Observe != nil {
		x.result.Took = time.Since(x.begun)
		x.s.Observe(&x.result)
	}
}
