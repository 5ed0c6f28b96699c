package tunnel_test

import (
	"fmt"

	"culvert.dev/tunnel"
)

// A party is one end of a tunnel: what it did, and what it was shown.
type party struct {
	sent, got int  // bytes; those it got were the right ones
	fin       bool // it ended its stream, after all it sent
	closed    bool // it closed altogether, with fin, and hears nothing any more
	reset     bool // it aborted, likewise
	moot      bool // both streams had ended before it closed or aborted, so perhaps nobody heard
	eof       bool // it was shown the end of the other's stream
	cut       bool // it was told of an abort
}

func (p *party) gone() bool { return p.closed || p.reset }

// A history is all there is to say about one tunnel, and the model of what
// may be said: the tunnel behaves as one connection between the two would.
type history struct {
	sides   [2]party // the client, the service
	ordered bool     // Relay.Abort was called
	limit   tunnel.Reason
	loud    bool // more than a goodbye was sent to a side whose end had been seen
	end     tunnel.End
}

// lost reports whether side i closed before it got all that is meant for it.
// The kernel then answers with a reset.
func (h *history) lost(i int) bool { return h.sides[i].closed && h.sides[1-i].sent > h.sides[i].got }

// over reports whether something has happened that ends the tunnel, whatever
// else its sides do or don't do.
func (h *history) over() bool {
	for i := range h.sides {
		if s := &h.sides[i]; !s.moot && (s.reset || h.lost(i)) {
			return true
		}
	}
	return h.ordered
}

// may reports whether the tunnel may have ended for this reason.
func (h *history) may(why tunnel.Reason) bool {
	done, reset := h.sides[0].fin && h.sides[1].fin, false
	for i := range h.sides {
		s := &h.sides[i]
		reset = reset || s.reset || h.lost(i)
		// A side that ended its stream and then stops listening has said all it
		// had to say: that the rest finds nobody is no abort, if it is little.
		done = done || s.fin && (s.reset || h.lost(i)) && !h.loud
	}
	switch why {
	case tunnel.Done:
		return done
	case tunnel.Reset:
		return reset
	case tunnel.Killed:
		return h.ordered
	}
	return why == h.limit
}

// judge compares the history of a tunnel that has ended with the model.
func (h *history) judge() error {
	if !h.may(h.end.Reason) || (h.end.Err != nil) != (h.end.Reason == tunnel.Reset) {
		return fmt.Errorf("ended for the wrong reason: %v", h)
	}
	whole := h.end.Reason == tunnel.Done && !h.lost(0) && !h.lost(1) && !h.sides[0].reset && !h.sides[1].reset
	taken := [2]int64{h.end.Out, h.end.In}
	for i, who := range [2]string{"client", "service"} {
		s, from := &h.sides[i], &h.sides[1-i]
		switch {
		case int64(s.got) > taken[i] || taken[i] > int64(from.sent):
			return fmt.Errorf("the %s's bytes are counted wrong: %v", who, h)
		case s.eof && (!from.fin || s.got != from.sent):
			return fmt.Errorf("what the %s got looks whole: %v", who, h)
		case whole && (taken[i] != int64(from.sent) || s.cut || !s.gone() && !s.eof):
			return fmt.Errorf("the %s did not get all and the end: %v", who, h)
		case !whole && !s.gone() && !s.cut && !(s.eof && s.fin):
			return fmt.Errorf("the %s was not told of an abort: %v", who, h)
		}
	}
	return nil
}

func (h *history) String() string {
	return fmt.Sprintf("client %+v, service %+v, abort ordered: %v, limit %q, ended %+v", h.sides[0], h.sides[1], h.ordered, h.limit, h.end)
}
