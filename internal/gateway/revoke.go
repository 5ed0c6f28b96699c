package gateway

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"culvert.dev/identity"
	"culvert.dev/registry"
	"culvert.dev/reverse"
	"culvert.dev/tunnel"
)

// A revoker ends the tunnels that policies allowed and deny since the table has changed, and
// those of callers whose identity was revoked. Names that connectors may no longer serve are
// taken from them.
type revoker struct {
	router   *tunnel.Router
	sessions *reverse.Server
	identity *identity.Store // may be nil
	log      *slog.Logger

	mu      sync.Mutex // guards pending
	pending []tableChange
	wake    chan struct{} // has room for one
}

// A tableChange is a table and the one before it.
type tableChange struct{ before, now *registry.Table }

func newRevoker(router *tunnel.Router, sessions *reverse.Server, store *identity.Store, log *slog.Logger) *revoker {
	return &revoker{router: router, sessions: sessions, identity: store, log: log, wake: make(chan struct{}, 1)}
}

// swapped is told of each table.
func (v *revoker) swapped(before, now *registry.Table) {
	if len(before.Policies())+len(now.Policies()) == 0 {
		return
	}
	v.mu.Lock()
	v.pending = append(v.pending, tableChange{before, now})
	v.mu.Unlock()
	select {
	case v.wake <- struct{}{}:
	default:
	}
}

// run ends tunnels after each change, until ctx is done.
func (v *revoker) run(ctx context.Context) error {
	var identities <-chan struct{}
	if v.identity != nil {
		changes, stop := v.identity.Watch()
		defer stop()
		identities = changes
	}
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-v.wake:
			v.sessions.Recheck()
			v.revoke()
		case <-identities:
			v.revokeIdentities()
		}
	}
}

// revokeIdentities ends the tunnels of callers whose certificate, or the statement of
// another gateway about them, counts no more.
func (v *revoker) revokeIdentities() {
	start := time.Now()
	if n := v.router.RevokeIdentities(); n > 0 {
		v.log.Info("ended tunnels of callers whose identity was revoked", "tunnels", n, "took", time.Since(start))
	}
}

// revoke ends the tunnels of the services that the pending changes concern, where the
// current table denies them. A tunnel that the Relay gets only now is the Router's.
func (v *revoker) revoke() {
	v.mu.Lock()
	pending := v.pending
	v.pending = nil
	v.mu.Unlock()
	open, services := v.router.Relay.OpenServices(), map[tunnel.ServiceKey]bool{}
	for _, c := range pending {
		for k := range c.now.PolicyChanges(c.before, open) {
			services[k] = true
		}
	}
	if len(services) == 0 {
		return
	}
	start := time.Now()
	if n := v.router.Revoke(services); n > 0 {
		v.log.Info("ended tunnels that policies no longer allow", "tunnels", n, "services", len(services), "took", time.Since(start))
	}
}
