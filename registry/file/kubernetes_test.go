package file

import (
	"os"
	"path/filepath"
	"reflect"
	"testing"
)

// A relative path is from the file.
func TestKubernetesState(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "culvert.yaml")
	for state, want := range map[string]string{"learnt": filepath.Join(dir, "learnt"), "/var/lib/culvert/kubernetes": "/var/lib/culvert/kubernetes"} {
		if err := os.WriteFile(path, []byte("cluster: west\nlisteners: [{address: \":443\"}]\nkubernetes: {discovery: {}, state: "+state+"}\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		c, err := Load(path)
		if err != nil {
			t.Fatal(err)
		}
		if c.Kubernetes.State != want {
			t.Errorf("%s: got %q, want %q", state, c.Kubernetes.State, want)
		}
	}
}

// What no annotation can change.
func TestKubernetesRules(t *testing.T) {
	path := filepath.Join(t.TempDir(), "culvert.yaml")
	for _, tt := range []struct {
		discovery string
		suffixes  []Suffix
		external  bool
	}{
		{`{}`, nil, false},
		{`{externalNames: true}`, nil, true},
		{`{externalNames: false}`, nil, false},
		{`{suffixes: [Shop.Example.com]}`, []Suffix{{Domain: "shop.example.com"}}, false},
		{`{suffixes: [{suffix: a.test}, {suffix: b.test, namespaces: [b, "team-*"]}]}`,
			[]Suffix{{Domain: "a.test"}, {Domain: "b.test", Namespaces: []string{"b", "team-*"}}}, false},
	} {
		if err := os.WriteFile(path, []byte("cluster: west\nlisteners: [{address: \":443\"}]\nkubernetes: {discovery: "+tt.discovery+"}\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		c, err := Load(path)
		if err != nil {
			t.Fatalf("%s: %v", tt.discovery, err)
		}
		if d := c.Kubernetes.Discovery; !reflect.DeepEqual(d.Suffixes, tt.suffixes) || d.ExternalNames != tt.external {
			t.Errorf("%s: got %+v, external names %v, want %+v, %v", tt.discovery, d.Suffixes, d.ExternalNames, tt.suffixes, tt.external)
		}
	}
}

// Where names may turn up outside of DNS's own zones.
func TestDNSClaims(t *testing.T) {
	path := filepath.Join(t.TempDir(), "culvert.yaml")
	const services = `services:
  - {names: [orders.example.com, "*.cdn.example.com"], endpoints: ["10.0.0.1:443"]}
  - {mesh: {service: db, cluster: north}, endpoints: ["10.0.0.2:5432"]}
`
	for _, tt := range []struct {
		lines string
		want  []string
	}{
		{"services: []\n", nil},
		{services, []string{"cdn.example.com", "north", "orders.example.com"}},
		{"kubernetes: {gatewayAPI: {}}\n", nil}, // whose names are not for DNS
		{services + "kubernetes: {discovery: {clusters: culvert-system, suffixes: [shop.test, {suffix: team.test, namespaces: [a]}]}}\n",
			[]string{"cdn.example.com", "north", "orders.example.com", "shop.test", "team.test", "west"}},
	} {
		if err := os.WriteFile(path, []byte("cluster: west\nlisteners: [{address: \":443\"}]\n"+tt.lines), 0o600); err != nil {
			t.Fatal(err)
		}
		c, err := Load(path)
		if err != nil {
			t.Fatalf("%s: %v", tt.lines, err)
		}
		if got := c.DNSClaims(); !reflect.DeepEqual(got, tt.want) {
			t.Errorf("%s: got %q, want %q", tt.lines, got, tt.want)
		}
	}
}
