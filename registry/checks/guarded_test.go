package checks

import (
	"net/netip"
	"testing"
	"time"

	"culvert.dev/registry"
)

// A check of a name that a stranger chose asks no address that is refused.
func TestGuardedNames(t *testing.T) {
	within(t, registry.Mesh{}, func(w *world) {
		w.registry.Refuses = func(a netip.Addr) string {
			if a == netip.MustParseAddr("10.96.0.1") {
				return "it is the address of Service stock/db"
			}
			return ""
		}
		w.dns["a.example.com."] = "203.0.113.1 ::ffff:10.96.0.1"
		s := service("a.test", tcp, "a.example.com./80")
		s.Endpoints[0].Guarded = true
		w.swap(registry.Snapshot{Services: []*registry.Service{s}})
		after(10 * time.Second)
		if allowed, refused := w.dialed("203.0.113.1:80"), w.dialed("10.96.0.1:80"); allowed == 0 || refused > 0 {
			t.Errorf("the address that is allowed was dialed %d times, and the other one %d times", allowed, refused)
		}
	})
}
