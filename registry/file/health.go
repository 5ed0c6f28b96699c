package file

import (
	"cmp"
	"slices"
	"strings"
	"time"

	"culvert.dev/registry"
)

// A healthCheck is a kind of check, or an object with it.
type healthCheck struct {
	Kind               string        `yaml:"kind,required,short" what:"check" oneof:"tcp tls http none"`
	Interval           time.Duration `yaml:"interval,min=100ms"` // less would be a load and not a check
	Timeout            time.Duration `yaml:"timeout,min=1ms"`
	Port               uint16        `yaml:"port,min=1,max=65535"`
	Host               string        `yaml:"host" as:"checkHost"`
	Path               string        `yaml:"path" as:"urlPath"`
	ExpectedStatuses   []string      `yaml:"expectedStatuses" what:"a status" as:"statuses" unique:"status" empty:"leave the key out for 200-399"`
	HealthyThreshold   int           `yaml:"healthyThreshold,min=1,max=100"`
	UnhealthyThreshold int           `yaml:"unhealthyThreshold,min=1,max=100"`
}

// registered returns c as the registry has it.
func (c *healthCheck) registered() registry.Check {
	if c.Kind == "none" { // whatever else is said
		return registry.Check{}
	}
	statuses, _ := registry.ParseStatuses(c.ExpectedStatuses...) // each was read as one
	return registry.Check{
		Kind: c.Kind, Interval: c.Interval, Timeout: c.Timeout, Port: c.Port, Host: c.Host, Path: c.Path,
		Statuses: statuses, HealthyThreshold: c.HealthyThreshold, UnhealthyThreshold: c.UnhealthyThreshold,
	}
}

// gatewayCheck is the check of gateways for which the file says nothing.
var gatewayCheck = registry.Check{Kind: "tcp"}

// onlyUDP reports whether a gateway takes nothing that TCP carries.
func onlyUDP(transports []registry.Hop) bool {
	return len(transports) > 0 && !slices.ContainsFunc(transports, func(h registry.Hop) bool { return h.Proto != "quic" && h.Proto != "connect-h3" })
}

// check finds keys that do not go with the kind or with each other.
func (c *healthCheck) check(d *decoder, at mapping) {
	if c.Kind == "" {
		return // which was reported
	}
	for _, only := range []struct {
		key   string
		has   bool
		kinds []string
	}{{"host", c.Host != "", []string{"tls", "http"}}, {"path", c.Path != "", []string{"http"}}, {"expectedStatuses", len(c.ExpectedStatuses) > 0, []string{"http"}}} {
		if only.has && !slices.Contains(only.kinds, c.Kind) {
			d.errorf(keyOf(at.node, only.key), "leave it out", "%s has no effect: it is for %s", only.key, strings.Join(only.kinds, " and "))
		}
	}
	interval := cmp.Or(c.Interval, registry.DefaultCheckInterval)
	if c.Timeout > interval/2 && (c.Interval != 0 || at.value("interval") == nil) {
		d.errorf(keyOf(at.node, "timeout"), "make the interval "+(2*c.Timeout).String()+" or longer", "timeout %v is more than half of the interval of %v, and there are two tries in one", c.Timeout, interval)
	}
}

// checkHealthCheck finds a check that can't be made, and an ejection that has no effect.
func (d *decoder) checkHealthCheck(s *registry.Service, at mapping) {
	if n := at.value("outlierEjection"); n != nil && at.value("via") != nil {
		d.errorf(n, "leave it out: the gateways there look after their endpoints", "outlierEjection has no effect: the service is reached through other gateways")
	}
	for i := range s.Endpoints {
		if hop := s.UncheckedHop(&s.Endpoints[i]); hop != nil && len(s.Via) == 0 {
			d.warnf(at.item("endpoints", i), "use TLS and credentials in its via, or say insecure: true of the last hop", "endpoint %s is not checked: an http check would go to gateway %q without %s", &s.Endpoints[i], hop.Address, hop.Lacks())
		}
	}
	switch {
	case at.value("check") == nil || s.Check.Kind == "":
	case at.value("via") != nil:
		d.errorf(at.value("check"), "leave it out: the gateways there look after their endpoints", "check has no effect: the service is reached through other gateways")
	case s.Check.Kind == "tls" && s.StartTLS != "":
		d.errorf(at.value("check"), "check by tcp", "the endpoints do not answer a ClientHello before startTLS")
	case portless(s) && len(s.Ports) == 0 && !d.carriesSNI() && !d.hasOwnPort(s): // for whom it is wrong anyway
		d.errorf(at.value("check"), "add the port to the endpoint, or ports to the service", "an endpoint has no port to check and the service lists none")
	}
}
