package tunnel_test

import (
	"errors"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"strings"
	"testing"

	"culvert.dev/tunnel"
)

// labels joins n-byte labels to a name of exactly the given length.
func labels(length int) string {
	b := []byte(strings.Repeat("a", length))
	for i := 63; i < length-1; i += 64 {
		b[i] = '.'
	}
	return string(b)
}

var names = []struct {
	in   string
	want string // "" where err is wanted
	err  error
}{
	{"svc.example.com", "svc.example.com", nil},
	{"SVC.Example.COM", "svc.example.com", nil},
	{"svc.example.com.", "svc.example.com", nil},
	{"localhost", "localhost", nil},
	{"a", "a", nil},
	{"A.", "a", nil},
	{"-", "-", nil},
	{"_", "_", nil},
	{"a-b.c-d", "a-b.c-d", nil},
	{"_sip._tcp.example.com", "_sip._tcp.example.com", nil},
	{"outbound_.443_._.host", "outbound_.443_._.host", nil},
	{"outbound_.8080_.v1_.Reviews.Default.svc", "outbound_.8080_.v1_.reviews.default.svc", nil},
	{"xn--bcher-kva.example", "xn--bcher-kva.example", nil},
	{"XN--BCHER-KVA.example", "xn--bcher-kva.example", nil},
	{"1.example", "1.example", nil},
	{"1.2.3.4.example", "1.2.3.4.example", nil},
	{"0x7f.0x1g", "0x7f.0x1g", nil},
	{"1e5", "1e5", nil},
	{"face", "face", nil}, // hexadecimal digits alone are no number
	{"0y1", "0y1", nil},
	{"127.0.0.1-", "127.0.0.1-", nil},
	{strings.Repeat("a", 63) + ".b", strings.Repeat("a", 63) + ".b", nil},
	{labels(253), labels(253), nil},
	{labels(253) + ".", labels(253), nil},

	{"", "", tunnel.ErrNameEmpty},
	{".", "", tunnel.ErrNameLabel},
	{"..", "", tunnel.ErrNameLabel},
	{".a", "", tunnel.ErrNameLabel},
	{"a..", "", tunnel.ErrNameLabel},
	{"a..b", "", tunnel.ErrNameLabel},
	{strings.Repeat("a", 64), "", tunnel.ErrNameLabel},
	{"b." + strings.Repeat("a", 64), "", tunnel.ErrNameLabel},
	{labels(254), "", tunnel.ErrNameTooLong},
	{labels(253) + "..", "", tunnel.ErrNameTooLong},
	{strings.Repeat("a", 70000), "", tunnel.ErrNameTooLong},

	{"a.example.test\x00.evil", "", tunnel.ErrNameByte},
	{"a\x00", "", tunnel.ErrNameByte},
	{"a b", "", tunnel.ErrNameByte},
	{" a", "", tunnel.ErrNameByte},
	{"a\n", "", tunnel.ErrNameByte},
	{"a\r\nb", "", tunnel.ErrNameByte},
	{"a/b", "", tunnel.ErrNameByte},
	{"user@host", "", tunnel.ErrNameByte},
	{"*.example.com", "", tunnel.ErrNameByte},
	{"a%2eb", "", tunnel.ErrNameByte},
	{"bücher.example", "", tunnel.ErrNameByte},
	{"exam\u212ale.com", "", tunnel.ErrNameByte}, // KELVIN SIGN lower-cases to an ASCII k
	{"\u0130.example", "", tunnel.ErrNameByte},   // and this one to an i with a dot
	{"a。b", "", tunnel.ErrNameByte},              // IDEOGRAPHIC FULL STOP
	{"\xff", "", tunnel.ErrNameByte},
	{"host:443", "", tunnel.ErrNameByte},
	{"[host]", "", tunnel.ErrNameByte},
	{"[]", "", tunnel.ErrNameByte},
	{":", "", tunnel.ErrNameByte},

	{"1.2.3.4", "", tunnel.ErrNameAddress},
	{"1.2.3.4.", "", tunnel.ErrNameAddress},
	{"127.1", "", tunnel.ErrNameAddress},
	{"0x7f.1", "", tunnel.ErrNameAddress},
	{"0X7F000001", "", tunnel.ErrNameAddress},
	{"0x", "", tunnel.ErrNameAddress},
	{"2130706433", "", tunnel.ErrNameAddress},
	{"0177.0.0.1", "", tunnel.ErrNameAddress},
	{"0", "", tunnel.ErrNameAddress},
	{"256.256.256.256", "", tunnel.ErrNameAddress},
	{"foo.09", "", tunnel.ErrNameAddress},
	{"foo.0xff", "", tunnel.ErrNameAddress},
	{"::1", "", tunnel.ErrNameAddress},
	{"::", "", tunnel.ErrNameAddress},
	{"2001:DB8::1", "", tunnel.ErrNameAddress},
	{"[2001:db8::1]", "", tunnel.ErrNameAddress},
	{"[::1]", "", tunnel.ErrNameAddress},
	{"fe80::1%eth0", "", tunnel.ErrNameAddress},
	{"[fe80::1%25eth0]", "", tunnel.ErrNameAddress},
	{"::ffff:127.0.0.1", "", tunnel.ErrNameAddress},
	{"[::ffff:7f00:1]", "", tunnel.ErrNameAddress},
}

func TestParseName(t *testing.T) {
	for _, tt := range names {
		n, err := tunnel.ParseName(tt.in)
		if n.String() != tt.want || !errors.Is(err, tt.err) {
			t.Errorf("ParseName(%q): got %q, %v; want %q, %v", tt.in, n, err, tt.want, tt.err)
		}
		if err != nil && len(err.Error()) > 400 {
			t.Errorf("ParseName(%.20q...): the error has %d bytes, it quotes too much", tt.in, len(err.Error()))
		}
		checkName(t, tt.in)
	}
}

// checkName checks what holds for every input.
func checkName(t *testing.T, in string) {
	t.Helper()
	n, err := tunnel.ParseName(in)
	wraps := 0
	for _, e := range []error{tunnel.ErrNameEmpty, tunnel.ErrNameTooLong, tunnel.ErrNameLabel, tunnel.ErrNameByte, tunnel.ErrNameAddress} {
		if errors.Is(err, e) {
			wraps++
		}
	}
	if err != nil {
		if !n.IsZero() || wraps != 1 {
			t.Errorf("%q: name %q with error %v, which wraps %d of the five", in, n, err, wraps)
		}
		for _, r := range err.Error() {
			if r < ' ' || r == 0x7f {
				t.Errorf("%q: the error has a control character: %q", in, err)
			}
		}
		return
	}
	s := n.String()
	if again, err := tunnel.ParseName(s); err != nil || again != n {
		t.Errorf("%q: parsed to %q, and that to %q, %v", in, s, again, err)
	}
	if dotted, err := tunnel.ParseName(s + "."); err != nil || dotted != n {
		t.Errorf("%q: with a dot it is %q, %v", s, dotted, err)
	}
	if upper, err := tunnel.ParseName(strings.ToUpper(s)); err != nil || upper != n {
		t.Errorf("%q: in upper case it is %q, %v", s, upper, err)
	}
	if s == "" || n.IsZero() || len(s) > tunnel.MaxNameLen || len(in)-len(s) > 1 {
		t.Errorf("%q parsed to %q", in, s)
	}
	for _, l := range strings.Split(s, ".") {
		if l == "" || len(l) > tunnel.MaxLabelLen || strings.Trim(l, "abcdefghijklmnopqrstuvwxyz0123456789-_") != "" {
			t.Errorf("%q parsed to %q with label %q", in, s, l)
		}
	}
}

func FuzzName(f *testing.F) {
	for _, tt := range names {
		f.Add(tt.in)
	}
	f.Fuzz(func(t *testing.T, in string) {
		checkName(t, in)
		p, err := tunnel.ParsePattern(in)
		if err != nil {
			return
		}
		if again, err := tunnel.ParsePattern(p.String()); err != nil || again != p {
			t.Errorf("pattern %q: %+v, and again %+v, %v", in, p, again, err)
		}
	})
}

func TestNameParts(t *testing.T) {
	n := tunnel.MustParseName("a.b.c")
	var got []string
	for ok := true; ok; n, ok = n.Parent() {
		got = append(got, n.String())
	}
	if strings.Join(got, " ") != "a.b.c b.c c" {
		t.Errorf("parents: got %q", got)
	}
	if p, ok := (tunnel.Name{}).Parent(); ok || !p.IsZero() {
		t.Errorf("parent of the zero name: %q, %v", p, ok)
	}
	n = tunnel.MustParseName("Svc.Example")
	text, err := n.MarshalText()
	more, err2 := n.AppendText([]byte("at "))
	if string(text) != "svc.example" || string(more) != "at svc.example" || err != nil || err2 != nil {
		t.Errorf("text: %q, %q, %v, %v", text, more, err, err2)
	}
	if a := testing.AllocsPerRun(100, func() { _, _ = n.Parent() }); a != 0 {
		t.Errorf("Parent allocates %v times", a)
	}
	defer func() {
		if recover() == nil {
			t.Error("MustParseName of nonsense did not panic")
		}
	}()
	tunnel.MustParseName("a..b")
}

func TestParsePattern(t *testing.T) {
	for _, tt := range []struct {
		in       string
		want     string
		wildcard bool
		err      error
	}{
		{"A.Example.", "a.example", false, nil},
		{"*.Example.com.", "*.example.com", true, nil},
		{"*.com", "*.com", true, nil},
		{"*", "", false, tunnel.ErrNameByte},
		{"*.", "", false, tunnel.ErrNameEmpty},
		{"*..", "", false, tunnel.ErrNameLabel},
		{"", "", false, tunnel.ErrNameEmpty},
		{"*.*.com", "", false, tunnel.ErrNameByte},
		{"a.*.com", "", false, tunnel.ErrNameByte},
		{"a*.com", "", false, tunnel.ErrNameByte},
		{"*a.com", "", false, tunnel.ErrNameByte},
		{".com", "", false, tunnel.ErrNameLabel},
		{"*.1.2.3.4", "", false, tunnel.ErrNameAddress},
		{"1.2.3.4", "", false, tunnel.ErrNameAddress},
	} {
		p, err := tunnel.ParsePattern(tt.in)
		if !errors.Is(err, tt.err) || p.String() != tt.want || p.Wildcard != tt.wildcard {
			t.Errorf("ParsePattern(%q): got %q, %v; want %q, %v", tt.in, p, err, tt.want, tt.err)
		}
	}
}

// TestPatternMatches compares Matches with the rule read label by label, for
// every pair of names over a small alphabet.
func TestPatternMatches(t *testing.T) {
	var all []string
	for _, a := range []string{"", "x.", "a.", "xa.", "a.x."} {
		for _, b := range []string{"", "a.", "x."} {
			for _, c := range []string{"a", "x", "xa", "ax"} {
				all = append(all, a+b+c)
			}
		}
	}
	reference := func(pattern, name string) bool {
		p, n := strings.Split(pattern, "."), strings.Split(name, ".")
		if p[0] != "*" {
			return pattern == name
		}
		p = p[1:]
		return len(n) > len(p) && strings.Join(n[len(n)-len(p):], ".") == strings.Join(p, ".")
	}
	matches := 0
	for _, suffix := range all {
		for _, pattern := range []string{suffix, "*." + suffix} {
			p, err := tunnel.ParsePattern(pattern)
			if err != nil {
				t.Fatal(err)
			}
			for _, name := range all {
				got, want := p.Matches(tunnel.MustParseName(name)), reference(pattern, name)
				if got != want {
					t.Errorf("%q matches %q: got %v, want %v", pattern, name, got, want)
				}
				if want {
					matches++
				}
			}
			if p.Matches(tunnel.Name{}) {
				t.Errorf("%q matches the zero name", pattern)
			}
		}
	}
	if matches < 100 {
		t.Errorf("only %d pairs match: the test compares nothing", matches)
	}
	if zero := (tunnel.Pattern{}); zero.Matches(tunnel.MustParseName("a")) || zero.Matches(tunnel.Name{}) {
		t.Error("the zero Pattern matches something")
	}
	if !tunnel.AnyName.Matches(tunnel.MustParseName("a")) || tunnel.AnyName.Matches(tunnel.Name{}) {
		t.Error("AnyName does not match a name, or matches none")
	}
	var read tunnel.Pattern
	if text, err := tunnel.AnyName.MarshalText(); err != nil || read.UnmarshalText(text) != nil || read != tunnel.AnyName || string(text) != "*" {
		t.Errorf("AnyName is written as %q and read as %+v, %v", text, read, err)
	}
	if p, err := tunnel.ParsePattern("*"); err == nil {
		t.Errorf("ParsePattern(\"*\") = %v, want an error: all names are not to be had by mistake", p)
	}
}

// TestNamesAreMadeInOnePlace: other packages can't make a Name but by ParseName,
// as its field is not theirs. In this one only name.go does.
func TestNamesAreMadeInOnePlace(t *testing.T) {
	entries, err := os.ReadDir(".")
	if err != nil {
		t.Fatal(err)
	}
	files := token.NewFileSet()
	made := 0
	for _, e := range entries {
		file := e.Name()
		if !strings.HasSuffix(file, ".go") || strings.HasSuffix(file, "_test.go") {
			continue
		}
		tree, err := parser.ParseFile(files, file, nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		ast.Inspect(tree, func(n ast.Node) bool {
			lit, ok := n.(*ast.CompositeLit)
			if !ok || len(lit.Elts) == 0 {
				return true
			}
			if id, ok := lit.Type.(*ast.Ident); ok && id.Name == "Name" {
				if made++; file != "name.go" {
					t.Errorf("%s: a Name that was not parsed", files.Position(lit.Pos()))
				}
			}
			return true
		})
	}
	if made == 0 {
		t.Error("no Name is made: they are not found")
	}
}

// A Name and a Pattern come back from text as they were, and so do their zero values.
func TestNamesAndPatternsAsText(t *testing.T) {
	for _, text := range []string{"", "a.example.com", "*.example.com"} {
		var p tunnel.Pattern
		if err := p.UnmarshalText([]byte(text)); err != nil {
			t.Fatal(err)
		}
		if got, err := p.MarshalText(); string(got) != text || err != nil {
			t.Errorf("pattern %q: got %q, %v", text, got, err)
		}
	}
	p, n := tunnel.Pattern{Wildcard: true}, tunnel.MustParseName("a.example.com")
	if err := p.UnmarshalText([]byte("*.a b")); err == nil || p != (tunnel.Pattern{}) {
		t.Errorf("pattern \"*.a b\": got %v, %v, want an error and the zero Pattern", p, err)
	}
	if err := n.UnmarshalText([]byte("a b")); err == nil || !n.IsZero() {
		t.Errorf("name \"a b\": got %q, %v, want an error and the zero Name", n, err)
	}
	if err := n.UnmarshalText([]byte("B.example.com")); err != nil || n.String() != "b.example.com" {
		t.Errorf("got %q, %v, want b.example.com", n, err)
	}
}

func TestReservedNames(t *testing.T) {
	for name, want := range map[string]bool{
		"culvert.alt": true, "reverse.culvert.alt": true, "a.b.CULVERT.alt.": true,
		"xculvert.alt": false, "alt": false, "culvert.alt.example": false,
	} {
		if got := tunnel.MustParseName(name).IsReserved(); got != want {
			t.Errorf("%s: got %v, want %v", name, got, want)
		}
	}
}
