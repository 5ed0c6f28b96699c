package dns

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/miekg/dns"
)

const (
	tries    = 3    // of one question, over all servers
	maxChain = 11   // CNAMEs from the name asked for to its addresses
	udpSize  = 1232 // bytes of an answer by UDP, so that it is not fragmented
)

// An answer is the result of a lookup: addresses or an error, and how long it may be
// cached.
type answer struct {
	addrs []netip.Addr
	ttl   time.Duration
	err   error
}

// ask asks the servers for the addresses of name, within the timeout.
func (r *Resolver) ask(ctx context.Context, conf *config, name string) answer {
	timeout := r.Timeout
	if timeout <= 0 {
		timeout = defaultTimeout
	}
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()

	if len(conf.servers) == 0 {
		addrs, err := net.DefaultResolver.LookupNetIP(ctx, "ip", name+".")
		return answer{addrs: addrs, ttl: otherTTL, err: err}
	}

	q := lookupRound{servers: conf.servers, step: max(timeout/tries, time.Millisecond)}
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
			found[i] = q.addresses(ctx, name, qtype)
		})
	}
	if first := <-done; found[first].err == nil {
		late := time.AfterFunc(familyGrace, cancel)
		defer late.Stop()
	}
	wg.Wait()
	return join(found[0], found[1])
}

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

// A lookupRound is how a question of a Resolver is asked.
type lookupRound struct {
	servers []string
	step    time.Duration // before the next try begins beside those under way
}

// addresses asks for one family, and follows CNAMEs where the server did not.
func (q lookupRound) addresses(ctx context.Context, name string, qtype uint16) answer {
	asked, ttl := dns.Fqdn(name), maxTTL
	for links := 0; ; {
		m, err := q.exchange(ctx, asked, qtype)
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

// exchange returns the first answer to a question: NOERROR or NXDOMAIN.
func (q lookupRound) exchange(ctx context.Context, name string, qtype uint16) (*dns.Msg, error) {
	m, err := hedge(ctx, nil, q.step, func(ctx context.Context, i int) (*dns.Msg, error) {
		return try(ctx, q.servers[i%len(q.servers)], name, qtype)
	})
	if err != nil && ctx.Err() != nil {
		return nil, contextError(ctx, strings.TrimSuffix(name, "."))
	}
	return m, err
}

// hedge returns the first answer of several tries, or the last error where all fail. A
// try that fails is followed by the next at once. One that takes longer than step goes
// on, and the next begins beside it.
func hedge(ctx context.Context, log *slog.Logger, step time.Duration, ask func(ctx context.Context, try int) (*dns.Msg, error)) (*dns.Msg, error) {
	outer := ctx
	ctx, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()

	type result struct {
		m   *dns.Msg
		err error
	}
	results := make(chan result, tries)
	started, open := 0, 0
	start := func() {
		try := started
		started++
		open++
		wg.Go(func() {
			var res result
			defer func() {
				if v := recover(); v != nil {
					res = result{err: recovered(log, "a question to a server", v)}
				}
				results <- res
			}()
			res.m, res.err = ask(ctx, try)
		})
	}
	start()
	tick := time.NewTicker(step)
	defer tick.Stop()
	var last error
	for open > 0 {
		select {
		case <-tick.C:
			if started < tries {
				start()
			}
		case res := <-results:
			open--
			if res.err == nil {
				return res.m, nil
			}
			last = res.err
			if started < tries && ctx.Err() == nil {
				start()
			}
		}
	}
	if err := outer.Err(); err != nil {
		return nil, err
	}
	return nil, last
}

// try asks one server once: by UDP from a port of its own, and by TCP if the
// answer is cut short.
func try(ctx context.Context, server, name string, qtype uint16) (*dns.Msg, error) {
	m, err := overUDP(ctx, server, question(name, qtype))
	if err == nil && m.Truncated {
		m, err = overTCP(ctx, server, question(name, qtype))
	}
	fail := &net.DNSError{Name: strings.TrimSuffix(name, "."), Server: server}
	switch {
	case err != nil:
		var ne net.Error
		fail.Err, fail.UnwrapErr = err.Error(), err
		fail.IsTimeout = errors.As(err, &ne) && ne.Timeout()
	case m.Rcode != dns.RcodeSuccess && m.Rcode != dns.RcodeNameError:
		fail.Err = "the server answers " + rcodeWord(m.Rcode)
		fail.IsTemporary = true
	default:
		return m, nil
	}
	return nil, fail
}

// question makes a message with an id that can't be guessed.
func question(name string, qtype uint16) *dns.Msg {
	m := new(dns.Msg)
	m.SetQuestion(name, qtype)
	m.Id = dns.Id()
	m.RecursionDesired = true
	m.SetEdns0(udpSize, false)
	return m
}

// answers reports whether m is an answer to q, and not what somebody else
// made up or what belongs to another question.
func answers(m, q *dns.Msg) bool {
	return m.Id == q.Id && m.Response && m.Opcode == dns.OpcodeQuery && len(m.Question) == 1 &&
		m.Question[0].Qtype == q.Question[0].Qtype && m.Question[0].Qclass == q.Question[0].Qclass &&
		same(m.Question[0].Name, q.Question[0].Name)
}

// dial connects to a server; the connection ends with ctx.
func dial(ctx context.Context, network, server string) (net.Conn, func(), error) {
	var d net.Dialer
	c, err := d.DialContext(ctx, network, server)
	if err != nil {
		return nil, nil, err
	}
	stop := context.AfterFunc(ctx, func() { _ = c.SetDeadline(time.Unix(1, 0)) })
	return c, func() { stop(); _ = c.Close() }, nil
}

func overUDP(ctx context.Context, server string, q *dns.Msg) (*dns.Msg, error) {
	out, err := q.Pack()
	if err != nil {
		return nil, err
	}
	c, end, err := dial(ctx, "udp", server) // connected: other senders are not heard
	if err != nil {
		return nil, err
	}
	defer end()
	if _, err := c.Write(out); err != nil {
		return nil, err
	}
	buf := make([]byte, 4096) // room for servers that send more than they were asked to
	for {
		n, err := c.Read(buf)
		if err != nil {
			return nil, err
		}
		m := new(dns.Msg)
		err = m.Unpack(buf[:n])
		if answers(m, q) && (err == nil || m.Truncated) {
			return m, nil
		}
		// Not ours, or broken: the true answer may still come.
	}
}

func overTCP(ctx context.Context, server string, q *dns.Msg) (*dns.Msg, error) {
	c, end, err := dial(ctx, "tcp", server)
	if err != nil {
		return nil, err
	}
	defer end()
	conn := &dns.Conn{Conn: c}
	if err := conn.WriteMsg(q); err != nil {
		return nil, err
	}
	m, err := conn.ReadMsg()
	if err != nil {
		return nil, err
	}
	if !answers(m, q) {
		return nil, errors.New("the answer is not to the question")
	}
	return m, nil
}
