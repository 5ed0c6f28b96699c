package kube

import (
	"os"
	"path/filepath"
	"testing"

	"culvert.dev/internal/kube/discovery"
	"culvert.dev/internal/kube/gatewayapi"
	"culvert.dev/registry/snapshot"
	"culvert.dev/tunnel"
)

// kubeconfig writes one for a server that nobody asks.
func kubeconfig(t *testing.T, server string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "kubeconfig")
	text := `{apiVersion: v1, kind: Config, current-context: a, clusters: [{name: a, cluster: {server: "` + server + `"}}], contexts: [{name: a, context: {cluster: a, user: a}}], users: [{name: a, user: {token: a}}]}`
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// What each source says is kept in a file of its own, for processes with the same
// settings: those of Gateways are nothing to services.
func TestStateIsOfTheSettings(t *testing.T) {
	config := func(change func(*Config)) Config {
		c := Config{
			Kubeconfig: kubeconfig(t, "https://192.0.2.1:6443"), Cluster: "west", State: "/var/lib/culvert/kubernetes",
			Discovery: &Discovery{
				Clusters: "culvert-system",
				Rules:    discovery.Rules{Deny: []string{"a/*"}, Names: []discovery.NameRule{{Suffix: tunnel.MustParseName("a.test")}}},
			},
			GatewayAPI: &GatewayAPI{Controller: "culvert.dev/gateway", Addresses: []gatewayapi.Address{{}}},
		}
		change(&c)
		return c
	}
	settings := func(c Config) map[string]string {
		t.Helper()
		k, err := New(c)
		if err != nil {
			t.Fatal(err)
		}
		all := map[string]string{}
		if s := k.Status(); len(s.Clusters) == 0 || (s.GatewayAPI != nil) != (c.GatewayAPI != nil) {
			t.Errorf("the status is %+v", s)
		}
		for _, src := range k.Sources() {
			s := src.(*snapshot.Source)
			all[s.Path] = s.Settings
		}
		return all
	}
	before := settings(config(func(*Config) {}))
	if len(before) != 3 {
		t.Fatalf("there are the files %v", before)
	}
	const services, clusters, gateways = "/var/lib/culvert/kubernetes.discovery", "/var/lib/culvert/kubernetes.clusters", "/var/lib/culvert/kubernetes.gateway-api"
	for _, c := range []struct {
		what    string
		change  func(*Config)
		another []string
	}{
		{"the same", func(*Config) {}, nil},
		{"the lease", func(c *Config) { c.Lease = Object{"a", "b"} }, nil},
		{"no Gateways", func(c *Config) { c.GatewayAPI = nil }, nil},
		{"what is denied", func(c *Config) { c.Discovery.Rules.Deny = []string{"*/*"} }, []string{services, clusters}},
		{"a suffix", func(c *Config) { c.Discovery.Rules.Names[0].Suffix = tunnel.MustParseName("b.test") }, []string{services, clusters}},
		{"the network", func(c *Config) { c.Discovery.Network = "pods" }, []string{services, clusters, gateways}},
		{"the controller", func(c *Config) { c.GatewayAPI.Controller = "a.test/b" }, []string{gateways}},
		{"namespaces", func(c *Config) { c.Namespaces = []string{"a"} }, []string{services, clusters, gateways}},
		{"the server", func(c *Config) { c.Kubeconfig = kubeconfig(t, "https://192.0.2.2:6443") }, []string{services, clusters, gateways}},
	} {
		after := settings(config(c.change))
		for path, s := range after {
			want := false
			for _, p := range c.another {
				want = want || p == path
			}
			if (s != before[path]) != want {
				t.Errorf("%s: the settings of %s are others: %t, want %t", c.what, path, !want, want)
			}
		}
	}
}
