package invitation

import (
	"testing"
	"time"

	"culvert.dev/internal/testnet"
)

func TestMain(m *testing.M) { testnet.Main(m) }

func FuzzToken(f *testing.F) {
	t := &Token{Kind: Site, Address: "gw.east.example:443", Transport: "connect", SPKI: make([]byte, 32), Secret: make([]byte, 32), Zones: []string{"*.a.example"}, Expires: time.Unix(4e9, 0)}
	for _, kind := range []Kind{Site, Device} {
		t.Kind = kind
		text, err := t.Text()
		if err != nil {
			f.Fatal(err)
		}
		f.Add(text)
		f.Add(string(kind))
	}
	f.Fuzz(func(t *testing.T, text string) {
		tok, err := Parse(text, time.Unix(1e9, 0))
		if err == nil && (len(tok.Secret) != SecretSize || len(tok.SPKI) != 32 || tok.Kind == "") {
			t.Errorf("%+v is taken", tok)
		}
	})
}
