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
// Each replica decides by its own clock whether it is held, so that clocks may differ.
type Lease struct {
	Client    kubernetes.Interface
	Namespace string
	Name      string
	Identity  string // of this replica; no other may have it
	Log       *slog.Logger

	// OnHolder is called with the holder of the lease when that changes; it must not block. It may
	// be nil.
	OnHolder func(id string)

	// OnDenied is called with the reason why the lease cannot be used, if only an administrator can
	// change that, and with "" once it can be; it must not block. It may be nil.
	OnDenied func(why string)
}

// How long a lease outlives its last renewal, after which time without one the holder gives up, and
// how often it is renewed or asked for.
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
	observe := &leaseDenials{lease: l}
	for ctx.Err() == nil {
		var leading sync.WaitGroup
		e, err := leaderelection.NewLeaderElector(leaderelection.LeaderElectionConfig{
			Lock: lock{LeaseLock: &resourcelock.LeaseLock{
				LeaseMeta:  metav1.ObjectMeta{Namespace: l.Namespace, Name: l.Name},
				Client:     l.Client.CoordinationV1(),
				LockConfig: resourcelock.ResourceLockConfig{Identity: l.Identity},
			}, leading: &leading, leaseDenials: observe},
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
	*leaseDenials
}

func (l lock) Get(ctx context.Context) (*resourcelock.LeaderElectionRecord, []byte, error) {
	r, raw, err := l.LeaseLock.Get(ctx)
	l.observe("get", err)
	return r, raw, err
}

func (l lock) Create(ctx context.Context, r resourcelock.LeaderElectionRecord) error {
	err := l.LeaseLock.Create(ctx, r)
	l.observe("create", err)
	return err
}

func (l lock) Update(ctx context.Context, r resourcelock.LeaderElectionRecord) error {
	err := l.LeaseLock.Update(ctx, r)
	l.observe("update", err)
	return err
}

func (l lock) RecordEvent(what string) {
	if what == "became leader" {
		l.leading.Add(1)
	}
}

// A leaseDenials observes why the lease cannot be used: client-go's elector retries for ever without
// a word, while no replica writes.
type leaseDenials struct {
	lease Lease

	mu       sync.Mutex     // guards the rest
	denied   map[string]int // answers in a row, by verb
	reported string         // what OnDenied was told
}

// minDenials is how many answers must deny something for it to be believed: an API server that has
// just started knows no roles for a moment.
const minDenials = 2

func (h *leaseDenials) observe(verb string, err error) {
	text, denied := Denied(verb, coordinationv1.Resource("leases"), err)
	h.mu.Lock()
	defer h.mu.Unlock()
	switch {
	case denied:
		if h.denied == nil {
			h.denied = map[string]int{}
		}
		if h.denied[verb]++; h.denied[verb] != minDenials {
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
			if n >= minDenials {
				return // which has been reported
			}
		}
		if text = ""; h.reported != "" {
			h.lease.Log.Info("lease is accessible again", "lease", h.lease.Namespace+"/"+h.lease.Name)
		}
	}
	if h.reported == text {
		return
	}
	if h.reported = text; h.lease.OnDenied != nil {
		h.lease.OnDenied(text)
	}
}
