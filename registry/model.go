package registry

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"culvert.dev/policy"
	"culvert.dev/tunnel"
)

// A Network is a named set of addresses that reach each other directly.
type Network struct {
	Name  string
	CIDRs []netip.Prefix

	Near     []string  // other networks, the nearest first; those not named come after them
	Gateways []Gateway // how those outside reach what is in it
	Via      []Hop     // how a gateway of another network does; none means at Gateways, by SNI or by their Carriers
	Insecure bool      // plaintext may go there by transports that are not Mutual
}

// OnlyInsecure reports whether n has a name and Insecure and nothing else: a later
// source defines the network itself.
func (n *Network) OnlyInsecure() bool {
	return n.Insecure && len(n.CIDRs) == 0 && len(n.Near) == 0 && len(n.Gateways) == 0 && len(n.Via) == 0
}

// A Check is a health check of an address. The zero Check is none. Checks are
// comparable: an address is probed once for all services with an equal one.
type Check struct {
	Kind     string        // "tcp", "tls" or "http"; "" means no check
	Port     uint16        // that is probed, at the endpoint's address; 0 means the endpoint's own
	Host     string        // for tls its SNI, for http its Host; "" means the service's first name, for tls that of any service there
	Path     string        // for http; "" means "/"
	Statuses Statuses      // for http, those of a healthy endpoint; "" means DefaultStatuses
	Interval time.Duration // between two probes; 0 means DefaultCheckInterval
	Timeout  time.Duration // of a probe, at most half of Interval, so that two fit into one; 0 means DefaultCheckTimeout

	// HealthyThreshold is how many probes in a row must succeed before an
	// endpoint that is down counts as healthy again; the first probe of all
	// counts at once. UnhealthyThreshold is how many in a row must fail before
	// an endpoint is down. 0 means the default of each.
	HealthyThreshold   int
	UnhealthyThreshold int
}

// Defaults of a Check.
const (
	DefaultCheckInterval      = time.Second
	DefaultCheckTimeout       = time.Second / 2
	DefaultStatuses           = Statuses("200-399")
	DefaultHealthyThreshold   = 2
	DefaultUnhealthyThreshold = 2
)

// Statuses is a set of HTTP status codes in its text form: codes and ranges with
// commas between them, such as "200,301-303".
type Statuses string

// ParseStatuses returns the set that items name, each a code or a range of codes
// from 200 to 599. The 1xx codes are not final answers (RFC 9110 section 15.2)
// and never in a set.
func ParseStatuses(items ...string) (Statuses, error) {
	ranges := make([]string, 0, len(items))
	for _, item := range items {
		from, to, isRange := strings.Cut(item, "-")
		if !isRange {
			to = from
		}
		low, high := statusCode(from), statusCode(to)
		if low == 0 || high < low {
			return "", fmt.Errorf("%q is not a status code or range of codes from 200 to 599", item)
		}
		ranges = append(ranges, item)
	}
	slices.Sort(ranges)
	return Statuses(strings.Join(slices.Compact(ranges), ",")), nil
}

// statusCode returns the status code that text is, or 0.
func statusCode(text string) int {
	code, err := strconv.Atoi(text)
	if err != nil || len(text) != 3 || code < 200 || code > 599 {
		return 0
	}
	return code
}

// Has reports whether code is in the set.
func (s Statuses) Has(code int) bool {
	for item := range strings.SplitSeq(string(s), ",") {
		from, to, isRange := strings.Cut(item, "-")
		if low := statusCode(from); low == code && code != 0 || isRange && low != 0 && low <= code && code <= statusCode(to) {
			return true
		}
	}
	return false
}

// A Service is what clients may ask for.
type Service struct {
	Name      string           // for logs, metrics and explain; need not be unique
	Names     []tunnel.Pattern // the names clients ask for
	Ports     []uint16         // the ports clients may ask for; empty means any
	Addresses []netip.Addr     // addresses clients may ask for in place of a name
	Endpoints []Endpoint       // where it is served, in any order; none means NoEndpoint, or with Via what was asked for
	Via       []Hop            // the gateways on the way there, nearest first; none means directly

	// ID gives it the names of a mesh: SERVICE.NAMESPACE.svc.CLUSTER.ZONE and
	// others. The zero ID gives it none.
	ID         ID
	Exported   bool        // by SERVICE.NAMESPACE.svc.clusterset.local, too, beside its namesakes of other clusters
	Headless   bool        // each of its endpoints may be asked for: by its name, index or address before one of the service's names
	ALPN       []string    // that its TLS speaks, for HTTPS records; empty means that nothing is said
	NamedPorts []NamedPort // of Ports, those that have names

	VIP   bool  // an address is found for it, of its own for as long as it stays
	Check Check // of its endpoints

	Exposed   bool     // false keeps the service private: every request is NotExposed
	ExposedTo []string // names of the networks that may ask; empty means everyone

	// Insecure says that plaintext may go to its endpoints by transports that are not
	// tunnel.Mutual, also in other networks.
	Insecure bool `json:",omitzero"`

	Clients ClientFilter `json:",omitzero"` // those that may connect, of those it is exposed to

	// Publish gives it a port of the gateway's to itself, if the gateway has
	// ports to give and it is exposed.
	Publish bool

	IdleTimeout       time.Duration // limit without a byte either way; 0 means the relay's
	HalfClosedTimeout time.Duration // limit half-closed and silent; 0 means the relay's

	// Limits bound what it has in this process; nil means nothing but the limits of the
	// whole gateway. Services of one Name count together.
	Limits *tunnel.ServiceLimits `json:",omitempty"`

	LoadBalancing LoadBalancing `json:",omitzero"` // which endpoint a new connection goes to

	// OutlierEjection has endpoints tried last that fail again and again; nil has it not.
	OutlierEjection *OutlierEjection `json:",omitempty"`

	// TLS is spoken by the gateway to its endpoints, upon what the client sends, unless
	// the client's own TLS is passed on; nil means that bytes go on as they come.
	TLS *BackendTLS

	// ProxyProtocol is the version, 1 or 2, of the PROXY protocol by which
	// its endpoints are told of the client; 0 means they are not.
	ProxyProtocol int

	// ForwardIdentity says what its endpoints are told, beside the client's address, of
	// who the client is; nil for nothing. ProxyProtocol is then 2.
	ForwardIdentity *ForwardIdentity `json:",omitempty"`

	// Match narrows its names to some ClientHellos. The name tunnel.AnyName makes
	// it the catch-all, for names that no other service has.
	Match HelloMatch `json:",omitzero"`

	// StartTLS is the protocol in which its endpoints are asked to begin TLS:
	// "postgres", or "" for endpoints that expect a ClientHello first.
	StartTLS string

	Origin string // who says so, for people: "culvert.yaml:12"
}

// A ForwardIdentity says how the endpoints of a service are told who a client is whose TLS
// or credentials the gateway has taken.
type ForwardIdentity struct {
	// InsideTLS has the PROXY header in the TLS session that the gateway opens to the
	// endpoints. Otherwise it comes before everything else, and whoever can connect to an
	// endpoint can write one.
	InsideTLS bool

	// Assertion adds a statement that the gateway signs with the key of its client
	// certificate, for that one TLS session: see package delegation. It needs InsideTLS.
	Assertion bool

	// Audience is what the endpoints call themselves; "" means the one URI of
	// BackendTLS.SANs, or else BackendTLS.ServerName.
	Audience string
}

// ForwardsInsideTLS reports whether s has its PROXY header in the TLS of the gateway.
func (s *Service) ForwardsInsideTLS() bool {
	return s.ForwardIdentity != nil && s.ForwardIdentity.InsideTLS
}

// ForwardedAudience returns for whom assertions to the endpoints of s are, "" where there
// are none.
func (s *Service) ForwardedAudience() string {
	f := s.ForwardIdentity
	switch {
	case f == nil || !f.Assertion || s.TLS == nil:
		return ""
	case f.Audience != "":
		return f.Audience
	case len(s.TLS.SANs) == 1 && strings.Contains(s.TLS.SANs[0], "://"):
		return s.TLS.SANs[0]
	}
	return s.TLS.ServerName
}

// An ID is what a service is called in its cluster.
type ID struct {
	Service   string // "db", one label
	Namespace string // "" means DefaultNamespace
	Cluster   string // "west", one label
}

// DefaultNamespace is the namespace of services that have none.
const DefaultNamespace = "default"

// A NamedPort is a port with a name, for SRV records: RFC 2782.
type NamedPort struct {
	Name     string // "postgres", without the underscore
	Protocol string // "tcp" or "udp"
	Port     uint16
}

// An Endpoint is one place that serves a service: an address, a DNS name or a group of
// connectors. Exactly one of Host, Addr and Group is set.
type Endpoint struct {
	Host        string     // a DNS name, looked up for every request; an absolute one where it ends with a dot
	Addr        netip.Addr // or an address
	Port        uint16     // 0 means the port that was asked for
	ServicePort uint16     // the one of the service's ports that it serves; 0 means all

	// Group is the name of a group of connectors, which can't be dialed: they have
	// sessions to this gateway, and requests go there on the sessions. Groups come and go without
	// another table. It is not in another network.
	Group string `json:",omitzero"`

	Weight   uint16 `json:",omitzero"` // its share of new connections beside other endpoints; 0 means 1
	Draining bool   `json:",omitzero"` // it gets no new client: only those that stick to it, and those that ask for it alone
	Zone     string `json:",omitzero"` // that it is in; those of Mesh.TopologyZone are preferred as long as enough of them are healthy

	Name    string // of it among the service's, one label: "db-0"; "" for none
	Network string // that it is in; "" means the one that has its address, or the registry's own
	Cluster string // that it is in; "" means the service's

	// Guarded says that Host was chosen by a user who may not direct the gateway to
	// every address: an address of it is used only if Registry.Refuses allows it.
	Guarded bool

	// Via is the gateways on the way to this endpoint alone, nearest first; nil means the
	// Via of its service. The last one is asked for Host or Addr, so the network that
	// these are in does not matter. Where the service has a Via, it has no effect.
	Via *[]Hop `json:",omitzero"`

	// Workload is what serves the endpoint, for policies that select it by its labels; nil
	// where that is not known. Endpoints of one workload should share it.
	Workload *policy.Workload `json:",omitzero"`

	load       *tunnel.EndpointLoad // in a table, where its tunnels are counted
	transports *endpointTransports  // in a table, where it has a Via
}

// Serves reports whether e is for a port of its service; 0 stands for any.
func (e *Endpoint) Serves(port uint16) bool {
	return e.ServicePort == 0 || port == 0 || e.ServicePort == port
}

// PortsFor returns the ports at which e serves s.
func (e *Endpoint) PortsFor(s *Service) []uint16 {
	switch {
	case e.Port != 0:
		return []uint16{e.Port}
	case e.ServicePort != 0:
		return []uint16{e.ServicePort}
	}
	return s.Ports
}

func (e Endpoint) String() string {
	host := e.Host
	switch {
	case e.Group != "":
		host = e.Group
	case e.Addr.IsValid():
		host = e.Addr.String()
	}
	if e.Port == 0 {
		return host
	}
	return net.JoinHostPort(host, strconv.Itoa(int(e.Port)))
}

// A Secret does not print itself.
type Secret string

func (Secret) String() string               { return "(hidden)" }
func (Secret) GoString() string             { return "(hidden)" }
func (Secret) MarshalText() ([]byte, error) { return []byte("(hidden)"), nil }

// A Snapshot is all that one source knows at one moment. It must not change after it
// was sent, nor anything that it points to.
type Snapshot struct {
	Networks  []Network
	Services  []*Service
	Listeners []*Listener
	Policies  []*policy.Policy // of all services, whichever snapshot they are in

	// SetAddresses are for DNS, of services in any snapshot.
	SetAddresses []SetAddress `json:"-"`

	// GatewayTransport is how the gateways in the networks of all other snapshots are
	// asked, which say by which protocols only; nil means without TLS. Its Proto and
	// Addresses have no meaning. The first snapshot that has one counts.
	GatewayTransport *Hop

	// Public has the outside addresses of gateways in the networks of all snapshots that have
	// no Public of their own, by their Address.
	Public []PublicAddress

	// Mesh is what the names of all snapshots are made of, and where the gateway is. The
	// first snapshot that has one counts; nil in all of them means the Registry's.
	Mesh *Mesh
}

// A PublicAddress is where an address of this host is reached from outside.
type PublicAddress struct{ Address, Public netip.AddrPort }

// An Update replaces the earlier snapshot of a source under the same name. One with
// the very slices of the earlier one confirms it, and makes no new table.
type Update struct {
	Source string // "file", "cluster/west"; a source may use several
	Snapshot

	// More says that the next Update of the source follows at once and belongs to the
	// same table.
	More bool

	// StandsFor, if set, is another name of the source: the snapshot is a stopgap until
	// there is one under that name. It is not used where one of a source that was replaced
	// is still in force.
	StandsFor string

	// Group, if set, replaces the Group of the Update before that had one. One without
	// sources replaces it by none. Run says what becomes of their snapshots.
	Group *Group

	// Err, if it is not nil, says that the source has lost sight of its objects. Its
	// earlier snapshot stays in force, and the Snapshot of this Update is ignored;
	// the next Update without an Err ends it. See Registry.Stale.
	Err error

	// Since is the time of the loss if it is not now: that of a snapshot that an
	// earlier process has saved.
	Since time.Time
}

// A Group is sources that begin and end together, and may be replaced by others.
type Group struct {
	Sources []Source

	// Start, if set, starts what the Sources need. It is called before they run, and the
	// function that it returns when all of them have ended.
	Start func() (stop func())
}

// A Source discovers services, networks and listeners. Run sends an Update at first
// and whenever something changes, each with all that the source knows under that
// name, until ctx is done. Its sends select on ctx.Done.
//
// The last snapshots stay in force when a source fails: Run returns an error only
// where it cannot go on, and is called again after a while. It returns nil if no
// update will follow.
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
