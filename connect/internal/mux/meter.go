package mux

import (
	"net/http"
	"time"

	"culvert.dev/tunnel"
)

// The peer of an HTTP/2 or HTTP/3 connection pays for frames that carry nothing from a
// bucket of points. Every known flood is made of frames that cost the sender less than
// the receiver. Honest peers stay below the limit, and count for that (Purse).
const (
	MeterBudget = 1000 // points, to begin with and at most
	MeterRefill = 200  // points a second

	CostFrame   = 1    // a frame that is neither of a request nor of its data
	CostRequest = 1    // given back when the request is accepted
	CostRefused = 0.25 // what is kept of it when the request is refused, and the client waits for that
	CostKiB     = 1    // each whole one of a header list as it was sent; given back when the request is accepted
	CostReset   = 2    // a reset stream, whoever reset it: CVE-2023-44487, CVE-2025-8671; nothing where it was accepted, and has cost its client a tunnel
	CostGuess   = 50   // credentials that are wrong: to check a password takes long on purpose, and to send one does not
	CostEmpty   = 5    // data without a byte: CVE-2019-9518
)

// A Meter counts the points of one peer. It is not safe for concurrent use.
type Meter struct {
	spent float64
	at    time.Time
}

// Spend charges points. It reports false if the peer has spent more than it had.
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

// A Purse is a client's estimate of the Meter of its peer. The users of a connection
// share what it may spend: one of them whose requests are refused or given up again and
// again would have the connection ended, with the tunnels of all. It is not safe for
// concurrent use.
type Purse struct{ m Meter }

// thrift is how much of the peer's budget a client leaves alone, for the frames that it
// does not count and for clocks that differ.
const thrift = MeterBudget / 4

// Ask charges a request. It reports false if too little is left for one.
func (p *Purse) Ask() bool {
	p.m.Spend(CostRequest)
	if p.m.spent <= MeterBudget-thrift {
		return true
	}
	p.m.GiveBack(CostRequest)
	return false
}

// Answered notes the answer to a request. An interim one, 1xx, changes nothing.
func (p *Purse) Answered(status int) {
	switch {
	case status/100 == 1:
	case status/100 == 2:
		p.m.GiveBack(CostRequest)
	default:
		p.m.GiveBack(CostRequest - CostRefused)
		if status == http.StatusUnauthorized || status == http.StatusProxyAuthRequired {
			p.m.Spend(CostGuess) // the credentials are wrong, for all that the peer says
		}
	}
}

// GaveUp notes that the answer to a request was not waited for.
func (p *Purse) GaveUp() { p.m.Spend(CostReset) }

// NotSent notes that a request was not sent after all.
func (p *Purse) NotSent() { p.m.GiveBack(CostRequest) }

// Empty returns the refusal of a request for which too little was left.
func (p *Purse) Empty(proxy string) error {
	return tunnel.Refusef(tunnel.Overload, "connect: proxy %q refused so many requests, or had so many given up, that one more would end the connection to it", proxy)
}
