package tunnel

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"
)

// Limits of a host name in its textual form, RFC 1035 section 2.3.4.
const (
	MaxNameLen  = 253 // octets, without the trailing dot
	MaxLabelLen = 63  // octets
)

// What can be wrong with a name. ParseName wraps exactly one of these.
var (
	ErrNameEmpty   = errors.New("name is empty")
	ErrNameTooLong = errors.New("name is too long")
	ErrNameLabel   = errors.New("name has an empty or over-long label")
	ErrNameByte    = errors.New("name has a byte that is not a letter, digit, hyphen, underscore or dot")
	ErrNameAddress = errors.New("name is an address")
)

// A Name is a normalised host name: lower case, without trailing dot, made of
// letters, digits, hyphens and underscores. It is a routing key, never an
// identity.
//
// ParseName is the only way to make one that is not zero, so that routing,
// policy and certificate choice can never see two spellings of the same name.
type Name struct{ s string }

// ParseName normalises s. Letters are lower-cased, one trailing dot is
// dropped; IDN A-labels ("xn--...") are left as they are and U-labels are
// refused. A name whose last label is a number ("127.1", "0x7f000001") is an
// address to some resolvers and is refused as one.
//
// Underscores are legal: Istio's "outbound_.443_._.host" is a name.
func ParseName(s string) (Name, error) {
	host := strings.TrimSuffix(s, ".")
	switch {
	case host == "" && s == "":
		return Name{}, ErrNameEmpty
	case len(host) > MaxNameLen:
		return Name{}, fmt.Errorf("%w: %d bytes, limit %d", ErrNameTooLong, len(host), MaxNameLen)
	}
	upper, start := false, 0
	for i := 0; i <= len(host); i++ {
		if i == len(host) || host[i] == '.' {
			if n := i - start; n == 0 || n > MaxLabelLen {
				return Name{}, fmt.Errorf("%w: %q at offset %d has %d bytes, want 1 to %d", ErrNameLabel, Clip(host), start, n, MaxLabelLen)
			}
			if i < len(host) {
				start = i + 1
			}
			continue
		}
		switch c := host[i]; {
		case 'a' <= c && c <= 'z', '0' <= c && c <= '9', c == '-', c == '_':
		case 'A' <= c && c <= 'Z':
			upper = true
		case c == ':' || c == '[':
			if _, err := netip.ParseAddr(strings.Trim(host, "[]")); err == nil {
				return Name{}, fmt.Errorf("%w: %q", ErrNameAddress, Clip(host))
			}
			fallthrough
		default:
			return Name{}, fmt.Errorf("%w: %q at offset %d", ErrNameByte, Clip(host), i)
		}
	}
	if upper {
		host = strings.ToLower(host)
	}
	if isNumber(host[start:]) {
		return Name{}, fmt.Errorf("%w: %q", ErrNameAddress, Clip(host))
	}
	return Name{s: host}, nil
}

// MustParseName is ParseName for names that stand in the source.
func MustParseName(s string) Name {
	n, err := ParseName(s)
	if err != nil {
		panic(err)
	}
	return n
}

// String returns the normalised name, "" for the zero Name.
func (n Name) String() string { return n.s }

// IsZero reports whether n is the zero Name, which no input parses to.
func (n Name) IsZero() bool { return n.s == "" }

// Parent returns n without its first label. It is false where n has one label
// only. It does not allocate.
func (n Name) Parent() (Name, bool) {
	_, rest, ok := strings.Cut(n.s, ".")
	return Name{s: rest}, ok
}

// ReservedZone is the name below which names belong to the gateways themselves. DNS has
// nothing there: RFC 9476 section 2.
const ReservedZone = "culvert.alt"

// IsReserved reports whether n is ReservedZone or below. No service has such a name: a
// gateway answers requests for it itself, or refuses them.
func (n Name) IsReserved() bool {
	rest, ok := strings.CutSuffix(n.s, ReservedZone)
	return ok && (rest == "" || rest[len(rest)-1] == '.')
}

// AppendText implements encoding.TextAppender.
func (n Name) AppendText(b []byte) ([]byte, error) { return append(b, n.s...), nil }

// MarshalText implements encoding.TextMarshaler.
func (n Name) MarshalText() ([]byte, error) { return []byte(n.s), nil }

// UnmarshalText implements encoding.TextUnmarshaler. Empty text is the zero Name.
func (n *Name) UnmarshalText(text []byte) (err error) {
	*n = Name{}
	if len(text) > 0 {
		*n, err = ParseName(string(text))
	}
	return err
}

// A Pattern is a name as a route writes it: exact, or "*.suffix" for every
// name with one or more labels before the suffix, the suffix itself excluded
// (Gateway API's rule for hostnames).
type Pattern struct {
	Suffix   Name // the name itself where Wildcard is false
	Wildcard bool
}

// AnyName is the Pattern "*", of every name. ParsePattern does not take it: only what
// means to have all names writes it.
var AnyName = Pattern{Wildcard: true}

// ParsePattern parses "name" or "*.name". An asterisk anywhere else is an error.
func ParsePattern(s string) (Pattern, error) {
	rest, wild := strings.CutPrefix(s, "*.")
	n, err := ParseName(rest)
	if err != nil {
		return Pattern{}, err
	}
	return Pattern{Suffix: n, Wildcard: wild}, nil
}

func (p Pattern) String() string {
	if p == AnyName {
		return "*"
	}
	if p.Wildcard {
		return "*." + p.Suffix.s
	}
	return p.Suffix.s
}

// MarshalText implements encoding.TextMarshaler.
func (p Pattern) MarshalText() ([]byte, error) { return []byte(p.String()), nil }

// UnmarshalText implements encoding.TextUnmarshaler. Empty text is the zero Pattern.
func (p *Pattern) UnmarshalText(text []byte) (err error) {
	*p = Pattern{}
	switch {
	case string(text) == "*":
		*p = AnyName
	case len(text) > 0:
		*p, err = ParsePattern(string(text))
	}
	return err
}

// Matches reports whether n is covered by p.
func (p Pattern) Matches(n Name) bool {
	if p == AnyName {
		return !n.IsZero()
	}
	if !p.Wildcard {
		return n == p.Suffix && !n.IsZero()
	}
	rest, ok := strings.CutSuffix(n.s, p.Suffix.s)
	return ok && len(rest) > 1 && rest[len(rest)-1] == '.'
}

// isNumber reports whether label reads as a number to the lenient address
// parsers of C libraries and browsers: decimal, octal or hexadecimal
// (WHATWG URL, "ends in a number checker").
func isNumber(label string) bool {
	digits, hex := strings.CutPrefix(label, "0x")
	for i := range len(digits) {
		c := digits[i]
		if '0' <= c && c <= '9' || hex && 'a' <= c && c <= 'f' {
			continue
		}
		return false
	}
	return true
}

// Clip shortens what a client sent to what an error may quote.
func Clip(s string) string {
	const most = 80
	if len(s) <= most {
		return s
	}
	return s[:most] + "..."
}
