package identity

import (
	"strings"
	"testing"

	"culvert.dev/internal/testca"
)

// Of each SPIFFE id there is one spelling.
func TestParseSPIFFEID(t *testing.T) {
	for _, tt := range []struct{ id, domain, path, err string }{
		{"spiffe://example.test/ns/a/sa/b", "example.test", "/ns/a/sa/b", ""},
		{"spiffe://example.test/a.b_c-D", "example.test", "/a.b_c-D", ""},
		{"spiffe://example.test/" + strings.Repeat("a", 2026), "example.test", "/" + strings.Repeat("a", 2026), ""},
		{"spiffe://example.test/" + strings.Repeat("a", 2027), "", "", "has 2049 bytes, limit 2048"},
		{"spiffe://example.test", "", "", "has no path"},
		{"spiffe://example.test/", "", "", "malformed path"},
		{"spiffe://example.test/a/", "", "", "malformed path"},
		{"spiffe://example.test/a//b", "", "", "malformed path"},
		{"spiffe://example.test/a/../b", "", "", "malformed path"},
		{"spiffe://example.test/a/.", "", "", "malformed path"},
		{"spiffe://example.test/a?b", "", "", "malformed path"},
		{"spiffe://example.test/a#b", "", "", "malformed path"},
		{"spiffe://example.test/a%62", "", "", "malformed path"},
		{"spiffe://Example.test/a", "", "", "trust domain is malformed"},
		{"spiffe://example.test:1/a", "", "", "trust domain is malformed"},
		{"spiffe://a@example.test/a", "", "", "trust domain is malformed"},
		{"spiffe:///a", "", "", "trust domain is malformed"},
		{"spiffe://", "", "", "trust domain is malformed"},
		{"spiffe://" + strings.Repeat("a", 256) + "/a", "", "", "trust domain is malformed"},
		{"SPIFFE://example.test/a", "", "", "is not a SPIFFE id"},
		{"https://example.test/a", "", "", "is not a SPIFFE id"},
		{"", "", "", "is not a SPIFFE id"},
	} {
		domain, path, err := ParseSPIFFEID(tt.id)
		if domain != tt.domain || path != tt.path || (err == nil) != (tt.err == "") || err != nil && !strings.Contains(err.Error(), tt.err) {
			t.Errorf("%.60q: got %q, %.60q and %v, want %q, %.60q and %q", tt.id, domain, path, err, tt.domain, tt.path, tt.err)
		}
	}
}

// Istio's form has a namespace and a service account, and nothing like it has.
func TestPrincipal(t *testing.T) {
	for id, want := range map[string][3]string{
		"spiffe://corp.example/ns/shop/sa/api":   {"corp.example", "shop", "api"},
		"spiffe://corp.example/ns/shop/sa/api/x": {"corp.example", "", ""},
		"spiffe://corp.example/ns/shop/sb/api":   {"corp.example", "", ""},
		"spiffe://corp.example/ns/shop/sa":       {"corp.example", "", ""},
		"spiffe://corp.example/ns/sa/api":        {"corp.example", "", ""},
		"spiffe://corp.example/x/ns/shop/sa/api": {"corp.example", "", ""},
		"spiffe://corp.example/api":              {"corp.example", "", ""},
	} {
		a, err := Principal(id)
		if err != nil {
			t.Fatal(err)
		}
		if got := [3]string{a.TrustDomain, a.Namespace, a.ServiceAccount}; got != want {
			t.Errorf("%s: got %q, want %q", id, got, want)
		}
	}
	if a, err := Principal("spiffe://corp.example"); err == nil {
		t.Errorf("got %+v of an id without a path, want an error", a)
	}
}

// What Linkerd calls a workload.
func TestLinkerd(t *testing.T) {
	for name, want := range map[string]string{
		"api.shop.serviceaccount.identity.linkerd.corp.example":  "spiffe://corp.example/ns/shop/sa/api",
		"api.shop.serviceaccount.identity.linkerd.cluster.local": "spiffe://cluster.local/ns/shop/sa/api",
		"api.shop.serviceaccount.identity.linkerd":               "",
		"api.shop.serviceaccount.identity.linkerd.":              "",
		"api.shop.serviceaccount.identity..corp.example":         "",
		"api.serviceaccount.identity.linkerd.corp.example":       "",
		".shop.serviceaccount.identity.linkerd.corp.example":     "",
		"api..serviceaccount.identity.linkerd.corp.example":      "",
		"*.shop.serviceaccount.identity.linkerd.corp.example":    "",
		"a.b.c.serviceaccount.identity.linkerd.corp.example":     "",
		"api.shop.serviceaccount.identity.linkerd.Corp.example":  "",
		"api.shop.svc.cluster.local":                             "",
	} {
		id, _, ok := linkerd(name)
		if ok != (want != "") || ok && id != want {
			t.Errorf("%s: got %q and %v, want %q", name, id, ok, want)
		}
	}
}

// An id that is accepted has one spelling: that of its two parts.
func FuzzParseSPIFFEID(f *testing.F) {
	for _, s := range []string{"spiffe://a.example/ns/b/sa/c", "spiffe://a.example", "spiffe://a/..", "spiffe:///", "spiffe://a.example/%61", ""} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, id string) {
		domain, path, err := ParseSPIFFEID(id)
		if want, _, other := testca.SplitID(id); (err == nil) != (other == nil) || err == nil && domain != want {
			t.Errorf("%q: got %q and %v, by another reading of the same specification %q and %v", id, domain, err, want, other)
		}
		if err != nil {
			if len(err.Error()) > 1024 {
				t.Errorf("an error of %d bytes", len(err.Error()))
			}
			if domain != "" || path != "" {
				t.Errorf("%q: got %q and %q beside an error", id, domain, path)
			}
			return
		}
		if scheme+domain+path != id || !IsTrustDomain(domain) || len(id) > maxID || strings.ContainsAny(path, "%?#\\ ") {
			t.Errorf("%q: got %q and %q", id, domain, path)
		}
		a, err := Principal(id)
		if err != nil || (a.Namespace == "") != (a.ServiceAccount == "") {
			t.Errorf("%q: got %+v and %v", id, a, err)
		}
		if a.Namespace != "" && id != scheme+domain+"/ns/"+a.Namespace+"/sa/"+a.ServiceAccount {
			t.Errorf("%q: got %+v, which is another", id, a)
		}
	})
}
