package registry

import (
	"fmt"
	"log/slog"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"culvert.dev/tunnel"
)

// An OutlierEjection says when an endpoint of a service that fails again and again is
// tried last for a while. A failure is a dial that fails, and a tunnel that the endpoint
// aborts before its first byte, or closes in place of an answer to a ClientHello.
type OutlierEjection struct {
	ConsecutiveFailures int           // without an answer in between; 0 means DefaultConsecutiveFailures
	EjectionTime        time.Duration // the first time; each time in a row is longer by as much; 0 means DefaultEjectionTime
	MaxEjectedPercent   int           // of the endpoints that a request may go to, rounded down; 0 means DefaultMaxEjectedPercent
}

// Defaults of an OutlierEjection.
const (
	DefaultConsecutiveFailures = 5
	DefaultEjectionTime        = 30 * time.Second
	DefaultMaxEjectedPercent   = 50
)

// Bounds of an OutlierEjection.
const (
	MaxConsecutiveFailures = 1000
	MinEjectionTime        = time.Second
	MaxEjectionTime        = time.Hour
)

// maxEjectionFactor is how many times EjectionTime an ejection takes at most.
const maxEjectionFactor = 10

// complete returns e with its defaults.
func (e OutlierEjection) complete() OutlierEjection {
	if e.ConsecutiveFailures == 0 {
		e.ConsecutiveFailures = DefaultConsecutiveFailures
	}
	if e.EjectionTime == 0 {
		e.EjectionTime = DefaultEjectionTime
	}
	if e.MaxEjectedPercent == 0 {
		e.MaxEjectedPercent = DefaultMaxEjectedPercent
	}
	return e
}

// outliers are the endpoints of one service that are watched. They outlive the table.
type outliers struct {
	service string
	events  atomic.Pointer[ejectionEvents]  // nil until a Registry has the table
	rules   atomic.Pointer[OutlierEjection] // of the current table, complete; nil for none
	out     atomic.Int32                    // endpoints that are ejected or on trial
}

// use has e of the service in force from now on; nil for none.
func (o *outliers) use(service string, e *OutlierEjection) {
	if o.service == "" { // which is read without a lock later
		o.service = service
	}
	if e == nil {
		o.rules.Store(nil)
		return
	}
	whole := e.complete()
	o.rules.Store(&whole)
}

// ejectionEvents are told of every change.
type ejectionEvents struct {
	log      *slog.Logger // nil discards
	ejected  atomic.Int64
	returned atomic.Int64
}

// An ejectionState is the state of one endpoint at one moment.
type ejectionState uint8

const (
	inUse   ejectionState = iota
	ejected               // its time is not over
	due                   // its time is over, and the next request for it is a trial
	onTrial               // a request is on its way to it, and others go elsewhere
)

// An outlier is what is known of one endpoint's failures. It implements
// tunnel.EndpointWatcher.
//
// It is in use until it has failed often enough in a row, and then ejected. Once that time
// is over, one request tries it: an answer brings it back, a failure ejects it for longer,
// and so do failures soon after it is back. A trial of which nothing is heard for
// retryWindow counts as passed where it was dialed, and else is repeated.
type outlier struct {
	of      *outliers
	addr    string
	trouble atomic.Bool // there is something below; it spares those that answer the lock

	mu        sync.Mutex // guards what follows
	failures  int        // in a row, while it is in use
	ejections int        // in a row
	isOut     bool       // ejected, due or on trial
	since     time.Time  // of the ejection that began it
	until     time.Time  // the end of the ejection, or when it came back after it
	trial     time.Time  // the end of the trial
	dialed    bool       // the trial stands
	last      time.Time  // of the last failure
	err       error      // of it
}

// Answered implements tunnel.EndpointWatcher.
func (o *outlier) Answered() {
	if !o.trouble.Load() {
		return
	}
	now := time.Now()
	o.mu.Lock()
	defer o.mu.Unlock()
	switch o.state(now) {
	case due, onTrial:
		o.comeBack(now)
	case inUse:
		o.failures = 0
		o.forgive(now)
	}
}

// Unanswered implements tunnel.EndpointWatcher.
func (o *outlier) Unanswered(err error) { o.failed(err) }

// failed counts a failure.
func (o *outlier) failed(err error) {
	now := time.Now()
	rules := o.of.rules.Load()
	if rules == nil {
		return
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	switch o.state(now) {
	case ejected:
		return // it began before
	case inUse:
		if now.Sub(o.last) > failureExpiry {
			o.failures = 0
		}
		o.forgive(now)
		o.trouble.Store(true)
		o.last, o.err = now, err
		if o.failures++; o.failures < rules.ConsecutiveFailures {
			return
		}
	}
	o.last, o.err = now, err
	o.eject(now, rules)
}

// eject ejects the endpoint, for longer than the last time in a row. The caller holds mu.
func (o *outlier) eject(now time.Time, rules *OutlierEjection) {
	failures := max(o.failures, 1) // on trial, one
	if !o.isOut {
		o.isOut, o.since = true, now
		o.of.out.Add(1)
	}
	o.ejections = min(o.ejections+1, maxEjectionFactor)
	lasts := time.Duration(o.ejections) * rules.EjectionTime
	o.failures, o.until, o.trial, o.dialed = 0, now.Add(lasts), time.Time{}, false
	events := o.of.events.Load()
	if events == nil {
		return
	}
	events.ejected.Add(1)
	if events.log != nil {
		events.log.Warn("endpoint ejected; it is tried last", "service", o.of.service, "endpoint", o.addr, "failures", failures, "retry_in", lasts, "err", o.err)
	}
}

// comeBack ends the ejection. The caller holds mu.
func (o *outlier) comeBack(now time.Time) {
	o.isOut, o.failures, o.until, o.trial = false, 0, now, time.Time{}
	o.of.out.Add(-1)
	events := o.of.events.Load()
	if events == nil {
		return
	}
	events.returned.Add(1)
	if events.log != nil {
		events.log.Info("ejected endpoint is back", "service", o.of.service, "endpoint", o.addr, "after", now.Sub(o.since).Round(time.Millisecond))
	}
}

// forgive forgets earlier ejections once the endpoint has been in use for as long as the
// last one took. The caller holds mu.
func (o *outlier) forgive(now time.Time) {
	if rules := o.of.rules.Load(); rules == nil || now.Sub(o.until) > time.Duration(o.ejections)*rules.EjectionTime {
		o.ejections = 0
	}
	o.trouble.Store(o.failures > 0 || o.ejections > 0)
}

// state returns the state at now. The caller holds mu.
func (o *outlier) state(now time.Time) ejectionState {
	switch {
	case !o.isOut:
		return inUse
	case now.Before(o.until):
		return ejected
	case o.trial.IsZero():
		return due
	case now.Before(o.trial):
		return onTrial
	case o.dialed: // and nothing bad has come of it
		o.comeBack(now)
		return inUse
	}
	return due
}

// reported takes in how a dial has ended.
func (o *outlier) reported(err error) {
	if err != nil {
		o.failed(err)
		return
	}
	if !o.trouble.Load() {
		return
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.state(time.Now()) == onTrial {
		o.dialed = true
	}
}

// forget reports whether nothing more is known of the endpoint that is worth keeping, and
// forgets the rest: it may be gone.
func (o *outlier) forget(now time.Time) bool {
	if !o.trouble.Load() {
		return true
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	if (now.Sub(o.until) < failureExpiry || now.Sub(o.last) < failureExpiry) && o.of.rules.Load() != nil {
		return false
	}
	if o.isOut {
		o.isOut = false
		o.of.out.Add(-1)
	}
	o.failures, o.ejections = 0, 0
	o.trouble.Store(false)
	return true
}

// try begins a trial where one is due.
func (o *outlier) try(now time.Time) {
	if o.of.out.Load() == 0 {
		return
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.state(now) == due {
		o.trial, o.dialed = now.Add(retryWindow), false
	}
}

// outlierOf returns what is known of an endpoint's failures, nil where it is not watched.
func outlierOf(ep *tunnel.Endpoint) *outlier {
	if ep.Load == nil {
		return nil
	}
	o, _ := ep.Load.Watcher.(*outlier)
	return o
}

// eachEjected calls mark with the index of each endpoint that is left out now: those
// that were ejected first, up to the share of eps that may be.
func eachEjected(eps []tunnel.Endpoint, mark func(i int)) {
	if len(eps) == 0 {
		return
	}
	first := outlierOf(&eps[0])
	if first == nil || first.of.out.Load() == 0 {
		return
	}
	rules := first.of.rules.Load()
	if rules == nil {
		return
	}
	now := time.Now()
	type one struct {
		at    int
		since time.Time
	}
	var out []one
	for i := range eps {
		o := outlierOf(&eps[i])
		if o == nil || !o.trouble.Load() {
			continue
		}
		o.mu.Lock()
		if s := o.state(now); s == ejected || s == onTrial {
			out = append(out, one{i, o.since})
		}
		o.mu.Unlock()
	}
	most := len(eps) * rules.MaxEjectedPercent / 100
	if len(out) > most {
		slices.SortStableFunc(out, func(a, b one) int { return a.since.Compare(b.since) })
		out = out[:most]
	}
	for _, o := range out {
		mark(o.at)
	}
}

// ejectLast moves the endpoints that are left out behind the others, and begins a trial
// of the first one where that is due.
func ejectLast(eps []tunnel.Endpoint) {
	first := outlierOf(&eps[0])
	if first == nil || first.of.out.Load() == 0 {
		return
	}
	out := make([]bool, len(eps))
	n := 0
	eachEjected(eps, func(i int) { out[i], n = true, n+1 })
	if n > 0 {
		last := make([]tunnel.Endpoint, 0, n)
		kept := eps[:0]
		for i := range out {
			if out[i] {
				last = append(last, eps[i])
			} else {
				kept = append(kept, eps[i])
			}
		}
		copy(eps[len(kept):], last)
	}
	if o := outlierOf(&eps[0]); o != nil {
		o.try(time.Now())
	}
}

// An Ejection is an endpoint that is ejected, on trial or due for one.
type Ejection struct {
	Service  string
	Endpoint string // its address, or the next hop to it
	State    string // StateEjected, or StateSuspect where its time is over
	Since    time.Time
	Err      error // the last
}

// Ejections returns the endpoints that are ejected, in no order, and Ejected how often
// one was. They are for people and metrics.
func (r *Registry) Ejections() (list []Ejection) {
	t := r.Table()
	if t == nil {
		return nil
	}
	now := time.Now()
	for _, b := range t.balances {
		if b.outliers.out.Load() == 0 || b.outliers.rules.Load() == nil {
			continue
		}
		b.mu.Lock()
		for _, l := range b.loads {
			o := l.Watcher.(*outlier)
			o.mu.Lock()
			if s := o.state(now); s != inUse {
				e := Ejection{Service: o.of.service, Endpoint: o.addr, State: StateEjected, Since: o.since, Err: o.err}
				if s == due {
					e.State = StateSuspect
				}
				list = append(list, e)
			}
			o.mu.Unlock()
		}
		b.mu.Unlock()
	}
	return list
}

// Ejected returns how often an endpoint was ejected.
func (r *Registry) Ejected() int64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.ejections == nil {
		return 0
	}
	return r.ejections.ejected.Load()
}

// ParseOutlierEjection parses the text that an annotation has: "true" for the defaults, or
// settings such as "consecutiveFailures=3; ejectionTime=1m; maxEjectedPercent=30".
func ParseOutlierEjection(text string) (*OutlierEjection, error) {
	const hint = `write "true", or settings such as "consecutiveFailures=3; ejectionTime=1m; maxEjectedPercent=30"`
	e := &OutlierEjection{}
	if strings.TrimSpace(text) == "true" {
		return e, nil
	}
	for item := range strings.SplitSeq(text, ";") {
		key, value, _ := strings.Cut(item, "=")
		value = strings.TrimSpace(value)
		var to *int
		most := 0
		switch key = strings.TrimSpace(key); key {
		case "consecutiveFailures":
			to, most = &e.ConsecutiveFailures, MaxConsecutiveFailures
		case "maxEjectedPercent":
			to, most = &e.MaxEjectedPercent, 100
		case "ejectionTime":
			d, err := time.ParseDuration(value)
			if err != nil || d < MinEjectionTime || d > MaxEjectionTime {
				return nil, fmt.Errorf("ejectionTime %.40q is not a duration from %v to %v", value, MinEjectionTime, MaxEjectionTime)
			}
			e.EjectionTime = d
			continue
		default:
			return nil, fmt.Errorf("%.40q is unknown: %s", key, hint)
		}
		n, err := strconv.ParseUint(value, 10, 32)
		if err != nil || n < 1 || n > uint64(most) {
			return nil, fmt.Errorf("%s %.40q is not a number from 1 to %d", key, value, most)
		}
		*to = int(n)
	}
	return e, nil
}
