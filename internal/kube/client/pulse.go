package client

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"sync"
	"time"
)

// A Pulse knows whether the API server answers: from all requests that are made anyway, and from
// probes where there are none. client-go's reflectors retry for as long as it takes and report
// nothing, so that a controller would not know that its caches are out of date.
type Pulse struct {
	mu   sync.Mutex
	err  error         // of the last request; nil is an answer
	turn chan struct{} // closed at the next change

	heard time.Time // when the last answer came
}

// NewPulse returns a Pulse of an API server that answers.
func NewPulse() *Pulse { return &Pulse{turn: make(chan struct{}), heard: time.Now()} }

// Wrap is for rest.Config.Wrap.
func (p *Pulse) Wrap(rt http.RoundTripper) http.RoundTripper { return pulsed{p, rt} }

// State returns why the API server does not answer, or nil if it does, and a channel that is closed
// when that changes.
func (p *Pulse) State() (turn <-chan struct{}, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.turn, p.err
}

func (p *Pulse) set(err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if err == nil {
		p.heard = time.Now()
	}
	if (p.err == nil) != (err == nil) {
		close(p.turn)
		p.turn = make(chan struct{})
	}
	p.err = err
}

type pulsed struct {
	*Pulse
	next http.RoundTripper
}

func (p pulsed) RoundTrip(req *http.Request) (*http.Response, error) {
	res, err := p.next.RoundTrip(req)
	switch {
	case err == nil && (res.StatusCode == http.StatusServiceUnavailable || res.StatusCode == http.StatusUnauthorized):
		// The first is of a load balancer, or of a server that starts or stops; with the second it
		// does not know us any more, and shows as little.
		p.set(fmt.Errorf("%s %s: %s", req.Method, req.URL.Path, res.Status))
	case err == nil:
		p.set(nil)
	case errors.Is(err, context.Canceled) || req.Context().Err() != nil:
		// We gave up, which says nothing about the server.
	default:
		p.set(err)
	}
	return res, err
}

// WrappedRoundTripper lets client-go find the transport, to close what is idle.
func (p pulsed) WrappedRoundTripper() http.RoundTripper { return p.next }
