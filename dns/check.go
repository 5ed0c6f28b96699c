package dns

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/miekg/dns"

	"culvert.dev/tunnel"
)

// A check removes from an upstream's message all that does not answer the question.
type check struct {
	name    string // as in a Question
	qtype   uint16
	do      bool // keep what proves the answer to a validator
	private bool // the name may have private addresses

	fqdn     string // the name as the library writes it
	negative bool
	stripped bool
}

// clean removes records from m that do not belong to the question, and returns
// an error if what is left is no answer.
func (c *check) clean(m *dns.Msg) error {
	if len(m.Question) != 1 {
		return errUnusable
	}
	c.fqdn = dns.CanonicalName(m.Question[0].Name)
	answers := make([]dns.RR, 0, len(m.Answer))
	end, found := c.fqdn, false
	for links := 0; ; links++ {
		if links > maxChain {
			return fmt.Errorf("%w: more than %d CNAMEs in a row", errUnusable, maxChain)
		}
		next := ""
		for _, rr := range m.Answer {
			h := rr.Header()
			if h.Class != dns.ClassINET || h.Rdlength == 0 || !same(h.Name, end) {
				continue // the library reads a record without data, as updates have them
			}
			switch rr := rr.(type) {
			case *dns.CNAME:
				if c.qtype == dns.TypeCNAME {
					found = true
				} else if next == "" {
					next = dns.CanonicalName(rr.Target)
				} else {
					continue // one name has one CNAME
				}
			case *dns.RRSIG:
				if !c.do || rr.TypeCovered != c.qtype && rr.TypeCovered != dns.TypeCNAME {
					continue
				}
			default:
				if h.Rrtype != c.qtype {
					continue
				}
				if c.isPrivate(rr) {
					c.stripped = true
					continue
				}
				c.stripHints(rr)
				found = true
			}
			if h.Rrtype == dns.TypeOPT || len(answers) >= maxRecords {
				continue
			}
			answers = append(answers, rr)
		}
		if next == "" || found {
			break
		}
		end = next
	}
	// The records' names in one case, so that those of the question can be
	// written as pointers to it, whatever its case will be.
	for _, rr := range answers {
		rr.Header().Name = dns.CanonicalName(rr.Header().Name)
	}
	m.Answer = answers
	c.negative = !found
	m.Ns = c.authority(m.Ns, end)
	m.Extra = nil
	m.MsgHdr = dns.MsgHdr{Response: true, Rcode: m.Rcode}
	return nil
}

// authority keeps the SOA of the name's zone in a negative answer, and the records
// that prove it.
func (c *check) authority(rrs []dns.RR, end string) []dns.RR {
	if !c.negative && !c.do {
		return nil
	}
	return slices.DeleteFunc(rrs, func(rr dns.RR) bool {
		h := rr.Header()
		if h.Rdlength == 0 {
			return true
		}
		switch h.Rrtype {
		case dns.TypeSOA:
			return !c.negative || !dns.IsSubDomain(h.Name, end)
		case dns.TypeNSEC, dns.TypeNSEC3, dns.TypeRRSIG:
			return !c.do
		}
		return true
	})
}

// privateRanges are addresses that no public name should have.
var privateRanges = []netip.Prefix{
	netip.MustParsePrefix("0.0.0.0/8"), netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("100.64.0.0/10"),
	netip.MustParsePrefix("127.0.0.0/8"), netip.MustParsePrefix("169.254.0.0/16"), netip.MustParsePrefix("172.16.0.0/12"),
	netip.MustParsePrefix("192.168.0.0/16"), netip.MustParsePrefix("224.0.0.0/3"), // multicast, and 240.0.0.0/4 of VIPs
	netip.MustParsePrefix("::/127"), netip.MustParsePrefix("fc00::/7"), netip.MustParsePrefix("fe80::/9"), netip.MustParsePrefix("ff00::/8"),
}

// isPrivateAddr reports whether a is in privateRanges, by itself or by an IPv4 address
// that it embeds, as the gateway judges addresses before it dials.
func isPrivateAddr(a netip.Addr) bool {
	a = a.Unmap()
	return within(privateRanges, a) || slices.ContainsFunc(tunnel.Embedded(a), isPrivateAddr)
}

func (c *check) isPrivate(rr dns.RR) bool {
	if c.private {
		return false
	}
	var a netip.Addr
	switch rr := rr.(type) {
	case *dns.A:
		a, _ = netip.AddrFromSlice(rr.A)
	case *dns.AAAA:
		a, _ = netip.AddrFromSlice(rr.AAAA)
	default:
		return false
	}
	return isPrivateAddr(a)
}

// stripHints removes hints of private addresses from HTTPS and SVCB records.
func (c *check) stripHints(rr dns.RR) {
	if c.private {
		return
	}
	var svcb *dns.SVCB
	switch rr := rr.(type) {
	case *dns.SVCB:
		svcb = rr
	case *dns.HTTPS:
		svcb = &rr.SVCB
	default:
		return
	}
	svcb.Value = slices.DeleteFunc(svcb.Value, func(v dns.SVCBKeyValue) bool {
		k := v.Key()
		if k != dns.SVCB_IPV4HINT && k != dns.SVCB_IPV6HINT {
			return false
		}
		for hint := range strings.SplitSeq(v.String(), ",") {
			if a, err := netip.ParseAddr(hint); err != nil || isPrivateAddr(a) {
				c.stripped = true
				return true
			}
		}
		return false
	})
}
