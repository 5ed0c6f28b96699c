package dns

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/miekg/dns"
)

const maxChain = 11 // CNAMEs from the name asked for to its addresses

// An answer is the result of a lookup: addresses or an error, and how long it may be
// cached.
type answer struct {
	addrs []netip.Addr
	ttl   time.Duration
	err   error
}

// ask asks the servers for the addresses of name, within the timeout.
func (r *Resolver) ask(ctx context.Context, conf *config, name string) answer {
	ctx, cancel := context.WithTimeout(ctx, r.timeout())
	defer cancel()

	if len(conf.servers) == 0 {
		addrs, err := r.Sockets.Resolver().LookupNetIP(ctx, "ip", name+".")
		return answer{addrs: addrs, ttl: otherTTL, err: err}
	}

	types := [2]uint16{dns.TypeA, dns.TypeAAAA}
	var found [2]answer
	done := make(chan int, len(types))
	var wg sync.WaitGroup
	for i, qtype := range types {
		wg.Go(func() {
			defer func() {
				if v := recover(); v != nil {
					found[i] = answer{err: recovered(nil, "a lookup", v)}
				}
				done <- i
			}()
			found[i] = r.addresses(ctx, conf, name, qtype)
		})
	}
	if first := <-done; found[first].err == nil {
		late := time.AfterFunc(familyGrace, cancel)
		defer late.Stop()
	}
	wg.Wait()
	return join(found[0], found[1])
}

func (r *Resolver) timeout() time.Duration {
	if r.Timeout > 0 {
		return r.Timeout
	}
	return defaultTimeout
}

func (r *Resolver) hedgeInterval() time.Duration { return max(r.timeout()/tries, time.Millisecond) }

// join combines the answers for the two families.
func join(four, six answer) answer {
	switch {
	case four.err == nil && six.err == nil:
		return answer{addrs: slices.Concat(four.addrs, six.addrs), ttl: min(four.ttl, six.ttl)}
	case four.err == nil || six.err == nil:
		found, missing := four, six
		if four.err != nil {
			found, missing = six, four
		}
		if !isNotFound(missing.err) {
			found.ttl = min(found.ttl, halfTTL)
		}
		return found
	case isNotFound(four.err) && isNotFound(six.err):
		return answer{ttl: min(four.ttl, six.ttl), err: four.err}
	case isNotFound(four.err):
		return six
	}
	return four
}

func isNotFound(err error) bool {
	var de *net.DNSError
	return errors.As(err, &de) && de.IsNotFound
}

// exchange returns the first answer to a question: NOERROR or NXDOMAIN.
func (r *Resolver) exchange(ctx context.Context, conf *config, name string, qtype uint16) (*dns.Msg, error) {
	q, err := newQuery(name, qtype)
	if err != nil {
		return nil, lookupError(name, "", err)
	}
	m, err := race(ctx, nil, r.upstreams.inUse(conf.servers, r.Sockets, r.clock()), q, r.hedgeInterval(), r.clock)
	if err != nil && ctx.Err() != nil {
		return nil, contextError(ctx, strings.TrimSuffix(name, "."))
	}
	return m, err
}

// addresses asks for one family, and follows CNAMEs where the server did not.
func (r *Resolver) addresses(ctx context.Context, conf *config, name string, qtype uint16) answer {
	asked, ttl := dns.Fqdn(name), maxTTL
	for links := 0; ; {
		m, err := r.exchange(ctx, conf, asked, qtype)
		if err != nil {
			return answer{err: err}
		}
		target := asked
		for {
			next, nextTTL, ok := alias(m.Answer, target)
			if !ok {
				break
			}
			if links++; links > maxChain {
				return answer{err: &net.DNSError{Err: fmt.Sprintf("more than %d CNAMEs in a row", maxChain), Name: name}}
			}
			target, ttl = next, min(ttl, nextTTL)
		}
		var addrs []netip.Addr
		for _, rr := range m.Answer {
			h := rr.Header()
			if h.Class != dns.ClassINET || h.Rrtype != qtype || !same(h.Name, target) || len(addrs) >= maxAddrs {
				continue
			}
			var a netip.Addr
			switch rr := rr.(type) {
			case *dns.A:
				a, _ = netip.AddrFromSlice(rr.A.To4())
			case *dns.AAAA:
				a, _ = netip.AddrFromSlice(rr.AAAA.To16())
			}
			if a = a.Unmap(); a.IsValid() && !slices.Contains(addrs, a) {
				addrs = append(addrs, a)
				ttl = min(ttl, seconds(h.Ttl))
			}
		}
		switch {
		case len(addrs) > 0:
			return answer{addrs: addrs, ttl: ttl}
		case m.Rcode == dns.RcodeNameError || same(target, asked):
			return answer{ttl: negativeTTL(m), err: &net.DNSError{Err: "no such host", Name: name, IsNotFound: true}}
		}
		asked = target
	}
}

// alias returns the target and the TTL of a CNAME of name.
func alias(rrs []dns.RR, name string) (string, time.Duration, bool) {
	for _, rr := range rrs {
		if c, ok := rr.(*dns.CNAME); ok && c.Hdr.Class == dns.ClassINET && same(c.Hdr.Name, name) {
			return c.Target, seconds(c.Hdr.Ttl), true
		}
	}
	return "", 0, false
}

// negativeTTL returns how long it may be cached that a name does not exist, RFC 2308
// section 5.
func negativeTTL(m *dns.Msg) time.Duration {
	for _, rr := range m.Ns {
		if soa, ok := rr.(*dns.SOA); ok {
			return seconds(min(soa.Hdr.Ttl, soa.Minttl))
		}
	}
	return minTTL
}

func seconds(ttl uint32) time.Duration { return min(time.Duration(ttl)*time.Second, maxTTL) }

// same reports whether two names are the same but for case.
func same(a, b string) bool { return strings.EqualFold(dns.Fqdn(a), dns.Fqdn(b)) }
