package gateway

import (
	"bytes"
	"cmp"
	"context"
	"crypto/tls"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"culvert.dev/identity"
	"culvert.dev/registry"
)

// A Certificate is one that the gateway shows: to its clients, or to another
// gateway on the way to a service. It is also what expires of a key or of trust that has a
// name.
type Certificate struct {
	// UsedBy is "listener", "dns", "via", "service" or "gateway-api"; of the Store, "key",
	// "trust" or "revocation-list".
	UsedBy string `json:"usedBy"`

	// File is as the configuration names it; of gateway-api it is "Secret NAMESPACE/NAME",
	// and of the Store the name of the key or trust.
	File string `json:"file"`

	NotAfter  time.Time `json:"notAfter"`
	NotBefore time.Time `json:"notBefore,omitzero"` // zero if that is not known
}

const (
	expiresSoon  = 7 * 24 * time.Hour // before the end, from when the log says so every day
	expirySaid   = 24 * time.Hour     // between two log lines about a certificate then
	expiryLook   = time.Hour          // between two looks at the clock, which may be set
	storeLook    = time.Minute        // likewise, where keys may be replaced at any time
	assumedLife  = 10 * expiresSoon   // of a certificate of which it is not known
	shortestHalf = 7 * 24 * time.Hour // of the life of a certificate whose half is told of
)

// expiryWatch says that certificates will expire, and that they have: each when a half, a
// quarter and a tenth of its life is left, and then every day. A certificate that is
// replaced in time, as that of a Workload API, is said nothing of. Time here is the wall
// clock's, as certificates have it.
type expiryWatch struct {
	log     *slog.Logger
	store   *identity.Store // nil if there is none
	changed chan struct{}   // has room for one

	mu      sync.Mutex // guards what follows
	files   []Certificate
	secrets []Certificate
	list    []Certificate             // of both
	said    map[expiring]expirySaying // for those that are there
}

// An expiring is a certificate, or one of several of the same name.
type expiring struct {
	Certificate
	of string // the SPIFFE ID, name, subject or issuer, where that is known
}

// An expirySaying is what the log was last told of a certificate.
type expirySaying struct {
	stage expiryStage
	at    time.Time
}

// An expiryStage is how much of a certificate's life is left.
type expiryStage int

const (
	young expiryStage = iota
	half
	quarter
	tenth
	expired
)

// stageOf returns the stage of c, and how long that lasts.
func stageOf(c *Certificate, now time.Time) (expiryStage, time.Duration) {
	left, life := c.NotAfter.Sub(now), assumedLife
	if !c.NotBefore.IsZero() && c.NotAfter.After(c.NotBefore) {
		life = c.NotAfter.Sub(c.NotBefore)
	}
	ends := [...]time.Duration{young: life / 2, half: life / 4, quarter: life / 10, tenth: -1}
	if life < shortestHalf {
		ends[young] = life / 4
	}
	for stage, end := range ends {
		if left > end {
			return expiryStage(stage), left - max(end, 0)
		}
	}
	return expired, expirySaid
}

func newExpiryWatch(log *slog.Logger, store *identity.Store) *expiryWatch {
	return &expiryWatch{log: log, store: store, changed: make(chan struct{}, 1)}
}

// UseCertificates replaces what the gateway knows of the certificates that it
// shows. The log, the metrics and Status say when they expire. It may be called at
// any time.
func (g *Gateway) UseCertificates(list []Certificate) { g.expiry.use(list) }

// UseKeys replaces the keys of Secrets of Kubernetes in the Store, by their names there:
// "secret/NAMESPACE/NAME". Handshakes that begin afterwards use them, and no table is made.
// Those that are gone go with the call after this one, as the table may still name them. The
// log, the metrics and Status say when they expire. It may be called at any time.
func (g *Gateway) UseKeys(all map[string]*tls.Certificate) {
	g.secrets.use(all)
	g.expiry.useSecrets(all)
}

// secretKeys are the keys of a Store that are Secrets'.
type secretKeys struct {
	store *identity.Store

	mu        sync.Mutex
	now, gone map[string]*tls.Certificate // those in use, and those of the call before that are not; guarded by mu
}

func (s *secretKeys) use(all map[string]*tls.Certificate) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for name, c := range all {
		if old := s.now[name]; old == nil || old != c && !slices.EqualFunc(old.Certificate, c.Certificate, bytes.Equal) {
			s.store.Key(name).Set(c)
		}
	}
	for name := range s.gone {
		if all[name] == nil {
			s.store.Key(name).Remove(identity.ErrUnused)
		}
	}
	gone := maps.Clone(s.now)
	maps.DeleteFunc(gone, func(name string, _ *tls.Certificate) bool { return all[name] != nil })
	s.now, s.gone = maps.Clone(all), gone
}

// useSecrets replaces what the log, the metrics and Status have of Secrets.
func (w *expiryWatch) useSecrets(all map[string]*tls.Certificate) {
	list := make([]Certificate, 0, len(all))
	for name, c := range all {
		list = append(list, Certificate{UsedBy: ofGatewayAPI, File: "Secret " + strings.TrimPrefix(name, registry.SecretKey), NotBefore: c.Leaf.NotBefore, NotAfter: c.Leaf.NotAfter})
	}
	w.mu.Lock()
	w.secrets = list
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

// all returns what expires, of the list and of the Store.
func (w *expiryWatch) all() []expiring {
	list := w.certificates()
	all := make([]expiring, len(list))
	for i, c := range list {
		all[i].Certificate = c
	}
	if w.store == nil {
		return all
	}
	for _, e := range w.store.Entries() {
		if e.Kind == identity.KindKey && e.Implied() {
			continue // it is in the list, as what it is used by
		}
		for _, end := range e.Ends {
			all = append(all, expiring{Certificate{UsedBy: end.Kind, File: e.Name, NotBefore: end.NotBefore, NotAfter: end.NotAfter}, end.Of})
		}
	}
	return all
}

// look tells the log what is due now, and returns the time until the next look.
func (w *expiryWatch) look(now time.Time) time.Duration {
	all := w.all()
	w.mu.Lock()
	defer w.mu.Unlock()
	next := expiryLook
	if w.store != nil {
		next = storeLook
	}
	said := make(map[expiring]expirySaying)
	for _, c := range all {
		stage, lasts := stageOf(&c.Certificate, now)
		next = min(next, lasts+time.Millisecond) // a certificate is valid at NotAfter
		if stage == young {
			continue
		}
		left := c.NotAfter.Sub(now)
		daily := stage == expired || stage == tenth && left <= expiresSoon
		if s := w.said[c]; s.stage == stage && !(daily && now.Sub(s.at) >= expirySaid) {
			said[c] = s
			continue
		}
		said[c] = expirySaying{stage, now}
		w.say(&c, stage, left)
	}
	w.said = said
	return next
}

// say tells the log of a certificate.
func (w *expiryWatch) say(c *expiring, stage expiryStage, left time.Duration) {
	log, text := w.log.Warn, "a certificate expires soon"
	list := c.UsedBy == identity.KindList
	switch {
	case stage == expired && list:
		log, text = w.log.Error, "a revocation list is out of date: certificates of its CA are refused"
	case stage == expired:
		log, text = w.log.Error, "a certificate has expired"
	case stage == half && list:
		log, text = w.log.Info, "a revocation list is in the second half of its life"
	case stage == half:
		log, text = w.log.Info, "a certificate is in the second half of its life"
	case list:
		text = "a revocation list is soon out of date"
	}
	attrs := []any{"file", c.File, "used_by", c.UsedBy}
	if c.of != "" {
		attrs = append(attrs, "of", c.of)
	}
	log(text, append(attrs, "not_after", c.NotAfter.UTC().Format(time.RFC3339), "left", max(left, 0).Round(time.Minute))...)
}

// gauges are what the metrics read at each scrape: of those of one name, what ends first.
func (w *expiryWatch) gauges(yield func(labels []string, v float64)) {
	first := make(map[[2]string]time.Time)
	for _, c := range w.all() {
		key := [2]string{c.UsedBy, c.File}
		if t, ok := first[key]; !ok || c.NotAfter.Before(t) {
			first[key] = c.NotAfter
		}
	}
	for key, t := range first {
		yield(key[:], float64(t.Unix()))
	}
}
