package discovery

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"culvert.dev/internal/kube/client"
	"culvert.dev/internal/kube/endpoints"
	"culvert.dev/internal/kube/watch"
	"culvert.dev/registry"
	"culvert.dev/tunnel"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
)

// updateInterval is the least time between two Updates: a rollout of a thousand pods must not cause a
// thousand tables.
const updateInterval = 100 * time.Millisecond

// Everyone stands for all networks in a ClusterSet.
const Everyone = "*"

// DefaultGatewayNamespace is where Services may say that they are gateways.
const DefaultGatewayNamespace = "culvert-system"

// Values of Source.Prefer: which address of a pod with two families is its endpoint.
const (
	PreferIPv4 = endpoints.PreferIPv4
	PreferIPv6 = endpoints.PreferIPv6
	PreferBoth = endpoints.PreferBoth // two endpoints, so that DNS has A and AAAA
)

// A Source is one cluster as a registry.Source, by the name "cluster/CLUSTER".
// Client and Cluster are required. It must not be copied, nor changed while it runs.
type Source struct {
	Client  kubernetes.Interface // its rate limit, if any, must be well above the default of client-go
	Cluster string               // its name, one label

	// Pulse observes the requests of Client. Its owner runs its Probe, which notices an API server
	// that accepts connections and does not answer. With nil only failed requests are noticed.
	Pulse *client.Pulse

	// Slices has the EndpointSlices of Client in Namespaces. Its owner runs it. With nil the source
	// watches them itself.
	Slices *endpoints.Store

	Network   string // that its pods are in; "" means the name of the cluster
	NoNetwork bool   // Network is declared elsewhere, with its gateways; the source does not declare it
	PodCIDRs  bool   // clients in the pod CIDRs of Nodes are in Network; not where several clusters have the same CIDRs

	Namespaces []string // that are watched; empty means all
	Zone       string   // that we are in; "" ignores hints
	Prefer     string   // "" means each service's first family

	Rules Rules // the administrator's

	// GatewayNamespaces are where Services may say that they are gateways;
	// empty means DefaultGatewayNamespace. The permission to write Services there gives control of all
	// traffic from other networks.
	GatewayNamespaces []string

	// ClusterSet has networks that exported services are exposed to, besides those of SetClusterSet,
	// unless their annotations name networks. It may be Everyone.
	ClusterSet []string

	// AwaitExports delays the first Update until SetExports is called.
	AwaitExports bool

	// Events reports whether to write Events of refused objects; nil means never. Only one of several
	// replicas should.
	Events func() bool

	// Log receives refused objects, missing permissions and lost connections. Nil discards them.
	Log *slog.Logger

	once    sync.Once
	changed watch.Signal

	mu           sync.Mutex // guards the rest
	exports      map[types.NamespacedName]bool
	set          []string // networks, beside ClusterSet
	exportsKnown bool     // exports are known
	stale        bool     // exports and set are not applied yet
	addresses    []registry.SetAddress
	readdressed  bool // addresses are not applied yet
	run          *run // nil before Run
	known        bool // an Update was sent
	lost         error
	lostAt       time.Time // since when
}

func (s *Source) init() { s.once.Do(func() { s.changed = watch.NewSignal() }) }

// SetExports sets the services that are exported to the cluster set, besides those that are exported
// by annotation. It may be called at any time; exports must not be changed afterwards.
func (s *Source) SetExports(exports map[types.NamespacedName]bool) {
	s.init()
	s.mu.Lock()
	s.exports, s.exportsKnown, s.stale = exports, true, true
	s.mu.Unlock()
	s.changed.Notify()
}

// SetClusterSet sets the networks of the clusters that export services to each other. It may be called
// at any time; networks must not be changed afterwards.
func (s *Source) SetClusterSet(networks []string) {
	s.init()
	s.mu.Lock()
	changed := !slices.Equal(s.set, networks)
	s.set, s.stale = networks, s.stale || changed
	s.mu.Unlock()
	if changed {
		s.changed.Notify()
	}
}

// SetAddresses sets the addresses by which the cluster's pods reach what it imports. It may be called
// at any time.
func (s *Source) SetAddresses(imports map[types.NamespacedName][]netip.Addr) {
	s.init()
	var all []registry.SetAddress
	for name, ips := range imports {
		if set, err := (registry.ID{Service: name.Name, Namespace: name.Namespace}).SetName(); err == nil && len(ips) > 0 {
			all = append(all, registry.SetAddress{Name: set, Network: s.PodNetwork(), IPs: ips})
		}
	}
	slices.SortFunc(all, func(a, b registry.SetAddress) int { return strings.Compare(a.Name.String(), b.Name.String()) })
	s.mu.Lock()
	s.addresses, s.readdressed = all, true
	s.mu.Unlock()
	s.changed.Notify()
}

// clusterSet returns the networks that exported services are exposed to. The
// caller holds mu.
func (s *Source) clusterSet() []string {
	all := slices.Concat(s.ClusterSet, s.set)
	if slices.Contains(all, Everyone) {
		return []string{Everyone}
	}
	slices.Sort(all)
	return slices.Compact(all)
}

// name is the name of the source in the registry and in logs.
func (s *Source) name() string { return "cluster/" + s.Cluster }

// PodNetwork returns the network that the cluster's pods are in.
func (s *Source) PodNetwork() string {
	if s.Network == "" {
		return s.Cluster
	}
	return s.Network
}

func (s *Source) check() error {
	if s.Client == nil {
		return errors.New("discovery: no client")
	}
	if _, err := tunnel.ParseName("a." + s.Cluster + ".x"); err != nil || !endpoints.IsLabel(s.Cluster) {
		return fmt.Errorf("discovery: cluster %q is not one label of a DNS name", s.Cluster)
	}
	switch s.Prefer {
	case "", PreferIPv4, PreferIPv6, PreferBoth:
	default:
		return fmt.Errorf("discovery: prefer %q is none of ipv4, ipv6 and both", s.Prefer)
	}
	if err := s.Rules.Check(); err != nil {
		return fmt.Errorf("discovery: %w", err)
	}
	return nil
}

// Run implements registry.Source. It returns when ctx is done.
func (s *Source) Run(ctx context.Context, updates chan<- registry.Update) error {
	s.init()
	if err := s.check(); err != nil {
		return err
	}
	log := s.Log
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	s.mu.Lock()
	s.stale, s.readdressed = true, true // also for a second Run
	s.mu.Unlock()
	r := newRun(s, log.With("cluster", s.Cluster))
	s.mu.Lock()
	s.run = r
	s.mu.Unlock()
	ctx, cancel := context.WithCancel(ctx)
	defer r.running.Wait()
	defer cancel()
	r.watch(ctx)
	return r.loop(ctx, updates)
}
