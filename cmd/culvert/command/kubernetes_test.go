//go:build !nokube

package command

import (
	"log/slog"
	"net/netip"
	"reflect"
	"slices"
	"testing"

	"culvert.dev/internal/kube/discovery"
	"culvert.dev/registry"
	"culvert.dev/registry/file"
	"culvert.dev/tunnel"
)

// What an administrator says reaches who holds annotations to it.
func TestKubeConfigHasTheRules(t *testing.T) {
	got := kubeConfig(&file.Config{Kubernetes: &file.Kubernetes{Discovery: &file.Discovery{
		Allow: []string{"shop/*"}, Deny: []string{"*/internal"}, ExternalNames: true,
		Suffixes: []file.Suffix{{Domain: "a.test"}, {Domain: "b.test", Namespaces: []string{"b"}}},
	}}}, slog.New(slog.DiscardHandler)).Discovery.Rules
	want := discovery.Rules{
		Allow: []string{"shop/*"}, Deny: []string{"*/internal"}, ExternalNames: true,
		Names: []discovery.NameRule{{Suffix: tunnel.MustParseName("a.test")}, {Suffix: tunnel.MustParseName("b.test"), Namespaces: []string{"b"}}},
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got  %+v\nwant %+v", got, want)
	}
	if n := reflect.TypeFor[discovery.Rules]().NumField(); n != 4 {
		t.Errorf("rules have %d fields: are all of them in the file, the schema and here?", n)
	}
}

// What gives services their names and places reaches who finds them, and DNS.
func TestKubeConfigHasThePlaces(t *testing.T) {
	c := &file.Config{Cluster: "west", Mesh: registry.Mesh{Zone: "mesh.test"}, DNS: &file.DNS{}, Kubernetes: &file.Kubernetes{
		Discovery: &file.Discovery{Network: "pods", Suffixes: []file.Suffix{{Domain: "shop.test"}}},
	}}
	got := kubeConfig(c, slog.New(slog.DiscardHandler))
	if got.Cluster != "west" || got.Mesh != c.Mesh || got.Discovery.Network != "pods" {
		t.Errorf("cluster %q, mesh %+v, network %q", got.Cluster, got.Mesh, got.Discovery.Network)
	}
	d, err := dnsServer(c)
	if err != nil {
		t.Fatal(err)
	}
	if want := []string{"shop.test", "west"}; !slices.Equal(d.Server.Claimed, want) {
		t.Errorf("DNS waits for names below %q, want %q", d.Server.Claimed, want)
	}
}

// Who stands in a chain of gateways is not taken for another one of it, and
// replicas are for one another.
func TestPseudonym(t *testing.T) {
	for _, tt := range []struct{ cluster, network, want string }{
		{"west", "", "culvert-west"},
		{"west", "west", "culvert-west-west"}, // in the cluster
		{"west", "dmz (old), 2", "culvert-west-dmz--old---2"},
	} {
		c := &file.Config{Cluster: tt.cluster, Mesh: registry.Mesh{Network: tt.network}}
		if got := pseudonym(c); got != tt.want {
			t.Errorf("cluster %q, network %q: got %q, want %q", tt.cluster, tt.network, got, tt.want)
		}
	}
}

// A network of the file is not taken from discovery, unless the file only says that
// it is insecure.
func TestKubeConfigHasTheNetwork(t *testing.T) {
	for _, row := range []struct {
		network registry.Network
		want    bool
	}{
		{registry.Network{Name: "west", Insecure: true}, false},
		{registry.Network{Name: "east"}, false},
		{registry.Network{Name: "west", CIDRs: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")}, Insecure: true}, true},
	} {
		c := &file.Config{Kubernetes: &file.Kubernetes{Discovery: &file.Discovery{Network: "west"}}, Networks: []registry.Network{row.network}}
		if got := kubeConfig(c, slog.New(slog.DiscardHandler)).Discovery.Declared; got != row.want {
			t.Errorf("with %+v: declared %v, want %v", row.network, got, row.want)
		}
	}
}
