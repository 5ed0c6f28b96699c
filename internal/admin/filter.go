package admin

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"culvert.dev/tunnel"
)

// A TunnelFilter says which tunnels are meant: those that fit every field that
// is not zero.
type TunnelFilter struct {
	IDs       []uint64 // any of them
	Service   string
	Target    string // "host" or "host:port"; without a port, whatever port was asked for
	Proto     string
	Listener  string // as configured
	Endpoint  string // its address, with or without its port, or the DNS name that this came from
	Peer      string
	Source    netip.Prefix
	OlderThan time.Duration // since the client's connection was accepted
	QuietFor  time.Duration // without a byte
	MinBytes  int64         // both ways together
	Limit     int           // the first so many of them, by ID
}

// A filterKey is a word of a filter as a query.
type filterKey[F any] struct {
	key string
	set func(f *F, s string) error
}

// repeatable is the one word that may be repeated.
const repeatable = "id"

// tunnelFilters are the words of a TunnelFilter, in the order in which they are
// told.
var tunnelFilters = []filterKey[TunnelFilter]{
	{repeatable, func(f *TunnelFilter, s string) error {
		id, err := parseID(s)
		f.IDs = append(f.IDs, id)
		return err
	}},
	{"service", func(f *TunnelFilter, s string) error { f.Service = s; return nil }},
	{"target", func(f *TunnelFilter, s string) error { f.Target = strings.TrimSuffix(s, "."); return nil }},
	{"source", func(f *TunnelFilter, s string) (err error) { f.Source, err = parseSource(s); return err }},
	{"peer", func(f *TunnelFilter, s string) error { f.Peer = s; return nil }},
	{"proto", func(f *TunnelFilter, s string) error { f.Proto = s; return nil }},
	{"listener", func(f *TunnelFilter, s string) error { f.Listener = s; return nil }},
	{"endpoint", func(f *TunnelFilter, s string) error { f.Endpoint = s; return nil }},
	{"older-than", func(f *TunnelFilter, s string) (err error) { f.OlderThan, err = parseAge(s); return err }},
	{"quiet-for", func(f *TunnelFilter, s string) (err error) { f.QuietFor, err = parseAge(s); return err }},
	{"min-bytes", func(f *TunnelFilter, s string) (err error) { f.MinBytes, err = parseBytes(s); return err }},
	{"limit", func(f *TunnelFilter, s string) (err error) { f.Limit, err = parseLimit(s); return err }},
}

// ParseTunnelFilter reads a query such as
//
//	service=orders.example.com&source=192.0.2.0/24&older-than=1h
//
// Its words are id (may be repeated), service, target, source (an address or a
// CIDR), peer, proto, listener, endpoint, older-than and quiet-for (durations
// such as 90s), min-bytes (such as 4096 or 10MiB) and limit. What it does not
// understand is an error, and so is a word without a value: a filter that were
// left out would let through what nobody meant.
func ParseTunnelFilter(q url.Values) (TunnelFilter, error) {
	return parseFilter(q, tunnelFilters)
}

func parseFilter[F any](q url.Values, keys []filterKey[F]) (f F, err error) {
	var known []string
	for _, k := range keys {
		known = append(known, k.key)
	}
	for key := range q {
		if !slices.Contains(known, key) {
			return f, fmt.Errorf("unknown filter %q; the filters are %s", key, strings.Join(known, ", "))
		}
	}
	for _, k := range keys {
		if len(q[k.key]) > 1 && k.key != repeatable {
			return f, fmt.Errorf("filter %s is given %d times", k.key, len(q[k.key]))
		}
		for _, s := range q[k.key] {
			if s == "" {
				return f, fmt.Errorf("filter %s has no value", k.key)
			}
			if err := k.set(&f, s); err != nil {
				return f, fmt.Errorf("filter %s=%q: %w", k.key, s, err)
			}
		}
	}
	return f, nil
}

// Narrows reports whether f leaves anything out but by its Limit.
func (f *TunnelFilter) Narrows() bool {
	return len(f.IDs) > 0 || f.Source.IsValid() || f.OlderThan > 0 || f.QuietFor > 0 || f.MinBytes > 0 ||
		f.Service+f.Target+f.Proto+f.Listener+f.Endpoint+f.Peer != ""
}

// Match reports whether l is meant, whatever the Limit.
func (f *TunnelFilter) Match(l *tunnel.Live) bool {
	is := func(want string, names ...string) bool {
		return want == "" || slices.ContainsFunc(names, func(s string) bool { return strings.EqualFold(s, want) })
	}
	return (len(f.IDs) == 0 || slices.Contains(f.IDs, l.ID)) &&
		is(f.Service, l.Service) && is(f.Proto, l.Proto) && is(f.Listener, l.Listener) &&
		(f.Target == "" || is(f.Target, l.Target, host(l.Target))) &&
		(f.Endpoint == "" || is(f.Endpoint, endpointNames(l.Endpoint)...)) &&
		(f.Peer == "" || f.Peer == l.Peer.ID) &&
		(!f.Source.IsValid() || f.Source.Contains(l.Source.Addr().Unmap().WithZone(""))) &&
		(f.OlderThan == 0 || l.Age >= f.OlderThan) &&
		l.Quiet >= f.QuietFor && l.In+l.Out >= f.MinBytes
}

// host is s without its port, if it has one.
func host(s string) string {
	if h, _, err := net.SplitHostPort(s); err == nil {
		return h
	}
	return s
}

// endpointNames are the ways to name an endpoint, written as its String does.
func endpointNames(s string) []string {
	name, addr, ok := strings.Cut(strings.TrimSuffix(s, ")"), " (")
	if !ok {
		return []string{s, host(s)}
	}
	return []string{s, name, addr, host(addr)}
}

func parseID(s string) (uint64, error) {
	id, err := strconv.ParseUint(s, 10, 64)
	if err != nil || id == 0 {
		return 0, errors.New("a tunnel's id is a number from 1")
	}
	return id, nil
}

func parseLimit(s string) (int, error) {
	n, err := strconv.Atoi(s)
	if err != nil || n < 1 {
		return 0, errors.New("want a number from 1")
	}
	return n, nil
}

func parseSource(s string) (netip.Prefix, error) {
	if a, err := netip.ParseAddr(s); err == nil && a.Zone() == "" {
		a = a.Unmap()
		return netip.PrefixFrom(a, a.BitLen()), nil
	}
	p, err := netip.ParsePrefix(s)
	if err != nil {
		return p, errors.New("want an address or a range such as 192.0.2.0/24")
	}
	if p.Addr().Is4In6() {
		return p, errors.New("write it as an IPv4 range")
	}
	return p.Masked(), nil
}

func parseAge(s string) (time.Duration, error) {
	d, err := time.ParseDuration(s)
	if err != nil || d <= 0 {
		return 0, errors.New("want a duration of more than 0, such as 90s or 1h30m")
	}
	return d, nil
}

var byteUnits = []struct {
	name string
	size int64
}{
	{"KiB", 1 << 10}, {"MiB", 1 << 20}, {"GiB", 1 << 30}, {"TiB", 1 << 40},
	{"kB", 1e3}, {"MB", 1e6}, {"GB", 1e9}, {"TB", 1e12}, {"B", 1},
}

func parseBytes(s string) (int64, error) {
	digits, size := s, int64(1)
	for _, u := range byteUnits {
		if d, ok := strings.CutSuffix(s, u.name); ok {
			digits, size = strings.TrimSpace(d), u.size
			break
		}
	}
	n, err := strconv.ParseInt(digits, 10, 64)
	if err != nil || n < 1 || n > (1<<63-1)/size {
		return 0, errors.New("want a number of bytes from 1, such as 4096 or 10MiB")
	}
	return n * size, nil
}
