package files

import (
	"bytes"
	"context"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"encoding/pem"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"culvert.dev/identity"
	"culvert.dev/internal/testnet"
)

const apiID = "spiffe://corp.example/ns/shop/sa/api"

// A buffer may be read while it is written to.
type buffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *buffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *buffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}

// run follows the files of c until the test ends.
func run(t testing.TB, c Config) (*Source, *buffer) {
	t.Helper()
	log := new(buffer)
	s := &Source{Store: new(identity.Store), Log: slog.New(slog.NewTextHandler(log, nil))}
	s.Configure(c)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	t.Cleanup(func() { cancel(); <-done })
	return s, log
}

// eventually waits until f is so.
func eventually(t testing.TB, s *Source, what string, f func() bool) {
	t.Helper()
	testnet.Eventually(t, time.Minute, f, "%s; %+v", what, s.Status())
}

// leaf returns the certificate of a key in DER, nil for none.
func leaf(s *Source, name string) []byte {
	c, err := s.Store.Key(name).Certificate()
	if err != nil {
		return nil
	}
	return c.Certificate[0]
}

func der(text []byte) []byte {
	block, _ := pem.Decode(text)
	return block.Bytes
}

// Each way in which certificates are replaced gives the new one, again and again, in the
// same Key.
func TestRotation(t *testing.T) {
	ca := newAuthority(t, "ca")
	for name, replace := range map[string]func(t *testing.T, dir string, n int, cert, key []byte){
		"rewritten": func(t *testing.T, dir string, _ int, cert, key []byte) {
			write(t, dir+"/tls.crt", cert)
			write(t, dir+"/tls.key", key)
		},
		"renamed over": func(t *testing.T, dir string, _ int, cert, key []byte) {
			write(t, dir+"/new.key", key)
			must(t, os.Rename(dir+"/new.key", dir+"/tls.key"))
			write(t, dir+"/new.crt", cert)
			must(t, os.Rename(dir+"/new.crt", dir+"/tls.crt"))
		},
		"volume of a Secret": func(t *testing.T, dir string, n int, cert, key []byte) {
			write(t, fmt.Sprintf("%s/..%d/tls.crt", dir, n), cert)
			write(t, fmt.Sprintf("%s/..%d/tls.key", dir, n), key)
			relink(t, fmt.Sprintf("..%d", n), dir+"/..data")
			if n == 0 {
				must(t, os.Symlink("..data/tls.crt", dir+"/tls.crt"))
				must(t, os.Symlink("..data/tls.key", dir+"/tls.key"))
				return
			}
			must(t, os.RemoveAll(fmt.Sprintf("%s/..%d", dir, n-1)))
		},
		"certbot": func(t *testing.T, dir string, n int, cert, key []byte) {
			write(t, fmt.Sprintf("%s/archive/privkey%d.pem", dir, n), key)
			write(t, fmt.Sprintf("%s/archive/fullchain%d.pem", dir, n), cert)
			relink(t, fmt.Sprintf("archive/privkey%d.pem", n), dir+"/tls.key")
			relink(t, fmt.Sprintf("archive/fullchain%d.pem", n), dir+"/tls.crt")
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			cert, key := ca.issue(t, apiID)
			replace(t, dir, 0, cert, key)
			s, _ := run(t, Config{Keys: map[string]Pair{"edge": {filepath.Join(dir, "tls.crt"), filepath.Join(dir, "tls.key")}}})
			if !bytes.Equal(leaf(s, "edge"), der(cert)) {
				t.Fatalf("after Configure: got status %+v, want the key", s.Status())
			}
			for n := 1; n <= 3; n++ {
				cert, key = ca.issue(t, apiID)
				replace(t, dir, n, cert, key)
				eventually(t, s, "the next key", func() bool { return bytes.Equal(leaf(s, "edge"), der(cert)) })
			}
			if g := s.Store.Key("edge").Generation(); g != 4 {
				t.Errorf("generation after three rotations: got %d, want 4", g)
			}
		})
	}
}

// Whatever is wrong with files, the last key and the last bundle stay, and the log says so
// once; what was wrong is in the status until it is put right.
func TestKeepsTheLast(t *testing.T) {
	ca, other := newAuthority(t, "ca"), newAuthority(t, "other")
	cert, key := ca.issue(t, apiID)
	otherCert, _ := ca.issue(t, apiID)
	another := *ca.cert
	another.SubjectKeyId = []byte{1}
	renamed := &authority{cert: &another, key: ca.key}
	delta := ca.list(t, []pkix.Extension{{Id: asn1.ObjectIdentifier{2, 5, 29, 27}, Critical: true, Value: []byte{2, 1, 1}}})
	good := map[string][]byte{"tls.crt": cert, "tls.key": key, "ca.pem": ca.pem, "ca.crl": ca.list(t, nil)}
	for name, c := range map[string]struct {
		file    string
		content []byte // nil removes the file
		want    string
	}{
		"certificate gone":               {"tls.crt", nil, "no such file"},
		"key gone":                       {"tls.key", nil, "no such file"},
		"certificate empty":              {"tls.crt", []byte{}, "is empty"},
		"certificate in part":            {"tls.crt", cert[:len(cert)-20], "0 of 1 blocks of PEM are whole"},
		"chain in part":                  {"tls.crt", append(bytes.Clone(cert), ca.pem[:100]...), "1 of 2 blocks of PEM are whole"},
		"key in part":                    {"tls.key", key[:len(key)-20], "failed to find any PEM data in key"},
		"certificate of another key":     {"tls.crt", otherCert, "private key does not match public key"},
		"no PEM":                         {"tls.crt", []byte("hello"), "failed to find any PEM data"},
		"too large":                      {"tls.crt", bytes.Repeat([]byte("x"), maxFile+1), "limit 4194304"},
		"CAs gone":                       {"ca.pem", nil, "no such file"},
		"CAs in part":                    {"ca.pem", append(bytes.Clone(ca.pem), other.pem[:100]...), "1 of 2 blocks of PEM are whole"},
		"CAs without a certificate":      {"ca.pem", []byte("none"), "no certificate in PEM"},
		"list gone":                      {"ca.crl", nil, "no such file"},
		"list of a CA of that name":      {"ca.crl", newAuthority(t, "ca").list(t, nil), `the CA "CN=ca" has not signed it`},
		"list for another key":           {"ca.crl", renamed.list(t, nil), "the list names another key of that CA"},
		"list that is none":              {"ca.crl", []byte("none"), "it is no list in PEM or DER"},
		"list that is a delta":           {"ca.crl", delta, "it is a delta"},
		"certificate in place of a list": {"ca.crl", ca.pem, `want "X509 CRL"`},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			for file, content := range good {
				write(t, filepath.Join(dir, file), content)
			}
			s, log := run(t, Config{
				Keys:  map[string]Pair{"edge": {filepath.Join(dir, "tls.crt"), filepath.Join(dir, "tls.key")}},
				Trust: map[string]CAs{"corp.example": {"corp.example", filepath.Join(dir, "ca.pem"), filepath.Join(dir, "ca.crl")}},
			})
			problems := func() string {
				var b strings.Builder
				for _, st := range s.Status() {
					b.WriteString(st.Problem)
				}
				return b.String()
			}
			if p := problems(); p != "" {
				t.Fatalf("problems with good files: %s", p)
			}
			path := filepath.Join(dir, c.file)
			if c.content == nil {
				must(t, os.Remove(path))
			} else {
				replace(t, path, c.content)
			}
			eventually(t, s, "the problem "+c.want, func() bool { return strings.Contains(problems(), c.want) })
			if !bytes.Equal(leaf(s, "edge"), der(cert)) {
				t.Error("the last key has not been kept")
			}
			if b, err := s.Store.Trust("corp.example").Bundle(); err != nil || len(b.Roots) != 1 || len(b.Revoked) != 1 {
				t.Errorf("the last bundle has not been kept: got %v, %v", b, err)
			}
			s.readChanged([]string{path}, true) // as after another notice
			if n := strings.Count(log.String(), "keeping what they contained before"); n != 1 {
				t.Errorf("the log says %d times that the last ones are kept, want once:\n%s", n, log)
			}
			replace(t, path, good[c.file])
			eventually(t, s, "no problem", func() bool { return problems() == "" })
			if g := s.Store.Key("edge").Generation() + s.Store.Trust("corp.example").Generation(); g != 2 {
				t.Errorf("generations: got a sum of %d, want 2: nothing has changed", g)
			}
			if strings.Contains(log.String(), "PRIVATE") || strings.Contains(log.String(), "hello") {
				t.Errorf("the log quotes a file:\n%s", log)
			}
		})
	}
}

// What can't be read at first is not known, and the Store says why, until it can be. What
// is no longer configured is not touched again.
func TestConfigure(t *testing.T) {
	ca, dir := newAuthority(t, "ca"), t.TempDir()
	pair := Pair{filepath.Join(dir, "tls.crt"), filepath.Join(dir, "tls.key")}
	s, log := run(t, Config{Keys: map[string]Pair{"edge": pair}})
	if _, err := s.Store.Key("edge").Certificate(); err == nil || !strings.Contains(err.Error(), "tls.crt\": no such file") {
		t.Errorf("without files: got error %v, want that there is none", err)
	}
	if !strings.Contains(log.String(), "level=ERROR msg=\"files cannot be used\" key=edge") {
		t.Errorf("the log does not say so:\n%s", log)
	}
	cert, key := ca.issue(t, apiID)
	write(t, pair.CertificateFile, cert)
	write(t, pair.KeyFile, key)
	eventually(t, s, "the key", func() bool { return bytes.Equal(leaf(s, "edge"), der(cert)) })

	// A second key of the same files, added while it runs, and another first.
	next := Pair{filepath.Join(dir, "next.crt"), filepath.Join(dir, "next.key")}
	nextCert, nextKey := ca.issue(t, apiID)
	write(t, next.CertificateFile, nextCert)
	write(t, next.KeyFile, nextKey)
	s.Configure(Config{Keys: map[string]Pair{"edge": next, "again": pair}})
	if !bytes.Equal(leaf(s, "edge"), der(nextCert)) || !bytes.Equal(leaf(s, "again"), der(cert)) {
		t.Fatalf("after a change of the configuration: got status %+v", s.Status())
	}
	s.Configure(Config{Keys: map[string]Pair{"again": pair}})
	s.Store.Key("edge").Remove(fmt.Errorf("of another source"))
	cert, key = ca.issue(t, apiID)
	write(t, next.CertificateFile, cert)
	write(t, next.KeyFile, key)
	write(t, pair.CertificateFile, cert)
	write(t, pair.KeyFile, key)
	eventually(t, s, "the next key", func() bool { return bytes.Equal(leaf(s, "again"), der(cert)) })
	if leaf(s, "edge") != nil || len(s.Status()) != 1 {
		t.Errorf("a key that is no longer configured was set; status %+v", s.Status())
	}
}

// A revocation list of a file is in force when it is written, in DER and in PEM, and goes
// with it.
func TestRevocation(t *testing.T) {
	ca, dir := newAuthority(t, "ca"), t.TempDir()
	cas := CAs{"corp.example", filepath.Join(dir, "ca.pem"), filepath.Join(dir, "ca.crl")}
	write(t, cas.CAFile, ca.pem)
	write(t, cas.CRLFile, ca.list(t, nil))
	s, _ := run(t, Config{Trust: map[string]CAs{"corp.example": cas}})
	certificate, _ := ca.issue(t, apiID)
	shown, err := x509.ParseCertificate(der(certificate))
	must(t, err)
	v := &identity.Verifier{Trust: []*identity.Trust{s.Store.Trust("corp.example")}, Want: identity.Expectation{Usage: x509.ExtKeyUsageClientAuth}}
	verify := func() string {
		if _, err := v.Verify([]*x509.Certificate{shown}); err != nil {
			return err.Error()
		}
		return ""
	}
	if got := verify(); got != "" {
		t.Fatalf("before it is revoked: %s", got)
	}
	revoked := ca.list(t, nil, shown.SerialNumber)
	for _, list := range [][]byte{revoked, pem.EncodeToMemory(&pem.Block{Type: "X509 CRL", Bytes: revoked})} {
		write(t, cas.CRLFile, list)
		eventually(t, s, "the list", func() bool { return strings.Contains(verify(), "is on the revocation list of the CA") })
		write(t, cas.CRLFile, ca.list(t, nil))
		eventually(t, s, "the next list", func() bool { return verify() == "" })
	}
}

// CAs of no trust domain identify by names, and never by a SPIFFE id beside those of the
// domain; CAs of a domain don't identify by names.
func TestCAsOfNoDomain(t *testing.T) {
	corp, old, dir := newAuthority(t, "corp"), newAuthority(t, "old"), t.TempDir()
	write(t, dir+"/corp.pem", corp.pem)
	write(t, dir+"/old.pem", old.pem)
	s, _ := run(t, Config{Trust: map[string]CAs{
		"corp.example": {TrustDomain: "corp.example", CAFile: filepath.Join(dir, "corp.pem")},
		"legacy":       {CAFile: filepath.Join(dir, "old.pem")},
	}})
	trust := []*identity.Trust{s.Store.Trust("corp.example"), s.Store.Trust("legacy")}
	for _, c := range []struct {
		by       *authority
		id       string // in the certificate
		trust    []*identity.Trust
		want, no string
	}{
		{corp, apiID, trust, apiID, ""},
		{old, "", trust, "dns:old.example", ""},
		{old, "https://old.example/a", trust, "uri:https://old.example/a", ""},
		{old, apiID, trust, "", "signed by an unknown CA"},
		{old, "spiffe://legacy/a", trust, "", `trust domain is "legacy", want one of ["corp.example"]`},
		{old, apiID, trust[1:], "uri:" + apiID, ""},
		{corp, "", trust, "", "signed by an unknown CA"},
	} {
		certificate, _ := c.by.issue(t, c.id)
		shown, err := x509.ParseCertificate(der(certificate))
		must(t, err)
		v := &identity.Verifier{Trust: c.trust, Want: identity.Expectation{Usage: x509.ExtKeyUsageClientAuth}}
		p, err := v.Verify([]*x509.Certificate{shown})
		if p.ID != c.want || (err == nil) != (c.no == "") || err != nil && !strings.Contains(err.Error(), c.no) {
			t.Errorf("%q of CA %q: got %q, %v, want %q, %q", c.id, c.by.cert.Subject.CommonName, p.ID, err, c.want, c.no)
		}
	}
}

// A thousand keys that rotate at once are all replaced, each by its own next one and once.
func TestThousandKeys(t *testing.T) {
	const n = 1000
	ca, dir := newAuthority(t, "ca"), t.TempDir()
	c := Config{Keys: map[string]Pair{}}
	certs := map[string][]byte{}
	for i := range n {
		name := fmt.Sprintf("key%d", i)
		c.Keys[name] = Pair{filepath.Join(dir, name+".crt"), filepath.Join(dir, name+".key")}
	}
	rotate := func() {
		for name, p := range c.Keys {
			cert, key := ca.issue(t, apiID)
			certs[name] = der(cert)
			write(t, p.KeyFile, key)
			write(t, p.CertificateFile, cert)
		}
	}
	rotate()
	s, _ := run(t, c)
	rotate()
	eventually(t, s, "all keys", func() bool {
		for name := range c.Keys {
			if !bytes.Equal(leaf(s, name), certs[name]) {
				return false
			}
		}
		return true
	})
	for name := range c.Keys {
		if g := s.Store.Key(name).Generation(); g != 2 {
			t.Errorf("%s: got generation %d, want 2", name, g)
		}
	}
}

// Of many changes at one time the log has some, and how many more there were.
func TestLogOfManyChanges(t *testing.T) {
	ca, dir, log := newAuthority(t, "ca"), t.TempDir(), new(buffer)
	c := Config{Keys: map[string]Pair{}}
	var all []string
	for i := range mostLines + 5 {
		p := Pair{filepath.Join(dir, fmt.Sprintf("%d.crt", i)), filepath.Join(dir, fmt.Sprintf("%d.key", i))}
		c.Keys[fmt.Sprint(i)] = p
		all = append(all, p.CertificateFile, p.KeyFile)
	}
	s := &Source{Store: new(identity.Store), Log: slog.New(slog.NewTextHandler(log, nil))}
	for again := range 2 {
		for _, p := range c.Keys {
			cert, key := ca.issue(t, apiID)
			write(t, p.CertificateFile, cert)
			write(t, p.KeyFile, key)
		}
		if again == 0 {
			s.Configure(c)
			continue
		}
		s.readChanged(all, false)
	}
	if got := log.String(); strings.Count(got, "using what they contain") != mostLines || !strings.Contains(got, "more keys and trust have changed\" count=5") {
		t.Errorf("the log is\n%s\nwant %d keys, and that there are 5 more", got, mostLines)
	}
}

// BenchmarkRotate replaces 10,000 keys whose files have changed.
func BenchmarkRotate(b *testing.B) {
	const n = 10_000
	ca, dir := newAuthority(b, "ca"), b.TempDir()
	c := Config{Keys: map[string]Pair{}}
	var all []string
	type pair struct{ cert, key []byte }
	var pairs [2][]pair
	for i := range n {
		p := Pair{filepath.Join(dir, fmt.Sprintf("%d.crt", i)), filepath.Join(dir, fmt.Sprintf("%d.key", i))}
		c.Keys[fmt.Sprint(i)] = p
		all = append(all, p.CertificateFile, p.KeyFile)
		for v := range pairs {
			cert, key := ca.issue(b, apiID)
			pairs[v] = append(pairs[v], pair{cert, key})
		}
	}
	put := func(v int) {
		for i, p := range pairs[v%2] {
			write(b, all[2*i], p.cert)
			write(b, all[2*i+1], p.key)
		}
	}
	put(0)
	s := &Source{Store: new(identity.Store)}
	s.Configure(c)
	v := 1
	for b.Loop() {
		b.StopTimer()
		put(v)
		v++
		b.StartTimer()
		s.readChanged(all, false)
	}
	b.StopTimer()
	if g := s.Store.Key("1").Generation(); g != uint64(v) {
		b.Fatalf("got generation %d, want %d", g, v)
	}
	b.ReportMetric(float64(b.Elapsed().Milliseconds())/float64(b.N), "ms/10000-keys")
}
