package client

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/leaderelection"
	"k8s.io/client-go/tools/leaderelection/resourcelock"
)

// A Lease is held by one of several replicas at a time: by the one that writes.
// Whether it is held is told by the holder's own clock, so that clocks may differ.
type Lease struct {
	Client    kubernetes.Interface
	Namespace string
	Name      string
	Identity  string // of this replica; no other may have it
	Log       *slog.Logger

	// OnHolder is told who holds the lease, when that changes; it must not block.
	// May be nil.
	OnHolder func(id string)
}

// How long a lease outlives its holder's last word, when the holder gives up by
// itself, and how often it is asked for.
const (
	leaseDuration = 15 * time.Second
	leaseRenew    = 10 * time.Second
	leaseRetry    = 4 * time.Second
)

// Run tries to hold the lease until ctx is done, and calls lead each time it
// does, with a context that ends with the lease. lead must return soon after
// its context is done; Run waits for it. The lease is given back at the end, for
// the next replica not to have to wait.
func (l Lease) Run(ctx context.Context, lead func(context.Context)) error {
	for ctx.Err() == nil {
		var leading sync.WaitGroup
		e, err := leaderelection.NewLeaderElector(leaderelection.LeaderElectionConfig{
			Lock: lock{LeaseLock: &resourcelock.LeaseLock{
				LeaseMeta:  metav1.ObjectMeta{Namespace: l.Namespace, Name: l.Name},
				Client:     l.Client.CoordinationV1(),
				LockConfig: resourcelock.ResourceLockConfig{Identity: l.Identity},
			}, leading: &leading},
			Name:          l.Name,
			LeaseDuration: leaseDuration, RenewDeadline: leaseRenew, RetryPeriod: leaseRetry,
			ReleaseOnCancel: true,
			Callbacks: leaderelection.LeaderCallbacks{
				OnStartedLeading: func(ctx context.Context) {
					defer leading.Done()
					lead(ctx)
				},
				OnStoppedLeading: func() {},
				OnNewLeader: func(id string) {
					if l.OnHolder != nil {
						l.OnHolder(id)
					}
					l.Log.Info("kubernetes: a lease is held", "lease", l.Namespace+"/"+l.Name, "by", id, "self", id == l.Identity)
				},
			},
		})
		if err != nil {
			return fmt.Errorf("kubernetes: lease %s/%s: %w", l.Namespace, l.Name, err)
		}
		e.Run(ctx)
		leading.Wait()
	}
	return ctx.Err()
}

// A lock knows that OnStartedLeading is about to be called, in a goroutine that
// client-go does not wait for.
type lock struct {
	*resourcelock.LeaseLock
	leading *sync.WaitGroup
}

func (l lock) RecordEvent(what string) {
	if what == "became leader" {
		l.leading.Add(1)
	}
}
