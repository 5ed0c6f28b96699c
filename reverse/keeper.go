package reverse

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"slices"
	"sync"
	"time"

	"culvert.dev/internal/statefile"
	"culvert.dev/tunnel"
)

// Limits of the file of a Keeper.
const (
	keptVersion  = 1
	maxKeptBytes = 32 << 20
	maxOwner     = 2048 // bytes of an id
	keepEvery    = time.Second
	keepRetry    = 30 * time.Second
)

// A Keeper keeps the names of Groups for their owners over a restart, in a file. Times in the
// file are durations, so that a clock that was set does not matter: a name that is in the
// file is its owner's for at most Groups.HoldFor after the start.
type Keeper struct {
	Groups *Groups

	// Log receives what is wrong with the file. Nil discards it.
	Log *slog.Logger

	mu     sync.Mutex // guards what follows
	path   string
	lock   io.Closer // nil where there is no path, or it could not be locked
	logged string    // the error of the last write, which was logged
}

// A keptFile is the content of the file.
type keptFile struct {
	Version int        `json:"version"`
	Names   []keptName `json:"names"`
}

// A keptName is a name with its owner.
type keptName struct {
	Name  tunnel.Pattern `json:"name"`
	Owner string         `json:"owner"`
	Left  int            `json:"left"`            // seconds for which it was kept when the file was written
	Since int64          `json:"since,omitempty"` // milliseconds of Unix time since when the owner has had it
}

// Use has the names kept in the file at path, "" for none, which it locks for this process.
// Names that are in the file belong to their owners from now on. A missing file counts as empty, and
// so does one that can't be read: the error is for the log. If the file can't be locked, nothing is
// kept.
func (k *Keeper) Use(path string) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	if path == k.path {
		return nil
	}
	k.close()
	if k.path = path; path == "" {
		return nil
	}
	lock, err := statefile.Lock(path, "names of connectors")
	if err != nil {
		return err
	}
	k.lock = lock
	defer k.Groups.tellChange()
	list, err := readKept(path)
	if err != nil {
		return fmt.Errorf("read the names of connectors: %w", err)
	}
	k.Groups.restore(list)
	return nil
}

// Close unlocks the file.
func (k *Keeper) Close() {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.close()
}

func (k *Keeper) close() {
	if k.lock != nil {
		_ = k.lock.Close()
		k.lock = nil
	}
}

// Run writes the file a moment after names have changed, and once more when ctx is done.
func (k *Keeper) Run(ctx context.Context) error {
	changed := k.Groups.changes()
	for {
		select {
		case <-ctx.Done():
			k.save()
			return nil
		case <-changed:
		}
		wait := keepEvery
		if !k.save() {
			wait = keepRetry
			k.Groups.tellChange()
		}
		_ = sleep(ctx, wait)
	}
}

// save writes the file. It logs an error that is not the one that was logged last.
func (k *Keeper) save() bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.lock == nil {
		return true
	}
	err := writeKept(k.path, k.Groups.kept())
	text := errorText(err)
	if text != k.logged && err != nil && k.Log != nil {
		k.Log.Error("cannot keep the names of connectors", "error", text)
	}
	k.logged = text
	return err == nil
}

func readKept(path string) ([]keptName, error) {
	info, err := os.Stat(path) // before opening: a FIFO would block
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() || info.Size() > maxKeptBytes {
		return nil, fmt.Errorf("%q is not a regular file of at most %d bytes", path, maxKeptBytes)
	}
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	var f keptFile
	if err := json.Unmarshal(data, &f); err != nil {
		return nil, fmt.Errorf("%q: %w", path, err)
	}
	if f.Version != keptVersion {
		return nil, fmt.Errorf("%q is of version %d, want %d", path, f.Version, keptVersion)
	}
	return f.Names, nil
}

// writeKept writes the file with as much of list as it may have. Only the owner of the file
// may read it.
func writeKept(path string, list []keptName) error {
	return statefile.Replace(path, func(w io.Writer) error {
		b := bufio.NewWriter(w)
		fmt.Fprintf(b, "{\"version\": %d, \"names\": [", keptVersion)
		size := 64
		for i := range list {
			line, err := json.Marshal(&list[i])
			if err != nil {
				return err
			}
			if size += len(line) + 2; size > maxKeptBytes {
				break
			}
			if i > 0 {
				b.WriteByte(',')
			}
			b.WriteByte('\n')
			b.Write(line)
		}
		b.WriteString("\n]}\n")
		return b.Flush()
	})
}

// kept returns the names that belong to somebody, those without a session last.
func (g *Groups) kept() []keptName {
	now := time.Now()
	g.mu.RLock()
	defer g.mu.RUnlock()
	list := make([]keptName, 0, len(g.names))
	for name, h := range g.names {
		left := g.holdFor()
		if len(h.members) == 0 && len(h.remotes) == 0 {
			left = h.until.Sub(now)
		}
		if left > 0 && len(h.owner) <= maxOwner {
			list = append(list, keptName{Name: name, Owner: h.owner, Left: int((left + time.Second - 1) / time.Second), Since: h.since})
		}
	}
	slices.SortFunc(list, func(a, b keptName) int { return b.Left - a.Left })
	return list
}

// restore gives the names of list to their owners, as if their last sessions had just ended.
// It leaves out names that are malformed, too many or in conflict.
func (g *Groups) restore(list []keptName) {
	now := time.Now()
	g.mu.Lock()
	defer g.mu.Unlock()
	for i := range list {
		k := &list[i]
		reg := Registration{Name: k.Name}
		if reg.check() != nil || k.Owner == "" || len(k.Owner) > maxOwner || k.Left <= 0 || len(g.names) >= maxNames || len(g.owned[k.Owner]) >= g.namesPerOwner() {
			continue
		}
		if g.names[k.Name] != nil || g.conflicting(&Membership{Registration: reg, Owner: k.Owner}, now) != nil {
			continue
		}
		left := g.holdFor()
		if k.Left < int(left/time.Second) {
			left = time.Duration(k.Left) * time.Second
		}
		h := g.hold(k.Name, k.Owner)
		if h.until = now.Add(left); k.Since > 0 {
			h.since = min(h.since, k.Since)
		}
	}
}

// changes returns a channel that gets an element when names have changed.
func (g *Groups) changes() <-chan struct{} {
	g.once.Do(func() { g.changed = make(chan struct{}, 1) })
	return g.changed
}

// tellChange tells the Keeper that names have changed. The caller may hold mu.
func (g *Groups) tellChange() {
	g.changes()
	select {
	case g.changed <- struct{}{}:
	default:
	}
}
