package registry

import (
	"context"
	"net"
	"net/netip"
	"strconv"
	"time"

	"culvert.dev/tunnel"
)

// A Network is a named set of source addresses.
type Network struct {
	Name  string
	CIDRs []netip.Prefix
}

// A Service is what clients may ask for.
type Service struct {
	Name      string           // for logs, metrics and explain; need not be unique
	Names     []tunnel.Pattern // the names clients ask for
	Ports     []uint16         // the ports clients may ask for; empty means any
	Addresses []netip.Addr     // addresses clients may ask for in place of a name
	Endpoints []Endpoint       // where it is served, in any order; none means NoEndpoint, or with Via what was asked for
	Via       []Hop            // the gateways on the way there, nearest first; none means directly

	Exposed   bool     // false keeps the service private: every request is NotExposed
	ExposedTo []string // names of the networks that may ask; empty means everyone

	// Publish gives it a port of the gateway's to itself, if the gateway has
	// ports to give and it is exposed.
	Publish bool

	Idle       time.Duration // limit without a byte either way; 0 means the relay's
	HalfClosed time.Duration // limit half-closed and silent; 0 means the relay's

	// ProxyProtocol is the version, 1 or 2, of the PROXY protocol by which
	// its endpoints are told of the client; 0 means they are not.
	ProxyProtocol int

	Origin string // who says so, for people: "culvert.yaml:12"
}

// An Endpoint is one place that serves a service: an address or a DNS name.
// Exactly one of Host and Addr is set.
type Endpoint struct {
	Host string     // a DNS name, looked up for every request
	Addr netip.Addr // or an address
	Port uint16     // 0 means the port that was asked for
}

func (e Endpoint) String() string {
	host := e.Host
	if e.Addr.IsValid() {
		host = e.Addr.String()
	}
	if e.Port == 0 {
		return host
	}
	return net.JoinHostPort(host, strconv.Itoa(int(e.Port)))
}

// A Hop is a further gateway on the way to a service. The last one is asked
// for the service's endpoints, by the names they have there.
type Hop struct {
	Proto string   // how it is asked: "connect", "connect-h2", "connect-h3", "websocket", "hbone" or "socks5"
	To    []string // where it is; those after the first are for when it can't be used
	Token Secret   // to show there; "" for none
	User  string   // to show there, with Password; "" for nobody
	Roots string   // PEM certificates to verify it by; "" means the system's
	HTTP2 bool     // WebSockets by wss may share connections of HTTP/2

	Password Secret // of User

	Certificate string // PEM, to show there; "" for none
	Key         Secret // PEM, of Certificate

	// Peers are the SPIFFE ids that the gateway may have, or "spiffe://domain"
	// for any of a trust domain, of hbone; empty means that its certificate must
	// have its name. Behind says who may be behind it, in double HBONE: nobody
	// is where it is empty.
	Peers  []string
	Behind []string
}

// A Secret does not print itself.
type Secret string

func (Secret) String() string               { return "(hidden)" }
func (Secret) GoString() string             { return "(hidden)" }
func (Secret) MarshalText() ([]byte, error) { return []byte("(hidden)"), nil }

// A Snapshot is all that one source knows at one time. Whoever makes one does
// not change it, or anything it points to, afterwards.
type Snapshot struct {
	Networks []Network
	Services []Service
}

// An Update replaces what a source said before under the same name.
type Update struct {
	Source string // "file", "cluster/west"; a source may use several
	Snapshot
}

// A Source finds out what there is. Run sends an Update at first and whenever
// something changes, each with everything that Source name knows, until ctx is
// done. Its sends select on ctx.Done.
//
// What a source has sent stays in force when it fails: Run returns an error
// only where it cannot go on, and is called again after a while. It returns
// nil if there is nothing more to come.
type Source interface {
	Run(ctx context.Context, updates chan<- Update) error
}

// Static is a Source that never changes, as made of command-line flags.
type Static struct {
	Name string
	Snapshot
}

// Run sends the one update.
func (s Static) Run(ctx context.Context, updates chan<- Update) error {
	select {
	case updates <- Update{Source: s.Name, Snapshot: s.Snapshot}:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
