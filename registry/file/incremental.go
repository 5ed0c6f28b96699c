package file

import (
	"bytes"
	"encoding/binary"
	"hash/maphash"

	"culvert.dev/registry"
)

// This file reads a changed configuration without parsing the services whose text
// is the same as before: a change of one of 100,000 must be in effect within 0.5 s, and a
// full parse takes as long in the YAML library alone when the gateway is busy
// (docs/internals/adr/0011-partial-reload.md).
//
// The lines of unchanged services are made empty, and the rest is parsed as usual, so
// that positions stay right. Services are told apart by their dashes alone. That is a
// guess, so the result counts only if it has as many services as were guessed, no
// mistake was found, and nothing around the services has changed. Otherwise the
// whole file is parsed, and mistakes are reported by that.

// A digest identifies a text. The zero digest identifies none.
type digest [16]byte

var seeds = [2]maphash.Seed{maphash.MakeSeed(), maphash.MakeSeed()}

func digestOf(b []byte) (d digest) {
	binary.LittleEndian.PutUint64(d[:8], maphash.Bytes(seeds[0], b))
	binary.LittleEndian.PutUint64(d[8:], maphash.Bytes(seeds[1], b))
	return d
}

// fileDigests are the digests of a file that was parsed: of the text before and after
// its services, and of each service in order.
type fileDigests struct {
	head, tail digest
	services   []serviceDigest
}

// A serviceDigest is the digest of a service's text, or the zero digest if the service
// must be parsed each time.
type serviceDigest struct {
	digest digest
	line   int
}

// A serviceText is where the text of a service is in a file, from its dash to where the
// next service begins.
type serviceText struct {
	from, to, line int
	digest         digest
}

// splitServices finds the elements of the list under "services:", if the list and the
// file are in block style. It returns none where it is not sure. expected is about how
// many there are.
func splitServices(data []byte, expected int) []serviceText {
	items := serviceBounds(data, expected)
	for i := range items {
		items[i].digest = digestOf(data[items[i].from:items[i].to])
	}
	return items
}

// serviceBounds is splitServices without the digests.
func serviceBounds(data []byte, expected int) []serviceText {
	for _, end := range []string{"\r", "\u0085", "\u2028", "\u2029"} { // YAML ends lines at these, too
		if n := bytes.Count(data, []byte(end)); n > 0 && n != bytes.Count(data, []byte("\r\n")) {
			return nil
		}
	}
	items := make([]serviceText, 0, expected+expected/8)
	indent := -1 // of the dashes
	inside := false
	for at, line := 0, 1; at < len(data); line++ {
		from, end := at, len(data)
		if i := bytes.IndexByte(data[at:], '\n'); i >= 0 {
			end = at + i + 1
		}
		at = end
		text := data[from:end]
		body := bytes.TrimLeft(text, " ")
		in := len(text) - len(body)
		body = bytes.TrimRight(body, " \r\n")
		dash := len(body) > 0 && body[0] == '-' && (len(body) == 1 || body[1] == ' ')
		switch {
		case !inside:
			rest, ok := bytes.CutPrefix(text, []byte("services:"))
			rest = bytes.TrimSpace(rest)
			inside = ok && (len(rest) == 0 || rest[0] == '#')
		case len(body) == 0 || body[0] == '#':
		case body[0] == '\t':
			return nil
		case indent < 0 && !dash:
			return nil
		case dash && (indent < 0 || in == indent):
			indent = in
			if n := len(items); n > 0 {
				items[n-1].to = from
			}
			items = append(items, serviceText{from: from, line: line})
		case in <= indent:
			items[len(items)-1].to = from
			return items
		}
	}
	if n := len(items); n > 0 {
		items[n-1].to = len(data)
	}
	return items
}

// keepDigests keeps the digests of data, which was parsed, for the next Reload. Services
// with other files, those of their hops or of TLS, are parsed each time.
func (d *decoder) keepDigests(data []byte, items []serviceText) {
	if len(items) == 0 || len(items) != len(d.cfg.Services) {
		return
	}
	r := &d.cfg.digests
	r.head, r.tail = surroundings(data, items)
	r.services = make([]serviceDigest, len(items))
	for i, it := range items {
		if s := d.cfg.Services[i]; len(s.Via) == 0 && s.TLS == nil && !s.HasEndpointVia() {
			r.services[i] = serviceDigest{it.digest, it.line}
		}
	}
}

// surroundings returns the digests of what is before and after the services.
func surroundings(data []byte, items []serviceText) (head, tail digest) {
	return digestOf(data[:items[0].from]), digestOf(data[items[len(items)-1].to:])
}

// parseChanged parses data, which replaces the file that current was read from. It
// returns nil where the whole file must be parsed.
func parseChanged(name string, data []byte, current *Config) *decoder {
	if current == nil || len(current.digests.services) == 0 || len(data) > maxSize {
		return nil
	}
	before := current.digests.services
	items := splitServices(data, len(before))
	if len(items) == 0 {
		return nil
	}
	if head, tail := surroundings(data, items); head != current.digests.head || tail != current.digests.tail {
		return nil
	}

	// rest is what is left to parse. from has the index in current of each service that is
	// unchanged, and -1 for the others.
	rest := append(make([]byte, 0, len(data)/8), data[:items[0].from]...)
	from := make([]int, len(items))
	changed := 0
	find := digestFinder{digests: before}
	for i, it := range items {
		text := data[it.from:it.to]
		at, same := find.find(it.digest)
		if same && (i < len(items)-1 || changed > 0) { // one is always parsed: an empty list would be a mistake
			from[i] = at
			for range bytes.Count(text, []byte("\n")) {
				rest = append(rest, '\n')
			}
			continue
		}
		from[i] = -1
		changed++
		rest = append(rest, text...)
	}
	rest = append(rest, data[items[len(items)-1].to:]...)

	d, root := decode(name, rest)
	if len(d.errs) > 0 || len(d.cfg.Services) != changed {
		return nil
	}
	d.restore(current, items, from)
	d.check(root)
	if len(d.errs) > 0 {
		return nil
	}
	d.keepDigests(data, items)
	return d
}

// A digestFinder finds digests in a list. It is fast while it is asked in the order of
// the list.
type digestFinder struct {
	digests []serviceDigest
	next    int            // the index after the last one that was found
	index   map[digest]int // of all, made when one is asked for out of order
}

func (f *digestFinder) find(d digest) (int, bool) {
	if f.next < len(f.digests) && f.digests[f.next].digest == d {
		f.next++
		return f.next - 1, true
	}
	if f.index == nil {
		f.index = make(map[digest]int, len(f.digests))
		for i, t := range f.digests {
			f.index[t.digest] = i
		}
		delete(f.index, digest{})
	}
	at, ok := f.index[d]
	if ok {
		f.next = at + 1
	}
	return at, ok
}

// restore puts the unchanged services of current between those that were parsed. from has
// the index of each in current, and -1 for those that were parsed. Unchanged services have
// no position.
func (d *decoder) restore(current *Config, items []serviceText, from []int) {
	parsed, at := d.cfg.Services, d.services
	all := make([]*registry.Service, len(items))
	d.services = make([]mapping, len(items))
	next := 0
	for i, before := range from {
		if before < 0 {
			all[i], d.services[i] = parsed[next], at[next]
			next++
			continue
		}
		all[i] = current.Services[before]
		if line := items[i].line; line != current.digests.services[before].line {
			moved := *all[i]
			moved.Origin = d.origin(line)
			all[i] = &moved
		}
	}
	d.cfg.Services = all
}
