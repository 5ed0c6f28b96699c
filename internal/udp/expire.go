package udp

import (
	"errors"
	"time"

	"culvert.dev/tunnel"
)

// A list has the sessions that are not proven.
type list struct {
	n     int
	queue tunnel.Queue[*session]
}

func (l *list) add(k *session) {
	l.n++
	k.half, k.place.Value = true, k
	k.src.AddPending(1)
	l.queue.Add(&k.place, k.src)
}

func (l *list) remove(k *session) {
	if !k.half {
		return
	}
	l.n--
	k.half = false
	k.src.AddPending(-1)
	l.queue.Remove(&k.place)
}

// expired reports whether a session's time is up, and the reason. The caller holds mu.
func (k *session) expired(now time.Time) (tunnel.Reason, bool) {
	switch k.state {
	case asking:
		most := limit(k.d.s.limits().HandshakeTimeout, tunnel.DefaultHandshakeTimeout)
		return tunnel.HelloTimeout, most > 0 && now.Sub(k.start) >= most
	case carried, local:
		idle := k.idleTimeout()
		return tunnel.Idle, idle > 0 && now.Sub(k.start)-time.Duration(k.moved.Load()) >= idle
	case refused:
		return "", now.Sub(k.since) >= refusalMemory
	}
	return "", false
}

// idleTimeout returns how long a session may be without a datagram; 0 means for ever.
func (k *session) idleTimeout() time.Duration {
	idle := k.idle
	if k.state == local {
		idle = max(limit(k.d.s.limits().UDPIdleTimeout, tunnel.DefaultUDPIdleTimeout), 0)
	}
	settled := !k.half
	if k.opening == nil {
		// A question or two are over with their answers. A client that only sends is
		// served for as long as it goes on.
		settled = k.sent.Load() > 2 && (k.answered.Load() || time.Duration(k.moved.Load()) >= provenAfter)
	}
	if !settled && (idle == 0 || idle > briefIdleTimeout) {
		return briefIdleTimeout
	}
	return idle
}

// expire ends a session whose time is up.
func (k *session) expire(why tunnel.Reason) {
	var err error
	if why == tunnel.HelloTimeout {
		err = errors.New("the hello is not complete in time")
	}
	k.end(why, err)
}
