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

// Two controllers that go by one name, with different settings, would undo each
// other's status for ever, as fast as the API server lets them.
const (
	contestAfter = 5                // times that what was written is undone, without anything else to write
	contestPause = 30 * time.Second // from one write of such an object to the next
	contestEach  = time.Second      // or that for each such object, if it is longer
	contestOver  = 10 * time.Minute // after the last of them it is over
)

// reasonContested is of objects whose status somebody else writes as well.
const reasonContested = "StatusContested"

// contests are the objects that were written lately, and by whom else.
type contests struct {
	mu   sync.Mutex // guards the rest
	of   map[types.UID]*contest
	many int // of those that have been undone often enough
}

// A contest is one of them.
type contest struct {
	object string // "Gateway a/edge"
	want   uint64 // of what was written last
	undone int    // how often the same had to be written again
	last   time.Time
}

// sum tells what is wanted from all else that was.
func sum(want any) uint64 {
	h := fnv.New64a()
	// It has nothing that could not be encoded: it goes to the API server so, too.
	_ = json.NewEncoder(h).Encode(want)
	return h.Sum64()
}

// wrote is called when want has been written to an object, and reports whether it
// has become clear that somebody else undoes that.
func (c *contests) wrote(uid types.UID, object string, want any, now time.Time) (undone bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	of := c.of[uid]
	if of == nil {
		if c.of == nil {
			c.of = map[types.UID]*contest{}
		}
		of = &contest{object: object}
		c.of[uid] = of
	}
	if s := sum(want); s != of.want {
		of.want = s
	} else {
		of.undone++
		if undone = of.undone == contestAfter; undone {
			c.many++
		}
	}
	of.last = now
	return undone
}

// notBefore is when want may be written to an object; zero is at once. What is
// not as it was last time never waits.
func (c *contests) notBefore(uid types.UID, want any) time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	of := c.of[uid]
	if of == nil || of.undone < contestAfter || sum(want) != of.want {
		return time.Time{}
	}
	return of.last.Add(max(contestPause, time.Duration(c.many)*contestEach))
}

// forget drops what was not written for long.
func (c *contests) forget(now time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	over := max(contestOver, 2*time.Duration(len(c.of))*contestEach)
	for uid, of := range c.of {
		if now.Sub(of.last) > over {
			delete(c.of, uid)
			if of.undone >= contestAfter {
				c.many--
			}
		}
	}
}

// contestNote is what is said of such an object.
func contestNote(controller string) note {
	return note{reasonContested, "somebody else writes this status, too, as controller " + controller + ", and not the same: another culvert, with other settings? It is written every 30 s at most while that lasts"}
}

// refusals are those of all objects that are contested.
func (c *contests) refusals(controller string) []Refusal {
	c.mu.Lock()
	defer c.mu.Unlock()
	var all []Refusal
	n := contestNote(controller)
	for _, of := range c.of {
		if of.undone >= contestAfter {
			all = append(all, Refusal{Object: of.object, Reason: n.reason, Message: n.message})
		}
	}
	slices.SortFunc(all, func(a, b Refusal) int { return strings.Compare(a.Object, b.Object) })
	return all
}
