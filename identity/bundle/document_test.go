package bundle

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"encoding/base64"
	"fmt"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/spiffe/go-spiffe/v2/bundle/spiffebundle"
	"github.com/spiffe/go-spiffe/v2/spiffeid"

	"culvert.dev/identity"
	"culvert.dev/internal/testca"
	"culvert.dev/internal/testnet"
)

func TestMain(m *testing.M) { testnet.Main(m) }

func newCA(t testing.TB, td string) *testca.CA {
	t.Helper()
	ca, err := testca.New(td, nil)
	if err != nil {
		t.Fatal(err)
	}
	return ca
}

// full returns a bundle with a key of each kind.
func full(t testing.TB, ca *testca.CA) *identity.Bundle {
	t.Helper()
	keys := map[string]crypto.PublicKey{}
	for name, curve := range map[string]elliptic.Curve{"p256": elliptic.P256(), "p384": elliptic.P384(), "p521": elliptic.P521()} {
		key, err := ecdsa.GenerateKey(curve, rand.Reader)
		if err != nil {
			t.Fatal(err)
		}
		keys[name] = key.Public()
	}
	r, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		t.Fatal(err)
	}
	keys["rsa"] = r.Public()
	if keys["ed25519"], _, err = ed25519.GenerateKey(rand.Reader); err != nil {
		t.Fatal(err)
	}
	return &identity.Bundle{TrustDomain: ca.TrustDomain, Roots: []*x509.Certificate{ca.Root()}, JWTKeys: keys, Sequence: 7, RefreshHint: 90 * time.Second}
}

// go-spiffe reads what we write, and the other way round.
func TestFormat(t *testing.T) {
	want := full(t, newCA(t, "a.example"))
	doc, err := Marshal(want)
	if err != nil {
		t.Fatal(err)
	}
	theirs, err := spiffebundle.Parse(spiffeid.RequireTrustDomainFromString("a.example"), doc)
	if err != nil {
		t.Fatal(err)
	}
	hint, _ := theirs.RefreshHint()
	sequence, _ := theirs.SequenceNumber()
	if got := theirs.JWTAuthorities(); !reflect.DeepEqual(got, want.JWTKeys) || hint != want.RefreshHint || sequence != 7 {
		t.Errorf("go-spiffe reads %v, hint %v, sequence %d, want %v, %v, 7", got, hint, sequence, want.JWTKeys, want.RefreshHint)
	}
	if roots := theirs.X509Authorities(); len(roots) != 1 || !roots[0].Equal(want.Roots[0]) {
		t.Errorf("go-spiffe reads %d CAs, want ours", len(roots))
	}
	if doc, err = theirs.Marshal(); err != nil {
		t.Fatal(err)
	}
	ours, err := Parse("a.example", doc)
	if err != nil {
		t.Fatal(err)
	}
	if !reflect.DeepEqual(ours.JWTKeys, want.JWTKeys) || ours.Sequence != 7 || ours.RefreshHint != want.RefreshHint || ours.TrustDomain != "a.example" || len(ours.Roots) != 1 || !ours.Roots[0].Equal(want.Roots[0]) {
		t.Errorf("of go-spiffe's we read %+v, want %+v", ours, want)
	}
}

func TestParseRefuses(t *testing.T) {
	ca := newCA(t, "a.example")
	leaf, err := ca.Issue(testca.Options{SPIFFEID: "spiffe://a.example/x"})
	if err != nil {
		t.Fatal(err)
	}
	b64 := base64.StdEncoding.EncodeToString
	x5c := func(der []byte) string { return fmt.Sprintf(`{"use":"x509-svid","kty":"EC","x5c":[%q]}`, b64(der)) }
	good := x5c(ca.Root().Raw)
	set := func(keys ...string) string { return `{"keys":[` + strings.Join(keys, ",") + `]}` }
	ec := `"kty":"EC","crv":"P-256","x":"f83OJ3D2xF1Bg8vub9tLe1gHMzV76e8Tus9uPHvRVEU","y":"x_FEzRu9m36HLN_tue659LNpXW6pCyStikYjKIWI5a0"`
	for _, c := range []struct{ name, doc, want string }{
		{"one CA", set(good), ""},
		{"a JWT key", set(`{"use":"jwt-svid","kid":"1",` + ec + `}`), ""},
		{"another use", set(good, `{"use":"wit-svid","kty":"oct"}`, `{"kty":"EC"}`), ""},
		{"a hint of null", `{"keys":[` + good + `],"spiffe_refresh_hint":null}`, ""},
		{"nothing", "", "not a JWK set"},
		{"HTML", "<html>", "not a JWK set"},
		{"more behind it", set(good) + "x", "not a JWK set"},
		{"no keys", `{}`, `no "keys"`},
		{"keys of null", `{"keys":null}`, `no "keys"`},
		{"empty", set(), "bundle is empty"},
		{"only other uses", set(`{"use":"sig","kty":"EC"}`), "bundle is empty"},
		{"too many keys", set(strings.Split(strings.Repeat(`{};`, maxKeys)+"{}", ";")...), "limit 1024"},
		{"too large", `{"keys":[` + good + `]` + strings.Repeat(" ", MaxSize) + `}`, "limit 1048576"},
		{"no certificate", set(`{"use":"x509-svid","kty":"EC"}`), "0 certificates"},
		{"two certificates", set(`{"use":"x509-svid","x5c":["",""]}`), "2 certificates"},
		{"no base64", set(`{"use":"x509-svid","x5c":["%"]}`), "not base64"},
		{"half a certificate", set(x5c(ca.Root().Raw[:50])), "not a certificate"},
		{"no CA", set(x5c(leaf.TLS.Certificate[0])), "not that of a CA"},
		{"CA of another trust domain", set(x5c(newCA(t, "b.example").Root().Raw)), `trust domain "b.example", want "a.example"`},
		{"JWT key without a name", set(`{"use":"jwt-svid",` + ec + `}`), `no "kid"`},
		{"two of one name", set(`{"use":"jwt-svid","kid":"1",`+ec+`}`, `{"use":"jwt-svid","kid":"1",`+ec+`}`), "two keys"},
		{"shared key", set(`{"use":"jwt-svid","kid":"1","kty":"oct","k":"AAAA"}`), `key type "oct"`},
		{"curve", set(`{"use":"jwt-svid","kid":"1","kty":"EC","crv":"P-224"}`), "not supported"},
		{"no point", set(`{"use":"jwt-svid","kid":"1","kty":"EC","crv":"P-256","x":"AA","y":"AA"}`), "not those of a point"},
		{"point off the curve", set(`{"use":"jwt-svid","kid":"1",` + strings.Replace(ec, "f83O", "f83P", 1) + `}`), "not those of a point"},
		{"short RSA key", set(`{"use":"jwt-svid","kid":"1","kty":"RSA","n":"AQAB","e":"AQAB"}`), "want at least 2048"},
		{"RSA exponent", set(`{"use":"jwt-svid","kid":"1","kty":"RSA","n":"` + strings.Repeat("_", 344) + `","e":"AAAAAAAA"}`), "not those of an RSA key"},
		{"Ed25519", set(`{"use":"jwt-svid","kid":"1","kty":"OKP","crv":"Ed25519","x":"AA"}`), "not that of an Ed25519 key"},
	} {
		b, err := Parse("a.example", []byte(c.doc))
		if c.want == "" && err != nil || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
			t.Errorf("%s: got %v, error %v, want %q", c.name, b, err, c.want)
		}
	}
}

// What is read can be written, and is the same then.
func FuzzParse(f *testing.F) {
	doc, err := Marshal(full(f, newCA(f, "a.example")))
	if err != nil {
		f.Fatal(err)
	}
	f.Add(doc)
	f.Add([]byte(`{"keys":[{"use":"jwt-svid","kid":"1","kty":"EC","crv":"P-256"}],"spiffe_refresh_hint":1e99}`))
	f.Fuzz(func(t *testing.T, doc []byte) {
		b, err := Parse("a.example", doc)
		if err != nil {
			return
		}
		if b.RefreshHint < 0 || len(b.Roots)+len(b.JWTKeys) == 0 {
			t.Fatalf("got hint %v and %d keys, want a bundle that makes sense", b.RefreshHint, len(b.Roots)+len(b.JWTKeys))
		}
		again, err := Marshal(b)
		if err != nil {
			t.Fatal(err)
		}
		c, err := Parse("a.example", again)
		if err != nil {
			t.Fatal(err)
		}
		if !reflect.DeepEqual(b.JWTKeys, c.JWTKeys) || len(b.Roots) != len(c.Roots) || b.Sequence != c.Sequence {
			t.Fatalf("written and read again: got %+v, want %+v", c, b)
		}
	})
}
