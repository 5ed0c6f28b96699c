package gatewayapi

import (
	"encoding/json"
	"hash/fnv"
	"slices"
	"strings"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"
)

// Two controllers with one name and different settings would overwrite each other's status for ever,
// as fast as the API server permits.
const (
	conflictAfter     = 5                // times that the same status is overwritten, without another one to write
	conflictPause     = 30 * time.Second // from one write of such an object to the next
	conflictPauseEach = time.Second      // or that for each such object, if it is longer
	conflictOver      = 10 * time.Minute // after the last of them it is over
)

// reasonStatusContested is the reason of Events of objects whose status another controller writes, too.
const reasonStatusContested = "StatusContested"

// statusConflicts are the objects that were written lately, and which of them another controller writes, too.
type statusConflicts struct {
	mu   sync.Mutex // guards the rest
	of   map[types.UID]*statusConflict
	many int // that have been overwritten often enough
}

// A statusConflict is one of them.
type statusConflict struct {
	object string // "Gateway a/edge"
	want   uint64 // the sum of what was written last
	undone int    // how often the same had to be written again
	last   time.Time
}

// sum is a hash of the wanted status.
func sum(want any) uint64 {
	h := fnv.New64a()
	// It can be encoded: that is how it is sent to the API server.
	_ = json.NewEncoder(h).Encode(want)
	return h.Sum64()
}

// wrote is called when want has been written to an object. It reports whether it has just become
// clear that another controller overwrites it.
func (c *statusConflicts) wrote(uid types.UID, object string, want any, now time.Time) (undone bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	of := c.of[uid]
	if of == nil {
		if c.of == nil {
			c.of = map[types.UID]*statusConflict{}
		}
		of = &statusConflict{object: object}
		c.of[uid] = of
	}
	if s := sum(want); s != of.want {
		of.want = s
	} else {
		of.undone++
		if undone = of.undone == conflictAfter; undone {
			c.many++
		}
	}
	of.last = now
	return undone
}

// notBefore returns when want may be written to an object; zero means at once, as for everything that
// differs from what was written last.
func (c *statusConflicts) notBefore(uid types.UID, want any) time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	of := c.of[uid]
	if of == nil || of.undone < conflictAfter || sum(want) != of.want {
		return time.Time{}
	}
	return of.last.Add(max(conflictPause, time.Duration(c.many)*conflictPauseEach))
}

// forget drops what was not written for long.
func (c *statusConflicts) forget(now time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	over := max(conflictOver, 2*time.Duration(len(c.of))*conflictPauseEach)
	for uid, of := range c.of {
		if now.Sub(of.last) > over {
			delete(c.of, uid)
			if of.undone >= conflictAfter {
				c.many--
			}
		}
	}
}

// contestNote is what is said of such an object.
func statusConflictNote(controller string) note {
	return note{reasonStatusContested, "another controller with the name " + controller + " writes a different status: is there another culvert with other settings? While it does, this status is written every 30 s at most"}
}

// refusals returns one for each object whose status another controller writes, too.
func (c *statusConflicts) refusals(controller string) []Refusal {
	c.mu.Lock()
	defer c.mu.Unlock()
	var all []Refusal
	n := statusConflictNote(controller)
	for _, of := range c.of {
		if of.undone >= conflictAfter {
			all = append(all, Refusal{Object: of.object, Reason: n.reason, Message: n.message})
		}
	}
	slices.SortFunc(all, func(a, b Refusal) int { return strings.Compare(a.Object, b.Object) })
	return all
}
