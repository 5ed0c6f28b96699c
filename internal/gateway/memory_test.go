package gateway

import (
	"log/slog"
	"testing"
	"time"

	"culvert.dev/tunnel"
)

func TestPressureFollowsMemory(t *testing.T) {
	const limit = 1000
	was := tunnel.Calm
	for _, step := range []struct {
		used int64
		want tunnel.Pressure
	}{
		{0, tunnel.Calm},
		{849, tunnel.Calm},
		{850, tunnel.Short},
		{801, tunnel.Short}, // not calm before it is five points lower
		{800, tunnel.Short},
		{799, tunnel.Calm},
		{849, tunnel.Calm},
		{950, tunnel.Full},
		{900, tunnel.Full},
		{899, tunnel.Short},
		{949, tunnel.Short},
		{2000, tunnel.Full},
		{0, tunnel.Calm},
	} {
		if got := next(was, step.used, limit); got != step.want {
			t.Errorf("%v with %d of %d used: %v, want %v", was, step.used, limit, got, step.want)
		}
		was = step.want
	}
}

func TestCrowdsAreLookedAt(t *testing.T) {
	for limit, want := range map[int64]int64{0: 1, 1 << 20: 1, 64 << 20: 102, 1 << 30: 1638} {
		if got := crowd(limit); got != want {
			t.Errorf("a limit of %d: the next look after %d descriptors, want %d", limit, got, want)
		}
	}
}

// The runtime's limit makes room for what others hold in the cgroup, in steps
// that are worth it, and never leaves the runtime with less than a quarter.
func TestTheRuntimeMakesRoom(t *testing.T) {
	const group = 1000
	set := []int64{}
	w := &memoryWatch{limit: 900, moved: 900, set: func(n int64) { set = append(set, n) }}
	for _, step := range []struct{ others, want int64 }{
		{0, 900}, {10, 900}, {19, 881}, {30, 881}, {300, 600}, {990, 225}, {0, 900},
	} {
		w.others = step.others
		w.move(group)
		if w.moved != step.want {
			t.Errorf("others hold %d: the limit is %d, want %d", step.others, w.moved, step.want)
		}
	}
	if len(set) != 4 {
		t.Errorf("it was set %d times, want 4: %d", len(set), set)
	}
	w.set, w.others = nil, 500 // GOMEMLIMIT stays
	w.move(group)
	if w.moved != 900 {
		t.Errorf("a limit that must stay was moved to %d", w.moved)
	}
}

// A look at this process: what it uses is some of it and less than all.
func TestMeasure(t *testing.T) {
	w := &memoryWatch{limit: 1 << 40}
	if garbage := w.measure(); garbage < 0 {
		t.Errorf("%d bytes of garbage", garbage)
	}
	if used := w.used.Load(); used < 1<<19 || used > 1<<30 {
		t.Errorf("%d bytes in use", used)
	}
	if of := w.of.Load(); of != 1<<40 {
		t.Errorf("the limit is %d, want the one given", of)
	}
}

// Memory that is full is freed at once, as far as needed for it to be full no
// longer, and again only when it is known what that was worth.
func TestFullMemoryIsFreed(t *testing.T) {
	var asked []int64
	w := &memoryWatch{limit: 1, budget: &tunnel.Budget{}, log: slog.New(slog.DiscardHandler)} // of which any process uses more
	w.relieve = func(n int64, _ bool) tunnel.FreedMemory {
		asked = append(asked, n)
		return tunnel.FreedMemory{Ended: 1, Freed: n, Client: "192.0.2.1"}
	}
	w.look(t.Context())
	if p := w.budget.Pressure(); p != tunnel.Full {
		t.Fatalf("memory is %v", p)
	}
	if len(asked) != 1 || asked[0] <= 0 || asked[0] > w.used.Load() {
		t.Fatalf("%d bytes were asked for, of %d in use", asked, w.used.Load())
	}
	w.free(t.Context(), 1)
	if len(asked) != 1 {
		t.Error("asked again before a collection")
	}
	w.collected = time.Now()
	w.hunting = 0
	w.free(t.Context(), 1)
	if len(asked) != 2 {
		t.Errorf("asked %d times, want once more", len(asked))
	}
	w.limit = 1 << 40
	w.look(t.Context())
	if p := w.budget.Pressure(); p != tunnel.Calm || len(asked) != 2 {
		t.Errorf("memory is %v, and was asked for %d times", p, len(asked))
	}
}
