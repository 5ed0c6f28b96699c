package culvert_test

import (
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// Every test that the documentation names is there.
func TestDocumentationNamesTestsThatExist(t *testing.T) {
	declared := map[string]bool{}
	decl := regexp.MustCompile(`(?m)^func ((?:Test|Fuzz)\w+)\(`)
	for _, pattern := range []string{"*_test.go", "*/*_test.go", "*/*/*_test.go", "*/*/*/*_test.go"} {
		files, err := filepath.Glob(pattern)
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range files {
			for _, m := range decl.FindAllStringSubmatch(read(t, f), -1) {
				declared[m[1]] = true
			}
		}
	}
	named := regexp.MustCompile("`((?:Test|Fuzz)[A-Z]\\w+)[`/]")
	n := 0
	for _, pattern := range []string{"*.md", "docs/*.md", "docs/*/*.md", "docs/*/*/*.md"} {
		files, _ := filepath.Glob(pattern)
		for _, f := range files {
			for _, m := range named.FindAllStringSubmatch(read(t, f), -1) {
				if n++; !declared[m[1]] {
					t.Errorf("%s names %s, which is no test", f, m[1])
				}
			}
		}
	}
	if n < 100 {
		t.Errorf("the documentation names %d tests: they are not found", n)
	}
}

// Every row of a test that the tables of bad input name is there: in the last
// column, which is headed "test", stands what "go test -run" takes.
func TestDocumentationNamesRowsThatExist(t *testing.T) {
	tests := map[string]string{ // by document
		"socks5.md": "connect/socks5", "proxy-protocol.md": "connect/proxyproto",
	}
	quoted := regexp.MustCompile("`([^`]+)`")
	for doc, folder := range tests {
		var source strings.Builder
		files, _ := filepath.Glob(folder + "/*_test.go")
		for _, f := range files {
			source.WriteString(read(t, f))
		}
		rows, in := 0, false
		for line := range strings.Lines(read(t, "docs/internals/protocols/"+doc)) {
			cells := strings.Split(strings.TrimSpace(line), "|")
			if len(cells) < 3 {
				in = false
				continue
			}
			last := strings.TrimSpace(cells[len(cells)-2])
			if last == "test" {
				in = true
				continue
			}
			for _, m := range quoted.FindAllStringSubmatch(last, -1) {
				parts := strings.Split(m[1], "/")
				row := parts[len(parts)-1]
				if !in || strings.HasPrefix(row, "Test") || row == "tunnel" || row == "Prefix" || row == "..." {
					continue
				}
				name, _ := strings.CutSuffix(row, "...")
				name = strings.ReplaceAll(name, "_", " ")
				if rows++; !strings.Contains(source.String(), name) {
					t.Errorf("%s names the row %q, which no test in %s has", doc, row, folder)
				}
			}
		}
		if rows < 20 {
			t.Errorf("%s names %d rows of tests: they are not found", doc, rows)
		}
	}
}

// Every link of a page leads to a file of the tree, and to a heading of it.
func TestLinks(t *testing.T) {
	link := regexp.MustCompile(`\]\(([^)\s:#]*)(?:#([^)\s]*))?\)|(?:src|href)="([^":]+)"`)
	code := regexp.MustCompile("(?ms)^ *```.*?^ *```|`[^`\n]*`")
	n := 0
	err := fs.WalkDir(os.DirFS("."), ".", func(name string, entry fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case entry.IsDir() && (name == "bin" || strings.HasPrefix(name, ".") && name != "."):
			return fs.SkipDir
		case !strings.HasSuffix(name, ".md"):
			return nil
		}
		for _, m := range link.FindAllStringSubmatch(code.ReplaceAllString(read(t, name), ""), -1) {
			n++
			target := name
			if m[1]+m[3] != "" {
				target = path.Join(path.Dir(name), m[1]+m[3])
			}
			if _, err := os.Stat(target); err != nil {
				t.Errorf("%s links to %s, which is not there", name, m[0])
			} else if m[2] != "" && !anchors(read(t, target))[m[2]] {
				t.Errorf("%s links to %s, and %s has no such heading", name, m[0], target)
			}
		}
		return nil
	})
	if err != nil || n < 100 {
		t.Errorf("%d links, want at least 100; %v", n, err)
	}
}

// anchors returns the anchors of a page's headings, as web pages of
// repositories make them.
func anchors(page string) map[string]bool {
	all := map[string]bool{}
	for _, m := range regexp.MustCompile(`(?m)^#+ (.*)$`).FindAllStringSubmatch(page, -1) {
		all[anchor(m[1])] = true
	}
	return all
}

func anchor(heading string) string {
	text := regexp.MustCompile("[^a-z0-9 _-]").ReplaceAllString(strings.ToLower(heading), "")
	return strings.ReplaceAll(text, " ", "-")
}

func read(t *testing.T, file string) string {
	t.Helper()
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// Every promise names a test, or says that it is none.
func TestEveryPromiseNamesItsTest(t *testing.T) {
	test := regexp.MustCompile("`(?:Test|Fuzz)[A-Z]\\w+`")
	rows := 0
	for line := range strings.Lines(read(t, "docs/internals/promises.md")) {
		if !strings.HasPrefix(line, "| ") || strings.HasPrefix(line, "| --- ") || strings.HasPrefix(line, "| promise ") || strings.HasPrefix(line, "| fault ") {
			continue
		}
		if rows++; !test.MatchString(line) && !strings.Contains(line, "not promised") {
			t.Errorf("no test is named: %s", line)
		}
	}
	if rows < 40 {
		t.Errorf("%d promises: they are not found", rows)
	}
}
