//go:build unix

package alloc

import (
	"fmt"
	"path/filepath"
	"testing"
	"time"
)

// Whoever reads while the file is written, or would after a crash at that
// moment, finds the one before or the one after, whole.
func TestFileIsWholeAtEveryMoment(t *testing.T) {
	const rounds, entries = 40, 5000
	f := fileAt(filepath.Join(t.TempDir(), "state.json"))
	save := func(n int) error {
		list := make([]testEntry, entries)
		for i := range list {
			list[i] = testEntry{fmt.Sprintf("s%d-%d", n, i), timesOf(noon, time.Time{})}
		}
		return f.Save(list)
	}
	if err := save(0); err != nil {
		t.Fatal(err)
	}
	done := make(chan error)
	go func() {
		for n := range rounds {
			if err := save(n); err != nil {
				done <- err
				return
			}
		}
		done <- nil
	}()
	for reads := 0; ; reads++ {
		if all, err := f.Load(); err != nil || len(all) != entries {
			t.Errorf("read %d: %d entries, %v", reads, len(all), err)
			<-done
			return
		}
		select {
		case err := <-done:
			if err != nil || reads < 2 {
				t.Errorf("%v after %d reads", err, reads)
			}
			return
		default:
		}
	}
}
