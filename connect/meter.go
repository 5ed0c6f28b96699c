package connect

import "time"

// What a connection of HTTP/2 or HTTP/3 may spend on frames that carry
// nothing: a bucket of points. Honest peers stay far below; every flood that is
// known is made of frames that cost the sender less than the receiver.
const (
	MeterBudget = 1000 // points, to begin with and at most
	MeterRefill = 200  // points a second

	CostFrame   = 1 // a frame that is neither of a request nor of its data
	CostRequest = 1 // given back when the request is accepted
	CostReset   = 2 // a reset stream, whoever reset it: CVE-2023-44487, CVE-2025-8671
	CostEmpty   = 5 // data without a byte: CVE-2019-9518
)

// A Meter counts them. It is not safe for concurrent use.
type Meter struct {
	spent float64
	at    time.Time
}

// Spend is false when the peer has spent more than it has.
func (m *Meter) Spend(cost float64) bool {
	now := time.Now()
	if !m.at.IsZero() {
		m.spent = max(0, m.spent-now.Sub(m.at).Seconds()*MeterRefill)
	}
	m.at = now
	m.spent += cost
	return m.spent <= MeterBudget
}

// GiveBack returns points.
func (m *Meter) GiveBack(cost float64) { m.spent = max(0, m.spent-cost) }
