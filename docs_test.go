package culvert_test

import (
	"os"
	"path/filepath"
	"regexp"
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

func read(t *testing.T, file string) string {
	t.Helper()
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}
