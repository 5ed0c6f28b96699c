package gatewayapi

import (
	"sync"

	"k8s.io/apimachinery/pkg/types"
)

// echoes are the events that our own writes come back as. They tell us nothing:
// with thousands of routes, to make the table anew for each would be all that
// is done. An event may come before the answer to the write that it is of.
type echoes struct {
	mu     sync.Mutex
	wrote  map[types.UID]string   // the version that our last write made
	during map[types.UID][]string // versions that were heard of while a write is under way
}

// begin is called before a write, and the function that it returns after it,
// with the version that it made, or "". That one is true if there was an event
// meanwhile that is not of the write.
func (e *echoes) begin(uid types.UID) (end func(version string) (others bool)) {
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

// is reports whether an event is known to be an echo, or left to be judged when
// the write that is under way has ended.
func (e *echoes) is(uid types.UID, version string) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	if version == "" {
		return false
	}
	if heard, writing := e.during[uid]; writing {
		e.during[uid] = append(heard, version)
		return true
	}
	return e.wrote[uid] == version
}

// forget is called for objects that are gone.
func (e *echoes) forget(uid types.UID) {
	e.mu.Lock()
	defer e.mu.Unlock()
	delete(e.wrote, uid)
}
