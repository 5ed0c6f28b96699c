package dns

import (
	"fmt"
	"net/netip"
	"strings"
	"time"

	"github.com/miekg/dns"
)

// A Type is a type of record, by its number.
type Type uint16

// The types a table can answer.
const (
	TypeA     = Type(dns.TypeA)
	TypePTR   = Type(dns.TypePTR)
	TypeTXT   = Type(dns.TypeTXT)
	TypeAAAA  = Type(dns.TypeAAAA)
	TypeSRV   = Type(dns.TypeSRV)
	TypeSSHFP = Type(dns.TypeSSHFP)
	TypeSVCB  = Type(dns.TypeSVCB)
	TypeHTTPS = Type(dns.TypeHTTPS)
	TypeCNAME = Type(dns.TypeCNAME)
)

// String returns the type's name, as "AAAA", or "TYPE65280" as in RFC 3597.
func (t Type) String() string {
	if s := dns.TypeToString[uint16(t)]; s != "" {
		return s
	}
	return fmt.Sprintf("TYPE%d", uint16(t))
}

// Names is a table of names: immutable, so that one question is answered from
// one state of the world. Both methods are called by many goroutines at once
// and must not block.
type Names interface {
	// Answer fills a with what q's name is from q's view. The Answer is zero
	// before; its slices may be the table's own, which are read and not
	// changed. Only what belongs to q.Type need be filled.
	Answer(q Question, a *Answer)

	// Updated is when the source of the table last said that this is how
	// things are. An old table is served for as long as there is no newer
	// one; Server.Age tells how old it is.
	Updated() time.Time
}

// A Question is what a table is asked.
type Question struct {
	// Name is in lower case and without the final dot; the root is "". Bytes
	// that no host name has are written \DDD, so that a dot is always between
	// labels.
	Name string
	Type Type
	View string     // the network of the client; "" if unknown
	From netip.Addr // the client's address, as the socket has it
}

// A Status is what a table says of a name.
type Status uint8

const (
	// Absent: neither the name nor a name below it is in the table, for this
	// view. In the server's zones that is NXDOMAIN; elsewhere it is forwarded.
	Absent Status = iota
	// Above: names below it are in the table, it is not itself. In the
	// server's zones it exists and has no records (RFC 8020); elsewhere it is
	// forwarded, as the table that has api.example.com does not speak for com.
	Above
	// Exists: the name is the table's, in a zone or by itself. Without a
	// record of the type asked for the answer is NODATA.
	Exists
	// Unknown: the part of the table that would know has never been loaded. In the
	// server's zones the answer is SERVFAIL, as resolvers cache NXDOMAIN.
	// Elsewhere the question is forwarded; in Server.Claimed the answer is
	// SERVFAIL if the other resolvers have no record either.
	Unknown
)

// An Answer is what a table says.
type Answer struct {
	Status Status
	TTL    time.Duration // of the records; 0 means the server's, less than 0 means 0

	Alias    string    // a CNAME: of the name itself, whatever the type; nothing else is read then
	Addrs    []Addr    // for A and AAAA; of the other family and invalid ones are passed over
	Targets  []Target  // for the same: names whose addresses are among Addrs, by rank
	Services []Service // for SRV
	Bindings []Binding // for HTTPS and SVCB
	Hosts    []string  // for PTR
	Texts    []string  // for TXT: a record each, of any length
	HostKeys []HostKey // for SSHFP
}

// reset empties a. Its slices may be the table's: none is kept to be written.
func (a *Answer) reset() { *a = Answer{} }

// An Addr is one address of a name. The table lists the best first; those of
// one rank, side by side, share the load: each is first in its turn, and one
// with twice the weight twice as often.
type Addr struct {
	Addr   netip.Addr
	Rank   uint8
	Weight uint16 // 0 means 1
}

// A Target is a DNS name in place of an Addr: the table does not know its
// addresses, and must not wait for them. Each of them has the rank and the
// weight. Of a name's targets the first 16 are looked up.
type Target struct {
	Host   string
	Port   uint16 // that Server.Usable is asked with
	Rank   uint8
	Weight uint16 // 0 means 1
}

// A Service is a SRV record, RFC 2782. The addresses of the target are added
// from the same table where there is room.
type Service struct {
	Priority, Weight, Port uint16
	Target                 string
}

// A Binding is an HTTPS or SVCB record, RFC 9460.
type Binding struct {
	Priority uint16 // 0 means 1: an alias is what Answer.Alias is for
	Target   string // "" means the name itself
	ALPN     []string
	Port     uint16 // 0 means that of the URL
	Hints    []netip.Addr
	ECH      []byte // an ECHConfigList; nil means none
}

// A HostKey is an SSHFP record, RFC 4255: by it a client of SSH knows a server.
type HostKey struct {
	Algorithm uint8 // of the key: 1 for RSA, 3 for ECDSA, 4 for Ed25519
	Hash      uint8 // 1 for SHA-1, 2 for SHA-256
	Digest    []byte
}

// A View names the networks that questions come from.
type View struct {
	Name    string
	Sources []netip.Prefix
}

// A zoneSet is a set of zones, without final dots; "" is the root.
type zoneSet map[string]struct{}

func newZoneSet(zones []string) zoneSet {
	set := zoneSet{}
	for _, z := range zones {
		set[trimName(z)] = struct{}{}
	}
	return set
}

// of returns the innermost zone of the set that name is in, by labels, and
// false if there is none.
func (set zoneSet) of(name string) (string, bool) {
	if len(set) == 0 {
		return "", false
	}
	for zone := name; ; {
		if _, ok := set[zone]; ok {
			return zone, true
		}
		i := strings.IndexByte(zone, '.')
		if i < 0 {
			_, ok := set[""]
			return "", ok
		}
		zone = zone[i+1:]
	}
}

// trimName makes a configured name what a Question has.
func trimName(s string) string { return strings.ToLower(strings.TrimSuffix(s, ".")) }
