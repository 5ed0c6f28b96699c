package command

import (
	"log/slog"
	"reflect"
	"testing"

	"culvert.dev/kube/discovery"
	"culvert.dev/registry/file"
	"culvert.dev/tunnel"
)

// What an administrator says reaches who holds annotations to it.
func TestKubeConfigHasTheRules(t *testing.T) {
	got := kubeConfig(&file.Config{Kubernetes: &file.Kubernetes{Discovery: &file.Discovery{
		Allow: []string{"shop/*"}, Deny: []string{"*/internal"}, NoExternalNames: true,
		Suffixes: []file.Suffix{{Domain: "a.test"}, {Domain: "b.test", Namespaces: []string{"b"}}},
	}}}, slog.New(slog.DiscardHandler)).Discovery.Rules
	want := discovery.Rules{
		Allow: []string{"shop/*"}, Deny: []string{"*/internal"}, NoExternalNames: true,
		Names: []discovery.NameRule{{Suffix: tunnel.MustParseName("a.test")}, {Suffix: tunnel.MustParseName("b.test"), Namespaces: []string{"b"}}},
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got  %+v\nwant %+v", got, want)
	}
	if n := reflect.TypeFor[discovery.Rules]().NumField(); n != 4 {
		t.Errorf("rules have %d fields: are all of them in the file, the schema and here?", n)
	}
}
