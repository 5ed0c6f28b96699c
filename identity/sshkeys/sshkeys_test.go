package sshkeys

import (
	"crypto/ed25519"
	"crypto/rand"
	"crypto/rsa"
	"encoding/pem"
	"net/netip"
	"strings"
	"testing"
	"time"

	"golang.org/x/crypto/ssh"
)

func newKey(t testing.TB) ssh.Signer {
	t.Helper()
	_, private, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	s, err := ssh.NewSignerFromKey(private)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func publicLine(key ssh.PublicKey) string {
	return strings.TrimSuffix(string(ssh.MarshalAuthorizedKey(key)), "\n")
}

// TestOptions has a key with each option, what it permits, and what is a mistake.
func TestOptions(t *testing.T) {
	key := newKey(t).PublicKey()
	now := time.Date(2026, 5, 1, 12, 0, 0, 0, time.UTC)
	for _, tc := range []struct {
		options string
		from    string
		want    string // of the mistake, or of the refusal; "" for none
	}{
		{"", "192.0.2.1", ""},
		{`from="192.0.2.0/24"`, "192.0.2.1", ""},
		{`from="192.0.2.0/24"`, "::ffff:192.0.2.1", ""},
		{`from="192.0.2.0/24"`, "198.51.100.1", "not for clients at"},
		{`from="192.0.2.0/24"`, "", "not for clients at"},
		{`from="192.0.2.?,2001:db8::/32"`, "2001:db8::1", ""},
		{`from="192.0.2.?"`, "192.0.2.10", "not for clients at"},
		{`from="*,!192.0.2.1"`, "192.0.2.1", "not for clients at"},
		{`from="*,!192.0.2.1"`, "192.0.2.2", ""},
		{`from="!192.0.2.1"`, "192.0.2.2", "not for clients at"},
		{`from="*.example.com"`, "192.0.2.1", "names are not looked up"},
		{`from=""`, "192.0.2.1", "an entry is empty"},
		{`expiry-time="20260501"`, "192.0.2.1", "has expired"},
		{`expiry-time="202605011201Z"`, "192.0.2.1", ""},
		{`expiry-time="20260501120000Z"`, "192.0.2.1", "has expired"},
		{`expiry-time="tomorrow"`, "192.0.2.1", "want YYYYMMDD"},
		{`permitopen="db.example:5432",permitlisten="cam.example:443"`, "192.0.2.1", ""},
		{`permitopen="5432"`, "192.0.2.1", "want HOST:PORT"},
		{`permitopen="*.example:5432"`, "192.0.2.1", "no wildcards"},
		{`permitlisten="cam.example:99999"`, "192.0.2.1", "the port"},
		{`command="/bin/true"`, "192.0.2.1", `the option "command" is not supported`},
		{`restrict`, "192.0.2.1", `the option "restrict" is not supported`},
		{`no-touch-required`, "192.0.2.1", "not supported"},
		{`cert-authority`, "192.0.2.1", "not supported"},
	} {
		line := strings.TrimSpace(tc.options + " " + publicLine(key) + " alice")
		keys, mistakes := ParseAuthorizedKeys("# a comment\n\n" + line + "\n")
		got := ""
		if len(mistakes) > 0 {
			got = mistakes[0].Text
			if mistakes[0].Line != 3 || len(keys) != 0 {
				t.Errorf("%s: a mistake in line %d and %d keys, want line 3 and none", tc.options, mistakes[0].Line, len(keys))
			}
		} else {
			from, _ := netip.ParseAddr(tc.from)
			grant, err := (&Authority{Keys: keys}).Check("whoever", key, from, now)
			if err != nil {
				got = err.Error()
			} else if grant.Peer.ID != "alice" || grant.Peer.Method != "ssh" {
				t.Errorf("%s: the peer is %+v, want alice by ssh", tc.options, grant.Peer)
			}
		}
		if tc.want == "" && got != "" || !strings.Contains(got, tc.want) {
			t.Errorf("%s from %q: %q, want %q", tc.options, tc.from, got, tc.want)
		}
	}
}

// A key is found by itself: how a client calls itself decides nothing, and so takes no time by
// which known names could be told from others.
func TestNamesOfUsersTellNothing(t *testing.T) {
	known := newKey(t).PublicKey()
	keys, mistakes := ParseAuthorizedKeys(publicLine(known) + " alice")
	if len(mistakes) > 0 {
		t.Fatal(mistakes)
	}
	a := &Authority{Keys: keys}
	from, now := netip.MustParseAddr("192.0.2.1"), time.Now()
	unknown := newKey(t).PublicKey()
	_, refused := a.Check("alice", unknown, from, now)
	if refused == nil {
		t.Fatal("an unknown key is let in")
	}
	for _, user := range []string{"", "alice", "bob", "root", strings.Repeat("x", 1<<16)} {
		if g, err := a.Check(user, known, from, now); err != nil || g.Peer.ID != "alice" {
			t.Errorf("user %.20q with alice's key: %+v, %v", user, g, err)
		}
		if _, err := a.Check(user, unknown, from, now); err == nil || err.Error() != refused.Error() {
			t.Errorf("user %.20q with an unknown key: %v, want %v", user, err, refused)
		}
	}
}

func TestLimits(t *testing.T) {
	keys, mistakes := ParseAuthorizedKeys(`permitopen="DB.example:5432",permitopen="192.0.2.1:*",permitlisten="*.cam.example:443",permitlisten="8080" ` + publicLine(newKey(t).PublicKey()) + " alice")
	if len(mistakes) > 0 {
		t.Fatal(mistakes)
	}
	for _, k := range keys {
		for _, tc := range []struct {
			host string
			port uint16
			open bool
			hear bool
		}{
			{"db.example", 5432, true, false},
			{"db.example", 5433, false, false},
			{"192.0.2.1", 1, true, false},
			{"a.cam.example", 443, false, true},
			{"cam.example", 443, false, false},
			{"any.example", 8080, false, true},
		} {
			if open, hear := k.Limits.MayOpen(tc.host, tc.port), k.Limits.MayListen(tc.host, tc.port); open != tc.open || hear != tc.hear {
				t.Errorf("%s:%d: may open %v, listen %v; want %v, %v", tc.host, tc.port, open, hear, tc.open, tc.hear)
			}
		}
	}
	if none := (&Limits{}); !none.MayOpen("x", 1) || !none.MayListen("x", 1) {
		t.Error("a key without options is restricted")
	}
}

func TestMistakes(t *testing.T) {
	a, b := publicLine(newKey(t).PublicKey()), publicLine(newKey(t).PublicKey())
	weak, err := rsa.GenerateKey(rand.Reader, 1024)
	if err != nil {
		t.Fatal(err)
	}
	short, err := ssh.NewPublicKey(&weak.PublicKey)
	if err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct{ content, want string }{
		{a + " x\n" + a + " y\n", "listed twice"},
		{a + " x\n" + b + " x\n", "line 1 has the name"},
		{"ssh-rsa nonsense\n", "not a public key"},
		{a + " uid:1000\n", "a user of this machine"},
		{a + " spiffe://Corp/x\n", "trust domain is malformed"},
		{a + " " + strings.Repeat("x", 129) + "\n", "more than 128 bytes"},
		{publicLine(short) + " x\n", "1024 bits"},
	} {
		_, mistakes := ParseAuthorizedKeys(tc.content)
		if len(mistakes) != 1 || !strings.Contains(mistakes[0].Text, tc.want) {
			t.Errorf("%q: %v, want %q", tc.content[:20], mistakes, tc.want)
		}
	}
	keys, mistakes := ParseAuthorizedKeys(a + "\n" + b + " spiffe://corp.example/ns/shop/sa/api\n")
	if len(mistakes) > 0 || len(keys) != 2 {
		t.Fatalf("%d keys, mistakes %v", len(keys), mistakes)
	}
	for _, k := range keys {
		switch {
		case strings.HasPrefix(k.Name, "SHA256:"):
		case k.Info.TrustDomain != "corp.example" || k.Info.Namespace != "shop" || k.Info.ServiceAccount != "api":
			t.Errorf("key %q says %+v of its workload", k.Name, k.Info)
		}
	}
}

// TestCertificates has a certificate for each reason why it is not accepted.
func TestCertificates(t *testing.T) {
	ca, other, user := newKey(t), newKey(t), newKey(t)
	known, err := ParseUserCA("# the CA\n"+publicLine(ca.PublicKey())+" users\n", "spiffe://corp.example/ssh/{principal}")
	if err != nil {
		t.Fatal(err)
	}
	a := &Authority{CAs: []*UserCA{known}}
	now := time.Date(2026, 5, 1, 12, 0, 0, 0, time.UTC)
	from := netip.MustParseAddr("192.0.2.1")
	for _, tc := range []struct {
		title  string
		signer ssh.Signer
		user   string
		change func(c *ssh.Certificate)
		want   string
	}{
		{"good", ca, "alice", func(*ssh.Certificate) {}, ""},
		{"good from an address", ca, "alice", func(c *ssh.Certificate) {
			c.CriticalOptions = map[string]string{"source-address": "192.0.2.0/24,2001:db8::/32"}
		}, ""},
		{"another CA", other, "alice", func(*ssh.Certificate) {}, "is not listed"},
		{"another user", ca, "bob", func(*ssh.Certificate) {}, "principal"},
		{"no principal", ca, "alice", func(c *ssh.Certificate) { c.ValidPrincipals = nil }, "names no principal"},
		{"of a host", ca, "alice", func(c *ssh.Certificate) { c.CertType = ssh.HostCert }, "not a user's"},
		{"expired", ca, "alice", func(c *ssh.Certificate) { c.ValidBefore = uint64(now.Unix()) }, "expired"},
		{"not yet valid", ca, "alice", func(c *ssh.Certificate) { c.ValidAfter = uint64(now.Unix()) + 60 }, "not yet valid"},
		{"force-command", ca, "alice", func(c *ssh.Certificate) {
			c.CriticalOptions = map[string]string{"force-command": "true"}
		}, "forces a command"},
		{"an unknown option", ca, "alice", func(c *ssh.Certificate) {
			c.CriticalOptions = map[string]string{"verify-required": ""}
		}, "not supported"},
		{"another address", ca, "alice", func(c *ssh.Certificate) {
			c.CriticalOptions = map[string]string{"source-address": "198.51.100.0/24"}
		}, "not for clients at"},
		{"no address", ca, "alice", func(c *ssh.Certificate) {
			c.CriticalOptions = map[string]string{"source-address": ""}
		}, "malformed"},
		{"no forwarding", ca, "alice", func(c *ssh.Certificate) { c.Extensions = nil }, "permit-port-forwarding"},
		{"a path for a principal", ca, "../admin", func(c *ssh.Certificate) { c.ValidPrincipals = []string{"../admin"} }, "slash"},
		{"a user with spaces", ca, "a b", func(c *ssh.Certificate) { c.ValidPrincipals = []string{"a b"} }, "malformed path"},
	} {
		c := &ssh.Certificate{
			Key: user.PublicKey(), CertType: ssh.UserCert, KeyId: tc.title, ValidPrincipals: []string{"alice"},
			ValidAfter: uint64(now.Add(-time.Hour).Unix()), ValidBefore: uint64(now.Add(time.Hour).Unix()),
			Permissions: ssh.Permissions{Extensions: map[string]string{"permit-port-forwarding": ""}},
		}
		tc.change(c)
		if err := c.SignCert(rand.Reader, tc.signer); err != nil {
			t.Fatal(err)
		}
		grant, err := a.Check(tc.user, c, from, now)
		switch {
		case tc.want == "" && err != nil:
			t.Errorf("%s: %v", tc.title, err)
		case tc.want == "":
			if p := grant.Peer; p.ID != "spiffe://corp.example/ssh/alice" || p.Auth.TrustDomain != "corp.example" || !p.Auth.Expires.Equal(now.Add(time.Hour)) {
				t.Errorf("%s: the peer is %+v %+v", tc.title, p, p.Auth)
			}
			if _, err := a.Recheck(grant, now.Add(2*time.Hour)); err == nil {
				t.Errorf("%s: it is still accepted an hour after its end", tc.title)
			}
		case err == nil || !strings.Contains(err.Error(), tc.want):
			t.Errorf("%s: %v, want %q", tc.title, err, tc.want)
		}
	}
	tampered := &ssh.Certificate{Key: user.PublicKey(), CertType: ssh.UserCert, ValidPrincipals: []string{"alice"}, ValidBefore: ssh.CertTimeInfinity,
		Permissions: ssh.Permissions{Extensions: map[string]string{"permit-port-forwarding": ""}}}
	if err := tampered.SignCert(rand.Reader, ca); err != nil {
		t.Fatal(err)
	}
	tampered.ValidPrincipals = []string{"root"}
	if _, err := a.Check("root", tampered, from, now); err == nil {
		t.Error("a certificate that was changed after it was signed is accepted")
	}
}

func TestUserCAs(t *testing.T) {
	key := publicLine(newKey(t).PublicKey())
	for _, tc := range []struct{ text, id, want string }{
		{key, "{principal}", ""},
		{key + "\n" + key, "ssh-{principal}", ""},
		{key, "alice", "has to have {principal} once"},
		{key, "{principal}{principal}", "once"},
		{key, "spiffe://corp.example/{principal}/../x", "malformed path"},
		{"", "{principal}", "there is no key"},
		{"nonsense", "{principal}", "line 1"},
		{`from="*" ` + key, "{principal}", "has options"},
	} {
		_, err := ParseUserCA(tc.text, tc.id)
		if tc.want == "" && err != nil || tc.want != "" && (err == nil || !strings.Contains(err.Error(), tc.want)) {
			t.Errorf("%q: %v, want %q", tc.id, err, tc.want)
		}
	}
	plain, err := ParseUserCA(key, "{principal}")
	if err != nil {
		t.Fatal(err)
	}
	for _, principal := range []string{"spiffe://corp.example/x", "uid:0", "", "a\nb"} {
		if p, err := plain.peer(principal); err == nil {
			t.Errorf("the principal %q names %q", principal, p.ID)
		}
	}
}

func TestHostKeys(t *testing.T) {
	_, private, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	block, err := ssh.MarshalPrivateKey(private, "host")
	if err != nil {
		t.Fatal(err)
	}
	key, err := ParseHostKey(pem.EncodeToMemory(block))
	if err != nil {
		t.Fatal(err)
	}
	f := Fingerprints(key.PublicKey())
	if len(f) != 2 || f[0].Algorithm != 4 || f[0].Hash != 1 || len(f[0].Digest) != 20 || f[1].Hash != 2 || len(f[1].Digest) != 32 {
		t.Errorf("fingerprints %+v", f)
	}
	locked, err := ssh.MarshalPrivateKeyWithPassphrase(private, "host", []byte("secret"))
	if err != nil {
		t.Fatal(err)
	}
	for text, want := range map[string]string{string(pem.EncodeToMemory(locked)): "passphrase", "nonsense": "no private key"} {
		if _, err := ParseHostKey([]byte(text)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
}

func FuzzAuthorizedKeys(f *testing.F) {
	key := publicLine(newKey(f).PublicKey())
	f.Add("192.0.2.?,!10.0.0.0/8", "a.example:1", "20260501")
	f.Add("*", "[::1]:*", "202605011200Z")
	f.Fuzz(func(t *testing.T, from, permit, expiry string) {
		line := `from="` + from + `",permitopen="` + permit + `",expiry-time="` + expiry + `" ` + key + " alice"
		keys, mistakes := ParseAuthorizedKeys(line)
		if len(keys) > 0 && len(mistakes) > 0 {
			t.Errorf("a line gives a key and mistakes: %v", mistakes)
		}
		for _, k := range keys {
			k.Limits.MayOpen("a.example", 1)
			k.Limits.From.admits(netip.MustParseAddr("192.0.2.1"))
		}
	})
}
