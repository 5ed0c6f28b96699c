package testca

import (
	"bytes"
	"crypto/tls"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

func TestSaveAndLoad(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "new", "ca")
	ca := newTestCA(t)
	for range 2 { // once more over itself
		if err := ca.Save(dir); err != nil {
			t.Fatal(err)
		}
	}
	loaded, err := Load(dir, nil)
	if err != nil {
		t.Fatal(err)
	}
	if loaded.TrustDomain != "example.test" || !bytes.Equal(loaded.CertPEM, ca.CertPEM) {
		t.Errorf("loaded the CA of %q, want the one saved", loaded.TrustDomain)
	}
	server := issue(t, loaded, Options{SPIFFEID: echoID, DNSNames: []string{"echo"}})
	client := issue(t, ca, Options{SPIFFEID: echoID})
	if serr, cerr := handshake(t, server.ServerConfig(), client.ClientConfig("echo")); serr != nil || cerr != nil {
		t.Errorf("handshake between before and after: %v, %v; want none", serr, cerr)
	}

	if err := server.Save(dir, "echo"); err != nil {
		t.Fatal(err)
	}
	if _, err := tls.LoadX509KeyPair(filepath.Join(dir, "echo.crt"), filepath.Join(dir, "echo.key")); err != nil {
		t.Error(err)
	}
	files, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]fs.FileMode{"ca.crt": 0o644, "ca.key": 0o600, "echo.crt": 0o644, "echo.key": 0o600}
	for _, f := range files {
		info, err := f.Info()
		if err != nil {
			t.Fatal(err)
		}
		if mode, ok := want[f.Name()]; !ok || info.Mode() != mode {
			t.Errorf("%s has mode %v, want %v (a temporary file left: %v)", f.Name(), info.Mode(), mode, !ok)
		}
	}
}

func TestSaveKeepsAnotherCA(t *testing.T) {
	dir := t.TempDir()
	first := newTestCA(t)
	if err := first.Save(dir); err != nil {
		t.Fatal(err)
	}
	if err := newTestCA(t).Save(dir); !errors.Is(err, fs.ErrExist) {
		t.Errorf("Save over another CA = %v, want fs.ErrExist", err)
	}
	if loaded, err := Load(dir, nil); err != nil || !bytes.Equal(loaded.CertPEM, first.CertPEM) {
		t.Errorf("the first CA is gone: %v", err)
	}
}

func TestSavePairRefusesNames(t *testing.T) {
	p := issue(t, newTestCA(t), Options{SPIFFEID: echoID})
	for _, name := range []string{"", "ca", ".", "..", ".x", "a/b", "../a", "/a"} {
		if err := p.Save(t.TempDir(), name); err == nil {
			t.Errorf("Save as %q = nil, want an error", name)
		}
	}
}

func TestLoadRefuses(t *testing.T) {
	saved := func(t *testing.T) string {
		dir := t.TempDir()
		if err := newTestCA(t).Save(dir); err != nil {
			t.Fatal(err)
		}
		return dir
	}
	write := func(t *testing.T, path string, data []byte) {
		if err := os.WriteFile(path, data, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	chmod := func(file string, mode fs.FileMode) func(*testing.T, string) {
		return func(t *testing.T, dir string) {
			if err := os.Chmod(filepath.Join(dir, file), mode); err != nil {
				t.Fatal(err)
			}
		}
	}
	for _, tt := range []struct {
		name  string
		spoil func(t *testing.T, dir string)
		want  string
	}{
		{"key readable by the group", chmod(keyFile, 0o640), "mode 0640"},
		{"key readable by all", chmod(keyFile, 0o604), "mode 0604"},
		{"key writable by the group", chmod(keyFile, 0o620), "mode 0620"},
		{"certificate writable by all", chmod(certFile, 0o646), "mode 0646"},
		{"no key", func(t *testing.T, dir string) { os.Remove(filepath.Join(dir, keyFile)) }, "no such file"},
		{"no certificate", func(t *testing.T, dir string) { os.Remove(filepath.Join(dir, certFile)) }, "no such file"},
		{"key is not PEM", func(t *testing.T, dir string) { write(t, filepath.Join(dir, keyFile), []byte("x")) }, "no PEM block"},
		{"key too large", func(t *testing.T, dir string) { write(t, filepath.Join(dir, keyFile), make([]byte, maxFile+1)) }, "larger than the limit"},
		{"key is a directory", func(t *testing.T, dir string) {
			os.Remove(filepath.Join(dir, keyFile))
			if err := os.Mkdir(filepath.Join(dir, keyFile), 0o700); err != nil {
				t.Fatal(err)
			}
		}, "not a regular file"},
		{"another CA's key", func(t *testing.T, dir string) {
			key, err := marshalKey(newTestCA(t).key)
			if err != nil {
				t.Fatal(err)
			}
			write(t, filepath.Join(dir, keyFile), key)
		}, "not the certificate's"},
		{"a leaf", func(t *testing.T, dir string) {
			p := issue(t, newTestCA(t), Options{SPIFFEID: echoID})
			write(t, filepath.Join(dir, keyFile), p.KeyPEM)
			write(t, filepath.Join(dir, certFile), p.CertPEM)
		}, "not a CA's"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			dir := saved(t)
			tt.spoil(t, dir)
			if _, err := Load(dir, nil); err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("Load = %v, want an error with %q", err, tt.want)
			}
		})
	}
	t.Run("expired", func(t *testing.T) {
		later := func() time.Time { return time.Now().Add(2 * caTTL) }
		if _, err := Load(saved(t), later); err == nil || !strings.Contains(err.Error(), "expired") {
			t.Errorf("Load = %v, want an error that says it expired", err)
		}
	})
}
