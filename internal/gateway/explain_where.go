package gateway

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"culvert.dev/internal/udp"
	"culvert.dev/registry"
)

// An explainTarget is a listener that may be asked what it does, under all the names that
// people know it by.
type explainTarget struct {
	listener string   // its address as configured, or its name in the table
	names    []string // others: its sections', its Gateway's
	where    string   // the address as `culvert status` prints it
	origin   string   // who wants it; "" for a configured one
	protocol string   // of the table; "" for a configured one
	problem  string   // why it is not open; "" if it is
}

// explainTargets are all listeners of the table, and those of the configuration.
func (g *Gateway) explainTargets() []explainTarget {
	var all []explainTarget
	for i, l := range g.cfg.Listeners {
		a := explainTarget{listener: l.Address, where: l.Address}
		if i < len(g.addrs) && g.addrs[i] != nil { // a port of 0 has another number by now
			at := g.addrs[i].String()
			if l.Datagrams != nil {
				at = udp.Scheme + at
			}
			a.names = []string{at}
		}
		all = append(all, a)
	}
	for _, p := range g.ports.listeners() {
		all = append(all, explainTarget{listener: p.Address, where: p.Address, origin: "a service"})
	}
	return append(all, g.inbound.explainTargets()...)
}

// explainTargets are the listeners of the table, with those that can't be opened.
func (f *listeners) explainTargets() []explainTarget {
	f.mu.Lock()
	defer f.mu.Unlock()
	var all []explainTarget
	for _, l := range f.configured {
		a := explainTarget{listener: l.Configured, where: l.Configured}
		if f.serving[l.Configured] == nil {
			a.problem = l.Problem
		} else {
			a.names = []string{l.Address}
		}
		all = append(all, a)
	}
	for _, s := range f.list {
		a := explainTarget{listener: s.Name, where: s.Address, origin: s.Origin, protocol: s.Protocol}
		if o := f.serving[s.Name]; o == nil {
			a.problem = s.Problem
		} else {
			for _, section := range o.Table().Sections {
				a.names = append(a.names, section.Name)
				if gateway, ok := strings.CutPrefix(section.Name, "gateway/"); ok { // "gateway/shop/edge/tls": several Gateways may share a port
					if i := strings.LastIndex(gateway, "/"); i > 0 {
						a.names = append(a.names, gateway[:i], "gateway "+gateway[:i])
					}
				}
			}
		}
		if _, name, ok := strings.Cut(s.Origin, " "); ok {
			a.names = append(a.names, name, strings.ToLower(s.Origin)) // "shop/edge", "gateway shop/edge"
		}
		all = append(all, a)
	}
	return all
}

// place is the address and port of an address as people write it; any address is the
// zero Addr. It is false for what is none.
func parseListenAddr(s string) (datagrams bool, addr netip.Addr, port uint16, ok bool) {
	s, datagrams = strings.CutPrefix(s, udp.Scheme)
	host, number, err := net.SplitHostPort(s)
	if err != nil {
		return false, addr, 0, false
	}
	n, err := strconv.ParseUint(number, 10, 16)
	if err != nil {
		return false, addr, 0, false
	}
	if host != "" {
		if addr, err = netip.ParseAddr(host); err != nil {
			return false, addr, 0, false
		}
		if addr = addr.Unmap(); addr.IsUnspecified() {
			addr = netip.Addr{}
		}
	}
	return datagrams, addr, uint16(n), true
}

// matches reports whether a person who writes s means a: by a name, or by the address. One
// that listens at all addresses is meant by any of them, and one at a single address by
// its port alone, too.
func (a *explainTarget) matches(s string) bool {
	if s == a.listener || s == a.where || slices.Contains(a.names, s) {
		return true
	}
	datagrams, addr, port, ok := parseListenAddr(s)
	if !ok {
		return false
	}
	for _, at := range append([]string{a.where}, a.names...) {
		d, own, p, ok := parseListenAddr(at)
		if ok && p == port && (d == datagrams || !strings.HasPrefix(s, udp.Scheme) && d) && (own == addr || !own.IsValid() || !addr.IsValid()) {
			return true
		}
	}
	return false
}

// serves reports whether a may be what a person means who names no listener.
func (a *explainTarget) serves(q Query) bool {
	_, _, port, _ := parseListenAddr(a.where)
	switch {
	case a.origin == "":
		return true
	case a.protocol == registry.TLS:
		return (q.Port == 0 || q.Port == port) && (q.Proto == "" || q.Proto == "sni" || q.Proto == "tls")
	case a.protocol == registry.TCP, a.protocol == registry.UDP:
		return q.Port == port && (q.Proto == "" || q.Proto == a.protocol)
	}
	return false
}

// explain answers q at the listener that is meant. It is an error where that can't be
// told, and for one that is not there.
func (g *Gateway) explain(ctx context.Context, q Query) (*Explanation, error) {
	all := g.explainTargets()
	listeners := slices.Concat(g.ports.listeners(), g.inbound.listeners(), g.cfg.Listeners)
	if q.Listener == "" {
		return g.explainAnywhere(ctx, all, listeners, q)
	}
	var meant []explainTarget
	for _, is := range []func(*explainTarget) bool{
		func(a *explainTarget) bool { return a.listener == q.Listener },
		func(a *explainTarget) bool { return a.where == q.Listener || slices.Contains(a.names, q.Listener) },
		func(a *explainTarget) bool { return a.matches(q.Listener) },
	} {
		for i := range all {
			if is(&all[i]) {
				meant = append(meant, all[i])
			}
		}
		if len(meant) > 0 {
			break
		}
	}
	if len(meant) == 0 {
		return nil, fmt.Errorf("there is no listener %q; there are %s", q.Listener, listTargets(all))
	}
	routes, leads, refusals := g.explainEach(ctx, meant, listeners, q)
	switch {
	case len(routes) == 1:
		return routes[0], nil
	case len(routes) > 1:
		return nil, fmt.Errorf("several listeners that %q means have a route: name one of %s", q.Listener, listTargets(leads))
	case len(refusals) == 1:
		return refusals[0], nil
	case len(meant) == 1:
		return nil, fmt.Errorf("listener %s is not open: %s", listTargets(meant), meant[0].problem)
	}
	return nil, fmt.Errorf("%q means several listeners, and none has a route: name one of %s", q.Listener, listTargets(meant))
}

// explainEach asks listeners, and returns the answers with a route, which listeners
// those are of, and the other answers.
func (g *Gateway) explainEach(ctx context.Context, some []explainTarget, listeners []Listener, q Query) (routes []*Explanation, leads []explainTarget, refusals []*Explanation) {
	for _, a := range some {
		if a.problem != "" {
			continue
		}
		one := q
		one.Listener, one.Tokens = a.listener, g.tokens
		x := Explain(ctx, g.router, listeners, one)
		if x.Reason != "" {
			refusals = append(refusals, x)
			continue
		}
		routes, leads = append(routes, x), append(leads, a)
	}
	return routes, leads, refusals
}

// explainAnywhere answers a question that names no listener: where only one listener of
// the table has a route, there, and otherwise by the configured listeners.
func (g *Gateway) explainAnywhere(ctx context.Context, all []explainTarget, listeners []Listener, q Query) (*Explanation, error) {
	some := slices.DeleteFunc(slices.Clone(all), func(a explainTarget) bool { return a.protocol == "" || !a.serves(q) })
	routes, leads, refusals := g.explainEach(ctx, some, listeners, q)
	configured := slices.DeleteFunc(slices.Clone(all), func(a explainTarget) bool { return a.origin != "" || a.problem != "" })
	if len(configured) > 0 {
		one := q
		if len(configured) == 1 {
			one.Listener = configured[0].listener
		}
		x := Explain(ctx, g.router, listeners, one)
		if x.Reason == "" {
			routes, leads = append(routes, x), append(leads, configured...)
		} else if len(routes) == 0 {
			return x, nil
		}
	}
	switch {
	case len(routes) == 1:
		return routes[0], nil
	case len(routes) > 1:
		return nil, fmt.Errorf("which listener is asked? Several have a route: name one of %s", listTargets(leads))
	case len(refusals) == 1:
		return refusals[0], nil
	}
	return nil, fmt.Errorf("which listener is asked? None has a route for this; there are %s", listTargets(all))
}

// maxListed is how many listeners an error names.
const maxListed = 20

// listTargets are listeners as people may name them.
func listTargets(all []explainTarget) string {
	if len(all) == 0 {
		return "none"
	}
	var texts []string
	for i, a := range all {
		if i == maxListed {
			texts = append(texts, fmt.Sprintf("%d more", len(all)-i))
			break
		}
		text := a.where
		if a.origin != "" {
			text += " (" + a.origin + ")"
		}
		texts = append(texts, text)
	}
	return strings.Join(texts, ", ")
}
