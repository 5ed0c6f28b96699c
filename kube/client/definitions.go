package client

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
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
)

// CustomResourceDefinitions is the resource that Definitions watch.
var CustomResourceDefinitions = schema.GroupVersionResource{Group: "apiextensions.k8s.io", Version: "v1", Resource: "customresourcedefinitions"}

// Definitions tell when a CustomResourceDefinition comes, changes or goes: a kind that
// is installed late, or served by another version, is then asked for at once. Of the
// definitions only the metadata is read, and nothing is kept. A nil one tells nothing.
type Definitions struct {
	metadata metadata.Interface
	log      *slog.Logger
	denials  int // in a row; of Run's goroutine

	mu       sync.Mutex // guards the rest
	turns    map[string]chan struct{}
	versions map[string]string // of each resource: its definition's resourceVersion
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
	return &Definitions{metadata: c, log: log, turns: map[string]chan struct{}{}, versions: map[string]string{}}
}

// Changed returns what is closed when the definition of a resource changes the next
// time. It is nil where nobody tells.
func (d *Definitions) Changed(resource schema.GroupResource) <-chan struct{} {
	if d == nil {
		return nil
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	name := resource.String()
	turn := d.turns[name]
	if turn == nil {
		turn = make(chan struct{})
		d.turns[name] = turn
	}
	return turn
}

// definitionsDenied is how long a process that may not read definitions leaves them alone.
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
			return l, d.heard(ctx, err)
		},
		WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
			return c.Watch(ctx, o)
		},
	}
	r := cache.NewReflectorWithOptions(cache.ToListWatcherWithWatchListSemantics(list, d.metadata), &metav1.PartialObjectMetadata{}, (*definitionStore)(d), cache.ReflectorOptions{Name: "definitions"})
	r.RunWithContext(ctx)
}

// heard says once that definitions may not be read, and then waits: it is worth a
// right, but not a request every half a minute.
func (d *Definitions) heard(ctx context.Context, err error) error {
	text, denied := Denied("list", CustomResourceDefinitions.GroupResource(), err)
	if !denied || apierrors.IsUnauthorized(err) {
		d.denials = 0
		return err
	}
	if d.denials++; d.denials >= absentSure { // an API server that has just started refuses everything for a moment
		if d.denials == absentSure {
			d.log.Info("kubernetes: " + text + "; a CRD that is installed later is noticed within minutes, not at once")
		}
		t := time.NewTimer(definitionsDenied + rand.N(definitionsDenied/2))
		defer t.Stop()
		select {
		case <-ctx.Done():
		case <-t.C:
		}
	}
	return err
}

// A definitionStore is where a reflector puts what it hears of.
type definitionStore Definitions

// turn tells those who wait for a definition. Its mutex is held.
func (s *definitionStore) turn(name, version string) {
	if was, known := s.versions[name]; known && was == version {
		return
	}
	if version == "" {
		delete(s.versions, name)
	} else {
		s.versions[name] = version
	}
	if turn := s.turns[name]; turn != nil {
		close(turn)
		delete(s.turns, name)
	}
}

func (s *definitionStore) put(o any) error {
	m, ok := o.(*metav1.PartialObjectMetadata)
	if !ok {
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.turn(m.Name, m.ResourceVersion)
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
		s.turn(m.Name, "")
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
			s.turn(m.Name, m.ResourceVersion)
		}
	}
	for name := range s.versions {
		if !there[name] {
			s.turn(name, "")
		}
	}
	return nil
}

// Resync is of cache.ReflectorStore.
func (s *definitionStore) Resync() error { return nil }
