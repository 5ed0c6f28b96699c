package file

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"culvert.dev/internal/testca"
)

// An authority signs for its own trust domain, with a CA that may do so and whose key others
// may not read.
func TestEnrollment(t *testing.T) {
	dir := t.TempDir()
	write := func(name string, content []byte, mode os.FileMode) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(dir, name), content, mode); err != nil {
			t.Fatal(err)
		}
	}
	for _, domain := range []string{"corp.example", "other.example"} {
		ca, err := testca.New(domain, nil)
		if err != nil {
			t.Fatal(err)
		}
		if err := ca.Save(filepath.Join(dir, domain)); err != nil {
			t.Fatal(err)
		}
		pair, err := ca.Issue(testca.Options{SPIFFEID: "spiffe://" + domain + "/gw", DNSNames: []string{"gw.example"}})
		if err != nil {
			t.Fatal(err)
		}
		write(domain+"/gw.crt", pair.CertPEM, 0o600)
		write(domain+"/gw.key", pair.KeyPEM, 0o600)
	}
	open, err := os.ReadFile(filepath.Join(dir, "corp.example", "ca.key"))
	if err != nil {
		t.Fatal(err)
	}
	write("corp.example/open.key", open, 0o600)
	for _, p := range []string{dir, filepath.Dir(dir), filepath.Join(dir, "corp.example")} {
		if err := os.Chmod(p, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Chmod(filepath.Join(dir, "corp.example", "open.key"), 0o644); err != nil {
		t.Fatal(err)
	}
	const good = `listeners: [{address: ":443", tls: {key: gw, trust: [corp.example], clientCertificates: optional, protocols: [connect-h2]}}]
identity:
  keys: {gw: {certificateFile: corp.example/gw.crt, keyFile: corp.example/gw.key}, far: {certificateFile: other.example/gw.crt, keyFile: other.example/gw.key}}
  trust: {corp.example: {caFile: corp.example/ca.crt}, other.example: {caFile: other.example/ca.crt}, b.example: {bundle: "https://b.example/"}, ca.example: {caFile: corp.example/ca.crt, type: ca}}
services: []
enrollment: {gateway: "gw.example:443", key: gw, trustDomain: corp.example, certificateFile: corp.example/ca.crt, keyFile: corp.example/ca.key, state: enrollment}
`
	load := func(change ...string) (*Config, error) {
		write("culvert.yaml", []byte(strings.NewReplacer(change...).Replace(good)), 0o600)
		return Load(filepath.Join(dir, "culvert.yaml"))
	}
	c, err := load()
	if err != nil {
		t.Fatal(err)
	}
	if e := c.Enrollment; e.CA == nil || e.CA.Leaf == nil || e.MaxTTL.Hours() != 24 || e.Transport != "connect-h2" || e.State != filepath.Join(dir, "enrollment") {
		t.Errorf("enrollment is %+v", e)
	}
	for name, of := range map[string]struct {
		change []string
		want   string
	}{
		"a CA of another domain":       {[]string{"certificateFile: corp.example/ca.crt, keyFile: corp.example/ca.key", "certificateFile: other.example/ca.crt, keyFile: other.example/ca.key"}, `is that of trust domain "other.example", and not of "corp.example"`},
		"another domain":               {[]string{"trustDomain: corp.example", "trustDomain: other.example"}, `not of "other.example"`},
		"another domain, with its CA":  {[]string{"trustDomain: corp.example, certificateFile: corp.example/ca.crt, keyFile: corp.example/ca.key", "trustDomain: other.example, certificateFile: other.example/ca.crt, keyFile: other.example/ca.key"}, `key "gw" has no id of trust domain "other.example"`},
		"a domain of others":           {[]string{"trustDomain: corp.example", "trustDomain: b.example"}, "comes from a bundle endpoint"},
		"CAs of no domain":             {[]string{"trustDomain: corp.example", "trustDomain: ca.example"}, "no trust domain"},
		"a domain that is not there":   {[]string{"trustDomain: corp.example", "trustDomain: c.example"}, `there is no trust "c.example"`},
		"a key that is not there":      {[]string{"443\", key: gw", "443\", key: missing"}, `there is no key "missing"`},
		"no CA":                        {[]string{"certificateFile: corp.example/ca.crt, keyFile: corp.example/ca.key", "certificateFile: corp.example/gw.crt, keyFile: corp.example/gw.key"}, "not the certificate of a CA"},
		"the key of another":           {[]string{"keyFile: corp.example/ca.key", "keyFile: other.example/ca.key"}, "private key does not match"},
		"a key that everybody may use": {[]string{"keyFile: corp.example/ca.key", "keyFile: corp.example/open.key"}, "may be used by all users"},
		"a year":                       {[]string{"state: enrollment", "state: enrollment, maxTTL: 8760h"}, "limit 2160h"},
		"no time":                      {[]string{"state: enrollment", "state: enrollment, maxTTL: 1s"}, "maxTTL"},
	} {
		if _, err := load(of.change...); err == nil || !strings.Contains(fmt.Sprint(err), of.want) {
			t.Errorf("%s: %v, want %q", name, err, of.want)
		}
	}
}
