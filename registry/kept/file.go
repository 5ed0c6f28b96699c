package kept

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
	version = 1

	// MaxSize is that of the largest file that is written or read, in bytes.
	MaxSize = 256 << 20

	// MaxLine is likewise that of a line.
	MaxLine = 4 << 20

	// chunk is how many endpoints are on a line, for no line to take long.
	chunk = 64

	format = "culvert kept state"
)

// said is what a source has said under one name.
type said struct {
	registry.Snapshot
	at time.Time
}

// A line is one of the file: exactly one field is set. A source is followed by
// all of it, a service by its endpoints, a listener by its sections, and a section by
// its rules.
type line struct {
	Head      *head      `json:"state,omitempty"`
	Source    *source    `json:"source,omitempty"`
	Network   *network   `json:"network,omitempty"`
	Service   *service   `json:"service,omitempty"`
	Endpoints []endpoint `json:"endpoints,omitempty"`
	Listener  *listener  `json:"listener,omitempty"`
	Section   *section   `json:"section,omitempty"`
	Rule      *rule      `json:"rule,omitempty"`
	End       *end       `json:"end,omitempty"`
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

// An encoder writes lines, and lets others have the processor between them.
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

// encode writes what was said, by name, until ctx is done.
func encode(ctx context.Context, w io.Writer, settings string, all map[string]*said, limit int) error {
	e := &encoder{ctx: ctx, w: bufio.NewWriterSize(w, 64<<10), sum: sha256.New(), limit: limit}
	e.json = json.NewEncoder(&e.buf)
	e.json.SetEscapeHTML(false)
	if err := e.line(&line{Head: &head{format, version, digest(settings)}}); err != nil {
		return err
	}
	for _, name := range slices.Sorted(maps.Keys(all)) {
		if err := e.source(name, all[name]); err != nil {
			return err
		}
	}
	if err := e.line(&line{End: &end{e.lines, hex.EncodeToString(e.sum.Sum(nil))}}); err != nil {
		return err
	}
	return e.w.Flush()
}

func digest(settings string) string {
	sum := sha256.Sum256([]byte(settings))
	return hex.EncodeToString(sum[:])
}

func (e *encoder) line(l *line) error {
	if err := e.ctx.Err(); err != nil {
		return err
	}
	registry.Yield(e.lines)
	e.buf.Reset()
	if err := e.json.Encode(l); err != nil {
		return err
	}
	e.lines++
	switch e.size += e.buf.Len(); {
	case e.buf.Len() > MaxLine:
		return fmt.Errorf("line %d would take %d bytes, limit %d", e.lines, e.buf.Len(), MaxLine)
	case e.size > e.limit:
		return fmt.Errorf("it would take more than the limit of %d bytes", e.limit)
	}
	_, _ = e.sum.Write(e.buf.Bytes())
	_, err := e.w.Write(e.buf.Bytes())
	return err
}

func (e *encoder) source(name string, s *said) error {
	if err := e.line(&line{Source: &source{name, s.at.UTC()}}); err != nil {
		return err
	}
	for i := range s.Networks {
		if err := e.line(&line{Network: ofNetwork(&s.Networks[i])}); err != nil {
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
		if err := e.listener(l, known); err != nil {
			return err
		}
	}
	return nil
}

func (e *encoder) service(s *registry.Service, listed bool) error {
	if err := e.line(&line{Service: ofService(s, listed)}); err != nil || needs(s) {
		return err
	}
	var some [chunk]endpoint
	for eps := s.Endpoints; len(eps) > 0; {
		n := min(chunk, len(eps))
		for i := range n {
			some[i] = endpoint(eps[i])
		}
		if err := e.line(&line{Endpoints: some[:n]}); err != nil {
			return err
		}
		eps = eps[n:]
	}
	return nil
}

func (e *encoder) listener(l *registry.Listener, known map[*registry.Service]int) error {
	// Services come before whom they are for.
	for _, s := range l.Sections {
		for _, r := range kept(s) {
			for i := range r.Backends {
				svc := r.Backends[i].Service
				if svc == nil || needs(svc) {
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
	if err := e.line(&line{Listener: &listener{l.Name, l.Protocol, l.Address, l.Port, l.Origin}}); err != nil {
		return err
	}
	for _, s := range l.Sections {
		out := &section{Name: s.Name, Istio: s.Istio && s.TLS == nil}
		if !s.Host.Suffix.IsZero() {
			out.Host = s.Host.String()
		}
		if err := e.line(&line{Section: out}); err != nil {
			return err
		}
		for _, r := range kept(s) {
			if err := e.rule(r, known); err != nil {
				return err
			}
		}
	}
	return nil
}

// kept are the rules of a section that hold without a key. One with none refuses.
func kept(s *registry.Section) []*registry.Rule {
	if s.TLS != nil {
		return nil
	}
	return s.Rules
}

func (e *encoder) rule(r *registry.Rule, known map[*registry.Service]int) error {
	out := &rule{Name: r.Name, Names: each(r.Names, ofPattern), Idle: int64(r.IdleTimeout), Origin: r.Origin}
	out.Backends = each(r.Backends, func(b *registry.Backend) backend {
		switch to := (backend{Weight: b.Weight, Broken: b.Broken, Of: b.ServiceName.String()}); {
		case b.Service == nil:
			return to
		case needs(b.Service):
			if to.Broken == "" {
				to.Broken = without
			}
			return to
		default:
			at := known[b.Service]
			to.Service = &at
			return to
		}
	})
	return e.line(&line{Rule: out})
}

// load reads the file at path; there may be none.
func load(ctx context.Context, path, settings string) (map[string]*said, error) {
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
		return nil, fmt.Errorf("%q %s: anything in it could be theirs; remove it", path, why)
	}
	return decode(ctx, io.LimitReader(f, MaxSize), settings)
}

// decode reads what encode has written. It returns all of it, or an error.
func decode(ctx context.Context, r io.Reader, settings string) (map[string]*said, error) {
	d := &decoder{all: map[string]*said{}}
	lines := bufio.NewScanner(r)
	lines.Buffer(make([]byte, 0, 64<<10), MaxLine+1)
	lines.Split(wholeLines)
	sum := sha256.New()
	n := 0
	for ; lines.Scan(); n++ {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		registry.Yield(n)
		if n == 0 {
			if err := checkHead(lines.Bytes(), settings); err != nil {
				return nil, err
			}
		}
		var l line
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
				return nil, fmt.Errorf("it says that it has %d lines, and has %d", l.End.Lines, n)
			case l.End.Sum != hex.EncodeToString(sum.Sum(nil)):
				return nil, errors.New("its checksum is another: it was changed, or the disk has lost some of it")
			case lines.Scan():
				return nil, fmt.Errorf("it goes on after its end in line %d", n+1)
			}
			return d.all, lines.Err()
		}
		if err := d.line(&l, n == 0); err != nil {
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

// allowed returns an error for an endpoint that no source of a cluster says: a route
// that names such an address is believed.
func allowed(e *registry.Endpoint) error {
	if host := strings.TrimSuffix(strings.ToLower(e.Host), "."); host == "localhost" || strings.HasSuffix(host, ".localhost") {
		return fmt.Errorf("an endpoint is %q, which no source says", e.Host)
	}
	if !e.Addr.IsValid() {
		return nil
	}
	if why, bad := tunnel.Forbidden(e.Addr.Unmap()); bad {
		return fmt.Errorf("an endpoint is %s, which no source says: it is %s", e.Addr, why)
	}
	return nil
}

// wholeLines splits after each newline; what has none is no line.
func wholeLines(data []byte, eof bool) (advance int, token []byte, err error) {
	if i := bytes.IndexByte(data, '\n'); i >= 0 {
		return i + 1, data[:i+1], nil
	}
	if eof {
		return len(data), nil, nil
	}
	return 0, nil, nil
}

// checkHead says what a file is that is not for us. Of other versions nothing is
// known but the beginning.
func checkHead(text []byte, settings string) error {
	var l struct {
		State *head `json:"state"`
	}
	err := json.Unmarshal(text, &l)
	switch {
	case err != nil || l.State == nil || l.State.Format != format:
		return errors.New("it is not a state that culvert has kept")
	case l.State.Version != version:
		return fmt.Errorf("it is of version %d, and this culvert reads version %d", l.State.Version, version)
	case l.State.Settings != digest(settings):
		return errors.New("it was made by other settings than those there are now")
	}
	return nil
}

// A decoder has what lines belong to.
type decoder struct {
	all      map[string]*said
	at       *said
	services []*registry.Service // of at, listed or not
	service  *registry.Service   // whose endpoints follow
	listener *registry.Listener
	section  *registry.Section
}

func (d *decoder) line(l *line, first bool) (err error) {
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
		return fmt.Errorf("it has %d keys that are known, and not one: %s", len(set), strings.Join(set, ", "))
	}
	switch what := set[0]; {
	case (what == "state") != first,
		d.at == nil && !first && what != "source",
		what == "endpoints" && d.service == nil,
		what == "section" && d.listener == nil,
		what == "rule" && d.section == nil:
		return fmt.Errorf("%s stands where it can't", what)
	}
	if l.Endpoints == nil {
		d.service = nil
	}
	switch {
	case l.Source != nil:
		if d.all[l.Source.Name] != nil {
			return fmt.Errorf("source %q is there twice", l.Source.Name)
		}
		*d = decoder{all: d.all, at: &said{at: l.Source.Said}}
		d.all[l.Source.Name] = d.at
	case l.Network != nil:
		n := l.Network.registry()
		for i := range n.Gateways {
			if err := cmp.Or(allowed(&n.Gateways[i].Address), allowed(&n.Gateways[i].Public)); err != nil {
				return err
			}
		}
		d.at.Networks = append(d.at.Networks, n)
	case l.Service != nil:
		if d.service, err = l.Service.registry(); err != nil {
			return err
		}
		d.services = append(d.services, d.service)
		if l.Service.Listed {
			d.at.Services = append(d.at.Services, d.service)
		}
	case l.Endpoints != nil:
		for i := range l.Endpoints {
			e := registry.Endpoint(l.Endpoints[i])
			if (e.Host == "") != e.Addr.IsValid() {
				return errors.New("an endpoint has not exactly one of host and addr")
			}
			if err := allowed(&e); err != nil {
				return err
			}
			d.service.Endpoints = append(d.service.Endpoints, e)
		}
	case l.Listener != nil:
		n := l.Listener
		d.listener = &registry.Listener{Name: n.Name, Protocol: n.Protocol, Address: n.Address, Port: n.Port, Origin: n.Origin}
		d.section = nil
		d.at.Listeners = append(d.at.Listeners, d.listener)
	case l.Section != nil:
		d.section = &registry.Section{Name: l.Section.Name, Istio: l.Section.Istio}
		if l.Section.Host != "" {
			hosts, err := patterns([]string{l.Section.Host})
			if err != nil {
				return err
			}
			d.section.Host = hosts[0]
		}
		d.listener.Sections = append(d.listener.Sections, d.section)
	case l.Rule != nil:
		return d.rule(l.Rule)
	}
	return nil
}

func (d *decoder) rule(r *rule) error {
	names, err := patterns(r.Names)
	if err != nil {
		return err
	}
	out := &registry.Rule{Name: r.Name, Names: names, IdleTimeout: time.Duration(r.Idle), Origin: r.Origin}
	for i := range r.Backends {
		b := &r.Backends[i]
		to := registry.Backend{Weight: b.Weight, Broken: b.Broken}
		if b.Of != "" {
			if to.ServiceName, err = tunnel.ParseName(b.Of); err != nil {
				return err
			}
		}
		if at := b.Service; at != nil {
			if *at < 0 || *at >= len(d.services) {
				return fmt.Errorf("there is no service %d, of %d", *at, len(d.services))
			}
			to.Service = d.services[*at]
		}
		out.Backends = append(out.Backends, to)
	}
	d.section.Rules = append(d.section.Rules, out)
	return nil
}
