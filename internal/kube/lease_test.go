package kube

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"testing"
	"testing/synctest"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/rest"
)

// A replica gives the lease back when it begins to drain, however long that takes.
func TestDrainingReplicaGivesTheLeaseBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		refuse := func(context.Context, string, string) (net.Conn, error) { return nil, errors.New("refused") }
		cfg := Config{Cluster: "west", Lease: Object{"system", "culvert"}, Log: slog.New(slog.DiscardHandler)}
		k, err := newOf(cfg, &rest.Config{Host: "http://api.test", Dial: refuse})
		if err != nil {
			t.Fatal(err)
		}
		core := fake.NewClientset()
		k.core = core
		holder := func() string {
			l, err := core.CoordinationV1().Leases("system").Get(t.Context(), "culvert", metav1.GetOptions{})
			if err != nil {
				t.Fatal(err)
			}
			if l.Spec.HolderIdentity == nil {
				return ""
			}
			return *l.Spec.HolderIdentity
		}
		serving, drain := context.WithCancel(t.Context())
		stop := k.Start(serving, opened{})
		defer stop()
		time.Sleep(time.Minute)
		if h := holder(); h != k.self || !k.leads.Load() {
			t.Fatalf("the lease is held by %q, and %q leads: %v; want it to", h, k.self, k.leads.Load())
		}
		drain()
		synctest.Wait()
		if h := holder(); h != "" || k.leads.Load() {
			t.Errorf("in a drain the lease is held by %q, and this replica leads: %v; want neither", h, k.leads.Load())
		}
	})
}
