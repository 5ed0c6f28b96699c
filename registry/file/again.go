package file

import (
	"bytes"
	"encoding/binary"
	"hash/maphash"

	"culvert.dev/registry"
	"go.yaml.in/yaml/v3"
)

// Of 100,000 services few change at once, and YAML is slow to read: a file that
// was read before is read again without the services whose text is the same.
//
// Their lines are made empty and the rest is parsed as ever, at the places it
// has. Services are told apart by their dashes alone, which is a guess: what is
// read must have as many services as were guessed and nothing to complain of,
// and nothing around the services may have changed. Otherwise the whole file
// is read, and every complaint is made by that.

// A digest stands for a text. The zero digest stands for none.
type digest [16]byte

var seeds = [2]maphash.Seed{maphash.MakeSeed(), maphash.MakeSeed()}

func digestOf(b []byte) (d digest) {
	binary.LittleEndian.PutUint64(d[:8], maphash.Bytes(seeds[0], b))
	binary.LittleEndian.PutUint64(d[8:], maphash.Bytes(seeds[1], b))
	return d
}

// A reading is what is remembered of a file: its services' texts, in order, and
// what is around them.
type reading struct {
	head, tail digest
	services   []text
}

// A text is that of a service, of no digest if it is to be read each time.
type text struct {
	digest digest
	line   int
}

// An item is the text of a service, from its dash to where the next begins.
type item struct {
	from, to, line int
	digest         digest
}

// itemsOf finds the elements of the list under "services:", where both are
// written in block style, of which there may be about so many. There are none
// where it isn't sure.
func itemsOf(data []byte, about int) []item {
	items := bounds(data, about)
	for i := range items {
		registry.Yield(i)
		items[i].digest = digestOf(data[items[i].from:items[i].to])
	}
	return items
}

func bounds(data []byte, about int) []item {
	for _, end := range []string{"\r", "\u0085", "\u2028", "\u2029"} { // YAML takes these for the ends of lines, too
		if n := bytes.Count(data, []byte(end)); n > 0 && n != bytes.Count(data, []byte("\r\n")) {
			return nil
		}
	}
	items := make([]item, 0, about+about/8)
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
			items = append(items, item{from: from, line: line})
			registry.Yield(line)
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

// remember notes how data was read. Services that other files belong to are
// read each time.
func (d *decoder) remember(data []byte, items []item) {
	if len(items) == 0 || len(items) != len(d.cfg.Services) {
		return
	}
	r := &d.cfg.reading
	r.head, r.tail = around(data, items)
	r.services = make([]text, len(items))
	for i, it := range items {
		registry.Yield(i)
		if len(d.cfg.Services[i].Via) == 0 {
			r.services[i] = text{it.digest, it.line}
		}
	}
}

func around(data []byte, items []item) (head, tail digest) {
	return digestOf(data[:items[0].from]), digestOf(data[items[len(items)-1].to:])
}

// parseAgain is parse for a file of which current was read before, or nil where
// that is of no help.
func parseAgain(name string, data []byte, current *Config) *decoder {
	if current == nil || len(current.reading.services) == 0 || len(data) > maxSize {
		return nil
	}
	was := current.reading.services
	items := itemsOf(data, len(was))
	if len(items) == 0 {
		return nil
	}
	if head, tail := around(data, items); head != current.reading.head || tail != current.reading.tail {
		return nil
	}

	// What is left to read, and where the rest is in current.
	rest := append(make([]byte, 0, len(data)/8), data[:items[0].from]...)
	from := make([]int, len(items))
	fresh := 0
	find := finder{texts: was}
	for i, it := range items {
		registry.Yield(i)
		text := data[it.from:it.to]
		at, same := find.index(it.digest)
		if same && (i < len(items)-1 || fresh > 0) { // one is always read: a list of none would be a mistake
			from[i] = at
			for range bytes.Count(text, []byte("\n")) {
				rest = append(rest, '\n')
			}
			continue
		}
		from[i] = -1
		fresh++
		rest = append(rest, text...)
	}
	rest = append(rest, data[items[len(items)-1].to:]...)

	d, root := decode(name, rest)
	if len(d.errs) > 0 || len(d.cfg.Services) != fresh {
		return nil
	}
	d.restore(current, items, from)
	d.check(root)
	if len(d.errs) > 0 {
		return nil
	}
	d.remember(data, items)
	return d
}

// A finder finds texts by their digests, at no cost while they are asked for in
// their order.
type finder struct {
	texts []text
	next  int            // the index after the one that was found last
	known map[digest]int // nil until one is asked for out of order
}

func (f *finder) index(d digest) (int, bool) {
	if f.next < len(f.texts) && f.texts[f.next].digest == d {
		f.next++
		return f.next - 1, true
	}
	if f.known == nil {
		f.known = make(map[digest]int, len(f.texts))
		for i, t := range f.texts {
			registry.Yield(i)
			f.known[t.digest] = i
		}
		delete(f.known, digest{})
	}
	at, ok := f.known[d]
	if ok {
		f.next = at + 1
	}
	return at, ok
}

// restore puts the services that were not read again between those that were.
// What it places in d.at for them is only there to be complained of.
func (d *decoder) restore(current *Config, items []item, was []int) {
	read, at := d.cfg.Services, d.at.services
	all := make([]*registry.Service, len(items))
	d.at.services = make([]*serviceAt, len(items))
	same := &serviceAt{}
	most, next := 0, 0
	for i, from := range was {
		if from < 0 {
			all[i], d.at.services[i] = read[next], at[next]
			next++
			continue
		}
		registry.Yield(i)
		all[i], d.at.services[i] = current.Services[from], same
		if line := items[i].line; line != current.reading.services[from].line {
			moved := *all[i]
			moved.Origin = d.origin(line)
			all[i] = &moved
		}
		most = max(most, len(all[i].Names), len(all[i].Addresses), len(all[i].Endpoints))
	}
	nodes := make([]*yaml.Node, most)
	for i := range nodes {
		nodes[i] = &yaml.Node{}
	}
	same.names, same.addresses, same.endpoints = nodes, nodes, nodes
	d.cfg.Services = all
}
