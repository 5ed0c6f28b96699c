package gateway

import (
	"context"
	"sync"
	"time"

	"culvert.dev/internal/gateway/inbound"
	"culvert.dev/tunnel"
)

const (
	credentialInterval = 5 * time.Second // between two looks for credentials that have expired
	credentialMemory   = time.Minute     // after which no request that was accepted before is still without its tunnel
)

// A credentialWatch ends tunnels whose credential has ended, of listeners that ask for
// that: those of a user, token or issuer that was taken away, and those whose token or
// certificate has expired.
type credentialWatch struct {
	g    *Gateway
	wake chan struct{}

	mu   sync.Mutex // guards what follows
	gone map[inbound.Credential]time.Time
}

func newCredentialWatch(g *Gateway) *credentialWatch {
	return &credentialWatch{g: g, wake: make(chan struct{}, 1), gone: make(map[inbound.Credential]time.Time)}
}

// add notes that a credential is not accepted from now on.
func (w *credentialWatch) add(c inbound.Credential) {
	w.mu.Lock()
	w.gone[c] = time.Now()
	w.mu.Unlock()
	select {
	case w.wake <- struct{}{}:
	default: // it will look anyway
	}
}

func (w *credentialWatch) run(ctx context.Context) error {
	tick := time.NewTicker(credentialInterval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		case <-w.wake:
		}
		w.sweep(time.Now())
	}
}

// sweep ends the tunnels whose credentials have ended by now, and returns how many.
func (w *credentialWatch) sweep(now time.Time) int {
	w.mu.Lock()
	gone := make(map[inbound.Credential]time.Time, len(w.gone))
	for c, at := range w.gone {
		// A request that was accepted before may get its tunnel after this look, so that
		// there are others.
		if gone[c] = at; now.Sub(at) > credentialMemory {
			delete(w.gone, c)
		}
	}
	w.mu.Unlock()
	listeners := make(map[string]bool)
	for l := range w.g.registry.Table().Listeners() {
		if l.Settings != nil && l.Settings.EndWithCredential {
			listeners[l.Name] = true
		}
	}
	if len(listeners) == 0 {
		return 0
	}
	n := w.g.relay.EndRecords(tunnel.Revoked, func(rec tunnel.Record) bool {
		peer := rec.Peer()
		if peer.Method == "" {
			return false
		}
		expired := hasExpired(&peer, now)
		if !expired && len(gone) == 0 {
			return false
		}
		var req tunnel.Request
		if _, ok := rec.Request(&req); !ok || !listeners[req.Listener] {
			return false
		}
		at, ended := gone[inbound.CredentialOf(req.Listener, &peer)]
		return expired || ended && req.Start.Before(at)
	})
	if n > 0 {
		w.g.log.Info("tunnels ended with their credentials", "tunnels", n)
	}
	return n
}

// hasExpired reports whether the credential of p has, or that of an Actor of it.
func hasExpired(p *tunnel.Peer, now time.Time) bool {
	for ; p != nil && p.Auth != nil; p = p.Auth.Actor {
		if e := p.Auth.Expires; !e.IsZero() && !now.Before(e) {
			return true
		}
	}
	return false
}
