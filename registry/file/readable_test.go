//go:build !windows

package file

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// A file with secrets is only complained of where others can get to it.
func TestReachableFiles(t *testing.T) {
	root := t.TempDir()
	openUp(t, root)
	version := filepath.Join(root, "secret", "..2026_01_31_12_00_00.123456789")
	for _, dir := range []string{filepath.Join(root, "open"), filepath.Join(root, "closed", "inner"), filepath.Join(version, "sub"), filepath.Join(root, "old", "..2025")} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range []string{"open/user", "closed/inner/user", "old/..2025/user", "secret/..2026_01_31_12_00_00.123456789/user", "secret/..2026_01_31_12_00_00.123456789/sub/user"} {
		if err := os.WriteFile(filepath.Join(root, name), []byte("alice:hunter2\n"), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	for link, to := range map[string]string{
		"secret/..data": filepath.Base(version), "secret/user": "..data/user", "secret/sub": "..data/sub",
		"link": "closed/inner/user", "closed/link": "../open/user",
	} {
		if err := os.Symlink(to, filepath.Join(root, link)); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Chmod(filepath.Join(root, "closed"), 0o750); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]bool{
		"open/user": true, "closed/inner/user": false, "link": false, "closed/link": true,
		"secret/user": false, "secret/sub/user": false, "old/..2025/user": true,
	} {
		path := filepath.Join(root, "culvert.yaml")
		text := "services: [{name: a.test, ports: [1], via: [{socks5: \"127.0.0.1:1\", userFile: " + name + "}]}]\n"
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		c, err := Load(path)
		if err != nil {
			t.Fatal(err)
		}
		if got := strings.Contains(c.Warnings.Error(), "may be read by everybody"); got != want {
			t.Errorf("%s: complained of: %v, want %v", name, got, want)
		}
	}
}
