package client

import (
	"log/slog"
	"net/http"
	"sync"
	"time"
)

// Clocks may differ by this much, and have to agree so well again, before anything
// is said of it.
const (
	maxSkew  = 30 * time.Second
	goodSkew = maxSkew / 2
)

// A Clock says once when the API server's clock is not this machine's, by what
// its answers say that the time is. Nothing here depends on that, but whether
// certificates and tokens are valid does, on either side, and what people read in
// Events, logs and conditions. It makes no request of its own.
type Clock struct {
	Log *slog.Logger

	mu      sync.Mutex // guards differs
	differs bool       // and it was said
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
			c.see(date, asked, time.Now(), req.URL.Host)
		}
	}
	return res, err
}

// see compares a time that was said between two others, without its fraction of a
// second. That an answer took its time makes no difference.
func (c *Clock) see(date, asked, answered time.Time, host string) {
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
