package identity

import (
	"crypto/tls"
	"errors"
	"strings"
	"testing"
)

// A key may be looked up before it is set, and is the same one afterwards.
func TestStore(t *testing.T) {
	var s Store
	k := s.Key("edge")
	if _, err := k.Certificate(); err == nil || !strings.Contains(err.Error(), `key "edge"`) {
		t.Errorf("before Set: got error %v, want one that names the key", err)
	}
	first, second := new(tls.Certificate), new(tls.Certificate)
	k.Set(first)
	before := k.Generation()
	s.Key("edge").Set(second)
	if got, err := k.Certificate(); got != second || err != nil {
		t.Errorf("after two Sets: got %p, %v, want the second, %p", got, err, second)
	}
	if k.Generation() == before {
		t.Errorf("generation %d before and after a Set, want another", before)
	}
	gone := errors.New("the file is gone")
	k.Remove(gone)
	if _, err := k.Certificate(); !errors.Is(err, gone) {
		t.Errorf("after Remove: got error %v, want %v", err, gone)
	}
	if one, other := s.Trust("corp.example"), s.Trust("corp.example"); one != other {
		t.Error("two Trusts of one name")
	}
	b := &Bundle{TrustDomain: "corp.example"}
	s.Trust("corp.example").Set(b)
	if got, err := s.Trust("corp.example").Bundle(); got != b || err != nil {
		t.Errorf("bundle: got %p, %v, want %p", got, err, b)
	}
}
