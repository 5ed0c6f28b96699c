package sshkeys

import (
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"golang.org/x/crypto/ssh"

	"culvert.dev/identity"
	"culvert.dev/tunnel"
)

// maxName is the most bytes of what a key or a principal is called.
const maxName = 128

// A Key is a line of authorized_keys.
type Key struct {
	Name    string    // its comment, and its fingerprint where it has none: the caller's ID
	Expires time.Time // zero for never
	Limits  Limits
	Info    tunnel.AuthInfo // what the Name says of a workload, where it is a SPIFFE id
}

// Limits are what a key or a certificate restricts.
type Limits struct {
	From         *From // addresses that clients may have; nil for any
	PermitOpen   []HostPort
	PermitListen []HostPort
}

// A HostPort is a destination that an option names. A Port of 0 is any.
type HostPort struct {
	Host string // in lower case; "" for any of permitlisten
	Port uint16
}

// A Mistake is a line of a file that is not understood.
type Mistake struct {
	Line int // from 1
	Text string
}

// AuthorizedKeys are the keys of a file, by their bytes on the wire.
type AuthorizedKeys map[string]*Key

// ParseAuthorizedKeys reads a file as sshd(8) describes it. A line with a mistake gives
// no key.
func ParseAuthorizedKeys(content string) (AuthorizedKeys, []Mistake) {
	keys := AuthorizedKeys{}
	names := map[string]int{}
	var mistakes []Mistake
	n := 0
	for line := range strings.Lines(content) {
		n++
		line = strings.TrimSpace(line)
		if line == "" || line[0] == '#' {
			continue
		}
		wrong := func(format string, args ...any) {
			mistakes = append(mistakes, Mistake{n, fmt.Sprintf(format, args...)})
		}
		public, comment, options, _, err := ssh.ParseAuthorizedKey([]byte(line))
		if err != nil {
			wrong("this is not a public key of OpenSSH, with options before it and a name after it")
			continue
		}
		if err := checkKey(public); err != nil {
			wrong("%v", err)
			continue
		}
		key := &Key{Name: comment}
		if comment == "" {
			key.Name = ssh.FingerprintSHA256(public)
		}
		wire := string(public.Marshal())
		var id error
		if key.Info, id = infoOf(key.Name); id != nil {
			wrong("%v", id)
			continue
		}
		switch {
		case !usableName(key.Name):
			wrong("the name after the key has more than %d bytes or control characters", maxName)
		case keys[wire] != nil:
			wrong("the key is listed twice")
		case names[key.Name] != 0:
			wrong("line %d has the name %q, too: give each key its own", names[key.Name], key.Name)
		default:
			if err := key.options(options); err != nil {
				wrong("%v", err)
				continue
			}
			keys[wire], names[key.Name] = key, n
		}
	}
	return keys, mistakes
}

// infoOf returns what the ID of a key says of a workload. It may not be that of a user of
// this machine.
func infoOf(id string) (tunnel.AuthInfo, error) {
	switch {
	case strings.HasPrefix(id, "spiffe://"):
		info, err := identity.Principal(id)
		if err != nil {
			return tunnel.AuthInfo{}, err
		}
		return *info, nil
	case strings.HasPrefix(id, tunnel.UserID):
		return tunnel.AuthInfo{}, fmt.Errorf("%q is the id of a user of this machine: call the key otherwise", tunnel.Clip(id))
	}
	return tunnel.AuthInfo{}, nil
}

// usableName reports whether s may be an ID, which ends up in logs.
func usableName(s string) bool {
	return s != "" && len(s) <= maxName && utf8.ValidString(s) && !strings.ContainsFunc(s, unicode.IsControl)
}

// options reads the options of a key.
func (k *Key) options(all []string) error {
	for _, o := range all {
		name, value, _ := strings.Cut(o, "=")
		value, quoted := strings.CutPrefix(value, `"`)
		if quoted {
			value = strings.ReplaceAll(strings.TrimSuffix(value, `"`), `\"`, `"`)
		}
		var err error
		switch strings.ToLower(name) {
		case "from":
			if k.Limits.From != nil {
				return fmt.Errorf("the option from is there twice")
			}
			k.Limits.From, err = parseFrom(value)
		case "permitopen":
			k.Limits.PermitOpen, err = appendHostPort(k.Limits.PermitOpen, value, true)
		case "permitlisten":
			k.Limits.PermitListen, err = appendHostPort(k.Limits.PermitListen, value, false)
		case "expiry-time":
			var at time.Time
			if at, err = parseExpiry(value); err == nil && (k.Expires.IsZero() || at.Before(k.Expires)) {
				k.Expires = at
			}
		default:
			return fmt.Errorf("the option %q is not supported: keys may have permitlisten, permitopen, from and expiry-time", tunnel.Clip(name))
		}
		if err != nil {
			return fmt.Errorf("%s=%q: %w", name, tunnel.Clip(value), err)
		}
	}
	return nil
}

// appendHostPort reads HOST:PORT, where PORT may be "*". Where the host is not required,
// a PORT alone is for any.
func appendHostPort(to []HostPort, s string, needsHost bool) ([]HostPort, error) {
	host, port, err := net.SplitHostPort(s)
	if err != nil {
		host, port = "", s
	}
	if host == "" && needsHost {
		return nil, fmt.Errorf("want HOST:PORT")
	}
	if needsHost && strings.ContainsAny(host, "*?") {
		return nil, fmt.Errorf("a host has no wildcards here")
	}
	hp := HostPort{Host: strings.ToLower(strings.TrimSuffix(host, "."))}
	if addr, err := netip.ParseAddr(hp.Host); err == nil {
		hp.Host = addr.Unmap().String()
	}
	if port != "*" {
		n, err := strconv.ParseUint(port, 10, 16)
		if err != nil || n == 0 {
			return nil, fmt.Errorf("the port is not a number from 1 to 65535 or *")
		}
		hp.Port = uint16(n)
	}
	return append(to, hp), nil
}

// MayOpen reports whether host and port are a destination that l permits. host is
// normalised, as tunnel.Name or an unmapped address is.
func (l *Limits) MayOpen(host string, port uint16) bool {
	return permits(l.PermitOpen, host, port, func(pattern, host string) bool { return pattern == host })
}

// MayListen reports whether l permits to register host at port. A pattern may have
// wildcards.
func (l *Limits) MayListen(host string, port uint16) bool {
	return permits(l.PermitListen, host, port, func(pattern, host string) bool { return pattern == "" || matches(pattern, host) })
}

func permits(all []HostPort, host string, port uint16, same func(pattern, host string) bool) bool {
	if all == nil {
		return true
	}
	for _, hp := range all {
		if (hp.Port == 0 || hp.Port == port) && same(hp.Host, host) {
			return true
		}
	}
	return false
}

// matches reports whether s matches a pattern with * and ?, which has no other
// characters with a meaning. Its time is the product of the lengths at most.
func matches(pattern, s string) bool {
	p, i, star, from := 0, 0, -1, 0
	for i < len(s) {
		switch {
		case p < len(pattern) && pattern[p] == '*':
			star, from = p, i
			p++
		case p < len(pattern) && (pattern[p] == '?' || pattern[p] == s[i]):
			p++
			i++
		case star >= 0:
			from++
			p, i = star+1, from
		default:
			return false
		}
	}
	for p < len(pattern) && pattern[p] == '*' {
		p++
	}
	return p == len(pattern)
}

// A From is a list of addresses, ranges, and addresses with wildcards, as PATTERNS in
// ssh_config(5): one that matches admits, and one that is negated and matches refuses.
type From struct{ all []fromItem }

type fromItem struct {
	negated bool
	prefix  netip.Prefix // invalid where there is a pattern
	pattern string
}

func parseFrom(s string) (*From, error) {
	f := &From{}
	for one := range strings.SplitSeq(s, ",") {
		one = strings.ToLower(strings.TrimSpace(one))
		var item fromItem
		one, item.negated = strings.CutPrefix(one, "!")
		if one == "" {
			return nil, fmt.Errorf("an entry is empty")
		}
		if p, err := netip.ParsePrefix(one); err == nil {
			item.prefix = p.Masked()
		} else if a, err := netip.ParseAddr(one); err == nil && a.Zone() == "" {
			item.prefix = netip.PrefixFrom(a.Unmap(), a.Unmap().BitLen())
		} else if strings.Trim(one, "0123456789abcdef.:*?") == "" && strings.ContainsAny(one, "*?") && (one == "*" || strings.ContainsAny(one, ".:")) {
			item.pattern = one
		} else {
			return nil, fmt.Errorf("%q is neither an address nor a range: names are not looked up", tunnel.Clip(one))
		}
		f.all = append(f.all, item)
	}
	return f, nil
}

// admits reports whether a client may have addr.
func (f *From) admits(addr netip.Addr) bool {
	if f == nil {
		return true
	}
	addr = addr.Unmap()
	if !addr.IsValid() { // of a Unix socket
		return false
	}
	text, admitted := addr.String(), false
	for _, item := range f.all {
		hit := item.prefix.IsValid() && item.prefix.Contains(addr) || !item.prefix.IsValid() && matches(item.pattern, text)
		if hit && item.negated {
			return false
		}
		admitted = admitted || hit
	}
	return admitted
}

// parseExpiry reads YYYYMMDD, YYYYMMDDHHMM or YYYYMMDDHHMMSS, in UTC with a Z at the
// end and in the time zone of the system otherwise.
func parseExpiry(s string) (time.Time, error) {
	digits, utc := strings.CutSuffix(s, "Z")
	zone := time.Local
	if utc {
		zone = time.UTC
	}
	for _, layout := range []string{"20060102", "200601021504", "20060102150405"} {
		if len(digits) == len(layout) {
			if at, err := time.ParseInLocation(layout, digits, zone); err == nil {
				return at, nil
			}
		}
	}
	return time.Time{}, fmt.Errorf("want YYYYMMDD[HHMM[SS]][Z]")
}
