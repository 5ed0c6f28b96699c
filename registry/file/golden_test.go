package file

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"culvert.dev/registry"
)

var update = flag.Bool("update", false, "write the .want files anew; then read the difference")

// Every file in testdata/bad is refused with the mistakes in its .want file.
func TestBadFiles(t *testing.T) {
	wants, err := filepath.Abs("testdata/bad")
	if err != nil {
		t.Fatal(err)
	}
	t.Chdir(private(t, "testdata/bad"))
	files, err := filepath.Glob("*.yaml")
	if err != nil || len(files) < 20 {
		t.Fatalf("%d files, %v", len(files), err)
	}
	for _, f := range files {
		t.Run(f, func(t *testing.T) {
			cfg, err := Load(f)
			if err == nil {
				t.Fatalf("loaded: %+v", cfg)
			}
			got := err.Error() + "\n"
			want := filepath.Join(wants, strings.TrimSuffix(f, ".yaml")+".want")
			if *update {
				if err := os.WriteFile(want, []byte(got), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			data, err2 := os.ReadFile(want)
			if err2 != nil {
				t.Fatal(err2)
			}
			if got != string(data) {
				t.Errorf("got:\n%s\nwant:\n%s", got, data)
			}
			var errs Errors
			if !errors.As(err, &errs) || len(errs) > maxErrors {
				t.Fatalf("%T with %d errors, want Errors of at most %d", err, len(errs), maxErrors)
			}
			var one *Error
			if !errors.As(err, &one) {
				t.Error("no *Error is found in Errors")
			}
			for _, e := range errs {
				if e.Line < 1 || e.Column < 1 || e.File == "" || e.Msg == "" {
					t.Errorf("an error without a place: %+v", e)
				}
			}
			for _, secret := range []string{"hunter2", "$2y$10", "9f86d0", "t0ken-of", "mighageamb"} {
				if strings.Contains(strings.ToLower(got), secret) {
					t.Errorf("the errors tell the secret %q:\n%s", secret, got)
				}
			}
		})
	}
}

// Every file in testdata/good loads, and makes a table without conflicts.
func TestGoodFiles(t *testing.T) {
	files, err := filepath.Glob(filepath.Join(private(t, "testdata/good"), "*.yaml"))
	if err != nil || len(files) < 4 {
		t.Fatalf("%d files, %v", len(files), err)
	}
	for _, f := range files {
		cfg, err := Load(f)
		if err != nil {
			t.Errorf("%s: %v", f, err)
			continue
		}
		if _, err := registry.Merge(cfg.Snapshot()); err != nil {
			t.Errorf("%s: %v", f, err)
		}
		for _, l := range cfg.Listeners {
			for _, one := range l.TLS {
				if s := fmt.Sprintf("%v %+v %#v", one, one, one); strings.Contains(s, "PRIVATE KEY") || len(one.Certificates) > 0 != strings.Contains(s, "CERTIFICATE") {
					t.Errorf("%s: a printed configuration shows its keys: %s", f, s)
				}
			}
		}
		if s := fmt.Sprintf("%v %+v %#v", cfg.Listeners, cfg.Listeners, cfg.Listeners); strings.Contains(s, "$2y$") {
			t.Errorf("%s: a printed configuration shows its hashes: %s", f, s)
		}
	}
}

// private copies a directory so that nobody else can write its files, whatever
// the checkout's modes are.
func private(t *testing.T, from string) string {
	t.Helper()
	dir := t.TempDir()
	if err := os.CopyFS(dir, os.DirFS(from)); err != nil {
		t.Fatal(err)
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if err := os.Chmod(filepath.Join(dir, e.Name()), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}
