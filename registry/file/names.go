package file

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"path"
	"runtime"
	"strconv"
	"strings"
	"unicode/utf8"

	"culvert.dev/registry"
	"culvert.dev/tunnel"
	"golang.org/x/net/idna"
)

// A complaint is an Error without a position.
type complaint struct {
	msg, hint string
	offset    int // in bytes, into what was parsed
}

func complain(hint, format string, args ...any) *complaint {
	return &complaint{msg: fmt.Sprintf(format, args...), hint: hint}
}

// parseName is tunnel.ParseName for what people write: U-labels become
// A-labels. It also refuses A-labels that no client can mean: those that are
// no punycode, and those that decode to plain ASCII and so are a second
// spelling of a name that has a first.
func parseName(s string) (tunnel.Name, *complaint) {
	ascii := s
	for i := range len(s) {
		if s[i] < utf8.RuneSelf {
			continue
		}
		var err error
		if ascii, err = idna.Lookup.ToASCII(s); err != nil {
			return tunnel.Name{}, complain("write the A-labels that DNS has (xn--...)", "not a valid name in IDNA")
		}
		break
	}
	n, err := tunnel.ParseName(ascii)
	if err != nil {
		hint := ""
		switch {
		case errors.Is(err, tunnel.ErrNameByte) && strings.Contains(s, "*"):
			hint = "an asterisk stands alone before the first dot: *.example.com"
		case errors.Is(err, tunnel.ErrNameAddress):
			hint = "a service has addresses under the key addresses, apart from its names"
		}
		return tunnel.Name{}, complain(hint, "%v", err)
	}
	for label := range strings.SplitSeq(n.String(), ".") {
		if !strings.HasPrefix(label, "xn--") {
			continue
		}
		u, err := idna.Punycode.ToUnicode(label)
		if err != nil || u == label || isASCII(u) {
			return tunnel.Name{}, complain("write the label as DNS has it", "label %q is not a valid A-label: it does not decode to a name outside of ASCII", label)
		}
	}
	return n, nil
}

func isASCII(s string) bool {
	for i := range len(s) {
		if s[i] >= utf8.RuneSelf {
			return false
		}
	}
	return true
}

// parsePattern is tunnel.ParsePattern for what people write.
func parsePattern(s string) (tunnel.Pattern, *complaint) {
	rest, wild := strings.CutPrefix(s, "*.")
	if s == "*" {
		return tunnel.Pattern{}, complain("name a domain: *.example.com", "it is every name")
	}
	n, c := parseName(rest)
	if c != nil {
		return tunnel.Pattern{}, c
	}
	return tunnel.Pattern{Suffix: n, Wildcard: wild}, nil
}

// cutPort splits "host", "host:port" and "[v6]:port". The port is 0 where
// there is none, the brackets are gone.
func cutPort(s string) (host string, port uint16, c *complaint) {
	if a, err := netip.ParseAddr(s); err == nil && a.Is6() {
		return "", 0, complain(fmt.Sprintf("write [%s]:port", s), "an IPv6 address needs brackets, or its end could be a port")
	}
	if !strings.Contains(s, ":") {
		return s, 0, nil
	}
	if strings.HasPrefix(s, "[") && strings.HasSuffix(s, "]") {
		return s[1 : len(s)-1], 0, nil
	}
	host, digits, err := net.SplitHostPort(s)
	if err != nil {
		return "", 0, complain("write host:port, or [address]:port for IPv6", "not a host and a port")
	}
	port, c = parsePort(digits)
	return host, port, c
}

func parsePort(s string) (uint16, *complaint) {
	v, err := strconv.ParseUint(s, 10, 16)
	if err != nil || v == 0 || s[0] == '0' {
		return 0, complain("", "port %q is not a number from 1 to 65535", clip(s))
	}
	return uint16(v), nil
}

// parseEndpoint parses "host[:port]" where host is an address or a DNS name.
func parseEndpoint(s string) (registry.Endpoint, *complaint) {
	if strings.Contains(s, "://") {
		return registry.Endpoint{}, complain("leave the scheme out: bytes are passed on as they are", "an endpoint is host:port, not a URL")
	}
	host, port, c := cutPort(s)
	if c != nil {
		return registry.Endpoint{}, c
	}
	ep := registry.Endpoint{Port: port}
	if a, err := netip.ParseAddr(host); err == nil {
		ep.Addr = a.Unmap()
		return ep, destination(a)
	}
	if strings.HasPrefix(host, "*") {
		return ep, complain("write the name of one host", "an endpoint can't be a wildcard")
	}
	if port == 0 && strings.Trim(host, "0123456789") == "" && host != "" {
		return ep, complain("write host:port, as in 127.0.0.1:8443", "it is a port without a host")
	}
	n, c := parseName(host)
	if c != nil {
		if _, err := tunnel.ParseName(host); errors.Is(err, tunnel.ErrNameAddress) {
			c.hint = "write an IPv4 address as four numbers, as in 127.0.0.1, and an IPv6 address with a port in brackets"
		}
		return ep, c
	}
	ep.Host = n.String()
	return ep, nil
}

// destination refuses an address that nothing can be sent to. Loopback and link-local
// addresses are allowed, because a person wrote them into the file.
func destination(a netip.Addr) *complaint {
	switch u := a.Unmap(); {
	case a.Zone() != "":
		return complain("write the address without its zone", "a zone names an interface of one machine only")
	case u.IsUnspecified():
		return complain("write the address of one host, 127.0.0.1 for this one", "an unspecified address is no destination")
	case u.IsMulticast(), u == netip.AddrFrom4([4]byte{255, 255, 255, 255}):
		return complain("write the address of one host", "a multicast or broadcast address is no destination")
	}
	return nil
}

// parseTarget parses the "name[:port]" of a listener's service.
func parseTarget(_, s string) (Target, *complaint) {
	host, port, c := cutPort(s)
	if c == nil {
		var name tunnel.Name
		if name, c = parseName(host); c == nil {
			return Target{name, port}, nil
		}
	}
	return Target{}, complain(c.hint, "service %q: %s", clip(s), c.msg)
}

// parseListenAddress parses "[host]:port" to listen at.
func parseListenAddress(what, s string) (string, *complaint) {
	host, digits, err := net.SplitHostPort(s)
	if err != nil {
		hint := "write :443, 192.0.2.1:443 or [2001:db8::1]:443"
		if _, c := parsePort(s); c == nil {
			hint = fmt.Sprintf("did you mean %q?", ":"+s)
		}
		return "", complain(hint, "%s %q is not an address with a port", what, clip(s))
	}
	if _, c := parsePort(digits); c != nil {
		return "", complain("clients need to know the port", "%s %q: %s", what, clip(s), c.msg)
	}
	if _, err := netip.ParseAddr(host); err != nil && host != "" && host != "localhost" {
		return "", complain("write an address of this machine, or none for all of them", "%s %q: %q is not an IP address", what, clip(s), clip(host))
	}
	return s, nil
}

// udpPrefix begins the address of a listener for datagrams.
const udpPrefix = "udp://"

func isUDP(address string) bool { return strings.HasPrefix(address, udpPrefix) }

// parseListenerAddress is parseListenAddress for one that may be of UDP, a Unix socket, or
// passed by systemd.
func parseListenerAddress(what, s string) (string, *complaint) {
	if name, ok := strings.CutPrefix(s, socketPrefix); ok {
		if c := checkSocketPath(name); c != nil {
			return "", complain(c.hint, "%s %q: %s", what, clip(s), c.msg)
		}
		return s, nil
	}
	if name, ok := strings.CutPrefix(s, inheritedPrefix); ok {
		if c := checkInherited(name); c != nil {
			return "", complain(c.hint, "%s %q: %s", what, clip(s), c.msg)
		}
		return s, nil
	}
	address, ok := strings.CutPrefix(s, udpPrefix)
	if !ok && strings.Contains(s, "://") {
		return "", complain("write udp://:443 for UDP, :443 for TCP, and unix:/run/culvert/proxy.sock for a Unix socket", "address %q: udp:// is the only scheme", clip(s))
	}
	if _, _, err := net.SplitHostPort(address); ok && err != nil {
		return "", complain("write udp://:443, udp://192.0.2.1:443 or udp://[2001:db8::1]:443", "address %q is not an address with a port", clip(s))
	}
	if _, c := parseListenAddress(what, address); c != nil {
		return "", c
	}
	return s, nil
}

// socketPrefix begins the address of a socket.
const socketPrefix = "unix:"

func isSocket(address string) bool { return strings.HasPrefix(address, socketPrefix) }

// maxSocketPath is the longest path of a Unix socket, in bytes, that every system takes.
const maxSocketPath = 103

// checkSocketPath returns what is wrong with the path of a Unix socket.
func checkSocketPath(name string) *complaint {
	switch {
	case runtime.GOOS == "windows":
		return complain("listen on 127.0.0.1", "Windows does not say by the file of a socket who may connect")
	case strings.HasPrefix(name, "@"):
		switch {
		case runtime.GOOS != "linux":
			return complain("write the path of a file", "only Linux has abstract sockets")
		case len(name) == 1:
			return complain("write unix:@NAME", "an abstract socket needs a name")
		}
	case !path.IsAbs(name):
		return complain("write unix:/run/culvert/proxy.sock", "the path of a socket must be absolute")
	case path.Clean(name) != name || name == "/":
		return complain("did you mean "+socketPrefix+path.Clean(name)+"?", "the path of a socket has empty elements, or . or ..")
	}
	if len(name) > maxSocketPath {
		return complain("use a shorter path", "the path of a socket has %d bytes, limit %d", len(name), maxSocketPath)
	}
	if strings.ContainsFunc(name, func(r rune) bool { return r < ' ' || r == 0x7f }) {
		return complain("", "the path of a socket has control characters")
	}
	return nil
}

// parseSocketMode parses the permission bits of a socket's file.
func parseSocketMode(what, s string) (fs.FileMode, *complaint) {
	mode, err := strconv.ParseUint(strings.TrimPrefix(s, "0o"), 8, 32)
	switch {
	case err != nil || mode > 0o777:
		return 0, complain(`write it in octal: "0660"`, "%s %q is not the permission bits of a file", what, clip(s))
	case mode&0o222 == 0:
		return 0, complain(`write "0600" for the user of the gateway, or "0660" for its group, too`, "%s %q lets nobody write to the socket, and so nobody connect", what, clip(s))
	}
	return fs.FileMode(mode), nil
}

// parseAdminAddress is parseListenAddress for one that may be a socket.
func parseAdminAddress(what, s string) (string, *complaint) {
	name, ok := strings.CutPrefix(s, socketPrefix)
	if !ok {
		return parseListenAddress(what, s)
	}
	if !path.IsAbs(name) {
		return "", complain("write unix:/run/culvert/admin.sock", "admin %q: the path of a socket must be absolute", clip(s))
	}
	return s, nil
}
