package snapshot

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"hash"
	"io"
	"maps"
	"os"
	"slices"
	"strings"
	"time"

	"culvert.dev/registry"
	"culvert.dev/tunnel"
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
	return s.TLS != nil && s.TLS.Key != "" || slices.ContainsFunc(s.Via, func(h registry.Hop) bool {
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

// load reads the file at path; there may be none.
func load(ctx context.Context, path, settings string) (map[string]*savedSnapshot, error) {
	info, err := os.Stat(path) // before opening: a FIFO would block
	switch {
	case errors.Is(err, os.ErrNotExist):
		return nil, nil
	case err != nil:
		return nil, err
	case !info.Mode().IsRegular():
		return nil, fmt.Errorf("%q is not a regular file", path)
	case info.Size() > MaxSize:
		return nil, fmt.Errorf("%q has %d bytes, limit %d", path, info.Size(), MaxSize)
	}
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	if info, err = f.Stat(); err != nil {
		return nil, err
	}
	if why := untrusted(info); why != "" {
		return nil, fmt.Errorf("%q %s: its content cannot be trusted; remove it", path, why)
	}
	return decode(ctx, io.LimitReader(f, MaxSize), settings)
}

// decode reads what encode has written. It returns all of it, or an error.
func decode(ctx context.Context, r io.Reader, settings string) (map[string]*savedSnapshot, error) {
	d := &decoder{all: map[string]*savedSnapshot{}}
	lines := bufio.NewScanner(r)
	lines.Buffer(make([]byte, 0, 64<<10), MaxLine+1)
	lines.Split(splitLines)
	sum := sha256.New()
	n := 0
	for ; lines.Scan(); n++ {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		if n == 0 {
			if err := checkHeader(lines.Bytes(), settings); err != nil {
				return nil, err
			}
		}
		var l record
		dec := json.NewDecoder(bytes.NewReader(lines.Bytes()))
		dec.DisallowUnknownFields()
		if err := dec.Decode(&l); err != nil {
			return nil, fmt.Errorf("line %d: %w", n+1, err)
		}
		if _, err := dec.Token(); !errors.Is(err, io.EOF) {
			return nil, fmt.Errorf("line %d has more than one object", n+1)
		}
		if l.End != nil {
			switch {
			case l.End.Lines != n:
				return nil, fmt.Errorf("it declares %d lines and has %d", l.End.Lines, n)
			case l.End.Sum != hex.EncodeToString(sum.Sum(nil)):
				return nil, errors.New("its checksum does not match: it was changed or damaged")
			case lines.Scan():
				return nil, fmt.Errorf("it continues after its end in line %d", n+1)
			}
			return d.all, lines.Err()
		}
		if err := d.add(&l, n == 0); err != nil {
			return nil, fmt.Errorf("line %d: %w", n+1, err)
		}
		_, _ = sum.Write(lines.Bytes())
	}
	switch err := lines.Err(); {
	case errors.Is(err, bufio.ErrTooLong):
		return nil, fmt.Errorf("line %d is longer than the limit of %d bytes", n+1, MaxLine)
	case err != nil:
		return nil, err
	case n == 0:
		return nil, errors.New("it is empty")
	}
	return nil, fmt.Errorf("it is cut off after %d lines", n)
}

// checkEndpoint returns an error for an endpoint that no source of a cluster may name:
// the gateway trusts a route that names such an address.
func checkEndpoint(e *registry.Endpoint) error {
	if host := strings.TrimSuffix(strings.ToLower(e.Host), "."); host == "localhost" || strings.HasSuffix(host, ".localhost") {
		return fmt.Errorf("an endpoint is %q, which no source may name", e.Host)
	}
	if !e.Addr.IsValid() {
		return nil
	}
	if why, bad := tunnel.Forbidden(e.Addr.Unmap()); bad {
		return fmt.Errorf("an endpoint is %s, which no source may name: it is %s", e.Addr, why)
	}
	return nil
}

// splitLines splits after each newline. A last line without one is dropped.
func splitLines(data []byte, eof bool) (advance int, token []byte, err error) {
	if i := bytes.IndexByte(data, '\n'); i >= 0 {
		return i + 1, data[:i+1], nil
	}
	if eof {
		return len(data), nil, nil
	}
	return 0, nil, nil
}

// checkHeader returns an error for a file that is not ours. It reads no more than the
// beginning, as nothing else is known of other versions.
func checkHeader(text []byte, settings string) error {
	var l struct {
		State *head `json:"state"`
	}
	err := json.Unmarshal(text, &l)
	switch {
	case err != nil || l.State == nil || l.State.Format != format:
		return errors.New("it is not a snapshot that culvert has saved")
	case l.State.Version != version:
		return fmt.Errorf("it is of version %d, and this culvert reads version %d", l.State.Version, version)
	case l.State.Settings != digest(settings):
		return errors.New("it was written with other settings")
	}
	return nil
}

// A decoder has the objects that the next lines belong to.
type decoder struct {
	all      map[string]*savedSnapshot
	at       *savedSnapshot
	services []*registry.Service // of at, listed or not
	service  *registry.Service   // whose endpoints follow
	listener *registry.Listener
	section  *registry.Section
}

func (d *decoder) add(l *record, first bool) (err error) {
	var set []string
	for what, is := range map[string]bool{
		"state": l.Head != nil, "source": l.Source != nil, "network": l.Network != nil, "service": l.Service != nil, "endpoints": l.Endpoints != nil,
		"listener": l.Listener != nil, "section": l.Section != nil, "rule": l.Rule != nil,
	} {
		if is {
			set = append(set, what)
		}
	}
	if len(set) != 1 {
		slices.Sort(set)
		return fmt.Errorf("it has %d known keys, not one: %s", len(set), strings.Join(set, ", "))
	}
	switch what := set[0]; {
	case (what == "state") != first,
		d.at == nil && !first && what != "source",
		what == "endpoints" && d.service == nil,
		what == "section" && d.listener == nil,
		what == "rule" && d.section == nil:
		return fmt.Errorf("%s is out of place", what)
	}
	if l.Endpoints == nil {
		d.service = nil
	}
	switch {
	case l.Source != nil:
		if d.all[l.Source.Name] != nil {
			return fmt.Errorf("source %q is there twice", l.Source.Name)
		}
		*d = decoder{all: d.all, at: &savedSnapshot{time: l.Source.Said}}
		d.all[l.Source.Name] = d.at
	case l.Network != nil:
		for i := range l.Network.Gateways {
			g := &l.Network.Gateways[i]
			if err := cmp.Or(checkEndpoint(&g.Address), checkEndpoint(&g.Public)); err != nil {
				return err
			}
		}
		d.at.Networks = append(d.at.Networks, *l.Network)
	case l.Service != nil:
		if len(l.Service.Endpoints) > 0 {
			return errors.New("a service has endpoints in its own record")
		}
		if err := checkPatterns(l.Service.Names); err != nil {
			return err
		}
		d.service = &l.Service.Service
		d.services = append(d.services, d.service)
		if l.Service.Listed {
			d.at.Services = append(d.at.Services, d.service)
		}
	case l.Endpoints != nil:
		for i := range l.Endpoints {
			e := &l.Endpoints[i]
			if (e.Host == "") != e.Addr.IsValid() {
				return errors.New("an endpoint has not exactly one of host and addr")
			}
			if err := checkEndpoint(e); err != nil {
				return err
			}
		}
		d.service.Endpoints = append(d.service.Endpoints, l.Endpoints...)
	case l.Listener != nil:
		if len(l.Listener.Sections) > 0 {
			return errors.New("a listener has sections in its own record")
		}
		d.listener, d.section = l.Listener, nil
		d.at.Listeners = append(d.at.Listeners, d.listener)
	case l.Section != nil:
		if l.Section.TLS != nil || len(l.Section.Rules) > 0 {
			return errors.New("a section has rules or keys in its own record")
		}
		d.section = l.Section
		d.listener.Sections = append(d.listener.Sections, d.section)
	case l.Rule != nil:
		return d.rule(l.Rule)
	}
	return nil
}

func checkPatterns(names []tunnel.Pattern) error {
	if slices.ContainsFunc(names, func(p tunnel.Pattern) bool { return p.Suffix.IsZero() }) {
		return errors.New("name is empty")
	}
	return nil
}

func (d *decoder) rule(r *rule) error {
	if err := checkPatterns(r.Names); err != nil {
		return err
	}
	out := r.Rule
	for _, b := range r.Backends {
		to := b.Backend
		if at := b.Service; at != nil {
			if *at < 0 || *at >= len(d.services) {
				return fmt.Errorf("there is no service %d, of %d", *at, len(d.services))
			}
			to.Service = d.services[*at]
		}
		out.Backends = append(out.Backends, to)
	}
	d.section.Rules = append(d.section.Rules, &out)
	return nil
}
