package metrics

import (
	"strings"
	"sync"
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"

	"culvert.dev/tunnel"
)

// Limits of the label values.
const (
	MaxServices = 10_000 // services with time series of their own
	maxPolicies = 1_000  // policies with time series of their own; the others become "other"
	maxProtos   = 32     // protocols; the others become ""
	maxLabel    = 253    // bytes of a label value
	otherName   = "other"
)

// Observe counts o. It holds no lock for longer than a map access takes, and
// allocates nothing for a tunnel of a service it has seen.
func (m *Metrics) Observe(o *tunnel.Outcome) {
	reason := m.reason(o.Reason)
	if o.ID == 0 {
		m.refused.WithLabelValues(reason).Inc()
		return
	}
	m.preamble.Observe(o.Waited.Seconds())
	s := m.service(o.Service)
	m.request(o.Proto, s.name, reason).Inc()
	m.policy(o.Policy, "false")
	for i := range o.Attempts {
		a := &o.Attempts[i]
		if a.Err == nil {
			m.dialOK.Observe(a.Took.Seconds())
			continue
		}
		m.dialFailed.Observe(a.Took.Seconds())
		if tunnel.NoLocalPort(a.Err) {
			m.noPort.Inc()
		}
		m.failure(s.name, m.reason(tunnel.ReasonOf(a.Err))).Inc()
	}
	if o.Carried() {
		m.tunnels.Observe(o.Lasted.Seconds())
		s.in.Add(max(o.BytesIn, 0))
		s.out.Add(max(o.BytesOut, 0))
	}
}

// policy counts d, the decision of a policy, and what those in dry run would have done.
func (m *Metrics) policy(d *tunnel.PolicyDecision, dryRun string) {
	if d == nil {
		return
	}
	if d.Policy != "" {
		name, action := m.policyName(d.Policy), "deny"
		if d.Allowed {
			action = "allow"
		}
		m.policies.WithLabelValues(name, action, dryRun).Inc()
	}
	m.policy(d.DryRun, "true")
}

// policyName returns the name of a policy as a label value.
func (m *Metrics) policyName(name string) string {
	name = label(name)
	c := &m.children
	c.mu.RLock()
	_, ok := c.policies[name]
	c.mu.RUnlock()
	if ok {
		return name
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if _, ok := c.policies[name]; !ok && len(c.policies) >= maxPolicies {
		return otherName
	}
	c.policies[name] = struct{}{}
	return name
}

// reason returns r as a label value: "" unless it is one of tunnel.Reasons.
func (m *Metrics) reason(r tunnel.Reason) string {
	if _, ok := m.reasons[r]; ok {
		return string(r)
	}
	return ""
}

// children are the time series in use, found without building a label set.
type children struct {
	mu       sync.RWMutex // guards what follows; never held over anything that waits
	services map[string]*service
	requests map[key]prometheus.Counter
	failures map[key]prometheus.Counter // of dials; the key has no proto
	protos   map[string]struct{}
	policies map[string]struct{}
}

// A key is a set of label values.
type key struct{ proto, service, reason string }

// A service is one value of the label.
type service struct {
	name    string
	in, out atomic.Int64 // bytes of tunnels that have ended

	shownIn, shownOut int64 // bytes of all tunnels at the last scrape; openTunnels.mu guards them
}

func (c *children) init() {
	c.services = make(map[string]*service)
	c.requests = make(map[key]prometheus.Counter)
	c.failures = make(map[key]prometheus.Counter)
	c.protos = make(map[string]struct{})
	c.policies = make(map[string]struct{})
}

// service finds or makes the service called name. Requests without a route
// belong to the service "".
func (m *Metrics) service(name string) *service {
	name = label(name)
	c := &m.children
	c.mu.RLock()
	s := c.services[name]
	c.mu.RUnlock()
	if s != nil {
		return s
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if !shared(name) && c.services[name] == nil && c.own() >= MaxServices {
		name = otherName
	}
	if s := c.services[name]; s != nil {
		return s
	}
	s = &service{name: name}
	c.services[name] = s
	return s
}

// shared reports whether name is a label value that stays and isn't counted.
func shared(name string) bool { return name == "" || name == otherName }

// own returns how many services have time series of their own.
func (c *children) own() int {
	n := len(c.services)
	for _, name := range []string{"", otherName} {
		if c.services[name] != nil {
			n--
		}
	}
	return n
}

// request finds or makes the counter of requests.
func (m *Metrics) request(proto, service, reason string) prometheus.Counter {
	k := key{m.proto(proto), service, reason}
	return m.children.counter(m.children.requests, k, func() prometheus.Counter {
		return m.requests.WithLabelValues(k.proto, k.service, k.reason)
	})
}

// failure finds or makes the counter of failed dials.
func (m *Metrics) failure(service, reason string) prometheus.Counter {
	k := key{"", service, reason}
	return m.children.counter(m.children.failures, k, func() prometheus.Counter {
		return m.dialFailures.WithLabelValues(k.service, k.reason)
	})
}

// counter finds k in known, which mu guards, or makes it.
func (c *children) counter(known map[key]prometheus.Counter, k key, create func() prometheus.Counter) prometheus.Counter {
	c.mu.RLock()
	n := known[k]
	c.mu.RUnlock()
	if n != nil {
		return n
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	n = create()
	known[k] = n
	return n
}

// proto returns name as a label value. Protocols are named in code, so there
// are few; but the cap does not rest on that.
func (m *Metrics) proto(name string) string {
	name = label(name)
	c := &m.children
	c.mu.RLock()
	_, ok := c.protos[name]
	c.mu.RUnlock()
	if ok {
		return name
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if _, ok := c.protos[name]; !ok && len(c.protos) >= maxProtos {
		return ""
	}
	c.protos[name] = struct{}{}
	return name
}

// Forget drops the time series of services that keep doesn't want, and so
// makes room for others. Call it after a reload that removed services. A
// service with open tunnels keeps its series. keep must not call m.
func (m *Metrics) Forget(keep func(service string) bool) {
	open := m.open.services()
	c := &m.children
	c.mu.Lock()
	defer c.mu.Unlock()
	for name := range c.services {
		if !shared(name) && !keep(name) && open[name] == 0 {
			delete(c.services, name)
		}
	}
	// By what is left and not by what went: an Observe under way may have
	// counted for a service just after it was forgotten.
	for k := range c.requests {
		if !shared(k.service) && c.services[k.service] == nil {
			delete(c.requests, k)
			m.requests.DeleteLabelValues(k.proto, k.service, k.reason)
		}
	}
	for k := range c.failures {
		if !shared(k.service) && c.services[k.service] == nil {
			delete(c.failures, k)
			m.dialFailures.DeleteLabelValues(k.service, k.reason)
		}
	}
}

// label makes a string fit for a label value: valid UTF-8, without which the
// Prometheus client panics, and not over-long. The exposition format escapes
// the rest.
func label(s string) string {
	if len(s) > maxLabel {
		s = s[:maxLabel]
	}
	return strings.ToValidUTF8(s, "\uFFFD")
}
