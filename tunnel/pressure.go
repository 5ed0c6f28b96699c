package tunnel

import (
	"errors"
	"time"
)

// A Pressure says how short of memory the process is. Whoever watches the
// memory tells the Budget.
type Pressure int32

const (
	Calm  Pressure = iota
	Short          // new requests are refused, pending connections are fewer and get less time, tunnels are read in small pieces
	Full           // nothing is accepted, either
)

func (p Pressure) String() string { return [...]string{"calm", "short", "full"}[p] }

const (
	// shortTime is what a preamble has while memory is short, and one part in
	// shortHalfOpen how many there may be: one that is in the middle of a TLS
	// handshake has tens of kilobytes.
	shortTime     = 2 * time.Second
	shortHalfOpen = 8

	// shortRead is the most that is read at once of a side whose other side
	// may not take it, while memory is short, in bytes.
	shortRead = 2 << 10
)

// SetPressure says how short memory is.
func (b *Budget) SetPressure(p Pressure) {
	if b != nil {
		b.pressure.Store(int32(p))
	}
}

// Pressure returns what SetPressure was last told.
func (b *Budget) Pressure() Pressure {
	if b == nil {
		return Calm
	}
	return Pressure(b.pressure.Load())
}

// errFull is why nothing is accepted.
var errFull = errors.New("memory is full")

// preamble shortens the time that preambles have while memory is short, and
// their number.
func (b *Budget) preamble(l Limits) Limits {
	if b.Pressure() == Calm {
		return l
	}
	for _, d := range []*time.Duration{&l.FirstByteTimeout, &l.HandshakeTimeout} {
		if *d <= 0 || *d > shortTime {
			*d = shortTime
		}
	}
	if most, limited := l.PendingLimit(); limited {
		l.MaxPendingConnections = max(most/shortHalfOpen, 1)
	} else {
		l.MaxPendingConnections = DefaultMaxPendingConnections / shortHalfOpen
	}
	return l
}

// AddBuffered counts n bytes that back-pressure keeps in memory. A negative n counts
// what is kept no longer.
func (b *Budget) AddBuffered(n int) {
	if b != nil && n != 0 {
		b.held.Add(int64(n))
	}
}

// Buffered returns how many bytes back-pressure keeps in memory.
func (b *Budget) Buffered() int64 {
	if b == nil {
		return 0
	}
	return b.held.Load()
}

// most is how much may be read at once, of n. The account is exact, where
// Pressure is a look from time to time: thousands that stop to read at once
// must not fill the memory between two looks.
func (b *Budget) most(n int) int {
	if b != nil && (b.pressure.Load() > 0 || b.Backlogs > 0 && b.held.Load() > b.Backlogs) {
		return min(n, shortRead)
	}
	return n
}
