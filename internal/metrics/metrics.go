package metrics

import (
	"net/http"
	"regexp"
	"runtime"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"culvert.dev/tunnel"
)

// Metrics counts what the gateway does. Make one with New; it can be used by
// any number of goroutines.
type Metrics struct {
	registry *prometheus.Registry
	reasons  map[tunnel.Reason]struct{}

	requests     *prometheus.CounterVec   // proto, service, reason
	refused      *prometheus.CounterVec   // reason
	dialFailures *prometheus.CounterVec   // service, reason
	policies     *prometheus.CounterVec   // policy, action, dry_run
	dials        *prometheus.HistogramVec // result
	noPort       prometheus.Counter
	tunnels      prometheus.Histogram
	preamble     prometheus.Histogram

	dialOK, dialFailed prometheus.Observer

	build *prometheus.GaugeVec

	children children
	open     openTunnels
}

// New returns Metrics with a registry of its own, which also holds the Go
// runtime's and the process's metrics.
func New() *Metrics {
	m := &Metrics{
		registry: prometheus.NewRegistry(),
		reasons:  make(map[tunnel.Reason]struct{}),
		requests: counters("culvert_requests_total",
			"Requests that have ended, whether refused or carried. reason says how.", "proto", "service", "reason"),
		refused: counters("culvert_connections_refused_total",
			"Connections that ended before they made a request.", "reason"),
		dialFailures: counters("culvert_dial_failures_total",
			"Failed dials of one endpoint. The request may have succeeded with the next one.", "service", "reason"),
		policies: counters("culvert_policy_decisions_total",
			"Requests that a policy has decided on, when they have ended. action is allow or deny; dry_run is true for what policies in dry run would have done.", "policy", "action", "dry_run"),
		dials: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name:    "culvert_dial_duration_seconds",
			Help:    "Duration of one dial of one endpoint. result is ok or failed.",
			Buckets: []float64{.0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2, 3, 5, 10},
		}, []string{"result"}),
		noPort: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "culvert_dials_without_port_total",
			Help: "Dials that failed because the host had no free local port, or no address of that family. Widen net.ipv4.ip_local_port_range, or add endpoints.",
		}),
		tunnels: histogram("culvert_tunnel_duration_seconds",
			"Time from accept to the end of the tunnel.",
			.01, .1, 1, 10, 60, 300, 1800, 3600, 6*3600, 24*3600, 7*24*3600),
		preamble: histogram("culvert_preamble_wait_seconds",
			"Time from accept to the complete request.",
			.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 15),
		build: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "culvert_build_info",
			Help: "Always 1. The labels are the versions of culvert and Go.",
		}, []string{"version", "goversion"}),
	}
	m.registry.MustRegister(
		m.requests, m.refused, &m.open, m.dialFailures, m.policies, m.dials, m.noPort, m.tunnels, m.preamble,
		m.build,
		// What the last collection found in use, besides the usual: the heap's
		// size also counts what is garbage and what is set aside.
		collectors.NewGoCollector(collectors.WithGoCollectorRuntimeMetrics(collectors.GoRuntimeMetricsRule{
			Matcher: regexp.MustCompile("^/gc/heap/live:bytes$"),
		})),
		// It reads /proc and needs a descriptor for that. Without one it leaves
		// its metrics out; the scrape still works.
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}),
	)
	for _, r := range tunnel.Reasons() {
		m.reasons[r] = struct{}{}
	}
	m.dialOK = m.dials.WithLabelValues("ok")
	m.dialFailed = m.dials.WithLabelValues("failed")
	// A rate needs its first point before the first event.
	for _, r := range tunnel.Reasons() {
		if endsConnection(r) {
			m.refused.WithLabelValues(string(r))
		}
	}
	m.children.init()
	m.open.m = m
	return m
}

// endsConnection reports whether r is a way for a connection to end before it
// asked for anything.
func endsConnection(r tunnel.Reason) bool {
	switch r {
	case tunnel.NoHello, tunnel.HelloTimeout, tunnel.BadPreamble, tunnel.BadHello, tunnel.BadRequest,
		tunnel.BadMethod, tunnel.TooLarge, tunnel.Gone, tunnel.Overload, tunnel.Flood, tunnel.NoSNI, tunnel.NoAuth:
		return true
	}
	return false
}

func counters(name, help string, labels ...string) *prometheus.CounterVec {
	return prometheus.NewCounterVec(prometheus.CounterOpts{Name: name, Help: help}, labels)
}

func histogram(name, help string, buckets ...float64) prometheus.Histogram {
	return prometheus.NewHistogram(prometheus.HistogramOpts{Name: name, Help: help, Buckets: buckets})
}

// Handler serves the metrics in the formats of Prometheus and OpenMetrics. A
// collector that fails leaves its metrics out and the others in: a gateway at
// its limits is when they are needed.
func (m *Metrics) Handler() http.Handler {
	return promhttp.HandlerFor(m.registry, promhttp.HandlerOpts{
		ErrorHandling:       promhttp.ContinueOnError,
		MaxRequestsInFlight: 4, // a scrape of 10,000 services takes megabytes
	})
}

// BuildInfo sets what culvert_build_info says.
func (m *Metrics) BuildInfo(version string) {
	m.build.Reset()
	m.build.WithLabelValues(label(version), runtime.Version()).Set(1)
}

// Gauge adds a gauge that is read at each scrape, by any number of goroutines;
// f must not wait for anything. The name is written in full. A name that is
// taken or malformed panics: it stands in the source.
func (m *Metrics) Gauge(name, help string, f func() float64) {
	m.registry.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: name, Help: help}, f))
}

// Counter adds a counter that is read at each scrape, as Gauge does. The name
// ends in _total, and f never goes down.
func (m *Metrics) Counter(name, help string, f func() float64) {
	m.registry.MustRegister(prometheus.NewCounterFunc(prometheus.CounterOpts{Name: name, Help: help}, f))
}

// Gauges adds gauges of one name, told apart by a label; of is by its values,
// which are words that stand in the source, too.
func (m *Metrics) Gauges(name, help, label string, of map[string]func() float64) {
	for value, f := range of {
		m.registry.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: name, Help: help, ConstLabels: prometheus.Labels{label: value}}, f))
	}
}

// Counters adds counters of one name, as Gauges does.
func (m *Metrics) Counters(name, help, label string, of map[string]func() float64) {
	for value, f := range of {
		m.registry.MustRegister(prometheus.NewCounterFunc(prometheus.CounterOpts{Name: name, Help: help, ConstLabels: prometheus.Labels{label: value}}, f))
	}
}

// GaugeSet adds gauges of one name that come and go: each scrape has f call yield
// once for each, with a value for each label. f bounds how many there are, and does
// not wait for anything.
func (m *Metrics) GaugeSet(name, help string, labels []string, f func(yield func(labels []string, v float64))) {
	m.registry.MustRegister(&valueSet{prometheus.NewDesc(name, help, labels, nil), prometheus.GaugeValue, f})
}

// CounterSet adds counters of one name that come and go, as GaugeSet does.
func (m *Metrics) CounterSet(name, help string, labels []string, f func(yield func(labels []string, v float64))) {
	m.registry.MustRegister(&valueSet{prometheus.NewDesc(name, help, labels, nil), prometheus.CounterValue, f})
}

// A valueSet is a prometheus.Collector.
type valueSet struct {
	desc *prometheus.Desc
	kind prometheus.ValueType
	read func(yield func(labels []string, v float64))
}

func (s *valueSet) Describe(to chan<- *prometheus.Desc) { to <- s.desc }

func (s *valueSet) Collect(to chan<- prometheus.Metric) {
	s.read(func(labels []string, v float64) {
		values := make([]string, len(labels))
		for i, l := range labels {
			values[i] = label(l)
		}
		to <- prometheus.MustNewConstMetric(s.desc, s.kind, v, values...)
	})
}
