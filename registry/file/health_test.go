package file

import (
	"reflect"
	"slices"
	"testing"
	"time"

	"culvert.dev/registry"
)

func TestChecks(t *testing.T) {
	cfg, err := Load("testdata/good/checks.yaml")
	if err != nil {
		t.Fatal(err)
	}
	var got []registry.Check
	for _, g := range cfg.Networks[0].Gateways {
		got = append(got, g.Check)
	}
	for _, s := range cfg.Services {
		got = append(got, s.Check)
	}
	want := []registry.Check{
		{Kind: "tcp"}, {}, {Kind: "tls", Interval: 5 * time.Second, Host: "gw.example.com"}, {}, {Kind: "tcp"}, {Kind: "tcp"},
		{Kind: "tcp"},
		{Kind: "tls", Interval: time.Second, Timeout: time.Second / 2, Host: "check.example.com"},
		{Kind: "http", Interval: 10 * time.Second, Timeout: 3 * time.Second, Path: "/healthz?full=1"},
		{}, {},
		{Kind: "http", Port: 8008, Path: "/primary", Statuses: "200,300-302", HealthyThreshold: 1, UnhealthyThreshold: 3},
	}
	if !slices.Equal(got, want) {
		t.Errorf("checks\n%+v, want\n%+v", got, want)
	}
	if reflect.TypeFor[registry.Check]().NumField() != len(keys[healthCheck]()) {
		t.Error("a check has a new field: is it in the file, the schema and the tests?")
	}
}
