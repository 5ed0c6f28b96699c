package file

import (
	"net/netip"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"culvert.dev/registry"
)

func TestVIPs(t *testing.T) {
	dir := private(t, "testdata/good")
	cfg, err := Load(filepath.Join(dir, "vips.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	want := &VIPs{
		Ranges: []netip.Prefix{netip.MustParsePrefix("10.9.0.0/16"), netip.MustParsePrefix("fd12:3456:789a::/64")},
		State:  filepath.Join(dir, "vips.json"), ReuseAfter: 36 * time.Hour,
	}
	if !reflect.DeepEqual(cfg.VIPs, want) {
		t.Errorf("got %+v, want %+v", cfg.VIPs, want)
	}
	tab, err := cfg.Mesh.Merge(cfg.Snapshot())
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, w := range tab.VIPRequests() {
		got = append(got, strings.Join(w.Keys, " "))
	}
	if want := []string{"db.example.com", "west/default/wild"}; !slices.Equal(got, want) {
		t.Errorf("wanted by %q, want %q", got, want)
	}
	// The defaults, a path of its own, and what only a restart takes up.
	const data = "cluster: west\nvips: {state: /var/lib/culvert/vips.json}\nservices: []\n"
	other, err := Parse("x.yaml", []byte(data))
	if err != nil {
		t.Fatal(err)
	}
	want = &VIPs{Ranges: registry.DefaultVIPRanges("west"), State: "/var/lib/culvert/vips.json", ReuseAfter: 24 * time.Hour}
	if !reflect.DeepEqual(other.VIPs, want) {
		t.Errorf("got %+v, want %+v", other.VIPs, want)
	}
	none, err := Parse("x.yaml", []byte("cluster: west\nservices: []\n"))
	if err != nil || none.VIPs != nil {
		t.Fatalf("%+v, %v", none, err)
	}
	if parts := changedKeys(other.RestartNeeded(cfg)); !slices.Equal(parts, []string{"vips.state"}) {
		t.Errorf("a restart is needed for %q, want vips.state", parts)
	}
	if parts := other.RestartNeeded(none); parts != nil {
		t.Errorf("a restart is needed for %q, want nothing, as they go", parts)
	}
	again, _ := Parse("x.yaml", []byte(data))
	if parts := other.RestartNeeded(again); parts != nil {
		t.Errorf("a restart is needed for %q, and nothing changed", parts)
	}
}
