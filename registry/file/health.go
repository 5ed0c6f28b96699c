package file

import (
	"net/netip"
	"slices"
	"strings"
	"time"

	"culvert.dev/registry"
	"go.yaml.in/yaml/v3"
)

// checkKinds are those a check may be of.
var checkKinds = []string{"tcp", "tls", "http", "none"}

// leastInterval is the least between two checks: what is less is a load, and not
// a check.
const leastInterval = 100 * time.Millisecond

// gatewayCheck is the check of gateways for which the file says nothing.
var gatewayCheck = registry.Check{Kind: "tcp"}

// onlyUDP reports whether a gateway takes nothing that TCP carries.
func onlyUDP(transports []string) bool {
	return len(transports) > 0 && !slices.ContainsFunc(transports, func(t string) bool { return t != "quic" && t != "connect-h3" })
}

// healthCheck reads how it is found out whether something works: the kind, or an
// object with it.
func (d *decoder) healthCheck(n *yaml.Node, to *registry.Check) {
	*to = registry.Check{}
	if n.Kind == yaml.ScalarNode {
		d.checkKind(n, to)
		return
	}
	before := len(d.errs)
	object(d, n, "check", checkFields, to)
	d.need(n, "check", "kind")
	if len(d.errs) > before {
		return
	}
	for _, only := range []struct {
		key   string
		kinds []string
	}{{"host", []string{"tls", "http"}}, {"path", []string{"http"}}} {
		if has(n, only.key) && !slices.Contains(only.kinds, to.Kind) {
			d.errorf(keyOf(n, only.key), "leave it out", "%s has no effect: it is for %s", only.key, strings.Join(only.kinds, " and "))
		}
	}
	interval := to.Interval
	if interval == 0 {
		interval = registry.DefaultCheckInterval
	}
	if to.Timeout > interval/2 {
		d.errorf(keyOf(n, "timeout"), "make the interval "+(2*to.Timeout).String()+" or longer", "timeout %v is more than half of the interval of %v, and there are two tries in one", to.Timeout, interval)
	}
	if to.Kind == "" { // none, with whatever else
		*to = registry.Check{}
	}
}

func (d *decoder) checkKind(n *yaml.Node, to *registry.Check) {
	if s, ok := d.word(n, "check", checkKinds...); ok && s != "none" {
		to.Kind = s
	}
}

var checkFields = []field[registry.Check]{
	{"kind", func(d *decoder, n *yaml.Node, to *registry.Check) { d.checkKind(n, to) }},
	durationField("interval", leastInterval, func(c *registry.Check) *time.Duration { return &c.Interval }),
	durationField("timeout", time.Millisecond, func(c *registry.Check) *time.Duration { return &c.Timeout }),
	{"host", func(d *decoder, n *yaml.Node, to *registry.Check) {
		s, ok := d.text(n, "host")
		if !ok {
			return
		}
		name, port, complaint := cutPort(s)
		if complaint == nil && port != 0 {
			complaint = complain("leave the port out", "it has a port")
		}
		if complaint == nil {
			if _, err := netip.ParseAddr(name); err == nil {
				complaint = complain("write the name that clients ask for", "it is an address")
			}
		}
		if complaint == nil {
			host, c := parseName(name)
			to.Host, complaint = host.String(), c
		}
		if complaint != nil {
			d.errorf(n, complaint.hint, "host %q: %s", clip(s), complaint.msg)
		}
	}},
	{"path", func(d *decoder, n *yaml.Node, to *registry.Check) {
		s, ok := d.text(n, "path")
		switch {
		case !ok:
		case s[0] != '/' || strings.ContainsFunc(s, func(r rune) bool { return r <= ' ' || r > '~' || r == '#' }):
			d.errorf(n, "write it as /healthz, with %20 and the like for what is not ASCII", "path %q is not that of a URL", clip(s))
		default:
			to.Path = s
		}
	}},
}

// checkHealthCheck finds a check that can't be made.
func (d *decoder) checkHealthCheck(s *registry.Service, at *serviceAt) {
	switch {
	case at.value("check") == nil || s.Check.Kind == "":
	case at.value("via") != nil:
		d.errorf(at.value("check"), "leave it out: the gateways there look after their endpoints", "check has no effect: the service is reached through other gateways")
	case at.portless && len(s.Ports) == 0 && !d.carriesSNI() && !d.hasOwnPort(s): // for whom it is wrong anyway
		d.errorf(at.value("check"), "add the port to the endpoint, or ports to the service", "an endpoint has no port to check and the service lists none")
	}
}
