package file

import (
	"fmt"
	"net/netip"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"culvert.dev/registry"
)

func TestServicePorts(t *testing.T) {
	dir := private(t, "testdata/good")
	cfg, err := Load(filepath.Join(dir, "service-ports.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	want := ServicePorts{
		Range: registry.PortRange{First: 20000, Last: 20999}, Address: netip.MustParseAddr("127.0.0.1"),
		State: filepath.Join(dir, "ports.json"), ReuseAfter: 36 * time.Hour,
	}
	if *cfg.ServicePorts != want {
		t.Errorf("got %+v, want %+v", *cfg.ServicePorts, want)
	}
	tab, err := registry.Merge(cfg.Snapshot())
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, p := range tab.Publishable() {
		got = append(got, fmt.Sprintf("%s:%d", p.Name, p.Port))
	}
	if want := []string{"db.example.com:5432", "db.example.com:5433", "mail.example.com:0", "far.example.com:22"}; !slices.Equal(got, want) {
		t.Errorf("publishable %q, want %q", got, want)
	}
	// The defaults, a path of its own, and what only a restart takes up.
	data := "servicePorts: {range: 4000, state: /var/lib/culvert/ports.json}\nservices: []\n"
	other, err := Parse("x.yaml", []byte(data))
	if err != nil {
		t.Fatal(err)
	}
	want = ServicePorts{Range: registry.PortRange{First: 4000, Last: 4000}, State: "/var/lib/culvert/ports.json", ReuseAfter: 24 * time.Hour}
	if *other.ServicePorts != want {
		t.Errorf("got %+v, want %+v", *other.ServicePorts, want)
	}
	none, err := Parse("x.yaml", []byte("services: []\n"))
	if err != nil || none.ServicePorts != nil {
		t.Fatalf("%+v, %v", none, err)
	}
	if parts := changedKeys(other.RestartNeeded(cfg)); !slices.Equal(parts, []string{"servicePorts.state"}) {
		t.Errorf("a restart is needed for %q, want servicePorts.state", parts)
	}
	if parts := other.RestartNeeded(none); parts != nil {
		t.Errorf("a restart is needed for %q, want nothing, as they go", parts)
	}
	again, _ := Parse("x.yaml", []byte(data))
	if parts := other.RestartNeeded(again); parts != nil {
		t.Errorf("a restart is needed for %q, and nothing changed", parts)
	}
}
