package gateway

import (
	"bytes"
	"context"
	"log/slog"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"culvert.dev/connect"
	"culvert.dev/tunnel"
)

// An expiryLog may be read while it is written to.
type expiryLog struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *expiryLog) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

// take returns what was written since the last time.
func (b *expiryLog) take() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	defer b.b.Reset()
	return b.b.String()
}

// The log says once a day for seven days that a certificate will expire, and then
// once a day that it has; a new one in the same file ends that.
func TestExpiryIsSaidBeforehand(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const day = 24 * time.Hour
		var log expiryLog
		w := newExpiryWatch(slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
			if a.Key == slog.TimeKey || a.Key == "not_after" {
				return slog.Attr{}
			}
			return a
		}})))
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			_ = w.run(ctx)
		}()
		defer func() {
			cancel()
			<-ended
		}()
		// after lets time go by, and returns what the log was told meanwhile.
		after := func(d time.Duration) string {
			time.Sleep(d)
			synctest.Wait()
			return strings.TrimSpace(log.take())
		}
		const warning = `level=WARN msg="a certificate expires soon" file=gw.crt used_by=listener left=`
		const expired = `level=ERROR msg="a certificate has expired" file=gw.crt used_by=listener left=0s`

		list := []Certificate{
			{"listener", "gw.crt", time.Now().Add(8*day + time.Minute)},
			{"via", "me.crt", time.Now().Add(1000 * day)},
			{"listener", "gw.crt", time.Now().Add(8*day + time.Minute)}, // of another listener
		}
		w.use(list)
		if got := after(day); got != "" {
			t.Fatalf("8 days before the end the log says %q", got)
		}
		for left := 7; left >= 1; left-- {
			if got := after(day); strings.Count(got, "\n") > 0 || !strings.HasPrefix(got, warning) {
				t.Errorf("%d days before the end the log says %q, want one line as %q", left, got, warning)
			}
			// The same list again, of a reload, repeats nothing.
			w.use(list)
			if got := after(0); got != "" {
				t.Errorf("after a reload the log says %q", got)
			}
		}
		if got := after(time.Minute); got != "" {
			t.Errorf("at its end the log says %q", got)
		}
		if got := after(time.Second); got != expired {
			t.Errorf("after the end the log says %q, want %q", got, expired)
		}
		if got := after(day); got != expired {
			t.Errorf("a day after the end the log says %q, want %q", got, expired)
		}

		list[0].NotAfter = time.Now().Add(90 * day)
		list[2].NotAfter = list[0].NotAfter
		w.use(list)
		if got := after(82 * day); got != "" {
			t.Errorf("with a new certificate the log says %q", got)
		}
		list[0].NotAfter = time.Now().Add(-time.Hour)
		w.use(list[:1])
		if got := after(0); got != expired {
			t.Errorf("with one that has expired before the log says %q, want %q", got, expired)
		}
	})
}

// Certificates of Secrets are told of as those of files are, beside them; one that is
// valid for a day not before a fifth of that is left.
func TestExpiryOfSecrets(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log expiryLog
		w := newExpiryWatch(slog.New(slog.NewTextHandler(&log, nil)))
		now := time.Now()
		w.use([]Certificate{{"listener", "a.crt", now.Add(time.Hour)}})
		w.useSecrets(map[string][2]time.Time{
			"shop/short": {now.Add(-12 * time.Hour), now.Add(12 * time.Hour)}, "shop/long": {now.Add(-85 * 24 * time.Hour), now.Add(5 * 24 * time.Hour)},
		})
		w.look(now)
		got := log.take()
		if strings.Count(got, "expires soon") != 2 || !strings.Contains(got, `file="Secret shop/long" used_by=gateway-api`) || !strings.Contains(got, "file=a.crt") {
			t.Errorf("the log says %q", got)
		}
		w.use(nil) // another configuration takes nothing from the Secrets
		if l := w.certificates(); len(l) != 2 || l[0].File != "Secret shop/short" {
			t.Errorf("the certificates are %v", l)
		}
		w.look(now.Add(8 * time.Hour))
		if got := log.take(); strings.Count(got, "expires soon") != 1 || !strings.Contains(got, `file="Secret shop/short"`) {
			t.Errorf("at a fifth before the end the log says %q", got)
		}
	})
}

// What expires first is first, and each scrape has what is in use now.
func TestExpiryMetrics(t *testing.T) {
	g, err := New(t.Context(), Config{Listeners: []Listener{{Address: "127.0.0.1:0", Protocols: []tunnel.Protocol{&connect.Protocol{}}}}})
	if err != nil {
		t.Fatal(err)
	}
	defer g.Close()
	scrape := func() string {
		t.Helper()
		rec := httptest.NewRecorder()
		g.metrics.Handler().ServeHTTP(rec, httptest.NewRequest("GET", "/metrics", nil))
		if rec.Code != 200 {
			t.Fatalf("a scrape: %d", rec.Code)
		}
		return rec.Body.String()
	}
	at := func(s int64) time.Time { return time.Unix(s, 0) }
	g.UseCertificates([]Certificate{{"listener", "a.crt", at(2000)}, {"listener", "a.crt", at(3000)}, {"via", "a.crt", at(1000)}, {"dns", "\xff.crt", at(4000)}})
	got := scrape()
	for _, want := range []string{
		`culvert_certificate_expiry_timestamp_seconds{file="a.crt",used_by="listener"} 2000`,
		`culvert_certificate_expiry_timestamp_seconds{file="a.crt",used_by="via"} 1000`,
		`culvert_certificate_expiry_timestamp_seconds{file="` + "\uFFFD" + `.crt",used_by="dns"} 4000`,
	} {
		if !strings.Contains(got, want+"\n") {
			t.Errorf("no %s", want)
		}
	}
	if l := g.Status().Certificates; len(l) != 3 || l[0].UsedBy != "via" {
		t.Errorf("the certificates are %v", l)
	}
	g.UseCertificates([]Certificate{{"listener", "a.crt", at(5000)}})
	if got := scrape(); !strings.Contains(got, `culvert_certificate_expiry_timestamp_seconds{file="a.crt",used_by="listener"} 5000`+"\n") || strings.Count(got, "culvert_certificate_expiry_timestamp_seconds{") != 1 {
		t.Errorf("after a change the metrics are\n%s", got[strings.Index(got, "culvert_certificate_expiry_timestamp_seconds"):])
	}
}
