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
	"io"
	"os"
	"slices"
	"strings"

	"culvert.dev/registry"
	"culvert.dev/tunnel"
)

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
		"state": l.Head != nil, "source": l.Source != nil, "network": l.Network != nil, "policy": l.Policy != nil, "service": l.Service != nil, "endpoints": l.Endpoints != nil,
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
	case l.Policy != nil:
		d.at.Policies = append(d.at.Policies, l.Policy)
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
