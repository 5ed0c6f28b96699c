//go:build amd64 || arm64

package tunnel_test

import (
	"bytes"
	"io"
	"testing"
	"time"

	"culvert.dev/tunnel"
)

// Tunnels that are blocked hold what their Budget gives and a little each,
// count it exactly, and lose none of it.
func TestRelayBoundsBacklogs(t *testing.T) {
	const (
		tunnels  = 64
		backlogs = 100 << 10
		little   = 2 << 10 // a read while there is too much
	)
	// Reads of the usual size that may be under way when it becomes too much:
	// the loop's one, or a pump's for each goroutine that happens to run.
	under := 64 << 10
	if !tunnel.InKernel {
		under = 8 * 32 << 10
	}
	t.Run("much is held", func(t *testing.T) {
		budget := &tunnel.Budget{Limit: 1, Backlogs: backlogs} // without pipes
		held := blockAndRelease(t, budget, tunnels, paths[0])
		if most := int64(backlogs + under + tunnels*little); held > most {
			t.Errorf("%d blocked tunnels hold %d bytes, want at most %d", tunnels, held, most)
		}
		if held <= backlogs/2 {
			t.Errorf("%d bytes are held: the limit was never near", held)
		}
	})
	for _, p := range paths {
		t.Run("memory is short/"+p.name, func(t *testing.T) {
			budget := &tunnel.Budget{Limit: 1}
			budget.SetPressure(tunnel.Short)
			if held := blockAndRelease(t, budget, tunnels, p); held > tunnels*little || held < tunnels*little/8 {
				t.Errorf("%d blocked tunnels hold %d bytes, want at most %d and not much less", tunnels, held, tunnels*little)
			}
		})
	}
}

// blockAndRelease has tunnels whose services don't read, until they hold no
// more, and returns how much that is. Some are read after all, the rest
// aborted.
func blockAndRelease(t *testing.T, budget *tunnel.Budget, tunnels int, p path) int64 {
	t.Helper()
	r := &tunnel.Relay{Loops: loops(t, budget)}
	defer r.Close()
	data := random(1<<20, 23)
	var blocked []carried
	for range tunnels {
		c := carryNarrow(t, r, p)
		go func() { _, _ = c.client.Write(data) }()
		blocked = append(blocked, c)
	}
	settled := 0
	for last, deadline := int64(-1), time.Now().Add(patience); settled < 20 && time.Now().Before(deadline); {
		time.Sleep(5 * time.Millisecond)
		if n := budget.Buffered(); n == last && n > 0 {
			settled++
		} else {
			last, settled = n, 0
		}
	}
	held := budget.Buffered()
	t.Logf("%d blocked tunnels hold %d bytes", tunnels, held)
	for i, c := range blocked[:4] { // these are read after all
		got := make([]byte, len(data))
		_ = c.server.SetReadDeadline(time.Now().Add(patience))
		if _, err := io.ReadFull(c.server, got); err != nil || !bytes.Equal(got, data) {
			t.Errorf("tunnel %d: what came is not what was sent: %v", i, err)
		}
	}
	r.Abort(t.Context(), tunnel.Killed, 0)
	for _, c := range blocked {
		c.wait(t)
		_, _ = c.client.Close(), c.server.Close()
	}
	if n := budget.Buffered(); n != 0 {
		t.Errorf("%d bytes are counted after the end", n)
	}
	return held
}
