package gatewayapi

import (
	"sync"

	"k8s.io/apimachinery/pkg/types"
)

// ownWrites recognize the events of our own writes, which must not cause a translation: with
// thousands of routes nothing else would be done. An event may come before the answer to its write.
//
// Ignoring each event that leaves the generation as it was would not do (docs/internals/adr/0012):
// status that another program removes is written again, and what a class or a Gateway was accepted
// for is read from its status.
type ownWrites struct {
	mu     sync.Mutex
	wrote  map[types.UID]string   // the resourceVersion of our last write
	during map[types.UID][]string // the versions of events during a write that is under way
}

// begin is called before a write. The function that it returns is called after the write, with the
// version that it made, or "". It reports whether there was an event meanwhile that is not of the
// write.
func (e *ownWrites) begin(uid types.UID) (end func(version string) (others bool)) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.wrote == nil {
		e.wrote, e.during = map[types.UID]string{}, map[types.UID][]string{}
	}
	e.during[uid] = []string{}
	return func(version string) (others bool) {
		e.mu.Lock()
		defer e.mu.Unlock()
		for _, v := range e.during[uid] {
			others = others || v != version
		}
		delete(e.during, uid)
		if version != "" {
			e.wrote[uid] = version
		}
		return others
	}
}

// isOwn reports whether an event is of our own write, or is to be judged when the write that is
// under way has ended.
func (e *ownWrites) isOwn(uid types.UID, version string) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	if version == "" {
		return false
	}
	if seen, writing := e.during[uid]; writing {
		e.during[uid] = append(seen, version)
		return true
	}
	return e.wrote[uid] == version
}

// forget is called for objects that are gone.
func (e *ownWrites) forget(uid types.UID) {
	e.mu.Lock()
	defer e.mu.Unlock()
	delete(e.wrote, uid)
}
