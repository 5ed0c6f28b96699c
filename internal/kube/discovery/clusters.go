package discovery

import (
	"cmp"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"culvert.dev/internal/kube/client"
	"culvert.dev/internal/kube/watch"
	"culvert.dev/registry"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/validation"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
)

// Reasons of Events at a Secret with a kubeconfig.
const (
	LabelCluster  = prefix + "cluster" // and names the cluster
	NoteNetwork   = prefix + "network" // annotation; the cluster's name, if it is not there
	KubeconfigKey = "kubeconfig"       // of the Secret's data
)

// gatherTimeout is how long to wait for the first updates of all clusters, to send them together: a
// table with half of the clusters refuses requests for services of the others. The registry waits a
// little longer.
const gatherTimeout = 4 * time.Second

// Clusters are further clusters as one registry.Source: each is a kubeconfig, under the key of that
// name, in a Secret with the label culvert.dev/cluster: NAME. They are added, changed and removed
// with their Secrets; a cluster whose Secret becomes invalid stays as it was. Client and Namespace
// are needed.
type Clusters struct {
	Client    kubernetes.Interface // of the cluster that has the Secrets
	Namespace string               // that they are in

	// Own is the cluster that needs no Secret. A Secret for it is refused.
	Own string

	// New returns the Source of a cluster, whose Client, Cluster and Network are set afterwards. Nil
	// means a zero Source.
	New func(name string) *Source

	// Connect makes a client from a kubeconfig that parseKubeconfig has accepted. Nil means a client
	// of client-go, with protobuf.
	Connect func(*rest.Config) (kubernetes.Interface, error)

	// Dial connects to API servers; nil means the dialer of client-go.
	Dial func(ctx context.Context, network, address string) (net.Conn, error)

	// OnCluster is called for each cluster whose discovery begins, with its context. The function
	// that it returns, if not nil, is called when the discovery has ended. It may be nil.
	OnCluster func(ctx context.Context, name string, cfg *rest.Config, src *Source) (ended func())

	// Log receives refused Secrets and lost clusters. Nil discards them.
	Log *slog.Logger

	names atomic.Pointer[[]string]

	mu      sync.Mutex         // guards the following
	sources map[string]*Source // of the clusters that are there
}

// Names returns the names under which Clusters sends updates: its own, and those of all clusters
// that have Secrets, valid or not. It is nil until the Secrets have been listed.
func (c *Clusters) Names() []string {
	if p := c.names.Load(); p != nil {
		return *p
	}
	return nil
}

// A secret has the fields of a Secret that are used.
type secret struct {
	name    string
	created time.Time
	cluster string
	network string
	config  *rest.Config
	bad     error             // why config is nil
	sum     [sha256.Size]byte // of all of it
}

func secretOf(s *corev1.Secret) *secret {
	out := &secret{name: s.Name, created: s.CreationTimestamp.Time, cluster: s.Labels[LabelCluster], network: s.Annotations[NoteNetwork]}
	h := sha256.New()
	fmt.Fprintf(h, "%q %q ", out.cluster, out.network)
	h.Write(s.Data[KubeconfigKey])
	h.Sum(out.sum[:0])
	switch {
	case !isCluster(out.cluster):
		out.bad = fmt.Errorf("label %s: %q is not a cluster name: it is not one label of a DNS name", LabelCluster, clip(out.cluster))
	case len(s.Data[KubeconfigKey]) == 0:
		out.bad = fmt.Errorf("it has no key %q", KubeconfigKey)
	default:
		out.config, out.bad = parseKubeconfig(s.Data[KubeconfigKey])
	}
	return out
}

// A clustersRun is one call of Clusters.Run.
type clustersRun struct {
	*Clusters
	log     *slog.Logger
	watch   *watch.Watch // of the Secrets
	changed watch.Signal
	updates chan registry.Update // of all clusters
	running sync.WaitGroup

	mu      sync.Mutex // guards the following
	secrets map[string]*secret

	members map[string]*member // by cluster; of the loop alone, as the next
	failed  map[string]bool    // clusters that were reported as failed, and never ran
	logged  client.Once
}

// A member is a cluster whose discovery runs.
type member struct {
	*secret
	stop func() // and waits
}

func (c *Clusters) source() string { return "clusters/" + c.Namespace }

// Run implements registry.Source. It returns when ctx is done. Its own updates, with the name
// "clusters/NAMESPACE", have no services, and an Err if the Secrets cannot be read.
func (c *Clusters) Run(ctx context.Context, updates chan<- registry.Update) error {
	if c.Client == nil || c.Namespace == "" {
		return errors.New("discovery: clusters need a client, and the namespace of their Secrets")
	}
	f := &clustersRun{
		Clusters: c, log: c.Log, changed: watch.NewSignal(), updates: make(chan registry.Update),
		secrets: map[string]*secret{}, members: map[string]*member{}, failed: map[string]bool{},
	}
	if f.log == nil {
		f.log = slog.New(slog.DiscardHandler)
	}
	ctx, cancel := context.WithCancel(ctx)
	defer f.running.Wait()
	defer cancel()
	f.watchSecrets(ctx)
	return f.loop(ctx, updates)
}

// loop starts and stops discoveries, and passes on their updates.
func (f *clustersRun) loop(ctx context.Context, out chan<- registry.Update) error {
	send := func(u registry.Update) error {
		select {
		case out <- u:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	var (
		begun, lost bool
		waiting     = map[string]bool{} // clusters that have not sent an update yet; nil once they are not waited for
		held        []registry.Update
		late        = time.After(gatherTimeout)
	)
	for {
		var own []registry.Update // of clusters whose discovery does not run
		select {
		case <-ctx.Done():
			return ctx.Err()
		case u := <-f.updates:
			if waiting != nil {
				delete(waiting, u.Source)
				held = append(held, u)
			} else if err := send(u); err != nil {
				return err
			}
		case <-late:
			for _, name := range slices.Sorted(maps.Keys(waiting)) { // what is known of them from before stays
				held = append(held, registry.Update{Source: name, Err: fmt.Errorf("discovery: the cluster has not been listed after %v", gatherTimeout)})
			}
			waiting = nil
		case <-f.changed:
			synced, err := f.state()
			if (err != nil) != lost {
				lost = err != nil
				if lost {
					f.log.Warn("cannot list the Secrets of clusters; keeping the known clusters", "err", err)
				}
				if !lost && begun || lost {
					own = append(own, registry.Update{Source: f.source(), Err: err})
				}
			}
			if !synced {
				break
			}
			own = append(own, f.apply(ctx)...)
			if !begun {
				begun = true
				own = append(own, registry.Update{Source: f.source()})
				for name := range f.members {
					if waiting != nil {
						waiting["cluster/"+name] = true
					}
				}
			}
		}
		if waiting != nil {
			held = append(held, own...)
			if !begun || len(waiting) > 0 {
				continue
			}
			waiting = nil
			own = nil
		}
		all := append(held, own...)
		for i, u := range all {
			u.More = u.More || i < len(all)-1
			if err := send(u); err != nil {
				return err
			}
		}
		held = nil
	}
}

// apply starts and stops discoveries so that those of the Secrets run, and returns the updates of
// clusters whose discovery does not run.
func (f *clustersRun) apply(ctx context.Context) (say []registry.Update) {
	f.mu.Lock()
	want := map[string]*secret{}
	wrong := map[*secret]error{}
	for _, s := range slices.SortedFunc(maps.Values(f.secrets), func(a, b *secret) int {
		return cmp.Or(a.created.Compare(b.created), cmp.Compare(a.name, b.name))
	}) {
		why := s.bad
		switch other := want[s.cluster]; {
		case f.Own != "" && s.cluster == f.Own:
			why = fmt.Errorf("cluster %q is the gateway's own and needs no Secret", s.cluster)
		case other != nil:
			why = fmt.Errorf("cluster %q is already defined by Secret %q", s.cluster, other.name)
		case isCluster(s.cluster):
			want[s.cluster] = s
		}
		wrong[s] = why
		f.logRefused(s, why)
	}
	f.mu.Unlock()
	names := []string{f.source()}
	for _, name := range slices.Sorted(maps.Keys(want)) {
		names = append(names, "cluster/"+name)
	}
	f.names.Store(&names)

	for _, name := range slices.Sorted(maps.Keys(f.members)) {
		m := f.members[name]
		s := want[name]
		if s != nil && (s.config == nil || s.sum == m.sum) {
			continue // if the new one is invalid, the old one stays in force
		}
		m.stop()
		delete(f.members, name)
		if s == nil {
			f.log.Info("cluster removed", "cluster", name)
			say = append(say, registry.Update{Source: "cluster/" + name})
		}
	}
	for _, name := range slices.Sorted(maps.Keys(want)) {
		if f.members[name] != nil || want[name].config == nil {
			continue
		}
		if err := f.start(ctx, want[name]); err != nil {
			f.log.Error("cannot connect to the cluster", "cluster", name, "secret", f.Namespace+"/"+want[name].name, "err", err)
			say = append(say, registry.Update{Source: "cluster/" + name, Err: err})
			f.failed[name] = true
			continue
		}
		delete(f.failed, name)
	}
	for _, name := range slices.Sorted(maps.Keys(want)) {
		if s := want[name]; wrong[s] != nil && f.members[name] == nil {
			say = append(say, registry.Update{Source: "cluster/" + name, Err: fmt.Errorf("discovery: Secret %s/%s: %w", f.Namespace, s.name, wrong[s])})
			f.failed[name] = true
		}
	}
	for _, name := range slices.Sorted(maps.Keys(f.failed)) {
		if want[name] == nil { // its Secret is gone
			say = append(say, registry.Update{Source: "cluster/" + name})
			delete(f.failed, name)
		}
	}
	return say
}

func isCluster(name string) bool { return len(validation.NameIsDNSLabel(name, false)) == 0 }

// logRefused logs once why a Secret is refused.
func (f *clustersRun) logRefused(s *secret, why error) {
	text := ""
	if why != nil {
		text = why.Error()
	}
	if f.logged.New(s.name, text) {
		f.log.Error("refused a kubeconfig Secret", "secret", f.Namespace+"/"+s.name, "cluster", clip(s.cluster), "err", text)
	}
}

// start begins the discovery of a cluster.
func (f *clustersRun) start(ctx context.Context, s *secret) error {
	cfg, pulse, keep := s.config, (*client.Pulse)(nil), func(context.Context) {}
	connect := f.Connect
	if connect == nil {
		cfg, pulse = rest.CopyConfig(cfg), client.NewPulse()
		cfg.Dial = f.Dial
		cfg.Wrap(pulse.Wrap)
		connect = func(cfg *rest.Config) (kubernetes.Interface, error) {
			alive, err := client.Livez(cfg)
			if err != nil {
				return nil, err
			}
			keep = func(ctx context.Context) { pulse.Probe(ctx, alive) }
			return kubernetes.NewForConfig(client.Protobuf(cfg))
		}
	}
	core, err := connect(cfg)
	if err != nil {
		return fmt.Errorf("discovery: Secret %s/%s: %w", f.Namespace, s.name, err)
	}
	src := &Source{}
	if f.New != nil {
		src = f.New(s.cluster)
	}
	src.Client, src.Cluster, src.Network, src.Pulse = core, s.cluster, s.network, pulse
	if src.Log == nil {
		src.Log = f.log
	}
	f.log.Info("cluster added", "cluster", s.cluster, "secret", f.Namespace+"/"+s.name, "server", s.config.Host)
	ctx, cancel := context.WithCancel(ctx)
	var ended func()
	if f.OnCluster != nil {
		ended = f.OnCluster(ctx, s.cluster, cfg, src)
	}
	f.running.Go(func() { keep(ctx) })
	done := make(chan struct{})
	gone := f.register(src)
	f.running.Go(func() {
		defer close(done)
		defer gone()
		if ended != nil {
			defer ended()
		}
		f.runSource(ctx, src)
	})
	f.members[s.cluster] = &member{secret: s, stop: func() {
		cancel()
		<-done
	}}
	return nil
}

// runSource runs a Source until ctx is done, and restarts it if it fails.
func (f *clustersRun) runSource(ctx context.Context, src *Source) {
	for pause := time.Second; ; pause = min(2*pause, 30*time.Second) {
		err := runSafely(ctx, src, f.updates)
		if ctx.Err() != nil {
			return
		}
		f.log.Error("cluster failed; keeping its last snapshot", "cluster", src.Cluster, "err", err, "again", pause)
		select {
		case f.updates <- registry.Update{Source: src.name(), Err: err}:
		case <-ctx.Done():
			return
		}
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			return
		}
	}
}

// runSafely runs src, and turns a panic into an error.
func runSafely(ctx context.Context, src *Source, updates chan<- registry.Update) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("panic: %v", p)
		}
	}()
	return src.Run(ctx, updates)
}
