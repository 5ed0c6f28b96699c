package h2

import "culvert.dev/connect"

// What frames cost of a connection's budget, beyond what connect.Meter names.
const (
	budget = connect.MeterBudget

	costFrame    = connect.CostFrame // PING, PRIORITY, an unknown type, a WINDOW_UPDATE beyond those that DATA called for
	costRequest  = connect.CostRequest
	costReset    = connect.CostReset
	costEmpty    = connect.CostEmpty // CONTINUATION, too: CVE-2023-45288
	costSettings = 10                // CVE-2019-9515
	costKiB      = 1                 // a KiB of a header block, which is what its decoding takes; given back like costRequest
	costList     = 10                // a header list that is malformed or over a limit: HPACK makes megabytes of one frame

	updatesPerData = 10 // WINDOW_UPDATEs that one DATA frame of ours calls for
)

// A meter is a connect.Meter that knows what a WINDOW_UPDATE is for.
type meter struct {
	connect.Meter
	updates int // WINDOW_UPDATEs that are free
}

// update spends for a WINDOW_UPDATE.
func (m *meter) update() bool {
	if m.updates > 0 {
		m.updates--
		return true
	}
	return m.Spend(costFrame)
}

// sent notes a DATA frame of ours.
func (m *meter) sent() { m.updates = min(m.updates+updatesPerData, 10*budget) }
