package deploy

import (
	"flag"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "write the values into the page on installing")

// The page on installing has every value as it is.
func TestThePageHasTheValues(t *testing.T) {
	name := filepath.Join("..", "docs", "guides", "install.md")
	page, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	values, err := os.ReadFile(filepath.Join("helm", "culvert", "values.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	head, block, ok := strings.Cut(string(page), "\n## Values\n")
	at := regexp.MustCompile("(?ms)^```yaml\n(.*?)^```$").FindStringSubmatchIndex(block)
	if !ok || at == nil {
		t.Fatal("the page has no values")
	}
	want := head + "\n## Values\n" + block[:at[2]] + string(values) + block[at[3]:]
	if *update {
		if err := os.WriteFile(name, []byte(want), 0o644); err != nil {
			t.Fatal(err)
		}
	} else if want != string(page) {
		t.Error("the values of the page are not those of the chart: run \"make manifests\"")
	}
}
