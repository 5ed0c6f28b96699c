package culvert_test

import (
	"os"
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
	for _, pattern := range []string{"*.md", "docs/*.md", "docs/*/*.md"} {
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
		for line := range strings.Lines(read(t, "docs/protocols/"+doc)) {
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
	for line := range strings.Lines(read(t, "docs/operations/promises.md")) {
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
