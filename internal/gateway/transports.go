package gateway

import "time"

// A StatusTransport is a transport to a gateway.
type StatusTransport struct {
	Gateway string    `json:"gateway"` // its address
	Carrier string    `json:"carrier"` // of the transport: "connect-h2"
	Up      bool      `json:"up"`      // false while it is tried after others, or not for each request, because it failed
	Since   time.Time `json:"since,omitzero"`
	RetryAt time.Time `json:"retryAt,omitzero"` // from when it is tried again in the background
	Error   string    `json:"error,omitempty"`  // why it is not up
}

func (g *Gateway) transportStatus() []StatusTransport {
	states := g.upstreams.States()
	out := make([]StatusTransport, len(states))
	for i, s := range states {
		out[i] = StatusTransport{Gateway: s.Gateway, Carrier: s.Carrier, Up: !s.Down, Since: s.Since, RetryAt: s.RetryAt}
		if s.Err != nil {
			out[i].Error = firstLine(s.Err)
		}
	}
	return out
}

func (g *Gateway) transportGauges(yield func(labels []string, v float64)) {
	for _, s := range g.upstreams.States() {
		up := 1.0
		if s.Down {
			up = 0
		}
		yield([]string{s.Gateway, s.Carrier}, up)
	}
}
