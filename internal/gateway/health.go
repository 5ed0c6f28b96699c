package gateway

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"slices"
	"strconv"
	"strings"
	"time"

	"culvert.dev/internal/metrics"
	"culvert.dev/internal/udp"
	"culvert.dev/registry"
)

// A StatusStale says that a source of the table is lost.
type StatusStale struct {
	Source string    `json:"source"`
	Since  time.Time `json:"since"`
	Error  string    `json:"error"`

	// Mistaken says that the source was read and makes no sense: what it said
	// before is served.
	Mistaken bool `json:"mistaken,omitempty"`
}

// A StatusHealth is what is known of an address.
type StatusHealth struct {
	Address  string    `json:"address"`
	Host     string    `json:"host,omitempty"`  // the DNS name it came from
	State    string    `json:"state"`           // of the registry's
	Since    time.Time `json:"since"`           // of the state; of the first failure in a row
	By       string    `json:"by"`              // who says so: "dial", "tunnels", or "tcp", "tls" or "http" for a check
	Asked    string    `json:"asked,omitempty"` // host and path that the check asks for
	Error    string    `json:"error,omitempty"` // the last
	Services []string  `json:"services,omitempty"`
	More     int       `json:"moreServices,omitempty"` // that are not listed
	Gateway  string    `json:"gateway,omitempty"`      // the network whose gateway it is
	Network  string    `json:"network,omitempty"`      // that it is in
	Via      string    `json:"via,omitempty"`          // the gateways on the way to it, where it has its own
}

// onTable has changed called for every table, after those that were given before.
func (g *Gateway) onTable(changed func()) {
	before := g.registry.OnTable
	g.registry.OnTable = func() {
		if before != nil {
			before()
		}
		changed()
	}
}

// stale says how old the table is, "" while every source is in touch.
func (g *Gateway) stale() string {
	source, since, err := g.registry.Stale()
	if err == nil {
		return ""
	}
	age := time.Since(since).Round(time.Second)
	if errors.Is(err, registry.ErrInvalid) {
		return fmt.Sprintf("%s has mistakes for %s, and what it said before is served: %s", source, age, firstLine(err))
	}
	return fmt.Sprintf("the table is %s old: source %s: %s", age, source, firstLine(err))
}

// staleSuffix says which source is lost, and why, after what comes of it.
func (g *Gateway) staleSuffix() string {
	source, _, err := g.registry.Stale()
	if err == nil {
		return ""
	}
	return fmt.Sprintf("; source %s: %s", source, firstLine(err))
}

// firstLine is the first of an error's: a file may have many mistakes.
func firstLine(err error) string {
	line, _, _ := strings.Cut(err.Error(), "\n")
	return line
}

func (g *Gateway) staleStatus() *StatusStale {
	source, since, err := g.registry.Stale()
	if err == nil {
		return nil
	}
	return &StatusStale{Source: source, Since: since.UTC(), Error: err.Error(), Mistaken: errors.Is(err, registry.ErrInvalid)}
}

// health returns what is known of addresses.
func (g *Gateway) health() []StatusHealth {
	list := g.registry.Health()
	out := make([]StatusHealth, len(list))
	for i, h := range list {
		out[i] = StatusHealth{
			Address: h.Addr.String(), Host: h.Host, State: h.State, Since: h.Since.UTC(), By: "dial",
			Asked: describeCheck(h.Check), Services: h.Services, More: h.More, Gateway: h.Gateway, Network: h.Network, Via: h.Via,
		}
		if h.Datagrams {
			out[i].Address = udp.Scheme + out[i].Address
		}
		if !h.Addr.Addr().IsValid() { // a gateway by its name
			out[i].Address = net.JoinHostPort(h.Host, strconv.Itoa(int(h.Addr.Port())))
		}
		if h.Check.Kind != "" {
			out[i].By = h.Check.Kind
		}
		if h.Err != nil {
			out[i].Error = h.Err.Error()
		}
	}
	return append(g.ejections(), out...)
}

// ejections returns the endpoints that are ejected.
func (g *Gateway) ejections() []StatusHealth {
	var out []StatusHealth
	for _, e := range g.registry.Ejections() {
		h := StatusHealth{Address: e.Endpoint, State: e.State, Since: e.Since.UTC(), By: "tunnels", Services: []string{e.Service}}
		if e.Err != nil {
			h.Error = e.Err.Error()
		}
		out = append(out, h)
	}
	slices.SortFunc(out, func(a, b StatusHealth) int {
		return cmp.Or(cmp.Compare(a.State, b.State), cmp.Compare(a.Services[0], b.Services[0]), cmp.Compare(a.Address, b.Address))
	})
	return out
}

// describeCheck says what a check asks for: "a.example/healthz", or ":8008/primary" at a
// port of its own.
func describeCheck(c registry.Check) string {
	if c.Port == 0 {
		return c.Host + c.Path
	}
	return c.Host + ":" + strconv.Itoa(int(c.Port)) + c.Path
}

// healthGauges registers what the metrics read of checks and of the table's age.
func (g *Gateway) healthGauges(m *metrics.Metrics) {
	count := func(of func() int64) func() float64 { return func() float64 { return float64(of()) } }
	m.Gauges("culvert_checked", "Addresses with a health check. state is up or down.", "state", map[string]func() float64{
		registry.StateUp:   count(func() int64 { return g.checker.Counts().Up }),
		registry.StateDown: count(func() int64 { return g.checker.Counts().Down }),
	})
	m.Counters("culvert_checks_total", "Health checks. result is passed or failed.", "result", map[string]func() float64{
		"passed": count(func() int64 { return g.checker.Counts().Passed }),
		"failed": count(func() int64 { return g.checker.Counts().Failed }),
	})
	m.Gauge("culvert_circuits_open", "Endpoints that requests are refused for at once, as connections to them fail again and again.", func() float64 {
		open, _ := g.registry.Circuits()
		return float64(open)
	})
	m.Counter("culvert_circuit_refusals_total", "Dials of endpoints that were refused at once, as their circuit is open.", func() float64 {
		_, refused := g.registry.Circuits()
		return float64(refused)
	})
	m.Counter("culvert_ejections_total", "Ejections of endpoints that have failed too often in a row.", count(g.registry.Ejected))
	m.GaugeSet("culvert_endpoints_ejected", "Endpoints of a service that are ejected or on trial. Only for services that have some.", []string{"service"}, func(yield func([]string, float64)) {
		by := map[string]float64{}
		for _, e := range g.registry.Ejections() {
			if by[e.Service]++; len(by) == metrics.MaxServices {
				break
			}
		}
		for service, n := range by {
			yield([]string{service}, n)
		}
	})
	m.Gauge("culvert_table_age_seconds", "Seconds since contact with a source of the table was lost. 0 while every source answers.", func() float64 {
		_, since, err := g.registry.Stale()
		if err == nil {
			return 0
		}
		return time.Since(since).Seconds()
	})
}
