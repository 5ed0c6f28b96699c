package nat

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"time"
)

// askSTUN returns the address that the first STUN server that answers sees, or why none has
// answered: "" where there are none to ask.
func (m *Manager) askSTUN(ctx context.Context, servers []string) (seen netip.Addr, why string) {
	ctx, cancel := context.WithTimeoutCause(ctx, stunTimeout, errors.New("no answer in time"))
	defer cancel()
	answers := make(chan netip.Addr, len(servers))
	failures := make([]string, len(servers))
	for i, server := range servers {
		go func() {
			at := netip.AddrPort{}
			defer func() { answers <- at.Addr() }()
			defer m.recovered()
			var err error
			if at, err = m.askOneSTUN(ctx, server); err != nil {
				m.Log.Debug("a STUN server does not answer", "server", server, "error", err)
				failures[i] = describeSTUN(server, err)
			}
		}()
	}
	for range servers {
		if at := <-answers; at.IsValid() && !seen.IsValid() {
			seen = at
			cancel()
		}
	}
	if seen.IsValid() {
		return seen, ""
	}
	return seen, strings.Join(slices.DeleteFunc(failures, func(s string) bool { return s == "" }), "; ")
}

// describeSTUN says why a server has told nothing, without what differs from one question to the next.
func describeSTUN(server string, err error) string {
	if bad, ok := errors.AsType[*net.DNSError](err); ok {
		return server + ": " + bad.Err
	}
	return server + " does not answer"
}

func (m *Manager) askOneSTUN(ctx context.Context, server string) (netip.AddrPort, error) {
	host, port, err := net.SplitHostPort(server)
	if err != nil {
		return netip.AddrPort{}, err
	}
	number, err := net.LookupPort("udp", port)
	if err != nil {
		return netip.AddrPort{}, err
	}
	lookup := m.Lookup
	if lookup == nil {
		lookup = func(ctx context.Context, host string) ([]netip.Addr, error) {
			return net.DefaultResolver.LookupNetIP(ctx, "ip4", host)
		}
	}
	addrs := []netip.Addr{}
	if a, err := netip.ParseAddr(host); err == nil {
		addrs = append(addrs, a)
	} else if addrs, err = lookup(ctx, host); err != nil {
		return netip.AddrPort{}, err
	}
	for _, a := range addrs {
		if a.Unmap().Is4() {
			return AskSTUN(ctx, m.Dial, netip.AddrPortFrom(a.Unmap(), uint16(number)))
		}
	}
	return netip.AddrPort{}, fmt.Errorf("%s has no address of IPv4", host)
}

// verify verifies the mappings that are due, and reports whether there were any.
func (m *Manager) verify(ctx context.Context) (asked bool) {
	again := m.reverify.Swap(false)
	for _, p := range m.mappings {
		public := m.public(p)
		if again && !p.verified {
			p.verifyAt = time.Time{}
		}
		if m.Verify == nil || !public.IsValid() || m.clock().Before(p.verifyAt) {
			continue
		}
		asked = true
		once, cancel := context.WithTimeoutCause(ctx, verifyTimeout, errors.New("no answer in time"))
		err := m.Verify(once, p.Port, public)
		cancel()
		if ctx.Err() != nil {
			return asked
		}
		p.verifyErr = err
		if err == nil {
			if !p.verified {
				m.Log.Info("mapped port verified from outside", "listener", p.Name, "external", public)
			}
			p.verified, p.unverified, p.verifyAt = true, 0, m.clock().Add(verifyInterval)
			continue
		}
		p.unverified++
		first := minReverify
		if p.verified {
			first = pollInterval // a short outage at the other site does not take the address back
		}
		p.verifyAt = m.clock().Add(min(first<<min(p.unverified-1, 10), verifyInterval))
		m.Log.Warn("mapped port not verified from outside; trying again", "listener", p.Name, "external", public, "error", err, "retry_in", p.verifyAt.Sub(m.clock()))
		if p.unverified >= maxUnverified {
			p.verified = false
		}
	}
	return asked
}
