package client

import (
	"bytes"
	"log/slog"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

func TestClock(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log bytes.Buffer
		c := &Clock{Log: slog.New(slog.NewTextHandler(&log, nil))}
		// ask has an answer that takes a while, with a time of the server's clock.
		ask := func(skew, takes time.Duration, header bool) {
			rt := c.Wrap(trip(func() (*http.Response, error) {
				res := &http.Response{StatusCode: 200, Header: http.Header{}}
				if header {
					res.Header.Set("Date", time.Now().Add(skew).UTC().Format(http.TimeFormat))
				}
				time.Sleep(takes)
				return res, nil
			}))
			req, _ := http.NewRequestWithContext(t.Context(), "GET", "https://api.test:6443/version", nil)
			_, _ = rt.RoundTrip(req)
		}
		for _, step := range []struct {
			skew, takes time.Duration
			header      bool
			want        string // the line; "" is none
		}{
			{0, 0, true, ""},
			{0, 0, false, ""},
			{29 * time.Second, 0, true, ""},
			{-29 * time.Second, 0, true, ""},
			{0, 10 * time.Minute, true, ""}, // a slow answer
			{time.Hour, 0, true, `its=ahead by=1h0m0s`},
			{time.Hour, 0, true, ""},
			{20 * time.Second, 0, true, ""}, // not good enough
			{time.Hour, 0, true, ""},
			{0, 0, true, "agrees again"},
			{-time.Hour, 0, true, `its=behind by=59m5`},
		} {
			log.Reset()
			ask(step.skew, step.takes, step.header)
			got := log.String()
			if strings.Count(got, "\n") > 1 || (got != "") != (step.want != "") || !strings.Contains(got, step.want) {
				t.Errorf("skew %v, answered in %v: got %q, want %q", step.skew, step.takes, got, step.want)
			}
			if step.want != "" && !strings.Contains(got, "server=api.test:6443") {
				t.Errorf("got %q, want the server", got)
			}
		}
	})
}
