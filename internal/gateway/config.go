package gateway

import (
	"context"
	"log/slog"
	"net"
	"net/netip"
	"time"

	"culvert.dev/identity"
	"culvert.dev/identity/enroll"
	"culvert.dev/identity/jwt"
	"culvert.dev/internal/activation"
	"culvert.dev/internal/gateway/inbound"
	"culvert.dev/internal/gateway/upstream"
	"culvert.dev/nat"
	"culvert.dev/registry"
	"culvert.dev/registry/peer"
	"culvert.dev/registry/peer/join"
	"culvert.dev/tunnel"
)

// A Config says what a gateway serves and within which limits.
type Config struct {
	Sources []registry.Source

	// SourceListeners are those that the sources are known to bring. New opens them, and
	// returns an error where that fails; those that sources bring later are tried again.
	SourceListeners []*registry.Listener

	// Listeners have protocols of the caller's, and stay as they are.
	Listeners []Listener

	// SourcesListen says that the sources may bring listeners, so that none has
	// to be configured. They are opened in any case.
	SourcesListen bool

	// DialOnly says that requests come by Gateway.Dial, so that there need not be a listener.
	DialOnly bool

	// Mesh is the zone of its names, and the network the gateway is in.
	Mesh registry.Mesh

	// Sockets opens all sockets by which the gateway begins connections. Lookup and Sources have
	// sockets of their own.
	Sockets tunnel.Sockets

	// Inherited are the sockets that systemd has passed to this process; nil means none.
	Inherited *activation.Sockets

	// Lookup resolves the names of endpoints; nil means they have no address.
	Lookup func(ctx context.Context, host string) ([]netip.Addr, error)

	// Refuses returns why an endpoint whose name was chosen by somebody who may not
	// lead the gateway everywhere may not be at an address, or "". Nil refuses all.
	Refuses func(netip.Addr) string

	// Loops is how many event loops there are; 0 means one for each processor
	// that Go uses. It is best one less.
	Loops int

	// Via is what this gateway calls itself to the gateways it asks, and what
	// it knows a request by that has been here before. Unique in a chain.
	Via string

	// Serving is called once all listeners are served; nil is not called.
	Serving func()

	Admin        string // address of the admin port, HOST:PORT or unix:PATH; "" means none
	AdminRemote  bool   // let the admin port be reached from other hosts
	AdminControl bool   // let tunnels be closed by TCP, too, and not only by a socket

	// Health is the address, HOST:PORT, of a port with /healthz, /readyz and
	// /metrics and nothing else, which other hosts may reach: for probes and for
	// Prometheus. "" means none.
	Health string

	Limits tunnel.Limits

	// Memory is what the Go runtime was told to keep below, in bytes. Where it,
	// or the cgroup's limit, is nearly reached, connections are refused, and
	// then none are accepted. 0 means that there is only the cgroup's, negative
	// that neither is looked at.
	Memory int64

	// SetMemory tells the runtime another limit: after a change of Memory, and while the
	// kernel holds much of the cgroup's memory for our sockets. Zero and less are none. May
	// be nil: then the runtime keeps the limit that it has, and Memory does not change.
	SetMemory func(bytes int64)

	// SetGCPercent sets the runtime's GOGC, in percent, for it to collect less often while it
	// does so many times a second. May be nil: then the runtime keeps what it has.
	SetGCPercent func(percent int)

	// ServicePorts are ports to give to services; nil means that none has one to
	// itself.
	ServicePorts *ServicePorts

	// NAT has the router in front of this gateway map ports; nil means that it is asked for
	// nothing. FindUPnP asks it by UPnP, and nil does not. NATSecret makes the nonces of PCP:
	// with the same one, mappings from before a crash are renewed; empty means a random one.
	NAT       *nat.Settings
	FindUPnP  func(ctx context.Context, route nat.Route) (nat.Client, error)
	NATSecret []byte

	// UpstreamProxy is an HTTP proxy through which gateways are dialed; nil means that they
	// are dialed directly. RunCommand runs its command, as of upstream.Transports.
	UpstreamProxy *upstream.Proxy
	RunCommand    func(ctx context.Context, argv []string, limit int) ([]byte, error)

	// DNS is what is answered by DNS; nil means nothing. With it a gateway may
	// have no listener for streams.
	DNS *DNS

	// VIPs are addresses to give to services; nil means that none has one to
	// itself.
	VIPs *VIPs

	// Reverse is the gateways that this one keeps reverse sessions to, as their connector;
	// nil means that there are none. With it a gateway may have no listener.
	Reverse *Reverse

	// Replicas are the other replicas of this gateway; nil means that it knows of none.
	Replicas *Replicas

	// Kubernetes returns what is known of that, for /status: anything that goes
	// into JSON. Nil means that there is none.
	Kubernetes func() any

	// IdentitySources returns how the sources of keys and trust are, for /status, as
	// Kubernetes does. Nil means that there are none.
	IdentitySources func() any

	// Issuers are those whose tokens listeners may accept, by their names. The keys of
	// those that are trust domains are those of Identity.
	Issuers []jwt.Issuer

	// ReadFile reads the token files of Issuers and of hops; nil means that there are none.
	ReadFile func(name string) ([]byte, error)

	// JWTSVID returns a JWT-SVID to show to a next hop: that of the SPIFFE id, or of the
	// agent's default for "". It is asked for each request, and its error fails the hop.
	// Nil means that there are none.
	JWTSVID func(ctx context.Context, id string, audience ...string) (string, error)

	// Identity has the keys and the trust that listeners, hops, backend TLS and Issuers name, and
	// gets the keys of UseKeys. Nil makes one.
	Identity *identity.Store

	// Peers are other sites with which catalogs of services are exchanged. Their source is
	// Gateway.Peers. Site is what this one calls itself to them; "" for nothing.
	Peers []peer.Config
	Site  string

	// Join says how other sites join by tokens; nil means that they cannot. KnowsTrust
	// reports whether the configuration has trust of a name, for which nobody else speaks.
	Join       *join.Settings
	KnowsTrust func(name string) bool

	// Enrollment says how devices get their identity by tokens; nil means that they cannot.
	Enrollment *enroll.Settings

	// Capture returns which connections of this host's programs are captured, for /status, as
	// Kubernetes does. Nil means that none are.
	Capture func() any

	// OnTable is called whenever Gateway.Table is another one. It must not block. May be nil.
	OnTable func()

	// Metrics adds gauges to those of the gateway, by GaugeSet of package metrics. May be nil.
	Metrics func(add func(name, help string, labels []string, read func(yield func(labels []string, v float64))))

	// Observe is told how each request ended, beside log and metrics. It must not block. May
	// be nil.
	Observe func(*tunnel.Outcome)

	DrainDelay   time.Duration // still accepting, no longer ready; 0 means DefaultDrainDelay, negative none
	DrainTimeout time.Duration // from the order to stop to the last tunnel's end; 0 means DefaultDrainTimeout, negative none

	Log             *slog.Logger   // nil discards
	Version         string         // for build_info
	DroppedLogLines func() float64 // log lines lost, for the metrics; may be nil
}

// A Listener is an address and what is spoken there.
type Listener struct {
	Address    string             // HOST:PORT, or udp://HOST:PORT
	Socket     net.Listener       // that New serves in place of one at Address, which is its name then; nil for TCP at Address
	Protocols  []tunnel.Protocol  // asked in order; a single one is pinned
	ConnHeader tunnel.ConnHeader  // that every connection begins with; nil means none
	RequireTLS bool               // as of a tunnel.ListenerConfig
	Datagrams  *inbound.Datagrams // of an address of UDP, in place of the others; nil at TCP
}
