package gateway

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"log/slog"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"culvert.dev/connect"
	"culvert.dev/identity"
	"culvert.dev/internal/testca"
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

// The log says so when a half, a quarter and a tenth of a certificate's life is left, once
// a day for the last seven days, and then once a day that it has expired; a new one in the
// same file ends that.
func TestExpiryIsSaidBeforehand(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const day = 24 * time.Hour
		var log expiryLog
		w := newExpiryWatch(slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
			if a.Key == slog.TimeKey || a.Key == "not_after" {
				return slog.Attr{}
			}
			return a
		}})), nil)
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

		const second = `level=INFO msg="a certificate is in the second half of its life" file=gw.crt used_by=listener left=`
		from, until := time.Now().Add(-10*day+time.Minute), time.Now().Add(90*day+time.Minute)
		list := []Certificate{
			{"listener", "gw.crt", until, from},
			{"via", "me.crt", time.Now().Add(1000 * day), time.Now()},
			{"listener", "gw.crt", until, from}, // of another listener
		}
		w.use(list)
		for _, said := range []struct {
			after time.Duration // days
			want  string        // but for what is left
		}{{39, ""}, {2, second}, {20, ""}, {5, warning}, {13, ""}, {2, warning}, {2, ""}} {
			if got := after(said.after * day); got != "" && said.want == "" || !strings.HasPrefix(got, said.want) || strings.Count(got, "\n") > 0 {
				t.Fatalf("after %d days more the log says %q, want %q", said.after, got, said.want)
			}
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

		list[0].NotBefore, list[0].NotAfter = time.Now(), time.Now().Add(90*day)
		list[2] = list[0]
		w.use(list)
		if got := after(44 * day); got != "" {
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
// valid for a day not before a quarter of that is left.
func TestExpiryOfSecrets(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log expiryLog
		w := newExpiryWatch(slog.New(slog.NewTextHandler(&log, nil)), nil)
		now := time.Now()
		w.use([]Certificate{{"listener", "a.crt", now.Add(time.Hour), time.Time{}}})
		valid := func(from, until time.Duration) *tls.Certificate {
			return &tls.Certificate{Leaf: &x509.Certificate{NotBefore: now.Add(from), NotAfter: now.Add(until)}}
		}
		w.useSecrets(map[string]*tls.Certificate{
			"secret/shop/short": valid(-12*time.Hour, 12*time.Hour), "secret/shop/long": valid(-85*24*time.Hour, 5*24*time.Hour),
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
			t.Errorf("at a quarter before the end the log says %q", got)
		}
	})
}

// A key that a listener, a hop or a Secret has itself is told of as what uses it, and not as
// an entry of the Store too; one that the configuration names is.
func TestExpiryIsSaidOnce(t *testing.T) {
	ca, err := testca.New("edge.test", nil)
	if err != nil {
		t.Fatal(err)
	}
	store, pair := new(identity.Store), issueOf(t, ca, "a.test")
	for _, name := range []string{"file:a.crt", "secret/shop/edge", "edge"} {
		store.Key(name).Set(&pair.TLS)
	}
	w := newExpiryWatch(slog.New(slog.DiscardHandler), store)
	if all := w.all(); len(all) != 1 || all[0].UsedBy != identity.KindKey || all[0].File != "edge" {
		t.Errorf("got %+v, want the key edge alone", all)
	}
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
	g.UseCertificates([]Certificate{{UsedBy: "listener", File: "a.crt", NotAfter: at(2000)}, {UsedBy: "listener", File: "a.crt", NotAfter: at(3000)}, {UsedBy: "via", File: "a.crt", NotAfter: at(1000)}, {UsedBy: "dns", File: "\xff.crt", NotAfter: at(4000)}})
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
	g.UseCertificates([]Certificate{{UsedBy: "listener", File: "a.crt", NotAfter: at(5000)}})
	if got := scrape(); !strings.Contains(got, `culvert_certificate_expiry_timestamp_seconds{file="a.crt",used_by="listener"} 5000`+"\n") || strings.Count(got, "culvert_certificate_expiry_timestamp_seconds{") != 1 {
		t.Errorf("after a change the metrics are\n%s", got[strings.Index(got, "culvert_certificate_expiry_timestamp_seconds"):])
	}
}

// Keys, CAs and revocation lists of the Store are told of, too. One that is replaced in
// time, every half an hour, is said nothing of; when that ends it is told of once at each
// stage, and after the end once a day. The metrics have what ends first of each.
func TestExpiryOfStore(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log expiryLog
		store := new(identity.Store)
		w := newExpiryWatch(slog.New(slog.NewTextHandler(&log, nil)), store)
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
		ca, err := testca.New("corp.example", nil)
		if err != nil {
			t.Fatal(err)
		}
		store.Trust("corp.example").Set(&identity.Bundle{
			TrustDomain: "corp.example", Roots: []*x509.Certificate{ca.Root()},
			Revoked: []*x509.RevocationList{{ThisUpdate: time.Now(), NextUpdate: time.Now().Add(24 * time.Hour)}},
		})
		store.Key("none").Remove(errors.New("gone"))
		issue := func() time.Time {
			pair, err := ca.Issue(testca.Options{SPIFFEID: "spiffe://corp.example/gw", TTL: time.Hour, NotBefore: time.Now()})
			if err != nil {
				t.Fatal(err)
			}
			store.Key("edge").Set(&pair.TLS)
			return pair.TLS.Leaf.NotAfter
		}
		for range 20 {
			issue()
			time.Sleep(30 * time.Minute)
		}
		until := issue()
		synctest.Wait()
		if got := log.take(); got != "" {
			t.Errorf("a key that is replaced in time: the log says %q", got)
		}
		values := map[string]float64{}
		w.gauges(func(labels []string, v float64) { values[strings.Join(labels, " ")] = v })
		if len(values) != 3 || values["key edge"] != float64(until.Unix()) || values["trust corp.example"] != float64(ca.Root().NotAfter.Unix()) || values["revocation-list corp.example"] == 0 {
			t.Errorf("metrics: got %v, want those of the key, of the CA and of its list", values)
		}
		time.Sleep(3 * time.Hour)
		synctest.Wait()
		got := log.take()
		if strings.Count(got, "\n") != 3 || strings.Count(got, `msg="a certificate expires soon" file=edge used_by=key of=spiffe://corp.example/gw`) != 2 || strings.Count(got, `level=ERROR msg="a certificate has expired" file=edge used_by=key`) != 1 {
			t.Errorf("a key that is not replaced: the log says %q, want two warnings and an error", got)
		}
		time.Sleep(12 * time.Hour)
		synctest.Wait()
		if got := log.take(); strings.Count(got, "a revocation list is soon out of date\" file=corp.example") != 2 || strings.Count(got, `level=ERROR msg="a revocation list is out of date: certificates of its CA are refused"`) != 1 {
			t.Errorf("a revocation list that is not replaced: the log says %q", got)
		}
	})
}
