package registry

import (
	"errors"
	"time"

	"culvert.dev/tunnel"
)

const (
	// circuitFailures is how many connections to an address fail in a row before its circuit
	// opens.
	circuitFailures = 10

	// circuitInterval is how long after a trial of an open circuit the next one may start.
	circuitInterval = time.Second
)

// hasCircuit reports whether ep has a circuit: it is dialed directly. Gateways have outages of
// their own, by what they complete, and what they say of an endpoint may be for one client alone.
func hasCircuit(ep *tunnel.Endpoint) bool {
	return ep.HealthKey == "" && ep.Addr.Addr().IsValid() && (ep.Transport == nil || len(ep.Transport.Info().Hops) == 0)
}

// countUnconnected counts err, of a dial of ep, where the address made no connection. A
// handshake that fails does not count, as it may succeed for another service at that address.
// The caller holds mu.
func (f *failure) countUnconnected(ep *tunnel.Endpoint, err error, now time.Time) {
	if e, ok := errors.AsType[*tunnel.Error](err); !ok || !e.Unconnected || !hasCircuit(ep) {
		return
	}
	if f.unconnected++; f.unconnected <= circuitFailures {
		f.nextTrial = now.Add(circuitInterval)
	}
	f.connectErr = err
	if inner := errors.Unwrap(errors.Unwrap(err)); inner != nil { // without the address
		f.connectErr = inner
	}
}

// open reports whether the circuit is open. The caller holds mu.
func (f *failure) open() bool { return f.unconnected >= circuitFailures }

// circuit is tunnel.Route.Circuit. A connection that is made closes the circuit.
func (h *health) circuit(ep *tunnel.Endpoint, take bool) (due bool, open error) {
	if h.n.Load() == 0 {
		return true, nil // no address has failed: no lock on the way of a connection
	}
	key := keyOf(ep)
	h.mu.RLock()
	f := h.failing[key]
	h.mu.RUnlock()
	if !f.open() || !hasCircuit(ep) {
		return true, nil
	}
	now := time.Now()
	if due = !now.Before(f.nextTrial); due && take {
		due = h.takeTrial(key, now)
	}
	if take && !due {
		h.cutOff.Add(1)
	}
	return due, tunnel.Refusef(tunnel.DialFailed, "dial %s: the circuit is open, as connections have failed for %v; one is tried each %v: %w", ep, now.Sub(f.since).Round(time.Second), circuitInterval, f.connectErr)
}

// takeTrial reports whether the caller makes the trial that is due for key.
func (h *health) takeTrial(key healthKey, now time.Time) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	f, ok := h.failing[key]
	if !ok || !f.open() { // a connection was made meanwhile
		return true
	}
	if now.Before(f.nextTrial) {
		return false
	}
	f.nextTrial = now.Add(circuitInterval)
	h.failing[key] = f
	return true
}

// Circuits returns how many circuits are open, and how many dials of theirs were refused
// since the start.
func (r *Registry) Circuits() (open int, refused uint64) {
	h := &r.health
	if h.n.Load() > 0 {
		h.mu.RLock()
		defer h.mu.RUnlock()
		for _, f := range h.failing {
			if f.open() {
				open++
			}
		}
	}
	return open, h.cutOff.Load()
}
