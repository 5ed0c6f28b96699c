package gateway

import (
	"cmp"
	"context"
	"log/slog"
	"slices"
	"sync"
	"time"
)

// A Certificate is one that the gateway shows: to its clients, or to another
// gateway on the way to a service.
type Certificate struct {
	UsedBy   string    `json:"usedBy"` // "listener", "dns", "via", "service" or "gateway-api"
	File     string    `json:"file"`   // as the configuration names it; of gateway-api "Secret NAMESPACE/NAME"
	NotAfter time.Time `json:"notAfter"`
}

const (
	expiresSoon = 7 * 24 * time.Hour // before the end, from when the log says so
	expirySaid  = 24 * time.Hour     // between two log lines about a certificate
	expiryLook  = time.Hour          // between two looks at the clock, which may be set
)

// expiryWatch says that certificates will expire, and that they have. Time here is
// the wall clock's, as certificates have it.
type expiryWatch struct {
	log     *slog.Logger
	changed chan struct{} // has room for one

	mu      sync.Mutex // guards what follows
	files   []Certificate
	secrets []Certificate
	soon    map[string]time.Duration     // before their ends, of those of Secrets
	list    []Certificate                // of both
	said    map[Certificate]expirySaying // for those of list
}

// An expirySaying is what the log was last told of a certificate.
type expirySaying struct {
	expired bool
	at      time.Time
}

func newExpiryWatch(log *slog.Logger) *expiryWatch {
	return &expiryWatch{log: log, changed: make(chan struct{}, 1)}
}

// UseCertificates replaces what the gateway knows of the certificates that it
// shows. The log, the metrics and Status say when they expire. It may be called at
// any time.
func (g *Gateway) UseCertificates(list []Certificate) { g.expiry.use(list) }

// UseSecrets does so for the certificates of Secrets of Kubernetes: from when, and until
// when, each is valid, by "NAMESPACE/NAME".
func (g *Gateway) UseSecrets(all map[string][2]time.Time) { g.expiry.useSecrets(all) }

// useSecrets replaces those of Secrets. One that is valid for some days only is said to
// expire soon when a fifth of that is left.
func (w *expiryWatch) useSecrets(all map[string][2]time.Time) {
	list, soon := make([]Certificate, 0, len(all)), make(map[string]time.Duration, len(all))
	for name, valid := range all {
		file := "Secret " + name
		list = append(list, Certificate{UsedBy: ofGatewayAPI, File: file, NotAfter: valid[1]})
		soon[file] = min(expiresSoon, valid[1].Sub(valid[0])/5)
	}
	w.mu.Lock()
	w.secrets, w.soon = list, soon
	w.mu.Unlock()
	w.join()
}

// ofGatewayAPI is Certificate.UsedBy of those of Secrets.
const ofGatewayAPI = "gateway-api"

func (w *expiryWatch) use(list []Certificate) {
	w.mu.Lock()
	w.files = slices.Clone(list)
	w.mu.Unlock()
	w.join()
}

// join makes the list. Of a file that several have in the same use there is one
// Certificate.
func (w *expiryWatch) join() {
	w.mu.Lock()
	list := slices.Concat(w.files, w.secrets)
	slices.SortFunc(list, func(a, b Certificate) int {
		return cmp.Or(a.NotAfter.Compare(b.NotAfter), cmp.Compare(a.UsedBy, b.UsedBy), cmp.Compare(a.File, b.File))
	})
	seen := make(map[[2]string]bool, len(list))
	list = slices.DeleteFunc(list, func(c Certificate) bool {
		key := [2]string{c.UsedBy, c.File}
		again := seen[key]
		seen[key] = true
		return again
	})
	w.list = list
	said := make(map[Certificate]expirySaying, len(list))
	for _, c := range list {
		if s, ok := w.said[c]; ok {
			said[c] = s
		}
	}
	w.said = said
	w.mu.Unlock()
	select {
	case w.changed <- struct{}{}:
	default:
	}
}

// certificates returns the list, what expires first first. Nobody may change it.
func (w *expiryWatch) certificates() []Certificate {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.list
}

// run looks at the clock until ctx is done.
func (w *expiryWatch) run(ctx context.Context) error {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-timer.C:
		case <-w.changed:
		}
		timer.Reset(w.look(time.Now()))
	}
}

// look tells the log what is due now, and returns the time until the next look.
func (w *expiryWatch) look(now time.Time) time.Duration {
	w.mu.Lock()
	defer w.mu.Unlock()
	next := expiryLook
	for _, c := range w.list {
		left := c.NotAfter.Sub(now)
		expired := left < 0
		if !expired {
			next = min(next, left+time.Millisecond) // a certificate is valid at NotAfter
		}
		soon := expiresSoon
		if c.UsedBy == ofGatewayAPI {
			soon = w.soon[c.File]
		}
		if left > soon {
			continue
		}
		if s, ok := w.said[c]; ok && s.expired == expired && now.Sub(s.at) < expirySaid {
			continue
		}
		w.said[c] = expirySaying{expired, now}
		log, text := w.log.Warn, "a certificate expires soon"
		if expired {
			log, text = w.log.Error, "a certificate has expired"
		}
		log(text, "file", c.File, "used_by", c.UsedBy,
			"not_after", c.NotAfter.UTC().Format(time.RFC3339), "left", max(left, 0).Round(time.Minute))
	}
	return next
}

// gauges are what the metrics read at each scrape.
func (w *expiryWatch) gauges(yield func(labels []string, v float64)) {
	for _, c := range w.certificates() {
		yield([]string{c.UsedBy, c.File}, float64(c.NotAfter.Unix()))
	}
}
