package client

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"time"

	"k8s.io/client-go/rest"
)

// An API server that accepts connections and does not answer, or that is cut off, is noticed after
// probeAfter and probeTimeout together. A watch cannot tell, because nothing may have changed, and
// HTTP/2 notices after 45 seconds, and some more for the next connection.
const (
	probeAfter   = 10 * time.Second // since the last answer to any request
	probeTimeout = 10 * time.Second // for the answer to a probe: a slow server is not unreachable
	probeRetry   = 2 * time.Second  // from one probe to the next, while it is unreachable
)

// Probe calls ask, which sends a request through Wrap, whenever there was no answer to any request
// for 10 seconds, and while the API server is unreachable. It ends with ctx. A replica that renews a
// Lease every few seconds sends no probes.
func (p *Pulse) Probe(ctx context.Context, ask func(context.Context) error) {
	for {
		turn, heard, lost := p.status()
		wait := time.Until(heard.Add(probeAfter))
		if lost {
			wait = probeRetry
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
				continue // there may have been an answer meanwhile
			}
		}
		begun := time.Now()
		asking, cancel := context.WithTimeout(ctx, probeTimeout)
		err := ask(asking)
		late := asking.Err() != nil
		cancel()
		if ctx.Err() != nil {
			return
		}
		if err != nil && late {
			p.setSilent(begun, fmt.Errorf("no answer within %v, though a connection is open or being opened", probeTimeout))
		}
	}
}

// status returns what Probe has to know.
func (p *Pulse) status() (turn <-chan struct{}, heard time.Time, lost bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.turn, p.heard, p.err != nil
}

// setSilent records that there was no answer since begun, unless there was one.
func (p *Pulse) setSilent(begun time.Time, err error) {
	p.mu.Lock()
	heard := p.heard
	p.mu.Unlock()
	if heard.Before(begun) {
		p.set(err)
	}
}

// Livez returns a probe of the API server of cfg: a request that needs no permission, and that a
// loaded API server answers before others.
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
