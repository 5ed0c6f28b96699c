package sni

import (
	"errors"
	"fmt"

	"golang.org/x/crypto/cryptobyte"

	"culvert.dev/tunnel"
)

// Parse reads the ClientHello at the start of raw, the bytes received so far.
// It returns ErrMore where raw may be the beginning of one, and a *ParseError
// where it can't be.
func Parse(raw []byte) (Hello, error) {
	var p Parser
	return p.Feed(raw)
}

// ServerName returns the name that raw asks for, a ClientHello as Parse takes it, and "" for
// anything else.
func ServerName(raw []byte) string {
	h, err := Parse(raw)
	if err != nil || h.Name.IsZero() {
		return ""
	}
	return h.Name.String()
}

// A Parser reads one ClientHello as it arrives. It looks at each byte once,
// copies nothing but the name and the ALPN list, and holds nothing else.
// The zero value is ready to use.
type Parser struct {
	raw []byte // what Feed was given; nil between calls

	off     int // in raw: everything before it has been read
	record  int // bytes of the current record that have not been read
	records int // headers read

	stage  stage
	pos    int // in the message, the records' headers not counted
	end    int // of the message
	extEnd int // of the extension being read
	skip   int // bytes to step over before the next field

	field [4]byte // the start of a field that is split over records
	have  int     // how many bytes of it
	at    int     // where it began in raw

	seen  typeSet
	named bool
	name  span
	alpn  span

	hello Hello
	err   error // what Feed has answered for good
	done  bool
}

// A stage is the field that is read next.
type stage uint8

const (
	readType stage = iota
	readLength
	readVersion
	readSession
	readSuites
	readCompression
	readExtensions
	readExtension
	readNames
	readName
	endName
	readProtocols
	readProtocol
	readVersions
	readOffered
	readECH
)

// size is the length of each stage's field in bytes, at most len(field).
var size = [...]int{
	readType:        1, // RFC 8446 section 4: HandshakeType
	readLength:      3, //   uint24 length
	readVersion:     2, // section 4.1.2: legacy_version; Random random[32]
	readSession:     1, //   opaque legacy_session_id<0..32>
	readSuites:      2, //   CipherSuite cipher_suites<2..2^16-2>
	readCompression: 1, //   opaque legacy_compression_methods<1..2^8-1>
	readExtensions:  2, //   Extension extensions<0..2^16-1>
	readExtension:   4, // section 4.2: uint16 type, uint16 length
	readNames:       2, // RFC 6066 section 3: ServerName server_name_list<1..2^16-1>
	readName:        3, //   uint8 name_type, opaque HostName<1..2^16-1>
	endName:         0,
	readProtocols:   2, // RFC 7301 section 3.1: ProtocolName protocol_name_list<2..2^16-1>
	readProtocol:    1, //   opaque ProtocolName<1..2^8-1>
	readVersions:    1, // RFC 8446 section 4.2.1: ProtocolVersion versions<2..254>
	readOffered:     2,
	readECH:         1, // RFC 9849 section 5: ECHClientHelloType
}

// The extensions that are read.
const (
	extServerName        = 0
	extALPN              = 16
	extSupportedVersions = 43
	extECH               = 0xfe0d
)

// Content, handshake, name and ECH types.
const (
	typeHandshake   = 22
	typeClientHello = 1
	typeHostName    = 0
	typeECHOuter    = 0
)

// Feed reads on. raw is everything received so far: it begins with the bytes
// of the call before. The answers are those of Parse; a Hello or a *ParseError
// is final.
func (p *Parser) Feed(raw []byte) (Hello, error) {
	if !p.done && p.err == nil {
		p.raw = raw
		err := p.run()
		p.raw = nil
		if err == ErrMore {
			return Hello{}, err
		}
		p.done, p.err = err == nil, err
	}
	if p.err != nil {
		return Hello{}, p.err
	}
	return p.hello, nil
}

// complete reports whether raw, the bytes received so far, has all of its first message,
// or does not begin with a ClientHello. Then Parse does not answer ErrMore. A hello
// that is malformed further in is complete with its last byte, and not before.
func complete(raw []byte) bool {
	p := Parser{raw: raw}
	for p.stage <= readLength {
		b, err := p.next(size[p.stage])
		if err == nil {
			err = p.read(cryptobyte.String(b))
		}
		if err != nil {
			return err != ErrMore
		}
	}
	p.skip = p.end - p.pos
	return p.discard() != ErrMore
}

// run reads fields to the end of the message. It returns nil there.
func (p *Parser) run() error {
	for {
		if err := p.discard(); err != nil {
			return err
		}
		end := p.end
		switch p.stage {
		case readType, readLength:
			end = helloHeader
		case readExtensions, readExtension:
			if p.pos == p.end { // TLS 1.2 and older may have no extensions at all
				p.finish()
				return nil
			}
		case readProtocol, readOffered:
			if p.pos == p.extEnd {
				p.stage = readExtension
				continue
			}
			end = p.extEnd
		case readNames, readName, endName, readProtocols, readVersions, readECH:
			end = p.extEnd
		}
		n := size[p.stage]
		if p.have == 0 && p.pos+n > end {
			return p.malformed(p.off, "a field of %d bytes where %d are left", n, end-p.pos)
		}
		b, err := p.next(n)
		if err == nil {
			err = p.read(cryptobyte.String(b))
		}
		if err != nil {
			return err
		}
	}
}

// read parses one field and sets the next stage.
func (p *Parser) read(s cryptobyte.String) error {
	var (
		n8  uint8
		n16 uint16
	)
	switch p.stage {
	case readType:
		if s.ReadUint8(&n8); n8 != typeClientHello {
			return p.fail(p.at, UnexpectedMessage, 0, "handshake message of type %d, want client_hello (%d)", n8, typeClientHello)
		}
		p.stage = readLength
	case readLength:
		var n uint32
		if s.ReadUint24(&n); n > MaxHello {
			return p.fail(p.at, IllegalParameter, MaxHello, "hello is %d bytes, limit %d", n, MaxHello)
		}
		p.end = p.pos + int(n)
		p.stage = readVersion
	case readVersion:
		if s.ReadUint16(&n16); n16 < 0x0300 {
			return p.fail(p.at, ProtocolVersion, 0, "hello of version %#04x, want 0x0300 or later", n16)
		}
		p.hello.Version = n16
		return p.then(readSession, 32)
	case readSession:
		if s.ReadUint8(&n8); n8 > 32 {
			return p.fail(p.at, DecodeError, 32, "session id is %d bytes, limit 32", n8)
		}
		return p.then(readSuites, int(n8))
	case readSuites:
		if s.ReadUint16(&n16); n16 == 0 || n16%2 != 0 {
			return p.malformed(p.at, "cipher suites are %d bytes, want a positive even number", n16)
		}
		return p.then(readCompression, int(n16))
	case readCompression:
		if s.ReadUint8(&n8); n8 == 0 {
			return p.malformed(p.at, "no compression method, want at least one")
		}
		return p.then(readExtensions, int(n8))
	case readExtensions:
		if s.ReadUint16(&n16); int(n16) != p.end-p.pos {
			return p.malformed(p.at, "extensions are %d bytes where %d are left", n16, p.end-p.pos)
		}
		p.stage = readExtension
	case readExtension:
		var t uint16
		s.ReadUint16(&t)
		s.ReadUint16(&n16)
		return p.extension(t, int(n16))
	case readNames:
		if s.ReadUint16(&n16); int(n16) != p.extEnd-p.pos {
			return p.malformed(p.at, "server names are %d bytes where %d are left", n16, p.extEnd-p.pos)
		}
		if n16 == 0 {
			return p.malformed(p.at, "the list of server names is empty, want one name")
		}
		p.stage = readName
	case readName:
		s.ReadUint8(&n8)
		s.ReadUint16(&n16)
		return p.serverName(n8, int(n16))
	case endName:
		return p.parseName()
	case readProtocols:
		if s.ReadUint16(&n16); int(n16) != p.extEnd-p.pos || n16 < 2 {
			return p.malformed(p.at, "ALPN list is %d bytes where %d are left", n16, p.extEnd-p.pos)
		}
		p.alpn = p.mark(int(n16))
		p.stage = readProtocol
	case readProtocol:
		if s.ReadUint8(&n8); n8 == 0 || int(n8) > p.extEnd-p.pos {
			return p.malformed(p.at, "ALPN protocol is %d bytes, want 1 to %d", n8, p.extEnd-p.pos)
		}
		p.skip = int(n8)
	case readVersions:
		if s.ReadUint8(&n8); int(n8) != p.extEnd-p.pos || n8 == 0 || n8%2 != 0 {
			return p.malformed(p.at, "supported versions are %d bytes where %d are left", n8, p.extEnd-p.pos)
		}
		p.hello.Version = 0 // the extension overrules the field
		p.stage = readOffered
	case readOffered:
		// Drafts (0x7fXX) and GREASE (0xXaXa) are no versions.
		if s.ReadUint16(&n16); n16>>8 == 3 {
			p.hello.Version = max(p.hello.Version, n16)
		}
	case readECH:
		s.ReadUint8(&n8)
		p.hello.ECH = n8 == typeECHOuter
		return p.then(readExtension, p.extEnd-p.pos)
	}
	return nil
}

// extension begins an extension of n bytes.
func (p *Parser) extension(t uint16, n int) error {
	switch {
	case n > p.end-p.pos:
		return p.malformed(p.at, "extension %d is %d bytes where %d are left", t, n, p.end-p.pos)
	case p.seen.add(t):
		return p.fail(p.at, IllegalParameter, 0, "extension %d occurs twice", t)
	}
	p.extEnd = p.pos + n
	switch t {
	case extServerName:
		p.named, p.stage = true, readNames
	case extALPN:
		p.stage = readProtocols
	case extSupportedVersions:
		p.stage = readVersions
	case extECH:
		// An empty one is the server's to judge: it does not change the route.
		if p.stage = readECH; n == 0 {
			p.stage = readExtension
		}
	default:
		p.skip = n
	}
	return nil
}

// serverName begins a server name of n bytes. RFC 6066 allows for other types
// than host_name, but none was ever made and TLS libraries differ in what they
// do with one: a list that is not exactly one host_name has no sure meaning.
func (p *Parser) serverName(t uint8, n int) error {
	switch rest := p.extEnd - p.pos - n; {
	case rest < 0:
		return p.malformed(p.at+1, "server name is %d bytes where %d are left", n, p.extEnd-p.pos)
	case t != typeHostName:
		return p.fail(p.at, IllegalParameter, 0, "server name of type %d, want host_name (%d)", t, typeHostName)
	case 0 < rest && rest < size[readName]:
		return p.malformed(p.at+1, "%d bytes left over after the server name", rest)
	case rest > 0:
		return p.fail(p.at, IllegalParameter, 0, "more than one server name in the list")
	case n == 0:
		return p.malformed(p.at+1, "server name is 0 bytes, want at least one")
	case n > tunnel.MaxNameLen+len("."):
		return p.fail(p.at+1, IllegalParameter, tunnel.MaxNameLen, "server name is %d bytes, limit %d", n, tunnel.MaxNameLen)
	}
	p.name = p.mark(n)
	return p.then(endName, n)
}

// parseName takes in the server name, which has arrived.
func (p *Parser) parseName() error {
	p.hello.RawName = p.text(p.name)
	name, err := ParseName(p.hello.RawName)
	if tunnel.ReasonOf(err) == tunnel.NoSNI {
		p.hello.NameErr = err
	} else if err != nil {
		e := &ParseError{Reason: tunnel.BadHello, Alert: IllegalParameter, Offset: p.name.off, Err: err}
		if errors.Is(err, tunnel.ErrNameTooLong) {
			e.Limit = tunnel.MaxNameLen
		}
		return e
	}
	p.hello.Name = name
	p.stage = readExtension
	return nil
}

// ParseName is tunnel.ParseName with the Reason a server name gets that is not
// a name: NoSNI for an address and for nothing, BadHello for the rest.
func ParseName(s string) (tunnel.Name, error) {
	name, err := tunnel.ParseName(s)
	switch {
	case err == nil:
		return name, nil
	case errors.Is(err, tunnel.ErrNameAddress):
		return name, &tunnel.Error{Reason: tunnel.NoSNI, Err: fmt.Errorf("sni: %w, which RFC 6066 section 3 does not allow", err)}
	case errors.Is(err, tunnel.ErrNameEmpty):
		return name, &tunnel.Error{Reason: tunnel.NoSNI, Err: ErrNoName}
	}
	return name, &tunnel.Error{Reason: tunnel.BadHello, Err: err}
}

// finish completes the hello.
func (p *Parser) finish() {
	if !p.named {
		p.hello.NameErr = ErrNoName
	}
	p.hello.alpn = p.text(p.alpn)
	p.hello.Len = p.off
}

// then steps over n bytes of the message and goes on with stage s.
func (p *Parser) then(s stage, n int) error {
	if n > p.end-p.pos {
		return p.malformed(p.at, "a field of %d bytes where %d are left", n, p.end-p.pos)
	}
	p.stage, p.skip = s, n
	return nil
}

// fail makes the error of a field at offset at.
func (p *Parser) fail(at int, a Alert, limit int, format string, args ...any) error {
	return &ParseError{Reason: tunnel.BadHello, Alert: a, Offset: at, Limit: limit, Err: fmt.Errorf(format, args...)}
}

// malformed returns the error for a length that overruns or does not fill its
// container.
func (p *Parser) malformed(at int, format string, args ...any) error {
	return p.fail(at, DecodeError, 0, format, args...)
}
