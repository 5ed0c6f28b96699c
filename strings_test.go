package culvert_test

import (
	"bytes"
	"flag"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"unicode"
)

var update = flag.Bool("update", false, "write testdata/strings.txt and docs/reference from the code")

// stringsFile lists every sentence that the program can print, by folder and
// kind. It is compared with the code, so that a change of wording shows in a
// review as a changed line of that file.
const stringsFile = "testdata/strings.txt"

// TestStrings compares the sentences in the code with the list in
// testdata/strings.txt. To accept new ones, read them and run:
//
//	go test . -run '^TestStrings$' -update
func TestStrings(t *testing.T) {
	var b bytes.Buffer
	for _, l := range allStrings(t) {
		fmt.Fprintln(&b, l)
	}
	if *update {
		if err := os.WriteFile(stringsFile, b.Bytes(), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	old, err := os.ReadFile(stringsFile)
	if err != nil {
		t.Fatal(err)
	}
	// Without an empty line at the end, as what is searched is sorted.
	was, is := strings.Split(strings.TrimSpace(string(old)), "\n"), strings.Split(strings.TrimSpace(b.String()), "\n")
	for _, l := range is {
		if _, found := slices.BinarySearch(was, l); !found && l != "" {
			t.Errorf("not in %s: %s", stringsFile, l)
		}
	}
	for _, l := range was {
		if _, found := slices.BinarySearch(is, l); !found && l != "" {
			t.Errorf("no longer in the code: %s", l)
		}
	}
	if t.Failed() {
		t.Log("read the new sentences as an operator would; then: go test . -run '^TestStrings$' -update")
	}
}

// allStrings returns a sorted line for each sentence of the product's code.
func allStrings(t *testing.T) []string {
	t.Helper()
	var lines []string
	eachFile(t, func(path string, _ []string) {
		if strings.HasSuffix(path, "_test.go") || servesTests(path) {
			return
		}
		fset := token.NewFileSet()
		f, err := parser.ParseFile(fset, path, nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		s := sentences{seen: map[ast.Expr]bool{}}
		ast.Inspect(f, func(n ast.Node) bool { s.visit(n); return true })
		ast.Inspect(f, func(n ast.Node) bool { s.rest(n); return true })
		for _, l := range s.lines {
			lines = append(lines, filepath.ToSlash(filepath.Dir(path))+": "+l)
		}
	})
	slices.Sort(lines)
	return slices.Compact(lines)
}

// servesTests reports folders that are part of no program: they serve tests.
func servesTests(path string) bool {
	for _, folder := range []string{"integration/", "examples/", "internal/testnet/", "tunnel/tunneltest/", "connect/connecttest/"} {
		if strings.HasPrefix(filepath.ToSlash(path), folder) {
			return true
		}
	}
	return false
}

// sentences collects the sentences of one file, each once, under the kind of
// the call or field it stands in.
type sentences struct {
	seen  map[ast.Expr]bool
	lines []string
}

// visit takes the strings whose place says what they are for.
func (s *sentences) visit(n ast.Node) {
	switch n := n.(type) {
	case *ast.CallExpr:
		sel, ok := n.Fun.(*ast.SelectorExpr)
		if !ok {
			return
		}
		switch name := sel.Sel.Name; name {
		case "Debug", "Info", "Warn", "Error":
			s.take("log", n.Args, 0)
		case "DebugContext", "InfoContext", "WarnContext", "ErrorContext":
			s.take("log", n.Args, 1)
		case "Log", "LogAttrs":
			s.take("log", n.Args, 2)
		case "New":
			if x, ok := sel.X.(*ast.Ident); ok && x.Name == "errors" {
				s.take("error", n.Args, 0)
			}
		case "Errorf":
			s.take("error", n.Args, 0)
		case "Refusef", "HopRefusedf":
			s.take("error", n.Args, 1)
		}
		if strings.Contains(sel.Sel.Name, "Var") && len(n.Args) > 3 { // pflag's StringVar, BoolVarP, ...
			s.take("help", n.Args, len(n.Args)-1)
		}
	case *ast.Field:
		s.takeTag(n.Tag)
	case *ast.KeyValueExpr:
		if key, ok := n.Key.(*ast.Ident); ok {
			switch key.Name {
			case "Use", "Short", "Long", "Example":
				s.take("help", []ast.Expr{n.Value}, 0)
			}
		}
	}
}

// rest takes what is left and reads like a sentence.
func (s *sentences) rest(n ast.Node) {
	switch n := n.(type) {
	case *ast.ImportSpec: // a path
		return
	case *ast.BinaryExpr:
		s.add("text", n, true)
	case *ast.BasicLit:
		s.add("text", n, true)
	}
}

func (s *sentences) take(kind string, args []ast.Expr, i int) {
	if i < len(args) {
		s.add(kind, args[i], false)
	}
}

// takeTag takes the sentences in a struct tag.
func (s *sentences) takeTag(tag *ast.BasicLit) {
	if tag == nil {
		return
	}
	s.seen[tag] = true
	all, _ := constant(tag)
	for _, m := range tagValue.FindAllStringSubmatch(all, -1) {
		if text, err := strconv.Unquote(m[2]); err == nil && m[1] != "oneof" && isSentence(text) {
			s.lines = append(s.lines, "text: "+strconv.Quote(text))
		}
	}
}

var tagValue = regexp.MustCompile(`(\w+):("(?:[^"\\]|\\.)*")`)

func (s *sentences) add(kind string, e ast.Expr, words bool) {
	text, ok := constant(e)
	if !ok || s.seen[e] || words && !isSentence(text) {
		return
	}
	ast.Inspect(e, func(n ast.Node) bool {
		if x, ok := n.(ast.Expr); ok {
			s.seen[x] = true
		}
		return true
	})
	s.lines = append(s.lines, kind+": "+strconv.Quote(text))
}

// constant returns the value of a string that is written out in one place, also
// over several lines.
func constant(e ast.Expr) (string, bool) {
	switch e := e.(type) {
	case *ast.BasicLit:
		if e.Kind != token.STRING {
			return "", false
		}
		text, err := strconv.Unquote(e.Value)
		return text, err == nil
	case *ast.BinaryExpr:
		x, okX := constant(e.X)
		y, okY := constant(e.Y)
		return x + y, e.Op == token.ADD && okX && okY
	case *ast.ParenExpr:
		return constant(e.X)
	}
	return "", false
}

// isSentence reports whether a text has two words or more.
func isSentence(text string) bool {
	n := 0
	for _, w := range strings.Fields(text) {
		letters := 0
		for _, r := range w {
			if unicode.IsLetter(r) {
				letters++
			}
		}
		if letters >= 2 && letters*2 > len(w) {
			n++
		}
	}
	return n >= 2
}
