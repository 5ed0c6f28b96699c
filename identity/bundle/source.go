package bundle

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"culvert.dev/identity"
	"culvert.dev/internal/statefile"
	"culvert.dev/internal/wallclock"
)

// How often an endpoint is asked.
const (
	DefaultRefresh = 5 * time.Minute  // where it says nothing
	MinRefresh     = 10 * time.Second // whatever it says
	MaxRefresh     = time.Hour
	firstRetry     = MinRefresh // after a failure; doubled with each, up to what it says
	timeout        = 30 * time.Second
)

// A Source keeps trust of Store by bundle endpoints. Its fields are set before Run. It is
// safe for concurrent use.
type Source struct {
	Store *identity.Store
	Log   *slog.Logger // nil discards

	// Dial connects to endpoints; nil means a net.Dialer's DialContext.
	Dial func(ctx context.Context, network, address string) (net.Conn, error)

	refresh time.Duration // for tests: how often to ask, whatever endpoints say; 0 means nothing

	mu      sync.Mutex
	polls   map[string]*poll // by Endpoint.Name
	changed chan struct{}    // closed when polls are others
}

// A Status says how an endpoint is.
type Status struct {
	TrustDomain string    `json:"trustDomain"`
	URL         string    `json:"url"`
	Updated     time.Time `json:"updated,omitzero"` // when it last answered with a bundle, or that it is the same
	Next        time.Time `json:"next,omitzero"`    // when it is asked again
	Sequence    uint64    `json:"sequence,omitempty"`
	Problem     string    `json:"problem,omitempty"`
}

// A poll asks one endpoint.
type poll struct {
	Endpoint
	source *Source
	trust  *identity.Trust
	client *http.Client
	stop   context.CancelFunc // nil until it runs

	etag string // of doc
	doc  []byte // what was set last
	kept bool   // in StateFile
	hint time.Duration

	mu     sync.Mutex
	status Status
}

// Configure says which endpoints to ask, from now on. One that is no longer among them
// is not asked again, and its bundle stays. After an error nothing has changed.
func (s *Source) Configure(endpoints []Endpoint) error {
	next := make(map[string]*poll, len(endpoints))
	for _, e := range endpoints {
		if err := e.check(); err != nil {
			return err
		}
		if next[e.Name] != nil {
			return fmt.Errorf("two bundle endpoints for trust %q", e.Name)
		}
		next[e.Name] = &poll{Endpoint: e, source: s, status: Status{TrustDomain: e.TrustDomain, URL: e.URL}}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for name, p := range s.polls {
		switch same := next[name]; {
		case same != nil && same.equal(&p.Endpoint):
			next[name] = p
		case p.stop != nil:
			p.stop()
		}
	}
	s.polls = next
	if s.changed != nil {
		close(s.changed)
		s.changed = nil
	}
	return nil
}

// Run asks the endpoints until ctx is done, and returns its error.
func (s *Source) Run(ctx context.Context) error {
	var wg sync.WaitGroup
	defer wg.Wait()
	for {
		s.mu.Lock()
		for _, name := range slices.Sorted(maps.Keys(s.polls)) {
			p := s.polls[name]
			if p.stop != nil {
				continue
			}
			mine, stop := context.WithCancel(ctx)
			p.stop = stop
			wg.Add(1)
			go func() {
				defer wg.Done()
				defer stop()
				p.run(mine)
			}()
		}
		if s.changed == nil {
			s.changed = make(chan struct{})
		}
		changed := s.changed
		s.mu.Unlock()
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// Status says how the endpoints are, by their trust domains.
func (s *Source) Status() []Status {
	s.mu.Lock()
	defer s.mu.Unlock()
	all := make([]Status, 0, len(s.polls))
	for _, p := range s.polls {
		p.mu.Lock()
		all = append(all, p.status)
		p.mu.Unlock()
	}
	slices.SortFunc(all, func(a, b Status) int { return strings.Compare(a.TrustDomain, b.TrustDomain) })
	return all
}

// run asks the endpoint again and again.
func (p *poll) run(ctx context.Context) {
	p.trust = p.source.Store.Trust(p.Name)
	p.client = p.newClient(p.source)
	defer p.client.CloseIdleConnections()
	p.begin()
	for wait := p.within(firstRetry); ; {
		err := p.ask(ctx)
		if ctx.Err() != nil {
			return
		}
		pause := p.within(p.hint)
		if err != nil {
			pause = min(wait, pause)
			wait = min(2*wait, MaxRefresh)
		} else {
			wait = p.within(firstRetry)
		}
		pause = pause*9/10 + rand.N(pause/5+1) // so that gateways do not ask all at once
		p.report(err, pause)
		if wallclock.Wait(ctx, time.Now, pause) != nil {
			return
		}
	}
}

// within returns how often to ask an endpoint that wants to be asked every d.
func (p *poll) within(d time.Duration) time.Duration {
	switch {
	case p.source.refresh > 0:
		return p.source.refresh
	case d == 0:
		return DefaultRefresh
	}
	return min(max(d, MinRefresh), MaxRefresh)
}

// begin uses the bundle of the time before the start: that which was kept in a file, or
// else that of the configuration.
func (p *poll) begin() {
	if _, err := p.trust.Bundle(); err == nil {
		return // of a poll before this one
	}
	if p.StateFile != "" {
		doc, err := os.ReadFile(p.StateFile)
		if err == nil {
			var b *identity.Bundle
			if b, err = Parse(p.TrustDomain, doc); err == nil {
				p.hint = b.RefreshHint
				p.trust.Set(b)
				return
			}
		}
		if !errors.Is(err, os.ErrNotExist) && p.source.Log != nil {
			p.source.Log.Warn("cannot use the bundle that was kept", "trust_domain", p.TrustDomain, "path", p.StateFile, "err", err.Error())
		}
	}
	if p.Bootstrap != nil {
		p.trust.Set(p.Bootstrap)
	}
}

// ask asks once. A panic by what the endpoint has sent is its error.
func (p *poll) ask(ctx context.Context) (err error) {
	defer func() {
		if v := recover(); v != nil {
			err = fmt.Errorf("panic: %v", v)
		}
	}()
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	doc, etag, err := p.fetch(ctx)
	if err != nil {
		return err
	}
	p.etag = etag
	if doc == nil || bytes.Equal(doc, p.doc) {
		return p.keep() // it is the same
	}
	b, err := Parse(p.TrustDomain, doc)
	if err != nil {
		p.etag = "" // so that it is sent, and looked at, again
		return err
	}
	p.doc, p.kept, p.hint = doc, false, b.RefreshHint
	p.trust.Set(b)
	p.mu.Lock()
	p.status.Sequence = b.Sequence
	p.mu.Unlock()
	if p.source.Log != nil {
		p.source.Log.Info("bundle changed", "trust_domain", p.TrustDomain, "url", p.URL, "sequence", b.Sequence, "roots", len(b.Roots), "jwt_keys", len(b.JWTKeys))
	}
	return p.keep()
}

// keep writes the bundle for the next start, if that is not done.
func (p *poll) keep() error {
	if p.StateFile == "" || p.kept {
		return nil
	}
	err := statefile.Replace(p.StateFile, func(w io.Writer) error {
		_, err := w.Write(p.doc)
		return err
	})
	if err != nil {
		return fmt.Errorf("cannot keep the bundle for the next start: %w", err)
	}
	p.kept = true
	return nil
}

// report notes how the last attempt went, and logs a change of that.
func (p *poll) report(err error, pause time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	was := p.status.Problem
	p.status.Problem, p.status.Next = "", time.Now().Add(pause)
	if err == nil {
		p.status.Updated = time.Now()
	} else {
		p.status.Problem = err.Error()
	}
	log := p.source.Log
	switch now := p.status.Problem; {
	case log == nil || now == was:
	case now == "":
		log.Info("bundle endpoint answers again", "trust_domain", p.TrustDomain, "url", p.URL)
	default:
		log.Warn("bundle endpoint has a problem; keeping the last bundle", "trust_domain", p.TrustDomain, "url", p.URL, "err", now, "retry_in", pause.Round(time.Second))
	}
}
