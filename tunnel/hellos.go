package tunnel

import (
	"hash/maphash"
	"sync/atomic"
)

// TLS that is passed on by its name says nothing of the gateways that it came
// through. But it is passed on as it came: where the ways of several gateways
// form a loop, the same ClientHello comes again and again, with the client's
// random bytes in it, and is never answered. (QUIC has connection ids, which
// package udp knows again.)

// DefaultMaxHelloRepeats is how often the same ClientHello may be on its way to services at
// once. A client sends each of its own once. But a generator of load may repeat
// one, to services that wait for more, and is no loop: so the limit is far above
// what such a program has waiting, and below the local ports that a loop over
// another gateway would take.
const DefaultMaxHelloRepeats = 4096

// hellos counts the ClientHellos that are on their way to a service and have not
// been answered, by their fingerprint. It holds few of them: of two in the same
// place the newer one is counted. So it takes as much memory whatever comes, and
// a loop is found a few times round later where thousands wait.
type hellos struct {
	places atomic.Pointer[[hellosPlaces]atomic.Uint32] // nil until there is one
}

const (
	hellosPlaces = 1 << 14 // of four bytes: which hello, and how often
	hellosCount  = hellosPlaces - 1
)

var fingerprintSeed = maphash.MakeSeed()

// fingerprintBytes is how much of a hello is looked at: all 32 random bytes if it
// is in records of a usual size, and many if each byte has its own.
const fingerprintBytes = 128

// Fingerprint returns what tells a ClientHello from others, as it arrived:
// passed on it is the same. It is never 0.
func Fingerprint(hello []byte) uint32 {
	return uint32(maphash.Bytes(fingerprintSeed, hello[:min(len(hello), fingerprintBytes)])) | hellosPlaces
}

// enter counts a hello that is about to be passed on. It is false where the same
// one is on its way as often as most.
func (h *hellos) enter(fingerprint uint32, most int) bool {
	places := h.places.Load()
	if places == nil {
		h.places.CompareAndSwap(nil, new([hellosPlaces]atomic.Uint32))
		places = h.places.Load()
	}
	place := &places[fingerprint%hellosPlaces]
	which := fingerprint &^ hellosCount
	for {
		old := place.Load()
		now := which | 1
		if old&^hellosCount == which {
			if int(old&hellosCount) >= min(most, hellosCount) {
				return false
			}
			now = old + 1
		}
		if place.CompareAndSwap(old, now) {
			return true
		}
	}
}

// leave takes back an enter.
func (h *hellos) leave(fingerprint uint32) {
	place := &h.places.Load()[fingerprint%hellosPlaces]
	for {
		old := place.Load()
		if old&^hellosCount != fingerprint&^hellosCount || old&hellosCount == 0 {
			return // another one has its place
		}
		if place.CompareAndSwap(old, old-1) {
			return
		}
	}
}
