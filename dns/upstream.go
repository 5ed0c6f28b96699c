package dns

import (
	"bytes"
	"cmp"
	"context"
	"crypto/rand"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/miekg/dns"

	"culvert.dev/tunnel"
)

const (
	tries        = 3    // of one question, over all upstreams
	udpSize      = 1232 // bytes of an answer by UDP, so that it is not fragmented
	maxForgeries = 3    // answers to something else, and the question is asked by TCP
	maxIdleConns = 4    // of an upstream by TLS
	idleTimeout  = 10 * time.Second
)

var (
	errUnusable   = errors.New("dns: an upstream's answer can't be used")
	errForged     = errors.New("dns: answers that are not to the question")
	errNoUpstream = errors.New("dns: no upstream is configured but this server itself")
)

// An upstream is an Upstream in use.
type upstream struct {
	addr    string
	tls     *tls.Config
	sockets tunnel.Sockets

	mu        sync.Mutex // guards what follows
	fails     int
	downUntil time.Time
	idle      []idleConn // by TLS, the last used at the end
}

type idleConn struct {
	net.Conn
	since time.Time
}

// down returns how long the upstream is still asked last: 0 for one that answers, or
// that may be tried again.
func (u *upstream) down(now time.Time) time.Duration {
	u.mu.Lock()
	defer u.mu.Unlock()
	return max(u.downUntil.Sub(now), 0)
}

// noteResult notes whether a try was answered.
func (u *upstream) noteResult(err error, now time.Time) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if err == nil {
		u.fails, u.downUntil = 0, time.Time{}
		return
	}
	u.downUntil = now.Add(min(minDown<<min(u.fails, 10), maxDown))
	u.fails++
}

// upstreams are those of a configuration that may change, by address.
type upstreams struct {
	mu     sync.Mutex // guards byAddr
	byAddr map[string]*upstream
}

// inUse returns the upstreams at addrs, those that answer first, and forgets all others.
func (s *upstreams) inUse(addrs []string, sockets tunnel.Sockets, now time.Time) []*upstream {
	s.mu.Lock()
	byAddr := make(map[string]*upstream, len(addrs))
	ups := make([]*upstream, len(addrs))
	for i, addr := range addrs {
		u := cmp.Or(byAddr[addr], s.byAddr[addr])
		if u == nil {
			u = &upstream{addr: addr, sockets: sockets}
		}
		byAddr[addr], ups[i] = u, u
	}
	s.byAddr = byAddr
	s.mu.Unlock()
	return answeringFirst(ups, now)
}

// all returns the upstreams that were in use last.
func (s *upstreams) all() []*upstream {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Collect(maps.Values(s.byAddr))
}

// answeringFirst returns ups in their order, but those last that do not answer.
func answeringFirst(ups []*upstream, now time.Time) []*upstream {
	ups = slices.Clone(ups)
	slices.SortStableFunc(ups, func(a, b *upstream) int { return cmp.Compare(a.down(now), b.down(now)) })
	return ups
}

// race asks one upstream after the other, at most three times in all: the next one
// where one fails, or has not answered within step. Its errors are *net.DNSErrors.
func race(ctx context.Context, log *slog.Logger, ups []*upstream, q *query, step time.Duration, clock func() time.Time) (*dns.Msg, error) {
	if len(ups) == 0 {
		return nil, errNoUpstream
	}
	return hedge(ctx, log, step, func(ctx context.Context, i int) (*dns.Msg, error) {
		u := ups[i%len(ups)]
		begun := time.Now()
		m, err := u.ask(ctx, q)
		if err == nil && m.Rcode != dns.RcodeSuccess && m.Rcode != dns.RcodeNameError {
			err = rcodeError(m.Rcode)
		}
		// A try that lost the race is no failure, unless a later one has overtaken it.
		if err == nil || !errors.Is(ctx.Err(), context.Canceled) || time.Since(begun) >= step {
			u.noteResult(err, clock())
		}
		if err != nil {
			return nil, lookupError(q.name, u.addr, err)
		}
		return m, nil
	})
}

// lookupError returns the error of the question for name to server.
func lookupError(name, server string, err error) error {
	var ne net.Error
	_, isRcode := errors.AsType[rcodeError](err)
	return &net.DNSError{
		Err: err.Error(), UnwrapErr: err, Name: strings.TrimSuffix(name, "."), Server: server,
		IsTimeout: errors.As(err, &ne) && ne.Timeout(), IsTemporary: isRcode,
	}
}

// A rcodeError is the response code of an upstream that has no answer.
type rcodeError int

func (e rcodeError) Error() string { return "the server answers " + rcodeWord(int(e)) }

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

func rcodeWord(rcode int) string {
	if s := dns.RcodeToString[rcode]; s != "" {
		return s
	}
	return fmt.Sprint(rcode)
}

// ask asks u once: by TLS, or by UDP and then by TCP for what UDP cannot carry.
func (u *upstream) ask(ctx context.Context, q *query) (*dns.Msg, error) {
	if u.tls != nil {
		return u.askTLS(ctx, q)
	}
	m, err := u.askUDP(ctx, q)
	if errors.Is(err, errForged) || err == nil && m.Truncated {
		// The answer was truncated, or may be forged.
		c, end, err := u.dial(ctx, "tcp")
		if err != nil {
			return nil, err
		}
		defer end()
		return askStream(c, q)
	}
	return m, err
}

// outgoing returns the message for an upstream, with its length in front. Its id is
// random, and so is the case of each letter, which is one more bit to guess.
func outgoing(q *query) []byte {
	var random [2 + maxWire/8 + 1]byte
	_, _ = rand.Read(random[:]) // it never fails: crypto/rand
	b := make([]byte, 2, 2+headerLen+len(q.raw)+11)
	b = append(b, random[0], random[1])
	flags := bitRD | q.flags&bitCD
	b = binary.BigEndian.AppendUint16(b, flags)
	b = append(b, 0, 1, 0, 0, 0, 0, 0, 1)
	at := len(b)
	b = append(b, q.raw...)
	for i := range b[at : at+q.labels] {
		// Lengths of labels are below 64 and so are not letters.
		if c := b[at+i] | 0x20; 'a' <= c && c <= 'z' {
			b[at+i] = c &^ (random[2+i/8] >> (i % 8) & 1 << 5)
		}
	}
	b = append(b, 0, 0, byte(dns.TypeOPT))
	b = binary.BigEndian.AppendUint16(b, udpSize)
	do := byte(0)
	if q.do {
		do = 0x80
	}
	b = append(b, 0, 0, do, 0, 0, 0)
	binary.BigEndian.PutUint16(b, uint16(len(b)-2))
	return b
}

// The results of matchQuestion.
const (
	isAnswer = iota
	isOther
	isWrongCase
)

// matchQuestion compares the header and question of a message with those of out, both
// without the length in front.
func matchQuestion(b, out []byte, q *query) int {
	end := headerLen + len(q.raw)
	switch {
	case len(b) < end || b[0] != out[0] || b[1] != out[1] || b[2]&0xf8 != 0x80, // QR, opcode 0
		b[4] != 0 || b[5] != 1:
		return isOther
	case bytes.Equal(b[headerLen:end], out[headerLen:end]):
		return isAnswer
	case bytes.EqualFold(b[headerLen:headerLen+q.labels], out[headerLen:headerLen+q.labels]) &&
		bytes.Equal(b[headerLen+q.labels:end], out[headerLen+q.labels:end]):
		return isWrongCase
	}
	return isOther
}

// restore puts the question of b into lower case: names in the records of b point
// into it, and the pattern of capitals was for the upstream only.
func restore(b []byte, q *query) {
	name := b[headerLen : headerLen+q.labels]
	for i, c := range name {
		if 'A' <= c && c <= 'Z' { // no length of a label is
			name[i] = c + 'a' - 'A'
		}
	}
}

// dial connects to the server; the connection ends with ctx.
func (u *upstream) dial(ctx context.Context, network string) (net.Conn, func(), error) {
	c, err := u.sockets.DialContext(ctx, network, u.addr)
	if err != nil {
		return nil, nil, err
	}
	stop := context.AfterFunc(ctx, func() { _ = c.SetDeadline(time.Unix(1, 0)) })
	return c, func() { stop(); _ = c.Close() }, nil
}

func (u *upstream) askUDP(ctx context.Context, q *query) (*dns.Msg, error) {
	c, end, err := u.dial(ctx, "udp") // a port of its own, and other senders are not heard
	if err != nil {
		return nil, err
	}
	defer end()
	out := outgoing(q)[2:]
	if _, err := c.Write(out); err != nil {
		return nil, err
	}
	buf := make([]byte, 4096)
	for forged := 0; ; {
		n, err := c.Read(buf)
		if err != nil {
			return nil, err
		}
		switch matchQuestion(buf[:n], out, q) {
		case isAnswer:
			restore(buf[:n], q)
			m := new(dns.Msg)
			if err = m.Unpack(buf[:n]); err == nil || buf[2]&(bitTC>>8) != 0 {
				m.Truncated = m.Truncated || err != nil
				return m, nil
			}
		case isWrongCase:
			// A server that does not keep the case, or a guess that is nearly
			// right: TCP tells.
			return nil, errForged
		}
		if forged++; forged >= maxForgeries {
			return nil, errForged
		}
	}
}

// askStream asks on a connection without other questions under way. An answer there
// cannot be forged by guessing, so the case need not match.
func askStream(c io.ReadWriter, q *query) (*dns.Msg, error) {
	out := outgoing(q)
	if _, err := c.Write(out); err != nil {
		return nil, err
	}
	var size [2]byte
	if _, err := io.ReadFull(c, size[:]); err != nil {
		return nil, err
	}
	b := make([]byte, binary.BigEndian.Uint16(size[:]))
	if _, err := io.ReadFull(c, b); err != nil {
		return nil, err
	}
	if matchQuestion(b, out[2:], q) == isOther {
		return nil, errForged
	}
	restore(b, q)
	m := new(dns.Msg)
	if err := m.Unpack(b); err != nil {
		return nil, err
	}
	return m, nil
}

// askTLS asks on an idle connection, or on a new one. An idle one that has ended
// meanwhile is no failure.
func (u *upstream) askTLS(ctx context.Context, q *query) (*dns.Msg, error) {
	for {
		c := u.takeIdle()
		fresh := c == nil
		if fresh {
			raw, err := u.sockets.DialContext(ctx, "tcp", u.addr)
			if err != nil {
				return nil, err
			}
			tc := tls.Client(raw, u.tls)
			if err := tc.HandshakeContext(ctx); err != nil {
				_ = raw.Close()
				return nil, err
			}
			c = tc
		}
		stop := context.AfterFunc(ctx, func() { _ = c.SetDeadline(time.Unix(1, 0)) })
		m, err := askStream(c, q)
		if err == nil && stop() {
			u.putIdle(c)
			return m, nil
		}
		stop()
		_ = c.Close()
		if err == nil || fresh || ctx.Err() != nil || errors.Is(err, errForged) {
			return m, err
		}
	}
}

func (u *upstream) takeIdle() net.Conn {
	u.mu.Lock()
	defer u.mu.Unlock()
	for n := len(u.idle); n > 0; n = len(u.idle) {
		c := u.idle[n-1]
		u.idle = u.idle[:n-1]
		if time.Since(c.since) < idleTimeout {
			return c.Conn
		}
		_ = c.Close()
	}
	return nil
}

func (u *upstream) putIdle(c net.Conn) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if len(u.idle) >= maxIdleConns {
		_ = u.idle[0].Close()
		u.idle = append(u.idle[:0], u.idle[1:]...)
	}
	u.idle = append(u.idle, idleConn{c, time.Now()})
}

func (u *upstream) closeIdle() {
	u.mu.Lock()
	defer u.mu.Unlock()
	for _, c := range u.idle {
		_ = c.Close()
	}
	u.idle = nil
}
