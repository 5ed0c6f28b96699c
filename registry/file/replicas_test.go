package file

import (
	"path/filepath"
	"slices"
	"testing"
)

// Replicas are delegates of every trust domain: they state callers to each other.
func TestReplicasAreDelegates(t *testing.T) {
	c, err := Load(filepath.Join(private(t, "testdata/good"), "replicas.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	const id = "spiffe://corp.example/gw"
	for domain, want := range map[string][]string{"corp.example": {"spiffe://corp.example/other", id}, "partner.example": {id}} {
		if got := c.Identity.Trust[domain].Delegates; !slices.Equal(got, want) {
			t.Errorf("the delegates of %s are %q, want %q", domain, got, want)
		}
	}
	r := c.Replicas
	if r == nil || len(r.To) != 2 || r.Hop.Proto != "connect" || !slices.Equal(r.Hop.Peers, []string{id}) || !r.Hop.ForwardIdentity.Assertion || r.Hop.KeyName != "gw" {
		t.Errorf("the replicas are %+v", r)
	}
}
