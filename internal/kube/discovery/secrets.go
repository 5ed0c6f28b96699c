package discovery

import (
	"cmp"
	"context"
	"errors"

	"culvert.dev/internal/kube/watch"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// watchSecrets starts the watch of the Secrets. It ends with ctx.
func (f *clustersRun) watchSecrets(ctx context.Context) {
	source := watch.Source(f.Client.CoreV1().Secrets(f.Namespace), func(o *metav1.ListOptions) { o.LabelSelector = LabelCluster })
	f.watch = watch.New(watch.Config{
		Name: f.source(), Resource: corev1.Resource("secrets"), Namespace: f.Namespace, Object: &corev1.Secret{}, Source: source, Client: f.Client,
		Store: (*secretStore)(f), OnChange: func(_, _ watch.State) { f.changed.Notify() }, Without: "further clusters", Log: f.log,
	})
	f.running.Go(func() { f.watch.Run(ctx) })
}

// state returns whether the Secrets have been listed, and why they may be out of date.
func (f *clustersRun) state() (synced bool, err error) {
	s := f.watch.State()
	if s.Denied != "" {
		err = errors.New(s.Denied)
	}
	return s.Synced, cmp.Or(s.Err, s.Unconfirmed, err)
}

// A secretStore is the watch.Store of the Secrets.
type secretStore clustersRun

// Apply implements watch.Store.
func (s *secretStore) Apply(changed []any, gone []key) {
	s.mu.Lock()
	for _, o := range changed {
		sec := secretOf(o.(*corev1.Secret))
		if old := s.secrets[sec.name]; old == nil || old.sum != sec.sum || !old.created.Equal(sec.created) {
			s.secrets[sec.name] = sec
		}
	}
	for _, k := range gone {
		delete(s.secrets, k.Name)
	}
	s.mu.Unlock()
	s.changed.Notify()
}
