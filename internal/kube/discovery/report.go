package discovery

import (
	"maps"
	"slices"
	"strings"
	"time"
)

// A Report is the state of a Source and of its cluster, for people and for JSON.
type Report struct {
	Cluster  string     `json:"cluster"`
	Known    bool       `json:"known"`           // a snapshot was sent
	Lost     *time.Time `json:"lost,omitempty"`  // since when the API server does not answer
	Error    string     `json:"error,omitempty"` // why
	Services int        `json:"services"`        // Services that were found
	Exposed  int        `json:"exposed"`         // of them, those that somebody may reach
	Exported int        `json:"exported"`        // ServiceExports that are part of the cluster set
	Problems int        `json:"problems"`
	Refusals []string   `json:"refusals,omitempty"` // the first of those
}

// maxRefusals is how many of the problems are listed.
const maxRefusals = 16

// Report returns the present state. It may be called at any time.
func (s *Source) Report() Report {
	s.mu.Lock()
	out, r := Report{Cluster: s.Cluster, Exported: len(s.exports)}, s.run
	if s.lost != nil {
		at := s.lostAt
		out.Lost, out.Error = &at, s.lost.Error()
	}
	out.Known = s.known
	s.mu.Unlock()
	if r == nil {
		return out
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	out.Services, out.Problems = len(r.services), len(r.problemCounts)
	for _, i := range r.order {
		if i.out != nil && i.out.Exposed {
			out.Exposed++
		}
		for _, p := range i.problems {
			if len(out.Refusals) < maxRefusals {
				out.Refusals = append(out.Refusals, p.object()+": "+p.String())
			}
		}
	}
	return out
}

// Reports returns those of the running clusters, by name.
func (c *Clusters) Reports() (all []Report) {
	c.mu.Lock()
	sources := slices.Collect(maps.Values(c.sources))
	c.mu.Unlock()
	for _, s := range sources {
		all = append(all, s.Report())
	}
	slices.SortFunc(all, func(a, b Report) int { return strings.Compare(a.Cluster, b.Cluster) })
	return all
}

// register adds a running Source; the function that it returns removes it.
func (c *Clusters) register(s *Source) (gone func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.sources == nil {
		c.sources = map[string]*Source{}
	}
	c.sources[s.Cluster] = s
	return func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		if c.sources[s.Cluster] == s {
			delete(c.sources, s.Cluster)
		}
	}
}

// setLost records why the cluster cannot be read. A nil error records that it has sent a snapshot.
func (s *Source) setLost(lost error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if lost != nil && s.lost == nil {
		s.lostAt = time.Now().UTC()
	}
	s.lost = lost
	s.known = s.known || lost == nil
}
