package metrics

import (
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// maxQuestions bounds the label sets of questions: four transports, a view for
// each network, a dozen codes, four sources.
const maxQuestions = 5000

// DNS counts what is asked by DNS. It can be used by any number of goroutines.
type DNS struct {
	queries *prometheus.CounterVec   // transport, view, rcode, source
	took    *prometheus.HistogramVec // source

	mu   sync.RWMutex // guards what follows
	seen map[Question]*counted
}

// A Question is what became of one, in words.
type Question struct {
	Transport string // "udp", "tcp", "tls" or "https"
	View      string // network of the asker; "" for none
	Rcode     string // "NOERROR"; "none" for no answer
	Source    string // "table", "cache", "stale" or "upstream"; "" for a refusal
}

// counted are the time series of one kind of question.
type counted struct {
	n    prometheus.Counter
	took prometheus.Observer
}

// DNS adds the metrics of a DNS server. It is called once.
func (m *Metrics) DNS() *DNS {
	d := &DNS{
		queries: counters("culvert_dns_queries_total",
			"DNS queries. source is empty for refused ones.", "transport", "view", "rcode", "source"),
		took: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name:    "culvert_dns_query_duration_seconds",
			Help:    "Time from a complete DNS query to its answer.",
			Buckets: []float64{.00001, .00005, .0001, .0005, .001, .005, .01, .05, .1, .3, .6, 1, 1.9, 3},
		}, []string{"source"}),
		seen: map[Question]*counted{},
	}
	m.registry.MustRegister(d.queries, d.took)
	return d
}

// Observe counts a question that took so long. It allocates nothing for a kind
// of question it has seen.
func (d *DNS) Observe(q Question, took time.Duration) {
	d.mu.RLock()
	c := d.seen[q]
	d.mu.RUnlock()
	if c == nil {
		c = d.add(q)
	}
	c.n.Inc()
	c.took.Observe(took.Seconds())
}

func (d *DNS) add(q Question) *counted {
	d.mu.Lock()
	defer d.mu.Unlock()
	if c := d.seen[q]; c != nil {
		return c
	}
	as := q
	if len(d.seen) >= maxQuestions {
		as.View = otherName // networks that come and go
		if c := d.seen[as]; c != nil {
			return c
		}
	}
	c := &counted{
		n:    d.queries.WithLabelValues(label(as.Transport), label(as.View), label(as.Rcode), label(as.Source)),
		took: d.took.WithLabelValues(label(as.Source)),
	}
	d.seen[as] = c
	return c
}
