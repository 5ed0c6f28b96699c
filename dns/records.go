package dns

import (
	"math/rand/v2"
	"net/netip"
	"slices"

	"github.com/miekg/dns"
)

// records writes the answer section. It is false if that does not fit.
func (x *exchange) records(w *writer, table Names, zone string) bool {
	ttl := x.rules.ttl
	if x.a.TTL != 0 {
		ttl = wireTTL(x.a.TTL, maxTTL)
	}
	if x.a.Alias != "" && x.q.qtype != dns.TypeANY {
		return x.aliases(w, table, ttl)
	}
	a := &x.a
	switch x.q.qtype {
	case dns.TypeA, dns.TypeAAAA:
		return x.addresses(w, "", ttl)
	case dns.TypeSRV:
		for i := range a.Services[:min(len(a.Services), maxRecords)] {
			if !w.service(&a.Services[i], ttl) {
				return false
			}
		}
		x.targets(w, table, ttl)
	case dns.TypeHTTPS, dns.TypeSVCB:
		for i := range a.Bindings[:min(len(a.Bindings), maxRecords)] {
			if !w.binding(x.q.qtype, &a.Bindings[i], ttl) {
				return false
			}
		}
	case dns.TypePTR:
		for _, h := range a.Hosts[:min(len(a.Hosts), maxRecords)] {
			if !w.record(inAnswer, "", dns.TypePTR, ttl, func(w *writer) bool { return w.name(h, true) }) {
				return false
			}
		}
	case dns.TypeTXT:
		for _, t := range a.Texts[:min(len(a.Texts), maxRecords)] {
			if !w.text(t, ttl) {
				return false
			}
		}
	case dns.TypeSSHFP:
		for i := range a.HostKeys[:min(len(a.HostKeys), maxRecords)] {
			if !w.hostKey(&a.HostKeys[i], ttl) {
				return false
			}
		}
	case dns.TypeANY:
		return w.unspecific(ttl)
	case dns.TypeSOA, dns.TypeNS:
		if x.q.name == zone {
			if x.q.qtype == dns.TypeSOA {
				return w.soa(inAnswer, zone, serial(table), x.rules.negativeTTL)
			}
			return w.record(inAnswer, "", dns.TypeNS, ttl, func(w *writer) bool { return w.name(join2("ns", zone), true) })
		}
	}
	return true
}

// unspecific is the answer to ANY, RFC 8482 section 4.2.
func (w *writer) unspecific(ttl uint32) bool {
	return w.record(inAnswer, "", dns.TypeHINFO, ttl, func(w *writer) bool {
		w.b = append(w.b, "\x07RFC8482\x00"...)
		return true
	})
}

// aliases writes the chain of CNAMEs from the name in the question, as far as
// the table has it, and the records at its end.
func (x *exchange) aliases(w *writer, table Names, ttl uint32) bool {
	owner := ""
	for range maxChain {
		target := trimName(x.a.Alias)
		if !w.record(inAnswer, owner, dns.TypeCNAME, ttl, func(w *writer) bool { return w.name(target, true) }) {
			return false
		}
		if x.q.qtype == dns.TypeCNAME {
			return true
		}
		owner = target
		x.a.reset()
		table.Answer(Question{Name: target, Type: Type(x.q.qtype), View: x.view, From: x.from.Addr()}, &x.a)
		if x.a.Alias == "" {
			break
		}
	}
	if x.a.Alias != "" {
		return true // a chain without an end: the asker has seen enough of it
	}
	switch x.q.qtype {
	case dns.TypeA, dns.TypeAAAA:
		return x.addresses(w, owner, ttl)
	}
	return true
}

// targets adds the addresses of SRV targets, as far as they fit.
func (x *exchange) targets(w *writer, table Names, ttl uint32) {
	for i := range x.a.Services[:min(len(x.a.Services), 8)] {
		target := trimName(x.a.Services[i].Target)
		if target == "" {
			continue
		}
		for _, t := range [...]Type{TypeA, TypeAAAA} {
			x.extra.reset()
			table.Answer(Question{Name: target, Type: t, View: x.view, From: x.from.Addr()}, &x.extra)
			if !x.writeAddrs(w, inAdditional, target, x.extra.Addrs, t == TypeAAAA, ttl) {
				return
			}
		}
	}
}

func (x *exchange) writeAddrs(w *writer, section int, owner string, addrs []Addr, six bool, ttl uint32) bool {
	for _, a := range x.order(addrs, six) {
		if !w.addr(section, owner, a, ttl) {
			return false
		}
	}
	return true
}

// order returns the addresses of one family in the order they are told this
// time. Chance deals the turns: a counter would give always the same half to
// those who ask twice, for A and AAAA.
func (x *exchange) order(addrs []Addr, six bool) []netip.Addr {
	out := x.addrs[:0]
	for len(addrs) > 0 && len(out) < maxRecords {
		start, total, n := len(out), uint32(0), 0
		for n < len(addrs) && addrs[n].Rank == addrs[0].Rank {
			if a := addrs[n].Addr.Unmap(); a.IsValid() && a.Is6() == six {
				total += uint32(max(addrs[n].Weight, 1))
				out = append(out, a)
			}
			n++
		}
		if run := out[start:]; len(run) > 1 {
			at := rand.Uint32N(total)
			first := 0
			for _, a := range addrs[:n] {
				if u := a.Addr.Unmap(); !u.IsValid() || u.Is6() != six {
					continue
				}
				weight := uint32(max(a.Weight, 1))
				if at < weight {
					break
				}
				at -= weight
				first++
			}
			rotate(run, first)
		}
		addrs = addrs[n:]
	}
	x.addrs = out
	return out[:min(len(out), maxRecords)]
}

// rotate puts the one at n first.
func rotate(a []netip.Addr, n int) {
	slices.Reverse(a[:n])
	slices.Reverse(a[n:])
	slices.Reverse(a)
}
