package client

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
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

	// OnDenied is told why the lease can't be had, if that is something that only
	// an administrator can change, and "" once it can; it must not block. May be nil.
	OnDenied func(why string)
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
	hear := &hearing{lease: l}
	for ctx.Err() == nil {
		var leading sync.WaitGroup
		e, err := leaderelection.NewLeaderElector(leaderelection.LeaderElectionConfig{
			Lock: lock{LeaseLock: &resourcelock.LeaseLock{
				LeaseMeta:  metav1.ObjectMeta{Namespace: l.Namespace, Name: l.Name},
				Client:     l.Client.CoordinationV1(),
				LockConfig: resourcelock.ResourceLockConfig{Identity: l.Identity},
			}, leading: &leading, hearing: hear},
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
					l.Log.Info("lease acquired", "lease", l.Namespace+"/"+l.Name, "by", id, "self", id == l.Identity)
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
	*hearing
}

func (l lock) Get(ctx context.Context) (*resourcelock.LeaderElectionRecord, []byte, error) {
	r, raw, err := l.LeaseLock.Get(ctx)
	l.hear("get", err)
	return r, raw, err
}

func (l lock) Create(ctx context.Context, r resourcelock.LeaderElectionRecord) error {
	err := l.LeaseLock.Create(ctx, r)
	l.hear("create", err)
	return err
}

func (l lock) Update(ctx context.Context, r resourcelock.LeaderElectionRecord) error {
	err := l.LeaseLock.Update(ctx, r)
	l.hear("update", err)
	return err
}

func (l lock) RecordEvent(what string) {
	if what == "became leader" {
		l.leading.Add(1)
	}
}

// A hearing says why the lease can't be had: client-go's elector tries again for
// ever, and nobody would write, nor know why.
type hearing struct {
	lease Lease

	mu     sync.Mutex     // guards the rest
	denied map[string]int // times, by verb, since it was done last
	said   string         // what OnDenied was told
}

// believed is how many times something must be forbidden for it to be so: an API
// server that has just started knows of no roles for a moment.
const believed = 2

func (h *hearing) hear(verb string, err error) {
	text, denied := Denied(verb, coordinationv1.Resource("leases"), err)
	h.mu.Lock()
	defer h.mu.Unlock()
	switch {
	case denied:
		if h.denied == nil {
			h.denied = map[string]int{}
		}
		if h.denied[verb]++; h.denied[verb] != believed {
			return
		}
		h.lease.Log.Warn("cannot use the lease; this replica writes no status", "lease", h.lease.Namespace+"/"+h.lease.Name, "reason", text)
	case err != nil:
		return
	case verb == "get": // there is one, which need not be created
		delete(h.denied, "get")
		delete(h.denied, "create")
	default:
		clear(h.denied)
	}
	if !denied {
		for _, n := range h.denied {
			if n >= believed {
				return // as has been said
			}
		}
		if text = ""; h.said != "" {
			h.lease.Log.Info("lease is accessible again", "lease", h.lease.Namespace+"/"+h.lease.Name)
		}
	}
	if h.said == text {
		return
	}
	if h.said = text; h.lease.OnDenied != nil {
		h.lease.OnDenied(text)
	}
}
