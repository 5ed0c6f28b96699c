//go:build !nospiffe

package spiffe

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/spiffe/go-spiffe/v2/proto/spiffe/workload"
	"github.com/spiffe/go-spiffe/v2/svid/jwtsvid"
)

const (
	maxTokens    = 256 // kept at most, by id and audience
	tokenTimeout = 5 * time.Second
	tokenPause   = 5 * time.Second // after a fetch that failed, while an older token is still good
	tokenFailure = time.Second     // after a fetch that failed, while there is no token
)

// tokens are the JWT-SVIDs that were fetched, by id and audience.
type tokens struct {
	mu  sync.Mutex
	all map[string]*token
}

type token struct {
	fetching chan struct{} // holds an element while somebody fetches

	mu      sync.Mutex // guards what follows
	value   string
	renew   time.Time // half of its life is over, or the next attempt is due
	expires time.Time
	err     error     // of the last attempt; nil where that was good
	failed  time.Time // when that was
}

// Token returns a JWT-SVID for audience: that of the SPIFFE id, or the agent's default
// for an empty one. It is kept until half of its life is over. The next one is fetched in
// the background then, and everybody has the old one meanwhile, and while the agent is
// away for as long as it is good. Then Token is the agent's error. It belongs in no log.
func (s *Source) Token(ctx context.Context, id string, audience ...string) (string, error) {
	if len(audience) == 0 {
		return "", fmt.Errorf("a JWT-SVID needs an audience")
	}
	t := s.tokens.of(s.time(), id, audience)
	value, fresh := t.get(s.time())
	if fresh {
		return value, nil
	}
	if value != "" {
		select {
		case t.fetching <- struct{}{}:
			go func() {
				defer func() { <-t.fetching }()
				_, _ = s.renewToken(context.WithoutCancel(ctx), t, id, audience)
			}()
		default: // somebody does it
		}
		return value, nil
	}
	select {
	case t.fetching <- struct{}{}:
	case <-ctx.Done():
		return "", ctx.Err()
	}
	defer func() { <-t.fetching }()
	// Somebody else may have fetched it meanwhile, or tried to: callers that wait for an
	// agent that does not answer are not to wait one after another.
	if value, _ := t.get(s.time()); value != "" {
		return value, nil
	}
	if err := t.failure(s.time()); err != nil {
		return "", err
	}
	return s.renewToken(ctx, t, id, audience)
}

// renewToken fetches t anew, unless somebody has. It is called by those who hold fetching.
func (s *Source) renewToken(ctx context.Context, t *token, id string, audience []string) (string, error) {
	if value, fresh := t.get(s.time()); fresh {
		return value, nil
	}
	next, expires, err := s.fetchToken(ctx, id, audience)
	now := s.time()
	if err == nil && !expires.After(now) {
		err = fmt.Errorf("it expired at %s", expires.UTC().Format("2006-01-02T15:04:05Z"))
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if err != nil {
		err = fmt.Errorf("JWT-SVID for %s: %w", strings.Join(audience, ", "), err)
		if ctx.Err() == nil { // else the caller has left, which says nothing of the agent
			t.renew, t.failed, t.err = now.Add(tokenPause), now, err
		}
		return "", err
	}
	t.value, t.renew, t.expires, t.err = next, now.Add(expires.Sub(now)/2), expires, nil
	return next, nil
}

// failure returns the error of the last attempt, if that was a moment ago.
func (t *token) failure(now time.Time) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.err == nil || now.Sub(t.failed) >= tokenFailure {
		return nil
	}
	return t.err
}

// get returns the token if it is still good, and whether it is fresh.
func (t *token) get(now time.Time) (value string, fresh bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.value == "" || !now.Before(t.expires) {
		return "", false
	}
	return t.value, now.Before(t.renew)
}

// of returns the token with id and audience. Where there are too many, those that are
// not good any more go, and then all.
func (ts *tokens) of(now time.Time, id string, audience []string) *token {
	audience = slices.Sorted(slices.Values(audience))
	name := id + "\x00" + strings.Join(audience, "\x00")
	ts.mu.Lock()
	defer ts.mu.Unlock()
	if t := ts.all[name]; t != nil {
		return t
	}
	if len(ts.all) >= maxTokens {
		for other, t := range ts.all {
			if value, _ := t.get(now); value == "" {
				delete(ts.all, other)
			}
		}
	}
	if ts.all == nil || len(ts.all) >= maxTokens {
		ts.all = make(map[string]*token)
	}
	t := &token{fetching: make(chan struct{}, 1)}
	ts.all[name] = t
	return t
}

func (s *Source) fetchToken(ctx context.Context, id string, audience []string) (value string, expires time.Time, err error) {
	ctx, cancel := context.WithTimeout(ctx, tokenTimeout)
	defer cancel()
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("panic: %v", p)
		}
	}()
	err = s.call(ctx, func(ctx context.Context, api workload.SpiffeWorkloadAPIClient) error {
		answer, err := api.FetchJWTSVID(ctx, &workload.JWTSVIDRequest{SpiffeId: id, Audience: audience})
		if err != nil {
			return fmt.Errorf("%s", describe(err))
		}
		if len(answer.GetSvids()) == 0 {
			return fmt.Errorf("there is none in the agent's answer")
		}
		first := answer.Svids[0]
		parsed, err := jwtsvid.ParseInsecure(first.GetSvid(), audience)
		if err != nil {
			return fmt.Errorf("the agent's answer is malformed: %w", err)
		}
		if got := parsed.ID.String(); id != "" && got != id {
			return fmt.Errorf("the agent's answer is that of %s, not of %s", got, id)
		}
		value, expires = first.GetSvid(), parsed.Expiry
		return nil
	})
	return value, expires, err
}
