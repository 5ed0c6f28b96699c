package snapshot

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"hash"
	"io"
	"maps"
	"slices"
	"strings"
	"time"

	"culvert.dev/policy"
	"culvert.dev/registry"
)

const (
	// version is that of the format.
	version = 3

	// MaxSize is the size of the largest file that is written or read, in bytes.
	MaxSize = 256 << 20

	// MaxLine is the size of the longest line, in bytes.
	MaxLine = 4 << 20

	// endpointsPerLine keeps lines short, so that none takes long to encode.
	endpointsPerLine = 64

	format = "culvert snapshot"
)

// A savedSnapshot is the last snapshot of a source under one name.
type savedSnapshot struct {
	registry.Snapshot
	time time.Time
}

// A record is a line of the file: exactly one field is set. A source is followed by
// all of it, a service by its endpoints, a listener by its sections, and a section by
// its rules. What follows is left out of the record itself.
type record struct {
	Head      *head               `json:"state,omitempty"`
	Source    *source             `json:"source,omitempty"`
	Network   *registry.Network   `json:"network,omitempty"`
	Policy    *policy.Policy      `json:"policy,omitempty"`
	Service   *service            `json:"service,omitempty"`
	Endpoints []registry.Endpoint `json:"endpoints,omitempty"`
	Listener  *registry.Listener  `json:"listener,omitempty"`
	Section   *registry.Section   `json:"section,omitempty"`
	Rule      *rule               `json:"rule,omitempty"`
	End       *end                `json:"end,omitempty"`
}

// A service is a registry.Service without its endpoints.
type service struct {
	registry.Service
	Listed bool // of the snapshot's Services, and not only a backend
}

// A rule is a registry.Rule whose backends name their services by number.
type rule struct {
	registry.Rule
	Backends []backend
}

type backend struct {
	registry.Backend
	Service *int // which of its source's services in the file
}

// secretMissing is why a backend is refused that needs a secret.
const secretMissing = "it needs a secret, which is not saved: it works again when its source is back"

// needsSecret reports whether s does not work without a secret.
func needsSecret(s *registry.Service) bool {
	if s.TLS != nil && (s.TLS.Key != "" || strings.HasPrefix(s.TLS.KeyName, registry.SecretKey)) || hopsNeedSecret(s.Via) {
		return true
	}
	return slices.ContainsFunc(s.Endpoints, func(ep registry.Endpoint) bool { return hopsNeedSecret(ep.Hops()) })
}

func hopsNeedSecret(hops []registry.Hop) bool {
	return slices.ContainsFunc(hops, func(h registry.Hop) bool {
		return h.Token != "" || h.Password != "" || h.Key != ""
	})
}

// redact returns s without endpoints, and without what needs a secret: with neither
// it leads nowhere. Secrets themselves have no JSON.
func redact(s *registry.Service, listed bool) *service {
	out := &service{*s, listed}
	out.Endpoints = nil
	if needsSecret(s) {
		out.Via, out.TLS = nil, nil
	}
	return out
}

type head struct {
	Format   string `json:"format"`
	Version  int    `json:"version"`
	Settings string `json:"settings"`
}

type source struct {
	Name string    `json:"name"`
	Said time.Time `json:"said"`
}

type end struct {
	Lines int    `json:"lines"` // before this one
	Sum   string `json:"sha256"`
}

// An encoder writes lines.
type encoder struct {
	ctx   context.Context
	w     *bufio.Writer
	sum   hash.Hash
	buf   bytes.Buffer
	json  *json.Encoder
	lines int
	size  int
	limit int
}

// encode writes all snapshots, by name, until ctx is done.
func encode(ctx context.Context, w io.Writer, settings string, all map[string]*savedSnapshot, limit int) error {
	e := &encoder{ctx: ctx, w: bufio.NewWriterSize(w, 64<<10), sum: sha256.New(), limit: limit}
	e.json = json.NewEncoder(&e.buf)
	e.json.SetEscapeHTML(false)
	if err := e.write(&record{Head: &head{format, version, digest(settings)}}); err != nil {
		return err
	}
	for _, name := range slices.Sorted(maps.Keys(all)) {
		if err := e.source(name, all[name]); err != nil {
			return err
		}
	}
	if err := e.write(&record{End: &end{e.lines, hex.EncodeToString(e.sum.Sum(nil))}}); err != nil {
		return err
	}
	return e.w.Flush()
}

func digest(settings string) string {
	sum := sha256.Sum256([]byte(settings))
	return hex.EncodeToString(sum[:])
}

func (e *encoder) write(l *record) error {
	if err := e.ctx.Err(); err != nil {
		return err
	}
	e.buf.Reset()
	if err := e.json.Encode(l); err != nil {
		return err
	}
	e.lines++
	switch e.size += e.buf.Len(); {
	case e.buf.Len() > MaxLine:
		return fmt.Errorf("line %d would take %d bytes, limit %d", e.lines, e.buf.Len(), MaxLine)
	case e.size > e.limit:
		return fmt.Errorf("it would exceed the limit of %d bytes", e.limit)
	}
	_, _ = e.sum.Write(e.buf.Bytes())
	_, err := e.w.Write(e.buf.Bytes())
	return err
}

func (e *encoder) source(name string, s *savedSnapshot) error {
	if err := e.write(&record{Source: &source{name, s.time.UTC()}}); err != nil {
		return err
	}
	for i := range s.Networks {
		if err := e.write(&record{Network: &s.Networks[i]}); err != nil {
			return err
		}
	}
	for _, p := range s.Policies {
		if err := e.write(&record{Policy: p}); err != nil {
			return err
		}
	}
	known := map[*registry.Service]int{}
	for _, svc := range s.Services {
		known[svc] = len(known)
		if err := e.service(svc, true); err != nil {
			return err
		}
	}
	for _, l := range s.Listeners {
		if l.Settings != nil {
			continue // without its credentials it would be open to everybody
		}
		if err := e.listener(l, known); err != nil {
			return err
		}
	}
	return nil
}

func (e *encoder) service(s *registry.Service, listed bool) error {
	if err := e.write(&record{Service: redact(s, listed)}); err != nil || needsSecret(s) {
		return err
	}
	for eps := range slices.Chunk(s.Endpoints, endpointsPerLine) {
		if err := e.write(&record{Endpoints: eps}); err != nil {
			return err
		}
	}
	return nil
}

func (e *encoder) listener(l *registry.Listener, known map[*registry.Service]int) error {
	// The services of backends come before the rules that name them.
	for _, s := range l.Sections {
		for _, r := range savedRules(s) {
			for i := range r.Backends {
				svc := r.Backends[i].Service
				if svc == nil || needsSecret(svc) {
					continue
				}
				if _, ok := known[svc]; !ok {
					known[svc] = len(known)
					if err := e.service(svc, false); err != nil {
						return err
					}
				}
			}
		}
	}
	head := *l
	head.Sections = nil
	if err := e.write(&record{Listener: &head}); err != nil {
		return err
	}
	for _, s := range l.Sections {
		head := &registry.Section{Name: s.Name, Host: s.Host, Clients: s.Clients, Istio: s.Istio && s.TLS == nil}
		if err := e.write(&record{Section: head}); err != nil {
			return err
		}
		for _, r := range savedRules(s) {
			if err := e.rule(r, known); err != nil {
				return err
			}
		}
	}
	return nil
}

// savedRules are the rules of a section that work without a key. A section without
// rules refuses.
func savedRules(s *registry.Section) []*registry.Rule {
	if s.TLS != nil {
		return nil
	}
	return s.Rules
}

func (e *encoder) rule(r *registry.Rule, known map[*registry.Service]int) error {
	out := &rule{Rule: *r}
	for _, b := range r.Backends {
		to := backend{Backend: b}
		switch {
		case b.Service == nil:
		case needsSecret(b.Service):
			to.Broken = cmp.Or(to.Broken, secretMissing)
		default:
			at := known[b.Service]
			to.Service = &at
		}
		out.Backends = append(out.Backends, to)
	}
	return e.write(&record{Rule: out})
}
