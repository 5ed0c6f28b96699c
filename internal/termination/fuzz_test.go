package termination

import (
	"strings"
	"testing"

	"culvert.dev/internal/testca"
)

// FuzzTrustDomain compares with another reading of the same specification.
func FuzzTrustDomain(f *testing.F) {
	for _, id := range []string{"spiffe://example.test/ns/a/sa/b", "spiffe://example.test", "spiffe://a:1/b", "spiffe://a/../b", "spiffe://A/b", "spiffe://a/b%63", "spiffe:///a", "x"} {
		f.Add(id)
	}
	f.Fuzz(func(t *testing.T, id string) {
		got, err := trustDomain(id)
		want, _, other := testca.SplitID(id)
		if (err == nil) != (other == nil) || err == nil && got != want {
			t.Errorf("%q: %q and %v, by the other reading %q and %v", id, got, err, want, other)
		}
		if err != nil && len(err.Error()) > 1024 {
			t.Errorf("an error of %d bytes", len(err.Error()))
		}
		if strings.ContainsAny(got, "/:@%") {
			t.Errorf("trust domain %q", got)
		}
	})
}
