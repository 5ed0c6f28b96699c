package socks5

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"

	"culvert.dev/tunnel"
)

// First bytes of messages.
const (
	version4    = 4 // SOCKS4 and SOCKS4a
	version5    = 5 // RFC 1928
	versionAuth = 1 // of the sub-negotiation, RFC 1929
)

// Methods of authentication, RFC 1928 section 3.
const (
	methodNone     = 0x00
	methodPassword = 0x02
	methodRefused  = 0xff
)

// Commands, RFC 1928 section 4.
const (
	cmdConnect   = 1
	cmdBind      = 2
	cmdAssociate = 3
)

// Types of address, RFC 1928 section 5.
const (
	typeIPv4 = 1
	typeName = 3
	typeIPv6 = 4
)

// maxMessage limits the bytes that are buffered while a message is incomplete. The
// longest one, with a user name and a password, has 513.
const maxMessage = 1 << 10

// errMore is the error for a proper prefix of a message.
var errMore = errors.New("socks5: more bytes are needed")

// parseGreeting reads
//
//	version (5) | number of methods | methods
//
// of RFC 1928 section 3. It returns the methods, which share memory with b,
// and the length of the message. The caller has looked at the version.
func parseGreeting(b []byte) (methods []byte, n int, err error) {
	if len(b) < 2 || len(b) < 2+int(b[1]) {
		return nil, 0, errMore
	}
	n = 2 + int(b[1])
	return b[2:n], n, nil
}

// parsePassword reads
//
//	version (1) | length | user name | length | password
//
// of RFC 1929 section 2. It returns the length of the message with the two.
// An error quotes nothing: the bytes may be a secret in the wrong place.
func parsePassword(b []byte) (user, password string, n int, err error) {
	if len(b) > 0 && b[0] != versionAuth {
		return "", "", 0, fmt.Errorf("the sub-negotiation begins with %#02x, want %#02x", b[0], versionAuth)
	}
	if len(b) < 2 {
		return "", "", 0, errMore
	}
	at := 2 + int(b[1])
	if len(b) <= at {
		return "", "", 0, errMore
	}
	n = at + 1 + int(b[at])
	if len(b) < n {
		return "", "", 0, errMore
	}
	return string(b[2:at]), string(b[at+1 : n]), n, nil
}

// A destination is what a request asks for.
type destination struct {
	name tunnel.Name // zero where addr is valid
	addr netip.Addr  // IPv4-mapped IPv6 addresses are unmapped
	port uint16      // never 0
}

// A requestError says what is wrong with a request, and has the reply for it.
type requestError struct {
	reply Reply
	err   error
}

func (e *requestError) Error() string { return e.err.Error() }
func (e *requestError) Unwrap() error { return e.err }

func badRequest(r Reply, format string, args ...any) error {
	return &requestError{r, fmt.Errorf(format, args...)}
}

// parseRequest reads
//
//	version (5) | command | 0 | type of address | address | port, 2 bytes
//
// of RFC 1928 section 4, in which a name has its length in front. It returns
// the length of the message. A request that is not supported is refused as soon as
// that is known: its rest may have any form.
//
// An address in the place of a name is read as an address.
func parseRequest(b []byte) (to destination, n int, err error) {
	switch {
	case len(b) > 0 && b[0] != version5:
		return to, 0, badRequest(GeneralFailure, "the request begins with %#02x, want %#02x", b[0], version5)
	case len(b) > 1 && b[1] != cmdConnect:
		return to, 0, badRequest(CommandNotSupported, "command %s, want CONNECT", command(b[1]))
	case len(b) > 2 && b[2] != 0:
		return to, 0, badRequest(GeneralFailure, "the reserved byte is %#02x, want 0", b[2])
	case len(b) > 3 && b[3] != typeIPv4 && b[3] != typeName && b[3] != typeIPv6:
		return to, 0, badRequest(AddressTypeNotSupported, "address type %#02x is none of IPv4, name and IPv6", b[3])
	case len(b) < 5:
		return to, 0, errMore
	}
	at, size := 4, 0
	switch b[3] {
	case typeIPv4:
		size = 4
	case typeIPv6:
		size = 16
	case typeName:
		at, size = 5, int(b[4])
	}
	n = at + size + 2
	if len(b) < n {
		return to, 0, errMore
	}
	host := b[at : at+size]
	if b[3] == typeName {
		if to.name, to.addr, err = parseHost(string(host)); err != nil {
			return destination{}, 0, &requestError{GeneralFailure, err}
		}
	} else {
		to.addr, _ = netip.AddrFromSlice(host)
		to.addr = to.addr.Unmap()
	}
	if to.port = binary.BigEndian.Uint16(b[at+size:]); to.port == 0 {
		return destination{}, 0, badRequest(GeneralFailure, "port 0")
	}
	return to, n, nil
}

// parseHost reads what stands in the place of a name. Addresses in any form
// but the usual ones ("127.1", "0x7f.0.0.1", "2130706433", "[::1]") are
// refused by ParseName.
func parseHost(s string) (tunnel.Name, netip.Addr, error) {
	if addr, err := netip.ParseAddr(s); err == nil {
		if addr.Zone() != "" {
			return tunnel.Name{}, netip.Addr{}, fmt.Errorf("an address with a zone means nothing on another host: %q", s)
		}
		return tunnel.Name{}, addr.Unmap(), nil
	}
	name, err := tunnel.ParseName(s)
	return name, netip.Addr{}, err
}

// appendRequest writes the CONNECT request that parseRequest reads.
func appendRequest(b []byte, to destination) []byte {
	b = append(b, version5, cmdConnect, 0)
	switch {
	case to.addr.Is4():
		b = append(b, typeIPv4)
		b = append(b, to.addr.AsSlice()...)
	case to.addr.Is6():
		b = append(b, typeIPv6)
		b = append(b, to.addr.AsSlice()...)
	default:
		name := to.name.String()
		b = append(b, typeName, byte(len(name))) // a Name has at most 253 bytes
		b = append(b, name...)
	}
	return binary.BigEndian.AppendUint16(b, to.port)
}

func command(c byte) string {
	switch c {
	case cmdBind:
		return "BIND"
	case cmdAssociate:
		return "UDP ASSOCIATE"
	}
	return fmt.Sprintf("%#02x", c)
}
