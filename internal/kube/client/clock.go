package client

import (
	"log/slog"
	"net/http"
	"sync"
	"time"
)

// The difference from which on it is logged, and below which the clocks agree again.
const (
	maxSkew  = 30 * time.Second
	goodSkew = maxSkew / 2
)

// A Clock logs once when the API server's clock differs from this machine's, by the Date of its
// answers. Nothing here depends on that, but the validity of certificates and tokens does, on either
// side, and so do the times that people read in Events, logs and conditions. It sends no requests.
type Clock struct {
	Log *slog.Logger

	mu      sync.Mutex // guards differs
	differs bool       // which was logged
}

// Wrap is for rest.Config.Wrap.
func (c *Clock) Wrap(rt http.RoundTripper) http.RoundTripper { return clocked{c, rt} }

type clocked struct {
	*Clock
	next http.RoundTripper
}

func (c clocked) RoundTrip(req *http.Request) (*http.Response, error) {
	asked := time.Now()
	res, err := c.next.RoundTrip(req)
	if err == nil {
		if date, err := http.ParseTime(res.Header.Get("Date")); err == nil {
			c.compare(date, asked, time.Now(), req.URL.Host)
		}
	}
	return res, err
}

// compare compares the Date of an answer, which has no fraction of a second, with the times before
// and after the request. A slow answer makes no difference.
func (c *Clock) compare(date, asked, answered time.Time, host string) {
	var skew time.Duration
	switch {
	case date.After(answered):
		skew = date.Sub(answered)
	case date.Add(time.Second).Before(asked):
		skew = date.Add(time.Second).Sub(asked)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case skew.Abs() > maxSkew && !c.differs:
		c.differs = true
		which := "ahead"
		if skew < 0 {
			which = "behind"
		}
		c.Log.Warn("clock of the API server differs: valid certificates and tokens may be refused",
			"server", host, "its", which, "by", skew.Abs().Round(time.Second).String())
	case skew.Abs() <= goodSkew && c.differs:
		c.differs = false
		c.Log.Info("clock of the API server agrees again", "server", host)
	}
}

// WrappedRoundTripper lets client-go find the transport, to close what is idle.
func (c clocked) WrappedRoundTripper() http.RoundTripper { return c.next }
