package watch

import (
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	apiwatch "k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"

	"culvert.dev/internal/kube/client"
)

// CustomResourceDefinitions is the resource that Definitions watch.
var CustomResourceDefinitions = schema.GroupVersionResource{Group: "apiextensions.k8s.io", Version: "v1", Resource: "customresourcedefinitions"}

// Definitions report when a CustomResourceDefinition is installed, changed or removed: a resource
// type that is installed late, or served in another version, is then asked for at once. Only the
// metadata of the definitions is read. A nil *Definitions reports nothing.
type Definitions struct {
	metadata metadata.Interface
	log      *slog.Logger
	denials  int // in a row; of Run's goroutine

	mu       sync.Mutex               // guards the rest
	waiting  map[string]chan struct{} // closed when the definition of a resource changes
	versions map[string]string        // of each resource: its definition's resourceVersion
}

// NewDefinitions makes one of an API server. It asks nothing before Run.
func NewDefinitions(cfg *rest.Config, log *slog.Logger) (*Definitions, error) {
	c, err := metadata.NewForConfig(cfg)
	if err != nil {
		return nil, fmt.Errorf("kubernetes: %w", err)
	}
	return newDefinitions(c, log), nil
}

func newDefinitions(c metadata.Interface, log *slog.Logger) *Definitions {
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	return &Definitions{metadata: c, log: log, waiting: map[string]chan struct{}{}, versions: map[string]string{}}
}

// Changed returns a channel that is closed when the definition of a resource changes the next time.
// It is nil if d is nil.
func (d *Definitions) Changed(resource schema.GroupResource) <-chan struct{} {
	if d == nil {
		return nil
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	name := resource.String()
	changed := d.waiting[name]
	if changed == nil {
		changed = make(chan struct{})
		d.waiting[name] = changed
	}
	return changed
}

// definitionsDenied is the pause between requests of a process that may not read definitions.
const definitionsDenied = 5 * time.Minute

// Run watches until ctx is done.
func (d *Definitions) Run(ctx context.Context) {
	if d == nil {
		return
	}
	c := d.metadata.Resource(CustomResourceDefinitions)
	list := &cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			l, err := c.List(ctx, o)
			return l, d.observe(ctx, err)
		},
		WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (apiwatch.Interface, error) {
			return c.Watch(ctx, o)
		},
	}
	r := cache.NewReflectorWithOptions(cache.ToListWatcherWithWatchListSemantics(list, d.metadata), &metav1.PartialObjectMetadata{}, (*definitionStore)(d), cache.ReflectorOptions{Name: "definitions"})
	r.RunWithContext(ctx)
}

// observe logs once that definitions cannot be read, and then waits: they are worth a permission,
// but not a request every half a minute.
func (d *Definitions) observe(ctx context.Context, err error) error {
	text, denied := client.Denied("list", CustomResourceDefinitions.GroupResource(), err)
	if !denied || apierrors.IsUnauthorized(err) {
		d.denials = 0
		return err
	}
	if d.denials++; d.denials >= minDenials {
		if d.denials == minDenials {
			d.log.Info("cannot watch CustomResourceDefinitions; one that is installed later is noticed within minutes, not at once", "reason", text)
		}
		Sleep(ctx, definitionsDenied+rand.N(definitionsDenied/2))
	}
	return err
}

// A definitionStore is the store of the reflector of the definitions.
type definitionStore Definitions

// set records the version of a definition, "" for one that is gone, and notifies those who wait for
// it. Its mutex is held.
func (s *definitionStore) set(name, version string) {
	if was, known := s.versions[name]; known && was == version {
		return
	}
	if version == "" {
		delete(s.versions, name)
	} else {
		s.versions[name] = version
	}
	if changed := s.waiting[name]; changed != nil {
		close(changed)
		delete(s.waiting, name)
	}
}

func (s *definitionStore) put(o any) error {
	m, ok := o.(*metav1.PartialObjectMetadata)
	if !ok {
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.set(m.Name, m.ResourceVersion)
	return nil
}

// Add is of cache.ReflectorStore.
func (s *definitionStore) Add(o any) error { return s.put(o) }

// Update is of cache.ReflectorStore.
func (s *definitionStore) Update(o any) error { return s.put(o) }

// Delete is of cache.ReflectorStore.
func (s *definitionStore) Delete(o any) error {
	if m, ok := o.(*metav1.PartialObjectMetadata); ok {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.set(m.Name, "")
	}
	return nil
}

// Replace is of cache.ReflectorStore.
func (s *definitionStore) Replace(all []any, _ string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	there := map[string]bool{}
	for _, o := range all {
		if m, ok := o.(*metav1.PartialObjectMetadata); ok {
			there[m.Name] = true
			s.set(m.Name, m.ResourceVersion)
		}
	}
	for name := range s.versions {
		if !there[name] {
			s.set(name, "")
		}
	}
	return nil
}

// Resync is of cache.ReflectorStore.
func (s *definitionStore) Resync() error { return nil }
