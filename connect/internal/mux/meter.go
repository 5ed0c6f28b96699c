package mux

import (
	"net/http"
	"time"

	"culvert.dev/tunnel"
)

// What a connection of HTTP/2 or HTTP/3 may spend on frames that carry
// nothing: a bucket of points. Honest peers stay below, and see to it (Purse);
// every flood that is known is made of frames that cost the sender less than the
// receiver.
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

// A Purse is what a client reckons the Meter of its peer to be. Those who share
// a connection share what it may spend, and one whose requests are refused or
// given up again and again would have it ended, with the tunnels of all. It is
// not safe for concurrent use.
type Purse struct{ m Meter }

// thrift is how much of the peer's budget a client leaves alone: the frames it
// does not reckon, and clocks that differ.
const thrift = MeterBudget / 4

// Ask is false when there is nothing left to ask with.
func (p *Purse) Ask() bool {
	p.m.Spend(CostRequest)
	if p.m.spent <= MeterBudget-thrift {
		return true
	}
	p.m.GiveBack(CostRequest)
	return false
}

// Accepted, Refused and GaveUp say what became of a request: the peer said yes,
// or no, or was not waited for.
func (p *Purse) Accepted() { p.m.GiveBack(CostRequest) }
func (p *Purse) Refused(status int) {
	p.m.GiveBack(CostRequest - CostRefused)
	if status == http.StatusUnauthorized || status == http.StatusProxyAuthRequired {
		p.m.Spend(CostGuess) // the credentials are wrong, for all that the peer says
	}
}
func (p *Purse) GaveUp() { p.m.Spend(CostReset) }

// Empty is the refusal of a request that was not made because of it.
func (p *Purse) Empty(proxy string) error {
	return tunnel.Refusef(tunnel.Overload, "connect: proxy %q refused so many requests, or had so many given up, that one more would end the connection to it", proxy)
}
