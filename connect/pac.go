package connect

import (
	"bytes"
	"slices"
	"strings"

	"culvert.dev/tunnel"
)

// MaxPACNames is how many names AutoConfig writes; browsers read the file for every request.
const MaxPACNames = 20_000

// AutoConfig returns a proxy auto-config file: clients ask the proxy, HOST:PORT, for the
// names, and for all others go where they would without it. They never go to one of the
// names directly. AnyName is left out, as it would take all others, too. Of more names than
// MaxPACNames, those that come first by the alphabet count.
func AutoConfig(proxy string, names []tunnel.Pattern) []byte {
	var exact, below []string
	for _, p := range names {
		switch {
		case p.Suffix.IsZero():
		case p.Wildcard:
			below = append(below, p.Suffix.String())
		default:
			exact = append(exact, p.Suffix.String())
		}
	}
	var b bytes.Buffer
	b.WriteString("function FindProxyForURL(url, host) {\n")
	b.WriteString("  host = host.toLowerCase().replace(/\\.$/, \"\");\n")
	left := writeSet(&b, "names", exact, MaxPACNames)
	writeSet(&b, "below", below, left)
	b.WriteString("  var proxy = \"PROXY " + onlyAddress(proxy) + "\";\n")
	b.WriteString("  if (names[host] === 1) return proxy;\n")
	b.WriteString("  for (var i = host.indexOf(\".\"); i >= 0; i = host.indexOf(\".\", i + 1))\n")
	b.WriteString("    if (below[host.substring(i + 1)] === 1) return proxy;\n")
	b.WriteString("  return \"DIRECT\";\n}\n")
	return b.Bytes()
}

// writeSet writes an object with at most most of the names, and returns how many more
// there may be. A name has letters, digits, hyphens, underscores and dots: no quotes.
func writeSet(b *bytes.Buffer, variable string, names []string, most int) (left int) {
	slices.Sort(names)
	names = slices.Compact(names)
	names = names[:min(len(names), most)]
	b.WriteString("  var " + variable + " = {")
	for i, name := range names {
		if i > 0 {
			b.WriteString(",")
		}
		b.WriteString("\n    \"" + name + "\": 1")
	}
	b.WriteString("};\n")
	return most - len(names)
}

// onlyAddress returns the characters of s that HOST:PORT has.
func onlyAddress(s string) string {
	return strings.Map(func(r rune) rune {
		if r < 0x80 && isAlnum(byte(r)) || strings.ContainsRune("[]:.-", r) {
			return r
		}
		return -1
	}, s)
}
