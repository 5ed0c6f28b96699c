package h2

import "culvert.dev/connect/internal/mux"

// The points that frames cost, of HTTP/2's own besides those of package mux.
const (
	budget = mux.MeterBudget

	costFrame    = mux.CostFrame // PING, PRIORITY, an unknown type, a WINDOW_UPDATE beyond those that DATA called for
	costRequest  = mux.CostRequest
	costReset    = mux.CostReset
	costEmpty    = mux.CostEmpty // CONTINUATION, too: CVE-2023-45288
	costSettings = 10            // CVE-2019-9515
	costList     = 10            // a header list that is malformed or over a limit: HPACK makes megabytes of one frame

	updatesPerData = 10 // WINDOW_UPDATEs that one DATA frame of ours calls for
)

// A meter is a mux.Meter that charges only those WINDOW_UPDATE and RST_STREAM
// frames that nothing of ours called for.
type meter struct {
	mux.Meter
	updates int // WINDOW_UPDATEs that are free
	resets  int // RST_STREAMs that are free: of streams that were paid for and have ended
}

// update charges a WINDOW_UPDATE.
func (m *meter) update() bool {
	if m.updates > 0 {
		m.updates--
		return true
	}
	return m.Spend(costFrame)
}

// ended notes the end of a stream that was answered. The peer may not know of it yet
// and reset the stream.
func (m *meter) ended() { m.resets = min(m.resets+1, budget) }

// late charges a RST_STREAM of a stream that has ended.
func (m *meter) late() bool {
	if m.resets > 0 {
		m.resets--
		return true
	}
	return m.Spend(costReset)
}

// sent notes a DATA frame of ours.
func (m *meter) sent() { m.updates = min(m.updates+updatesPerData, 10*budget) }
