package file

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"
)

// A decoder turns YAML nodes into a Config. It goes on after a mistake, so
// that one run reports all of them.
type decoder struct {
	file string
	errs Errors
	cfg  Config

	root     mapping
	services []mapping // the elements of services; empty for those that were read before
	policies []mapping // the elements of policies
	peers    []mapping // the elements of peers

	keyNames map[string][2]string // the files of cfg.Credentials.Keys
}

// full reports whether there are more mistakes than anybody reads.
func (d *decoder) full() bool { return len(d.errs) > 10*maxErrors }

func (d *decoder) errorf(n *yaml.Node, hint, format string, args ...any) {
	if d.full() {
		return
	}
	d.errs = d.errs.with(d.mistake(n, hint, format, args...))
}

// warnf reports what is allowed and probably not meant.
func (d *decoder) warnf(n *yaml.Node, hint, format string, args ...any) {
	if len(d.cfg.Warnings) < maxErrors {
		d.cfg.Warnings = d.cfg.Warnings.with(d.mistake(n, hint, format, args...))
	}
}

func (d *decoder) mistake(n *yaml.Node, hint, format string, args ...any) *Error {
	return &Error{File: d.file, Line: max(n.Line, 1), Column: max(n.Column, 1), Msg: fmt.Sprintf(format, args...), Hint: hint}
}

// parse decodes and checks data.
func parse(name string, data []byte) *decoder {
	d, root := decode(name, data)
	if root != nil {
		d.check(root)
	}
	return d
}

// decode reads data and checks each value by itself. The root is nil if data is not a
// document.
func decode(name string, data []byte) (*decoder, *yaml.Node) {
	d := &decoder{file: name}
	root := d.document(data)
	c := &configuration{}
	if root != nil {
		d.root.node = root
		into(d, root, "the configuration", c)
		if c.Agent != nil {
			c.Agent.expand(d, c)
		}
	}
	warnings := d.cfg.Warnings
	d.cfg = *c.config()
	d.cfg.Warnings = warnings
	return d, root
}

// document returns the root of the one document in data, or nil.
func (d *decoder) document(data []byte) *yaml.Node {
	start := &yaml.Node{Line: 1, Column: 1}
	if len(data) > maxSize {
		d.errorf(start, "", "the file has %d bytes, limit %d", len(data), maxSize)
		return nil
	}
	dec := yaml.NewDecoder(bytes.NewReader(data))
	var doc, second yaml.Node
	switch err := decodeNode(dec, &doc); {
	case errors.Is(err, io.EOF) || err == nil && (len(doc.Content) == 0 || isNull(doc.Content[0])):
		d.errorf(start, "a configuration begins with listeners and services", "the file is empty")
		return nil
	case err != nil:
		d.syntaxError(err, data)
		return nil
	}
	switch err := decodeNode(dec, &second); {
	case errors.Is(err, io.EOF):
	case err != nil:
		d.syntaxError(err, data)
		return nil
	default:
		d.errorf(&second, "use one file per gateway, without a line of ---", "the file has a second document")
		return nil
	}
	return doc.Content[0]
}

// decodeNode turns a panic of the YAML library into an error: what is in a
// file must not stop a running gateway.
func decodeNode(dec *yaml.Decoder, n *yaml.Node) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("yaml: the parser failed: %v", p)
		}
	}()
	return dec.Decode(n)
}

// needsQuotes finds a value that begins with a character that has a meaning in YAML, as
// in "name: *.example.com".
var needsQuotes = regexp.MustCompile("(?:[:-] +|[\\[{,] *)([*&!%@`][^\\s,\\]}]*)")

var yamlLine = regexp.MustCompile(`^line (\d+): `)

// syntaxError reports an error of the YAML library. The library returns no column, and as
// line the one where the block with the mistake begins.
func (d *decoder) syntaxError(err error, data []byte) {
	msg := strings.TrimPrefix(err.Error(), "yaml: ")
	line := 1
	if m := yamlLine.FindStringSubmatch(msg); m != nil {
		line, _ = strconv.Atoi(m[1])
		msg = msg[len(m[0]):]
	}
	line, text := brokenLine(data, line)
	if m := needsQuotes.FindSubmatchIndex(text); m != nil {
		value := string(text[m[2]:m[3]])
		d.errorf(&yaml.Node{Line: line, Column: column(string(text), m[2])}, "", "quote a value that begins with %c: %q", value[0], clip(value))
		return
	}
	hint := "check the indentation, and quote values with : or # in them"
	trimmed := bytes.TrimLeft(text, " \t")
	if indent := text[:len(text)-len(trimmed)]; bytes.Contains(indent, []byte("\t")) {
		hint = "indent with spaces, not with tabs"
	}
	d.errorf(&yaml.Node{Line: line, Column: len(text) - len(trimmed) + 1}, hint, "invalid YAML: %s", msg)
}

// brokenLine finds the line that breaks a document: the one after the longest
// beginning of it that is YAML. It looks from line on, within reason, and
// returns line itself where it finds nothing better.
func brokenLine(data []byte, line int) (int, []byte) {
	lines := bytes.SplitAfter(data, []byte("\n"))
	line = min(max(line, 1), len(lines))
	const (
		most = 8 << 20 // bytes to parse in all
		far  = 50      // lines that are broken in a row
	)
	size := 0
	for _, l := range lines[:line-1] {
		size += len(l)
	}
	best := line
	for at, work := line, size; at <= len(lines) && at-best < far && work < most; at++ {
		var n yaml.Node
		if err := decodeNode(yaml.NewDecoder(bytes.NewReader(data[:size])), &n); err == nil || errors.Is(err, io.EOF) {
			best = at
		}
		size += len(lines[at-1])
		work += size
	}
	return best, bytes.TrimRight(lines[best-1], "\r\n")
}

func isNull(n *yaml.Node) bool { return n.Kind == yaml.ScalarNode && n.ShortTag() == "!!null" }

var kinds = map[yaml.Kind]string{
	yaml.MappingNode: "keys and values", yaml.SequenceNode: "a list", yaml.ScalarNode: "a single value",
}

// firstKeys are the keys that a single value in place of an object is probably meant for.
var firstKeys = map[string]string{"a listener": "address", "a service": "name", "a network": "name", "a certificate": "certificateFile"}

// is reports whether n is of a kind, and adds an error if it is not.
func (d *decoder) is(n *yaml.Node, kind yaml.Kind, what string) bool {
	switch {
	case n.Kind == yaml.AliasNode:
		d.errorf(n, "write the value out", "%s is an alias, and aliases are not read", what)
	case n.Kind != kind:
		hint := ""
		switch {
		case kind == yaml.SequenceNode && n.Kind == yaml.ScalarNode:
			hint = "write it as a list: [...]"
		case kind == yaml.MappingNode && n.Kind == yaml.ScalarNode && n.Value != "":
			if key := firstKeys[what]; key != "" {
				hint = fmt.Sprintf("write - %s: %q", key, clip(n.Value))
			}
		case kind == yaml.MappingNode && n.Kind == yaml.SequenceNode:
			hint = "write key: value, without a dash or brackets"
		}
		d.errorf(n, hint, "%s must be %s, and is %s", what, kinds[kind], kinds[n.Kind])
	default:
		return true
	}
	return false
}

// text returns a scalar as it is written in the file, with or without quotes.
func (d *decoder) text(n *yaml.Node, what string) (string, bool) {
	if !d.is(n, yaml.ScalarNode, what) {
		return "", false
	}
	switch n.ShortTag() {
	case "!!str", "!!int", "!!float", "!!bool", "!!timestamp":
	default:
		d.errorf(n, "leave the tag out", "%s has the tag %q, which is not read", what, clip(n.ShortTag()))
		return "", false
	}
	if n.Value == "" {
		d.errorf(n, "give it a value, or leave it out", "%s is empty", what)
		return "", false
	}
	return n.Value, true
}

// insideTLS are protocols that can't be among those in the clear.
var insideTLS = map[string]*complaint{
	"hbone":       complain("write tls: {protocols: [hbone], ...}", "hbone needs TLS"),
	"connect-h3":  complain("write tls: {certificateFile: ..., keyFile: ...} at an address of UDP", "connect-h3 needs a listener that terminates QUIC"),
	"connect-udp": complain("write tls: {protocols: [connect-h2, connect-udp], ...}, or the same with connect-h3 at an address of UDP", "connect-udp needs TLS"),
}

// oneOf complains of a word that is none of words.
func oneOf(what, s string, words []string) *complaint {
	if slices.Contains(words, s) {
		return nil
	}
	if c := insideTLS[s]; c != nil && slices.Contains(words, "connect") {
		return c
	}
	hint := "it is one of " + strings.Join(words, ", ")
	if m := called(s, words); m != "" {
		hint = fmt.Sprintf("did you mean %q?", m)
	}
	return complain(hint, "%s can't be %q", what, clip(s))
}

func (d *decoder) boolean(n *yaml.Node, what string, to *bool) {
	if !d.is(n, yaml.ScalarNode, what) {
		return
	}
	switch {
	case n.ShortTag() == "!!bool" && strings.EqualFold(n.Value, "true"):
		*to = true
	case n.ShortTag() == "!!bool" && strings.EqualFold(n.Value, "false"):
		*to = false
	default:
		d.errorf(n, "write true or false, without quotes", "%s can't be %q", what, clip(n.Value))
	}
}

func (d *decoder) integer(n *yaml.Node, what string, least, most int) (int, bool) {
	if !d.is(n, yaml.ScalarNode, what) {
		return 0, false
	}
	v, err := strconv.ParseInt(n.Value, 10, 64) // Atoi refuses with other words where an int has 32 bits
	if err != nil || n.ShortTag() != "!!int" && n.ShortTag() != "!!str" {
		d.errorf(n, "write digits only", "%s must be a whole number, and is %q", what, clip(n.Value))
		return 0, false
	}
	if v < int64(least) || v > int64(most) {
		d.errorf(n, "", "%s is %d, want %d to %d", what, v, least, most)
		return 0, false
	}
	return int(v), true
}

func (d *decoder) duration(n *yaml.Node, what string, least time.Duration, to *time.Duration) {
	s, ok := d.text(n, what)
	if !ok {
		return
	}
	v, err := time.ParseDuration(s)
	switch {
	case err != nil:
		hint := `write it as "30s", "5m" or "1h30m"`
		if _, err := strconv.Atoi(s); err == nil {
			hint = fmt.Sprintf("add a unit, for example %ss", s)
		}
		d.errorf(n, hint, "%s: %q is not a duration", what, clip(s))
	case v < least && least > 0:
		d.errorf(n, "leave the key out for the default", "%s is %v, want %v or more", what, v, least)
	case v < least:
		d.errorf(n, "", "%s is negative", what)
	default:
		*to = v
	}
}
