package metrics

import (
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"culvert.dev/tunnel"
)

// readShare limits how much of a processor scrapes may take to read what open tunnels
// have carried: after a reading of 10 ms the next one is 200 ms later at the earliest.
const readShare = 20

var (
	openDesc  = gaugeDesc("culvert_tunnels_open", "Open tunnels.", "service")
	bytesDesc = counterDesc("culvert_tunnel_bytes_total",
		"Bytes carried by tunnels, while they are open and after. direction is in (client to service) or out.", "service", "direction")
)

func gaugeDesc(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc(name, help, labels, nil)
}

func counterDesc(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc(name, help, labels, nil)
}

// openTunnels is a prometheus.Collector: it adds what the open tunnels of a service
// have carried to what those that have ended did.
type openTunnels struct {
	m     *Metrics
	count func() map[string]int                 // nil for no tunnels
	bytes func() map[string]tunnel.ServiceBytes // likewise

	mu   sync.Mutex // guards what follows, and what services have shown
	next time.Time  // when bytes is read again at the earliest
}

// OpenTunnels sets the source of the figures of open tunnels, by service: their number, and what
// they have carried. Both are read at scrapes. A tunnel must be missing in bytes
// before it is observed. Call it before the first scrape.
func (m *Metrics) OpenTunnels(count func() map[string]int, bytes func() map[string]tunnel.ServiceBytes) {
	m.open.count, m.open.bytes = count, bytes
}

// services returns the number of open tunnels by service.
func (o *openTunnels) services() map[string]int {
	if o.count == nil {
		return nil
	}
	return o.count()
}

// Describe implements prometheus.Collector.
func (o *openTunnels) Describe(to chan<- *prometheus.Desc) {
	to <- openDesc
	to <- bytesDesc
}

// Collect implements prometheus.Collector.
func (o *openTunnels) Collect(to chan<- prometheus.Metric) {
	o.mu.Lock()
	defer o.mu.Unlock()
	open := make(map[*service]int)
	for name, n := range o.services() {
		open[o.m.service(name)] += n
	}
	if o.count != nil {
		o.m.service("") // so that the gauge is there before the first tunnel
	}
	o.read()
	for _, s := range o.m.children.all() {
		if o.count != nil {
			to <- prometheus.MustNewConstMetric(openDesc, prometheus.GaugeValue, float64(open[s]), s.name)
		}
		to <- prometheus.MustNewConstMetric(bytesDesc, prometheus.CounterValue, float64(s.shownIn), s.name, "in")
		to <- prometheus.MustNewConstMetric(bytesDesc, prometheus.CounterValue, float64(s.shownOut), s.name, "out")
	}
}

// read updates what the services show. What has ended is read first: a tunnel that
// ends meanwhile is counted in neither, and never in both. As a counter never goes
// down, such bytes show at the next scrape. The caller holds mu.
func (o *openTunnels) read() {
	begin := time.Now()
	if begin.Before(o.next) {
		return
	}
	sums := make(map[*service]tunnel.ServiceBytes)
	for _, s := range o.m.children.all() {
		sums[s] = tunnel.ServiceBytes{In: s.in.Load(), Out: s.out.Load()}
	}
	if o.bytes != nil {
		for name, live := range o.bytes() {
			s := o.m.service(name)
			sum := sums[s]
			sum.In += live.In
			sum.Out += live.Out
			sums[s] = sum
		}
		now := time.Now()
		o.next = now.Add(readShare * now.Sub(begin))
	}
	for s, sum := range sums {
		s.shownIn, s.shownOut = max(s.shownIn, sum.In), max(s.shownOut, sum.Out)
	}
}

// all returns the services, in no order.
func (c *children) all() []*service {
	c.mu.RLock()
	defer c.mu.RUnlock()
	return slices.Collect(maps.Values(c.services))
}
