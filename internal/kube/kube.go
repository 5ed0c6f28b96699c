// Package kube composes everything that concerns Kubernetes: the discovery of services, the
// Gateways of Gateway API, multi-cluster services, and the election of the replica that writes
// status.
//
//	k, err := kube.New(kube.Config{Cluster: "west", Discovery: &kube.Discovery{}, Log: log})
//	...
//	g, err := gateway.New(ctx, gateway.Config{Sources: append(sources, k.Sources()...), SourcesListen: true})
//	...
//	defer k.Start(ctx, g)()
//	err = g.Run(ctx, nil)
//
// No package outside of this folder imports client-go.
package kube

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"sync"
	"sync/atomic"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"culvert.dev/internal/kube/client"
	"culvert.dev/internal/kube/discovery"
	"culvert.dev/internal/kube/endpoints"
	"culvert.dev/internal/kube/gatewayapi"
	"culvert.dev/internal/kube/policy"
	"culvert.dev/internal/kube/watch"
	"culvert.dev/registry"
	"culvert.dev/registry/snapshot"
)

// A Config says what culvert reads from Kubernetes, and what it writes there.
type Config struct {
	Kubeconfig string // path; "" means the pod's own service account
	Context    string // of the kubeconfig; "" means its current one
	Version    string // of the program, for the user agent

	Cluster    string        // the cluster's name, one label; needed by Discovery
	Mesh       registry.Mesh // by which its services have names
	Namespaces []string      // that are watched; empty means all

	Discovery    *Discovery  // nil means that no services are discovered
	GatewayAPI   *GatewayAPI // nil means that no Gateways are served
	MultiCluster bool        // ServiceExports are served, and ServiceImports written
	Policies     *Policies   // nil means that AuthorizationPolicies are not read

	// ImportedServices has the imports of MultiCluster be at ClusterIPs; nil means that they are not.
	// It needs Lease, whose namespace is that of the gateway's pods.
	ImportedServices *ImportedServices

	Lease Object // of the replica that writes; zero means that this process never does

	// State is the prefix of the paths of files in which the last snapshot of each source is kept
	// for the next start. "" keeps nothing.
	State string

	// Dial connects to API servers; nil means the dialer of client-go.
	Dial func(ctx context.Context, network, address string) (net.Conn, error)

	Log *slog.Logger
}

// An Object is the name of a namespaced object.
type Object struct{ Namespace, Name string }

// Discovery says which Services become services.
type Discovery struct {
	Network           string // that pods are in; "" means one with the name of the cluster
	Declared          bool   // Network is declared in the configuration file, with its gateways
	Zone              string // that we are in; "" ignores topology hints
	Prefer            string // "ipv4", "ipv6" or "both"; "" means each Service's first family
	PodCIDRs          bool   // the podCIDRs of Nodes belong to Network
	GatewayNamespaces []string
	Rules             discovery.Rules
	ExportedTo        []string // networks that exports open a Service to, beside those of the clusters; "*" means everyone
	Clusters          string   // namespace of Secrets with the kubeconfigs of further clusters; "" means that there are none
}

// GatewayAPI says which Gateways are served, and where.
type GatewayAPI struct {
	Controller string // of their classes
	Addresses  []gatewayapi.Address
	Public     []netip.Addr // what all of them are known by, where they listen at every address
	Service    Object       // or whose addresses; zero means none's

	InfrastructureKeys []string // of gatewayapi.Settings
}

// Policies says how AuthorizationPolicies and ClusterAuthorizationPolicies are read.
type Policies struct {
	TrustDomains []string // of the cluster's workloads, whose ServiceAccounts policies name
}

// ImportedServices says how imports are led to the gateway's pods.
type ImportedServices struct {
	Ports    registry.PortRange // of the pods
	Selector map[string]string  // of the pods
}

// A Gateway opens the listeners of the sources.
type Gateway interface {
	// ListenerErrors returns the listeners that the gateway tried to open, by name: nil is open, and
	// an error says why not.
	ListenerErrors() map[string]error
	// ListenersChanged receives when that has changed.
	ListenersChanged() <-chan struct{}
	// ClusterSetAddresses returns the addresses that a service of the cluster
	// set has to itself.
	ClusterSetAddresses(namespace, service string) []netip.Addr
	// UseKeys is called with the certificates of the Secrets that Gateways use, by the names
	// that the table has for them, whenever they change: before the table has them.
	UseKeys(map[string]*tls.Certificate)
	// PolicyUses returns what policies are about, by their Origin.
	PolicyUses() map[string]registry.PolicyUse
}

// A Kube holds all sources and controllers of Kubernetes. A nil *Kube has none.
type Kube struct {
	cfg     Config
	rest    *rest.Config
	pulse   *client.Pulse               // of all requests by rest
	alive   func(context.Context) error // probes the API server
	core    kubernetes.Interface
	slices  *endpoints.Store   // of the cluster; nil if no source needs them
	defs    *watch.Definitions // of the cluster's kinds
	self    string             // the name of this replica
	leads   atomic.Bool        // this replica writes
	holder  atomic.Pointer[string]
	denied  atomic.Pointer[string] // why it can't; "" or nil if it may
	sources []registry.Source
	own     *discovery.Source   // nil without Discovery
	further *discovery.Clusters // nil for none
	plane   *plane              // nil where nothing is listened at
	set     *clusterSet         // nil for none
}

// Logs sends the log of client-go to log, for the whole process. It must not be called while
// a Kube runs.
func Logs(log *slog.Logger) { client.Logs(log) }

// New makes a Kube. It sends no request yet.
func New(cfg Config) (*Kube, error) {
	c, err := (client.Config{Kubeconfig: cfg.Kubeconfig, Context: cfg.Context, Version: cfg.Version, Dial: cfg.Dial}).REST()
	if err != nil {
		return nil, err
	}
	return newOf(cfg, c)
}

// newOf is New with the configuration of its clients.
func newOf(cfg Config, c *rest.Config) (*Kube, error) {
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	host, err := os.Hostname()
	if err != nil {
		return nil, fmt.Errorf("kubernetes: a name for this replica: %w", err)
	}
	k := &Kube{cfg: cfg, rest: c, self: fmt.Sprintf("%s_%d", host, os.Getpid())}
	k.pulse = client.NewPulse()
	k.rest.Wrap(k.pulse.Wrap)
	if k.alive, err = client.Livez(k.rest); err != nil {
		return nil, err
	}
	k.rest.Wrap((&client.Clock{Log: cfg.Log}).Wrap)
	if k.core, err = kubernetes.NewForConfig(client.Protobuf(k.rest)); err != nil {
		return nil, fmt.Errorf("kubernetes: %w", err)
	}
	if k.defs, err = watch.NewDefinitions(k.rest, cfg.Log); err != nil {
		return nil, err
	}
	if cfg.Discovery != nil || cfg.GatewayAPI != nil {
		k.slices = endpoints.NewStore(endpoints.Config{
			Client: k.core, Name: "kube", Namespaces: cfg.Namespaces, Imports: cfg.GatewayAPI != nil, Pulse: k.pulse, Log: cfg.Log,
		})
	}
	if cfg.MultiCluster {
		if err := k.export(); err != nil {
			return nil, err
		}
	}
	if cfg.Discovery != nil {
		if err := k.discover(cfg.Discovery); err != nil {
			return nil, err
		}
	}
	if cfg.ImportedServices != nil && k.set != nil {
		k.imports(cfg.ImportedServices)
	}
	if cfg.GatewayAPI != nil {
		if err := k.serve(cfg.GatewayAPI); err != nil {
			return nil, err
		}
	}
	if cfg.Policies != nil {
		if err := k.authorize(cfg.Policies); err != nil {
			return nil, err
		}
	}
	return k, nil
}

// Sources returns the sources of the registry.
func (k *Kube) Sources() []registry.Source {
	if k == nil {
		return nil
	}
	return k.sources
}

// discover adds the sources of services.
func (k *Kube) discover(d *Discovery) error {
	if err := d.Rules.Check(); err != nil {
		return fmt.Errorf("kubernetes: discovery: %w", err)
	}
	own := k.source(k.cfg.Cluster)
	own.Client, own.Network, own.NoNetwork, own.Namespaces = k.core, d.Network, d.Declared, k.cfg.Namespaces
	own.Pulse, own.Slices = k.pulse, k.slices
	k.own = own
	k.add(own, "discovery", printed(d), func() []string { return []string{"cluster/" + k.cfg.Cluster} })
	further := &discovery.Clusters{Client: k.core, Namespace: d.Clusters, Own: k.cfg.Cluster, New: k.source, Dial: k.cfg.Dial, Log: k.cfg.Log}
	if k.set != nil {
		k.set.register(k.cfg.Cluster, own)
		further.OnCluster = k.joinClusterSet
	}
	if d.Clusters != "" {
		k.further = further
		k.add(further, "clusters", printed(d), further.Names)
	}
	return nil
}

// Listed reports whether the Services of the own cluster are known, so that Refuses can tell.
func (k *Kube) Listed() bool { return k == nil || k.own == nil || k.own.Listed() }

// Refuses returns why what the name of an ExternalName leads to may not be at an
// address, or "".
func (k *Kube) Refuses(a netip.Addr) string {
	if k == nil || k.own == nil {
		return "no cluster is known that it could be of"
	}
	if why := k.own.Refuses(a); why != "" {
		return why
	}
	if k.further == nil {
		return ""
	}
	return k.further.Refuses(a)
}

// source returns the discovery of the cluster called name, with the settings
// that all clusters share.
func (k *Kube) source(name string) *discovery.Source {
	d := k.cfg.Discovery
	s := &discovery.Source{
		Cluster: name, PodCIDRs: d.PodCIDRs, Zone: d.Zone, Prefer: d.Prefer, GatewayNamespaces: d.GatewayNamespaces,
		Rules: d.Rules, Events: k.leads.Load, Log: k.cfg.Log,
	}
	if k.cfg.MultiCluster {
		s.ClusterSet = d.ExportedTo
	}
	return s
}

// serve adds the source of listeners.
func (k *Kube) serve(api *GatewayAPI) error {
	k.plane = &plane{}
	settings := gatewayapi.Settings{
		Controller: api.Controller, Namespaces: k.cfg.Namespaces,
		Addresses: api.Addresses, PublicAddresses: api.Public, PublicService: types.NamespacedName(api.Service),
		InfrastructureKeys: api.InfrastructureKeys,
	}
	if d := k.cfg.Discovery; d != nil { // where we are is said there
		settings.Zone, settings.Prefer, settings.Refuses = d.Zone, d.Prefer, d.Rules.Refuses
		settings.Network, settings.Cluster, settings.Mesh = cmp.Or(d.Network, k.cfg.Cluster), k.cfg.Cluster, k.cfg.Mesh
		if d.Prefer == discovery.PreferBoth {
			settings.Prefer = "" // that is for DNS: a pod has one share of a route's connections
		}
	}
	c, err := gatewayapi.New(gatewayapi.Config{
		Settings: settings,
		REST:     k.rest, Pulse: k.pulse, Slices: k.slices, Definitions: k.defs, Plane: k.plane, Leads: k.leads.Load, Log: k.cfg.Log,
		UseKeys: func(all map[string]*tls.Certificate) { k.plane.UseKeys(all) },
	})
	if err != nil {
		return err
	}
	k.add(c, "gateway-api", printed(api)+" "+settings.Network, func() []string { return []string{"gateway-api"} })
	return nil
}

// authorize adds the source of policies. Until they have been read once, or were in the state of the
// last process, every request is denied.
func (k *Kube) authorize(p *Policies) error {
	cfg := policy.Config{
		Settings: policy.Settings{Cluster: k.cfg.Cluster, TrustDomains: p.TrustDomains},
		REST:     k.rest, Pulse: k.pulse, Definitions: k.defs, Namespaces: k.cfg.Namespaces, Leads: k.leads.Load, Log: k.cfg.Log,
	}
	if k.plane == nil {
		k.plane = &plane{}
	}
	cfg.Uses = func() map[string]registry.PolicyUse { return k.plane.PolicyUses() }
	if k.slices != nil {
		cfg.SelectPods, cfg.PodsKnown = k.slices.SelectPods, k.slices.PodsKnown
	}
	src, err := policy.New(cfg)
	if err != nil {
		return err
	}
	k.add(src, "policies", printed(p), func() []string { return []string{policy.Name} })
	last := len(k.sources) - 1
	k.sources[last] = policy.Guard(k.sources[last])
	return nil
}

// add adds a source. Its last snapshots by those names are kept under name, with the settings that
// they depend on.
func (k *Kube) add(src registry.Source, name, settings string, names func() []string) {
	if k.cfg.State != "" {
		src = &snapshot.Source{Source: src, Path: k.cfg.State + "." + name, Settings: k.common() + settings, Names: names, Log: k.cfg.Log}
	}
	k.sources = append(k.sources, src)
}

// common returns the settings that all sources depend on.
func (k *Kube) common() string {
	return fmt.Sprintf("%q %q %q %t ", k.rest.Host, k.cfg.Cluster, k.cfg.Namespaces, k.cfg.MultiCluster)
}

// printed formats what v points to, because its address differs in each process.
func printed[T any](v *T) string { return fmt.Sprintf("%+v", *v) }

// A plane is a Gateway as its controller sees it, which is made before it.
type plane struct{ Gateway }

func (p *plane) Changed() <-chan struct{} { return p.ListenersChanged() }

// Start starts everything but the sources, and gives those their gateway. It must be called before
// they run. When ctx is done another replica may write. The function that Start returns stops the
// rest and waits; it is to be called when the sources have ended. Another Kube may be started then.
func (k *Kube) Start(ctx context.Context, g Gateway) (stop func()) {
	if k == nil {
		return func() {}
	}
	if k.plane != nil {
		k.plane.Gateway = g
	}
	serving, stopLeading := context.WithCancel(ctx)
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx)) // a drain serves, too
	var running sync.WaitGroup
	running.Go(func() {
		// A draining replica does not write: draining may take hours, while the other replicas serve the
		// current state and, after an upgrade, write newer conditions.
		if err := k.lead(serving); err != nil {
			k.cfg.Log.Error("leader election failed; this replica will not write status", "err", err)
		}
	})
	running.Go(func() { k.pulse.Probe(ctx, k.alive) })
	if k.slices != nil {
		running.Go(func() { k.slices.Run(ctx) })
	}
	if k.cfg.GatewayAPI != nil || k.cfg.Policies != nil || k.set != nil {
		running.Go(func() { k.defs.Run(ctx) })
	}
	if k.set != nil {
		running.Go(func() { k.runSet(ctx, g) })
	}
	return func() {
		stopLeading()
		cancel()
		running.Wait()
		if k.plane != nil {
			g.UseKeys(nil)
		}
	}
}

// lead takes part in the election of the replica that writes, until ctx is done.
func (k *Kube) lead(ctx context.Context) error {
	if k.cfg.Lease == (Object{}) {
		return nil
	}
	lease := client.Lease{
		Client: k.core, Namespace: k.cfg.Lease.Namespace, Name: k.cfg.Lease.Name,
		Identity: k.self, OnHolder: func(id string) { k.holder.Store(&id) }, OnDenied: func(why string) { k.denied.Store(&why) }, Log: k.cfg.Log,
	}
	err := lease.Run(ctx, func(ctx context.Context) {
		k.leads.Store(true)
		defer k.leads.Store(false)
		<-ctx.Done()
	})
	if errors.Is(err, context.Canceled) {
		return nil
	}
	return err
}
