package policy

import (
	"context"
	"fmt"
	"sync"

	"culvert.dev/policy"
	"culvert.dev/registry"
)

// Guard returns a Source that denies every request until src has sent its policies for the first
// time, so that a gateway that cannot read them serves nothing that they might deny. If src fails
// later and is run again, the policies of before stay in force.
func Guard(src registry.Source) registry.Source { return &guarded{Source: src} }

// guardName is that of the snapshot of a Guard.
const guardName = Name + "/unread"

type guarded struct {
	registry.Source
	open bool // the policies have been sent once; calls of Run follow each other
}

// Run implements registry.Source.
func (g *guarded) Run(ctx context.Context, updates chan<- registry.Update) error {
	send := func(u registry.Update) error {
		select {
		case updates <- u:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	if !g.open {
		shut := &policy.Policy{Name: guardName, Origin: "Kubernetes", Tier: policy.Admin, Action: policy.Deny, Invalid: "the policies of Kubernetes have not been read yet"}
		if err := send(registry.Update{Source: guardName, StandsFor: Name, Snapshot: registry.Snapshot{Policies: []*policy.Policy{shut}}}); err != nil {
			return err
		}
	}
	ctx, cancel := context.WithCancel(ctx)
	in := make(chan registry.Update)
	ended := make(chan error, 1)
	var running sync.WaitGroup
	defer running.Wait()
	defer cancel()
	running.Go(func() { ended <- g.runSource(ctx, in) })
	for {
		select {
		case err := <-ended:
			return err
		case u := <-in:
			if err := send(u); err != nil {
				return err
			}
			if g.open || u.Err != nil {
				continue
			}
			g.open = true
			if err := send(registry.Update{Source: guardName}); err != nil {
				return err
			}
		}
	}
}

// runSource runs the Source. It turns a panic into an error.
func (g *guarded) runSource(ctx context.Context, in chan<- registry.Update) (err error) {
	defer func() {
		if v := recover(); v != nil {
			err = fmt.Errorf("panic: %v", v)
		}
	}()
	return g.Source.Run(ctx, in)
}
