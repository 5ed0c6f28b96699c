package h2

import "time"

// What a connection may spend on frames that carry nothing: a bucket of
// points. Honest peers stay far below; every flood that is known is made of
// frames that cost the sender less than the receiver.
const (
	budget = 1000 // points, to begin with and at most
	refill = 200  // points a second

	costFrame    = 1  // PING, PRIORITY, an unknown type, a WINDOW_UPDATE beyond those that DATA called for
	costRequest  = 1  // given back when the request is accepted
	costReset    = 2  // RST_STREAM, or whatever makes us send one: CVE-2023-44487, CVE-2025-8671
	costEmpty    = 5  // DATA or CONTINUATION without a byte: CVE-2019-9518, CVE-2023-45288
	costSettings = 10 // CVE-2019-9515

	updatesPerData = 10 // WINDOW_UPDATEs that one DATA frame of ours calls for
)

// A meter counts them.
type meter struct {
	spent   float64
	at      time.Time
	updates int // WINDOW_UPDATEs that are free
}

// spend is false when the peer has spent more than it has.
func (m *meter) spend(cost float64) bool {
	now := time.Now()
	if !m.at.IsZero() {
		m.spent = max(0, m.spent-now.Sub(m.at).Seconds()*refill)
	}
	m.at = now
	m.spent += cost
	return m.spent <= budget
}

// update spends for a WINDOW_UPDATE.
func (m *meter) update() bool {
	if m.updates > 0 {
		m.updates--
		return true
	}
	return m.spend(costFrame)
}

// sent notes a DATA frame of ours.
func (m *meter) sent() { m.updates = min(m.updates+updatesPerData, 10*budget) }

// giveBack returns points.
func (m *meter) giveBack(cost float64) { m.spent = max(0, m.spent-cost) }
