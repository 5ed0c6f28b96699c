package discovery

import (
	"context"
	"errors"
	"fmt"

	"culvert.dev/kube/client"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	apiwatch "k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"
)

// watch starts the reflector of the Secrets. It ends with ctx.
func (f *fleet) watch(ctx context.Context) {
	secrets := f.Client.CoreV1().Secrets(f.Namespace)
	both := cache.ToListWatcherWithWatchListSemantics(&cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			o.LabelSelector = LabelCluster
			l, err := secrets.List(ctx, o)
			f.heard(ctx, list, err)
			return l, err
		},
		WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (apiwatch.Interface, error) {
			o.LabelSelector = LabelCluster
			w, err := secrets.Watch(ctx, o)
			f.heard(ctx, watch, err)
			return w, err
		},
	}, f.Client)
	r := newReflector(both, &corev1.Secret{}, (*secretStore)(f), f.source())
	f.running.Go(func() { keepUp(ctx, r) })
}

// heard notes how a request went.
func (f *fleet) heard(ctx context.Context, verb int, err error) {
	if ctx.Err() != nil || err != nil && (errors.Is(err, context.Canceled) || apierrors.IsResourceExpired(err) || apierrors.IsGone(err)) {
		return
	}
	text := ""
	if err != nil {
		if denial, denied := client.Denied(verbs[verb], corev1.Resource("secrets"), err); denied {
			f.mu.Lock()
			if f.refused[verb]++; f.refused[verb] >= believe {
				text = denial
			}
			f.mu.Unlock()
		}
		err = fmt.Errorf("%s secrets in namespace %s: %w", verbs[verb], f.Namespace, err)
	}
	if f.said.New(" "+verbs[verb], text) {
		f.log.Error("discovery: "+text, "verb", verbs[verb], "resource", "secrets", "namespace", f.Namespace, "without", "further clusters")
	}
	f.mu.Lock()
	if err == nil {
		f.refused[verb] = 0
	}
	changed := (f.err == nil) != (err == nil)
	if err == nil && verb == list && f.err != nil {
		changed = false // a watch follows, and says whether all is well
	} else {
		f.err = err
	}
	f.mu.Unlock()
	if changed {
		f.kick()
	}
}

// state returns whether the Secrets have been listed, and why what is known of
// them may be old.
func (f *fleet) state() (synced bool, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.synced, f.err
}

func (f *fleet) kick() {
	select {
	case f.signal <- struct{}{}:
	default:
	}
}

// secretStore is where the reflector puts Secrets.
type secretStore fleet

func (s *secretStore) put(list ...any) {
	for _, o := range list {
		sec := secretOf(o.(*corev1.Secret))
		if old := s.secrets[sec.name]; old == nil || old.sum != sec.sum || !old.created.Equal(sec.created) {
			s.secrets[sec.name] = sec
		}
	}
}

func (s *secretStore) take(f func()) error {
	s.mu.Lock()
	f()
	s.mu.Unlock()
	(*fleet)(s).kick()
	return nil
}

func (s *secretStore) Add(o any) error    { return s.take(func() { s.put(o) }) }
func (s *secretStore) Update(o any) error { return s.Add(o) }
func (s *secretStore) Resync() error      { return nil }
func (s *secretStore) Delete(o any) error {
	return s.take(func() { delete(s.secrets, nameOf(o).Name) })
}

func (s *secretStore) Replace(list []any, _ string) error {
	return s.take(func() {
		clear(s.secrets)
		s.put(list...)
		s.synced = true
	})
}
