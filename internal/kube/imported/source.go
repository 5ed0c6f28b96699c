package imported

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	mcsv1 "sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	"culvert.dev/internal/kube/client"
	"culvert.dev/internal/kube/watch"
	"culvert.dev/registry"
	"culvert.dev/registry/alloc"
)

// SourceName is that of the snapshots of a Source.
const SourceName = "imported-services"

const (
	settleInterval = 200 * time.Millisecond // the least time between two rounds
	retryInterval  = 10 * time.Second       // between attempts of failed writes, and looks at who leads
	writeTimeout   = 15 * time.Second       // of one write
	reuseAfter     = 10 * time.Minute       // before a target port that is free is given to another import
)

// A Name is of a ServiceImport.
type Name = types.NamespacedName

// A Source keeps the Services of imports. It must not be copied, nor its fields be changed once it
// is used.
type Source struct {
	Client    kubernetes.Interface
	Namespace string             // of the gateway's pods, and so of the Services
	Owner     string             // tells the Services from those of other gateways of Namespace
	Selector  map[string]string  // of the gateway's pods
	Ports     registry.PortRange // that target ports are taken from

	Leads   func() bool   // whether this replica writes; nil means that it does
	Pulse   *client.Pulse // of Client; nil where nobody knows whether the API server answers
	Changed func()        // called when Address may say something else; must not block, and may be nil
	Log     *slog.Logger  // nil discards

	once   sync.Once
	signal watch.Signal
	log    *slog.Logger
	logged client.Once

	mu       sync.Mutex // guards the following
	imports  map[Name][]mcsv1.ServicePort
	known    bool                       // imports are
	services map[string]*corev1.Service // by name; as watched
	synced   bool                       // services have been listed
	denied   string                     // why they can't be
	doubt    error                      // why services may be out of date
	silent   error                      // the API server does not answer
	gone     []alloc.Port               // that are not given to others yet
	failed   map[Name]string            // why an import has no Service
	created  map[string]time.Time       // when Services were created that have not been seen yet
}

func (s *Source) init() {
	s.once.Do(func() {
		s.signal, s.log = watch.NewSignal(), s.Log
		s.services, s.failed, s.created = map[string]*corev1.Service{}, map[Name]string{}, map[string]time.Time{}
		if s.log == nil {
			s.log = slog.New(slog.DiscardHandler)
		}
	})
}

// SetImports sets the imports, with their ports. It may be called at any time; imports must not be
// changed afterwards.
func (s *Source) SetImports(imports map[Name][]mcsv1.ServicePort) {
	s.init()
	s.mu.Lock()
	s.imports, s.known = imports, true
	s.mu.Unlock()
	s.signal.Notify()
}

// An Address is what a cluster's pods reach an import by.
type Address struct {
	Service string       // "NAMESPACE/NAME" of the Service, "" for none
	IPs     []netip.Addr // its ClusterIPs
	Why     string       // there is none
}

// Address returns that of an import. It is false while that is not known.
func (s *Source) Address(name Name) (a Address, known bool) {
	s.init()
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.synced {
		return Address{Why: s.denied}, s.denied != ""
	}
	if svc := s.services[s.serviceName(name)]; svc != nil && svc.DeletionTimestamp == nil && svc.Annotations[noteImport] == name.String() {
		a := Address{Service: svc.Namespace + "/" + svc.Name}
		for _, text := range svc.Spec.ClusterIPs {
			if ip, err := netip.ParseAddr(text); err == nil {
				a.IPs = append(a.IPs, ip)
			}
		}
		return a, len(a.IPs) > 0
	}
	if why := s.failed[name]; why != "" {
		return Address{Why: why}, true
	}
	if ports, ok := s.imports[name]; ok && len(tcpPorts(ports)) == 0 {
		return Address{Why: "it has no TCP port"}, true
	}
	return Address{}, false
}

// Apply implements watch.Store.
func (s *Source) Apply(changed []any, gone []types.NamespacedName) {
	s.mu.Lock()
	for _, o := range changed {
		if svc, ok := o.(*corev1.Service); ok {
			s.services[svc.Name] = svc
			delete(s.created, svc.Name)
		}
	}
	for _, n := range gone {
		delete(s.services, n.Name)
		delete(s.created, n.Name)
	}
	s.mu.Unlock()
	s.changed()
}

func (s *Source) changed() {
	s.signal.Notify()
	if s.Changed != nil {
		s.Changed()
	}
}

func (s *Source) onState(_, after watch.State) {
	s.mu.Lock()
	s.synced, s.denied, s.doubt = after.Synced, after.Denied, cmp.Or(after.Err, after.Unconfirmed)
	s.mu.Unlock()
	s.changed()
}

func (s *Source) reachable(err error) {
	if err != nil {
		err = fmt.Errorf("the API server does not answer: %w", err)
	}
	s.mu.Lock()
	s.silent = err
	s.mu.Unlock()
	s.signal.Notify()
}

// Run implements registry.Source. It returns when ctx is done.
func (s *Source) Run(ctx context.Context, updates chan<- registry.Update) error {
	if s.Client == nil || s.Namespace == "" || len(s.Selector) == 0 || s.Ports.First == 0 {
		return errors.New("imported services: Client, Namespace, Selector or Ports is missing")
	}
	s.init()
	w := watch.New(watch.Config{
		Name: SourceName, Resource: corev1.Resource("services"), Namespace: s.Namespace, Object: &corev1.Service{}, Client: s.Client,
		Source: watch.Source(s.Client.CoreV1().Services(s.Namespace), func(o *metav1.ListOptions) {
			o.LabelSelector = labels.SelectorFromSet(s.labels()).String()
		}),
		Store: s, Transform: withoutManagedFields, Pulse: s.Pulse, OnChange: s.onState, Without: "addresses of imported services", Log: s.log,
	})
	ctx, cancel := context.WithCancel(ctx)
	var running sync.WaitGroup
	defer running.Wait()
	defer cancel()
	running.Go(func() { w.Run(ctx) })
	if s.Pulse != nil {
		running.Go(func() { watch.Reachability(ctx, s.Pulse, s.reachable) })
	}
	return s.loop(ctx, updates)
}

// loop sends updates and writes, until ctx is done.
func (s *Source) loop(ctx context.Context, updates chan<- registry.Update) error {
	tick := time.NewTicker(retryInterval)
	defer tick.Stop()
	pause := time.NewTimer(0)
	defer pause.Stop()
	var sent sentUpdate
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-s.signal:
		case <-tick.C:
		}
		if u, ok := s.next(&sent); ok {
			select {
			case updates <- u:
			case <-ctx.Done():
				return ctx.Err()
			}
		}
		s.settle(ctx)
		pause.Reset(settleInterval)
		select {
		case <-pause.C:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// A sentUpdate is what the last Update said.
type sentUpdate struct {
	begun     bool
	ports     []openPort
	listeners []*registry.Listener
	lost      error
}

// next returns the Update to send, if something has changed.
func (s *Source) next(sent *sentUpdate) (registry.Update, bool) {
	s.mu.Lock()
	ports, synced, denied, lost := s.open(), s.synced, s.denied, cmp.Or(s.silent, s.doubt)
	s.mu.Unlock()
	u := registry.Update{Source: SourceName}
	switch {
	case lost != nil:
		if sent.lost != nil {
			return u, false
		}
		sent.lost, u.Err = lost, lost
		return u, true
	case !synced && denied == "":
		return u, false
	case sent.begun && sent.lost == nil && slices.Equal(ports, sent.ports):
		return u, false
	}
	if !sent.begun || !slices.Equal(ports, sent.ports) {
		sent.ports, sent.listeners = ports, listeners(ports)
	}
	sent.begun, sent.lost, u.Listeners = true, nil, sent.listeners
	return u, true
}

// An openPort is a target port and where it leads.
type openPort struct {
	target uint16
	to     Name
	port   uint16
	origin string
}

// open returns the target ports of all Services, in order. mu is held.
func (s *Source) open() (all []openPort) {
	for _, svc := range s.services {
		name, ok := importOf(svc)
		if !ok {
			continue
		}
		for _, p := range svc.Spec.Ports {
			if target := s.targetPort(&p); target != 0 {
				all = append(all, openPort{target, name, uint16(p.Port), "Service " + svc.Namespace + "/" + svc.Name})
			}
		}
	}
	slices.SortFunc(all, func(a, b openPort) int {
		return cmp.Or(cmp.Compare(a.target, b.target), strings.Compare(a.origin, b.origin), cmp.Compare(a.port, b.port))
	})
	return all
}

// targetPort returns the port of the gateway that p leads to, 0 where that is none of the range.
func (s *Source) targetPort(p *corev1.ServicePort) uint16 {
	n := p.TargetPort.IntValue()
	if cmp.Or(p.Protocol, corev1.ProtocolTCP) != corev1.ProtocolTCP || n < 1 || n > 65535 || p.Port < 1 || p.Port > 65535 || !s.Ports.Contains(uint16(n)) {
		return 0
	}
	return uint16(n)
}

func listeners(ports []openPort) (all []*registry.Listener) {
	for _, p := range ports {
		name, err := registry.ID{Service: p.to.Name, Namespace: p.to.Namespace}.SetName()
		if err != nil {
			continue
		}
		all = append(all, &registry.Listener{
			Name: fmt.Sprintf("imported/%s/%d", p.to, p.port), Protocol: registry.Streams, Port: p.target, Origin: p.origin,
			Settings: &registry.ListenerSettings{Service: name, Port: p.port},
		})
	}
	return all
}

// settle plans, and has the leading replica write.
func (s *Source) settle(ctx context.Context) {
	s.mu.Lock()
	if !s.known || !s.synced || s.doubt != nil || s.silent != nil {
		s.mu.Unlock()
		return
	}
	todo, failed := s.plan(time.Now())
	s.mu.Unlock()
	if s.Leads != nil && !s.Leads() {
		return
	}
	for _, ch := range todo {
		if why := s.write(ctx, ch); why != "" && ch.verb != deletes {
			failed[ch.name] = why
		}
	}
	for _, name := range slices.SortedFunc(maps.Keys(failed), compareNames) {
		if s.logged.New(name.String(), failed[name]) {
			s.log.Warn("imported service has no address in this cluster, or not all of its ports", "import", name.String(), "reason", failed[name])
		}
	}
	s.mu.Lock()
	before := s.failed
	s.failed = failed
	s.mu.Unlock()
	for name := range before {
		if failed[name] == "" {
			s.logged.New(name.String(), "")
		}
	}
	if !maps.Equal(before, failed) && s.Changed != nil {
		s.Changed()
	}
}

func compareNames(a, b Name) int {
	return cmp.Or(strings.Compare(a.Namespace, b.Namespace), strings.Compare(a.Name, b.Name))
}

func withoutManagedFields(o any) (any, error) {
	o.(metav1.Object).SetManagedFields(nil)
	return o, nil
}
