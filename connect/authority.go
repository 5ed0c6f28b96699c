package connect

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"strings"

	"culvert.dev/tunnel"
)

// errUserinfo does not quote its input, which is a password more often than
// not.
var errUserinfo = errors.New("connect: the authority has user information before an @")

// An Authority is a destination as CONNECT names it: a name or an address,
// and always a port.
type Authority struct {
	Name tunnel.Name // zero where Addr is valid
	Addr netip.Addr  // IPv4-mapped IPv6 addresses are unmapped
	Port uint16      // never 0
}

// ParseDial returns the destination of DialContext(network, addr): addr is an authority
// and network is "tcp". An error about addr is a *tunnel.Error.
func ParseDial(network, addr string) (Authority, error) {
	if network != "tcp" {
		return Authority{}, net.UnknownNetworkError(network)
	}
	to, err := ParseAuthority(addr)
	if err != nil {
		return Authority{}, &tunnel.Error{Reason: tunnel.BadRequest, Err: err}
	}
	return to, nil
}

// ParseAuthority parses "host:port", "1.2.3.4:port" or "[2001:db8::1]:port"
// (RFC 9112 section 3.2.3).
//
// It refuses what resolvers do not agree on: a missing port, port 0, ports
// with leading zeros, user information, paths, zone identifiers, IPv4 in
// brackets, IPv6 without them, and IPv4 in any spelling but four decimal
// numbers ("127.1", "0x7f.0.0.1", "0177.0.0.1", "2130706433"). Whatever is no
// address is given to tunnel.ParseName and to nothing else.
//
// The result does not share memory with s.
func ParseAuthority(s string) (Authority, error) {
	if strings.Contains(s, "@") {
		return Authority{}, errUserinfo
	}
	i := strings.LastIndexByte(s, ':')
	if i < 0 || strings.HasSuffix(s, "]") {
		return Authority{}, fmt.Errorf("connect: authority %q has no port", tunnel.Clip(s))
	}
	var a Authority
	var err error
	if a.Port, err = parsePort(s[i+1:]); err != nil {
		return Authority{}, fmt.Errorf("connect: authority %q: %w", tunnel.Clip(s), err)
	}
	host := s[:i]
	if strings.HasPrefix(host, "[") {
		a.Addr, err = parseBracketed(host)
	} else if a.Addr, err = netip.ParseAddr(host); err == nil && a.Addr.Is6() {
		err = errors.New("an IPv6 address needs brackets")
	} else if err != nil {
		a.Addr = netip.Addr{}
		a.Name, err = tunnel.ParseName(strings.Clone(host)) // a Name keeps its input alive
	}
	if err != nil {
		return Authority{}, fmt.Errorf("connect: authority %q: %w", tunnel.Clip(s), err)
	}
	return a, nil
}

// String returns the normalised authority: ParseAuthority(a.String()) is a.
func (a Authority) String() string {
	host := a.Name.String()
	if a.Addr.IsValid() {
		host = a.Addr.String()
	}
	return net.JoinHostPort(host, strconv.Itoa(int(a.Port)))
}

func parsePort(s string) (uint16, error) {
	n, err := strconv.ParseUint(s, 10, 16)
	if err != nil || n == 0 || s[0] == '0' {
		return 0, fmt.Errorf("port %q is not a number from 1 to 65535", tunnel.Clip(s))
	}
	return uint16(n), nil
}

func parseBracketed(s string) (netip.Addr, error) {
	inner, ok := strings.CutSuffix(s[1:], "]")
	if !ok {
		return netip.Addr{}, errors.New("a bracket is not closed")
	}
	addr, err := netip.ParseAddr(inner)
	switch {
	case err != nil || !addr.Is6():
		return netip.Addr{}, errors.New("the text in brackets is not an IPv6 address")
	case addr.Zone() != "":
		return netip.Addr{}, errors.New("an address with a zone means nothing on another host")
	}
	return addr.Unmap(), nil
}
