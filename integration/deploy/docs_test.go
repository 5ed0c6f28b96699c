package deploy

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"
)

// The shell blocks of the page on installing, in one script, bring out what
// they say. Blocks of consoles are for a cluster that is not here, or for root.
func TestThePageOnInstallingDoesWhatItSays(t *testing.T) {
	page := read(t, "docs/guides/install.md")
	script, wants := shell(page)
	if len(wants) < 5 {
		t.Fatalf("%d things are said to come out", len(wants))
	}
	folder := t.TempDir()
	must(t, os.Symlink(built(t), filepath.Join(folder, "culvert")))
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, "bash", "-c", "set -euo pipefail\n"+script)
	cmd.Dir = t.TempDir()
	cmd.Env = append(os.Environ(), "PATH="+folder+":"+os.Getenv("PATH"))
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	for _, want := range wants {
		if !strings.Contains(string(out), want) {
			t.Errorf("the output does not have %q:\n%s", want, out)
		}
	}
}

// What the page names is there: files, commands of the program, their flags.
func TestThePageOnInstallingNamesWhatThereIs(t *testing.T) {
	page := read(t, "docs/guides/install.md")
	for _, m := range regexp.MustCompile(`\]\(([^)#:]+)(?:#[^)]*)?\)`).FindAllStringSubmatch(page, -1) {
		if _, err := os.Stat(filepath.Join(root, "docs", "guides", m[1])); err != nil {
			t.Errorf("it links to %s: %v", m[1], err)
		}
	}
	for _, name := range regexp.MustCompile(`\bdeploy/[a-zA-Z/._-]*[a-zA-Z]`).FindAllString(page, -1) {
		if name == "deploy/culvert" {
			continue // kubectl's word for the Deployment
		}
		if _, err := os.Stat(filepath.Join(root, name)); err != nil {
			t.Errorf("it names %s: %v", name, err)
		}
	}
}

func read(t *testing.T, name string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(root, filepath.FromSlash(name)))
	must(t, err)
	return string(text)
}

// shell returns the shell blocks of a text, and what their comments of the form
// "# => TEXT" say will come out.
func shell(text string) (script string, wants []string) {
	for _, block := range regexp.MustCompile("(?ms)^```sh\n(.*?)^```").FindAllStringSubmatch(text, -1) {
		script += block[1]
		for _, want := range regexp.MustCompile(`(?m)^ *# => (.*)$`).FindAllStringSubmatch(block[1], -1) {
			wants = append(wants, want[1])
		}
	}
	return script, wants
}
