package gateway

import (
	"errors"
	"os"
	"slices"
	"testing"
	"time"

	"culvert.dev/registry"
	"culvert.dev/registry/alloc"
)

func TestForecastPorts(t *testing.T) {
	s := newSite(t, 2)
	old := time.Now().Add(-time.Hour).UTC().Truncate(time.Second)
	kept := []alloc.Port{{PortKey: alloc.PortKey{Protocol: "tcp", Service: "a.test"}, Assigned: s.cfg.Range.First, Since: old}}
	if err := alloc.PortFile(s.cfg.State).Save(kept); err != nil {
		t.Fatal(err)
	}
	tab, err := registry.Merge(registry.Snapshot{Services: []*registry.Service{
		published("c.test", registry.Endpoint{}), published("a.test", registry.Endpoint{}), published("b.test", registry.Endpoint{}, 53),
	}})
	if err != nil {
		t.Fatal(err)
	}
	list, err := ForecastPorts(s.cfg, tab)
	if err != nil || len(list) != 3 {
		t.Fatalf("got %+v, %v", list, err)
	}
	for i, want := range []ServicePort{
		{Name: "a.test", Assigned: s.cfg.Range.First, State: PortAssigned, Since: old},
		{Name: "b.test", Port: 53, Assigned: s.cfg.Range.Last, State: PortNew},
		{Name: "c.test", State: PortFull},
	} {
		got := list[i]
		if got.Name != want.Name || got.Port != want.Port || got.Assigned != want.Assigned || got.State != want.State || !got.Since.Equal(want.Since) || got.Service != want.Name {
			t.Errorf("got %+v\nwant %+v", got, want)
		}
	}
	if after, err := alloc.PortFile(s.cfg.State).Load(); err != nil || !slices.Equal(after, kept) {
		t.Errorf("the state was changed: %v, %v", after, err)
	}
	if err := os.WriteFile(s.cfg.State, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	var se *StateError
	if _, err := ForecastPorts(s.cfg, tab); !errors.As(err, &se) {
		t.Errorf("a broken state: %v", err)
	}
}
