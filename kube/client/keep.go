package client

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"time"

	"k8s.io/client-go/rest"
)

// How long it takes to notice an API server that takes connections and says
// nothing, or that is cut off: unheard and silence together. A watch can't tell, for
// nothing may have changed, and HTTP/2 finds out after 45 seconds, and some more
// for the next connection.
const (
	unheard = 10 * time.Second // without an answer to anybody, before it is asked whether it is there
	silence = 10 * time.Second // for the answer to that: one that is slow is not lost
	retry   = 2 * time.Second  // from one such question to the next, when it is lost
)

// Keep asks the API server by ask, until ctx is done, whenever nobody has heard of
// it for 10 seconds, or it is lost. A replica that asks for a Lease every few
// seconds needs no question more. ask must go through Wrap.
func (p *Pulse) Keep(ctx context.Context, ask func(context.Context) error) {
	for {
		turn, heard, lost := p.vigil()
		wait := time.Until(heard.Add(unheard))
		if lost {
			wait = retry
		}
		if wait > 0 {
			t := time.NewTimer(wait)
			select {
			case <-ctx.Done():
			case <-turn: // it may be lost now
			case <-t.C:
			}
			t.Stop()
			if ctx.Err() != nil {
				return
			}
			if !lost {
				continue // somebody may have heard of it meanwhile
			}
		}
		begun := time.Now()
		asking, cancel := context.WithTimeout(ctx, silence)
		err := ask(asking)
		late := asking.Err() != nil
		cancel()
		if ctx.Err() != nil {
			return
		}
		if err != nil && late {
			p.silent(begun, fmt.Errorf("it says nothing: a connection is open, or asked for, and there is no answer within %v", silence))
		}
	}
}

// vigil returns what Keep has to know.
func (p *Pulse) vigil() (turn <-chan struct{}, heard time.Time, lost bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.turn, p.heard, p.err != nil
}

// silent notes that there was no answer since begun, unless there was one.
func (p *Pulse) silent(begun time.Time, err error) {
	p.mu.Lock()
	heard := p.heard
	p.mu.Unlock()
	if heard.Before(begun) {
		p.set(err)
	}
}

// Livez returns what asks the API server of cfg whether it is there: what anybody
// may ask, and what is answered before all else where much is asked.
func Livez(cfg *rest.Config) (func(context.Context) error, error) {
	c, err := rest.HTTPClientFor(cfg)
	if err != nil {
		return nil, fmt.Errorf("kubernetes: %w", err)
	}
	base, _, err := rest.DefaultServerUrlFor(cfg)
	if err != nil {
		return nil, fmt.Errorf("kubernetes: %w", err)
	}
	url := base.JoinPath("livez").String()
	return func(ctx context.Context) error {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
		if err != nil {
			return err
		}
		res, err := c.Do(req)
		if err != nil {
			return err
		}
		_, err = io.Copy(io.Discard, io.LimitReader(res.Body, 1<<16))
		_ = res.Body.Close()
		return err
	}, nil
}
