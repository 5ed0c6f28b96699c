// Package kube composes what a process has to do with Kubernetes: where services
// are found, which listeners Gateways ask for, and which of several replicas
// writes what has become of them.
//
//	k, err := kube.New(kube.Config{Cluster: "west", Discovery: &kube.Discovery{}, Log: log})
//	...
//	g, err := gateway.New(ctx, gateway.Config{Sources: append(sources, k.Sources()...), SourcesListen: true})
//	...
//	defer k.Start(ctx, g)()
//	err = g.Run(ctx, nil)
//
// What client-go knows stays below this folder.
package kube

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"culvert.dev/kube/client"
	"culvert.dev/kube/discovery"
	"culvert.dev/kube/gatewayapi"
	"culvert.dev/kube/watch"
	"culvert.dev/registry"
	"culvert.dev/registry/kept"
)

// A Config says what is read from Kubernetes, and what is written to it.
type Config struct {
	Kubeconfig string // path; "" means the pod's own service account
	Context    string // of the kubeconfig; "" means its current one
	Version    string // of the program, for the user agent

	Cluster    string        // the cluster's name, one label; needed by Discovery
	Mesh       registry.Mesh // by which its services have names
	Namespaces []string      // what is looked at; empty means the whole cluster

	Discovery    *Discovery  // nil means that services are not looked for
	GatewayAPI   *GatewayAPI // nil means that no Gateways are served
	MultiCluster bool        // ServiceExports are taken up, and ServiceImports kept

	Lease Object // among those who write; zero means that this process never does

	// State is where what each source says is kept for the next start: it is the
	// beginning of paths of files. "" keeps nothing.
	State string

	Log *slog.Logger
}

// An Object is what a namespaced object is called.
type Object struct{ Namespace, Name string }

// Discovery says which Services become services.
type Discovery struct {
	Network           string // that pods are in; "" means one that is called as the cluster
	Declared          bool   // Network is told of elsewhere, with its gateways
	Zone              string // that we are in; "" ignores topology hints
	Prefer            string // "ipv4", "ipv6" or "both"; "" means each Service's first family
	PodCIDRs          bool   // what Nodes have for their pods is of Network
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

// A Gateway opens the listeners that a Kube knows of.
type Gateway interface {
	// ListenerErrors has the listeners that have been tried, by name: nil is
	// open, and an error says why not.
	ListenerErrors() map[string]error
	// ListenersChanged is sent to when that has changed.
	ListenersChanged() <-chan struct{}
	// ClusterSetAddresses returns the addresses that a service of the cluster
	// set has to itself.
	ClusterSetAddresses(namespace, service string) []netip.Addr
	// UseSecrets is told of the certificates of Secrets that Gateways show, whenever
	// they change: from when, and until when, each is valid, by "NAMESPACE/NAME".
	UseSecrets(map[string][2]time.Time)
}

// A Kube is what a process has to do with Kubernetes. A nil Kube is nothing.
type Kube struct {
	cfg     Config
	rest    *rest.Config
	pulse   *client.Pulse               // of all that goes by rest
	alive   func(context.Context) error // asks whether the API server is there
	core    kubernetes.Interface
	defs    *watch.Definitions // of the cluster's kinds
	self    string             // what this replica is called
	leads   atomic.Bool        // this replica writes
	holder  atomic.Pointer[string]
	denied  atomic.Pointer[string] // why it can't; "" or nil if it may
	sources []registry.Source
	own     *discovery.Source   // nil without Discovery
	further *discovery.Clusters // nil for none
	plane   *plane              // nil where nothing is listened at
	set     *clusterSet         // nil for none
}

// New makes a Kube. It makes no request yet.
func New(cfg Config) (*Kube, error) {
	c, err := (client.Config{Kubeconfig: cfg.Kubeconfig, Context: cfg.Context, Version: cfg.Version}).REST()
	if err != nil {
		return nil, err
	}
	return newOf(cfg, c)
}

// newOf is New of an API server.
func newOf(cfg Config, c *rest.Config) (*Kube, error) {
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	host, err := os.Hostname()
	if err != nil {
		return nil, fmt.Errorf("kubernetes: a name for this replica: %w", err)
	}
	k := &Kube{cfg: cfg, rest: c, self: fmt.Sprintf("%s_%d", host, os.Getpid())}
	client.Logs(cfg.Log)
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
	if cfg.GatewayAPI != nil {
		if err := k.serve(cfg.GatewayAPI); err != nil {
			return nil, err
		}
	}
	return k, nil
}

// Sources returns what is to be run with a registry.
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
	own.Pulse = k.pulse
	k.own = own
	k.add(own, "discovery", printed(d), func() []string { return []string{"cluster/" + k.cfg.Cluster} })
	further := &discovery.Clusters{Client: k.core, Namespace: d.Clusters, Own: k.cfg.Cluster, New: k.source, Log: k.cfg.Log}
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

// source returns the discovery of a cluster, without what is its own.
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
		settings.Zone, settings.Prefer = d.Zone, d.Prefer
		settings.Network, settings.Cluster, settings.Mesh = cmp.Or(d.Network, k.cfg.Cluster), k.cfg.Cluster, k.cfg.Mesh
		if d.Prefer == discovery.PreferBoth {
			settings.Prefer = "" // that is for DNS: a pod has one share of a route's connections
		}
	}
	c, err := gatewayapi.New(gatewayapi.Config{
		Settings: settings,
		REST:     k.rest, Pulse: k.pulse, Definitions: k.defs, Plane: k.plane, Leads: k.leads.Load, Log: k.cfg.Log,
		UseSecrets: func(all map[string][2]time.Time) { k.plane.UseSecrets(all) },
	})
	if err != nil {
		return err
	}
	k.add(c, "gateway-api", printed(api)+" "+settings.Network, func() []string { return []string{"gateway-api"} })
	return nil
}

// add adds a source, which is told settings, and what it says by those names is
// kept under a name of its own.
func (k *Kube) add(src registry.Source, name, settings string, names func() []string) {
	if k.cfg.State != "" {
		src = &kept.Source{Source: src, Path: k.cfg.State + "." + name, Settings: k.common() + settings, Names: names, Log: k.cfg.Log}
	}
	k.sources = append(k.sources, src)
}

// common are the settings that all sources have.
func (k *Kube) common() string {
	return fmt.Sprintf("%q %q %q %t ", k.rest.Host, k.cfg.Cluster, k.cfg.Namespaces, k.cfg.MultiCluster)
}

// printed is what v points to: the address of it is another in each process.
func printed[T any](v *T) string { return fmt.Sprintf("%+v", *v) }

// A plane is a Gateway as its controller sees it, which is made before it.
type plane struct{ Gateway }

func (p *plane) Changed() <-chan struct{} { return p.ListenersChanged() }

// Start begins what the sources don't do, and tells them which gateway they
// feed. It comes before they run. When ctx is done another replica may write.
// What Start returns ends the rest, and waits; it is for when the sources have ended.
func (k *Kube) Start(ctx context.Context, g Gateway) (stop func()) {
	if k == nil {
		return func() {}
	}
	if k.plane != nil {
		k.plane.Gateway = g
	}
	serving := ctx
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx)) // a drain serves, too
	var running sync.WaitGroup
	running.Go(func() {
		// Who drains does not write: that may last for hours, in which the others
		// know better what is served, and after an upgrade what to say of it.
		if err := k.lead(serving); err != nil {
			k.cfg.Log.Error("leader election failed; this replica will not write status", "err", err)
		}
	})
	running.Go(func() { k.pulse.Probe(ctx, k.alive) })
	if k.cfg.GatewayAPI != nil || k.set != nil {
		running.Go(func() { k.defs.Run(ctx) })
	}
	if k.set != nil {
		running.Go(func() { k.runSet(ctx, g) })
	}
	return func() {
		cancel()
		running.Wait()
	}
}

// lead does what is left to one of several replicas, until ctx is done.
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
