package file

import (
	"net"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"

	"culvert.dev/registry"
	"culvert.dev/tunnel"
)

// An AgentInbound lets callers from elsewhere reach one program of the host: the agent ends
// mutual TLS with its own certificate, and connects to the program where the caller may have it.
// Those of one address share a listener. Beside that one, each stands for a service and a policy,
// and a policy for all of the listener says that nothing else is reached by it.
type AgentInbound struct {
	Name   tunnel.Pattern `yaml:"name" as:"servicePattern"`             // of the service; no wildcard, zero for what callers reach whatever name they ask for
	Listen string         `yaml:"listen,required" as:"inboundListener"` // HOST:PORT
	To     string         `yaml:"to,required" as:"ownProgram"`          // HOST:PORT on loopback
	Allow  []string       `yaml:"allow,required" what:"a SPIFFE id" as:"spiffePattern" unique:"SPIFFE id" empty:"list the ids of callers, or take inbound out"`
	Trust  []string       `yaml:"trust,single" what:"trust" unique:"trust" empty:"name trust of identity.trust"` // empty means that of the agent
	Tell   string         `yaml:"tell" oneof:"nothing proxy" default:"nothing"`                                  // to the program, of the caller

	// Protocol is what callers speak inside of TLS. With tcp it is what the program speaks, and they
	// ask for Name by TLS, or without one for whatever they have. The others have the name in a request, and TLS ends for any name.
	Protocol string `yaml:"protocol" oneof:"tcp hbone websocket connect connect-h2 proxy" default:"tcp"`
}

// parseInboundListener parses the address of a listener for TLS over TCP.
func parseInboundListener(what, s string) (string, *complaint) {
	if isUDP(s) || isSocket(s) || isInherited(s) {
		return "", complain("write HOST:PORT, or :PORT for all addresses", "%s %q: callers come by TCP", what, clip(s))
	}
	return parseListenerAddress(what, s)
}

// parseOwnProgram parses the address of a program on this host.
func parseOwnProgram(what, s string) (string, *complaint) {
	if !registry.OnLoopback(s) || listenPort(s) == 0 {
		return "", complain("write 127.0.0.1:PORT or [::1]:PORT", "%s %q is no port of loopback: what the agent sends there is not encrypted", what, clip(s))
	}
	return s, nil
}

// check finds what callers cannot ask for.
func (in *AgentInbound) check(d *decoder, at mapping) {
	if in.Protocol != "" && in.Protocol != registry.PlainTCP && !has(at.node, "name") {
		d.errorf(at.where("protocol"), "add the name that callers write into their requests", "inbound has no name, and with %s a request says which service it is for", in.Protocol)
	}
	if in.Name.Wildcard {
		d.errorf(at.value("name"), "write the name that callers ask for", "name %q is a wildcard, and one program has one name", in.Name)
	}
}

// service returns the name of the service that the program is, where it has any.
func (in *AgentInbound) service(one mapping) (name *yaml.Node, ok bool) {
	if in.Name != (tunnel.Pattern{}) {
		return scalarNode(one.value("name"), in.Name.String()), true
	}
	host, port, _ := net.SplitHostPort(in.Listen)
	label := strings.Trim("inbound-"+strings.NewReplacer(".", "-", ":", "-", "%", "-").Replace(host), "-") + "-" + port
	return scalarNode(one.node, label+".invalid"), in.Protocol == registry.PlainTCP && !has(one.node, "name") // RFC 6761 section 6.4: it is no other service's
}

// An inboundListener is the listener that programs of the host share.
type inboundListener struct {
	*AgentInbound              // the first
	at            *yaml.Node   // of the first
	service       *yaml.Node   // of the first
	tls           []*yaml.Node // of the listener
}

// addInbound adds the listeners of programs of the host, with their services and policies.
func (a *Agent) addInbound(d *decoder, c *configuration, at mapping) {
	var listeners []*inboundListener
	for i := range a.Inbound {
		in, n := &a.Inbound[i], at.item("inbound", i)
		if n == nil || n.Kind != yaml.MappingNode || in.To == "" || in.Listen == "" || in.Protocol == "" || len(in.Allow) == 0 {
			continue // which is reported
		}
		one := mapping{n}
		name, ok := in.service(one)
		if !ok {
			continue // which is reported
		}
		ends := mappingNode(n, "clientCertificates", scalarNode(n, "required"), "protocols", sequenceNode(n, scalarNode(n, in.Protocol)))
		if !copyKeys(ends, at, "key", "certificateFile", "keyFile") {
			d.errorf(n, "add key: NAME with the name of one in identity.keys to agent", "inbound needs a certificate of the agent, which callers verify")
			continue
		}
		if !copyKeys(ends, one, "trust") && !copyKeys(ends, at, "trust") {
			d.errorf(n, "add trust: NAME with the name of one in identity.trust", "inbound needs trust, by which callers are verified")
			continue
		}
		if in.Protocol == registry.PlainTCP && has(n, "name") {
			ends.Content = append(ends.Content, scalarNode(n, "names"), sequenceNode(n, name))
		}
		k := slices.IndexFunc(listeners, func(l *inboundListener) bool { return l.Listen == in.Listen })
		if k < 0 {
			listeners = append(listeners, &inboundListener{AgentInbound: in, at: n, service: name, tls: []*yaml.Node{ends}})
		} else if !listeners[k].share(d, in, one, ends) {
			continue
		}
		if !has(n, "name") || !slices.ContainsFunc(a.Inbound[:i], func(b AgentInbound) bool { return b.Name == in.Name && b.To == in.To && b.Tell == in.Tell }) {
			in.addService(d, c, one, name)
		}
		rule := mappingNode(n, "sources", sequenceNode(n, mappingNode(n, "spiffe", one.value("allow"))))
		addInboundPolicy(d, c, name.Value+" at "+in.Listen,
			mappingNode(n, "names", sequenceNode(n, name), "listeners", sequenceNode(n, scalarNode(n, in.Listen))), rule)
	}
	for _, l := range listeners {
		address := scalarNode(mapping{l.at}.value("listen"), l.Listen)
		listener := mappingNode(l.at, "address", address, "tls", sequenceNode(l.at, l.tls...))
		if l.Name == (tunnel.Pattern{}) {
			listener.Content = append(listener.Content, scalarNode(l.at, "service"), l.service)
		}
		addTo(d, "listeners", "a listener", listener, &c.Listeners)
		addInboundPolicy(d, c, "nothing else at "+l.Listen, mappingNode(l.at, "listeners", sequenceNode(l.at, address)))
	}
	a.checkTold(d, at)
	if c.Reverse != nil {
		a.holdReverse(d, c.Reverse, at)
	}
}

// sameProgram reports whether two addresses on loopback may be those of one program.
func sameProgram(a, b string) bool {
	hostA, portA, errA := net.SplitHostPort(a)
	hostB, portB, errB := net.SplitHostPort(b)
	return errA == nil && errB == nil && portA == portB && (hostA == hostB || hostA == "localhost" || hostB == "localhost")
}

// checkTold refuses listeners that lead to a program without a PROXY header of the agent while
// another one sends it: the program expects the header, and a caller could write it.
func (a *Agent) checkTold(d *decoder, at mapping) {
	for i := range a.Inbound {
		in := &a.Inbound[i]
		k := slices.IndexFunc(a.Inbound, func(b AgentInbound) bool { return sameProgram(b.To, in.To) && b.Tell == "proxy" })
		if in.Tell == "nothing" && k >= 0 {
			d.errorf(at.item("inbound", i), "write tell: proxy here, too, or give this one a port of the program that expects no header",
				"the program at %q expects the PROXY header of line %d, and here the agent sends none: callers could write the header themselves", in.To, at.item("inbound", k).Line)
		}
	}
}

// holdReverse limits what r exposes of inbound services to the callers that those allow. The
// gateways enforce it, as requests on their sessions have no identity of a caller.
func (a *Agent) holdReverse(d *decoder, r *reverseSessions, at mapping) {
	for i := range r.Expose {
		e, n := &r.Expose[i], d.root.object("reverse").item("expose", i)
		to := mapping{n}.word("to")
		var allow []string
		for k, in := range a.Inbound {
			line := at.item("inbound", k).Line
			switch {
			case sameProgram(to, in.To) && in.Tell == "proxy":
				d.errorf(mapping{n}.value("to"), "leave to out, and expose the name of the inbound listener",
					"the program at %q expects the PROXY header of line %d, and to sends none: callers could write the header themselves", to, line)
			case in.Name == (tunnel.Pattern{}) || len(e.Allow) > 0:
			case in.Name == e.Name:
				allow = append(allow, in.Allow...)
			case to == "" && e.Name.Matches(in.Name.Suffix) && !slices.ContainsFunc(r.Expose, func(o exposed) bool { return o.Name == in.Name }):
				d.errorf(n, "expose that name beside the wildcard, or add allow",
					"name %q exposes %q of agent.inbound in line %d, too, to any caller that the gateways let in", e.Name, in.Name, line)
			}
		}
		if len(allow) > 0 && e.Group != "" {
			d.warnf(n, "", "name %q has a group of the gateways' configuration, so their policies decide who may connect, and not allow of agent.inbound", e.Name)
			continue
		}
		if slices.Sort(allow); len(allow) > 0 {
			e.Allow = slices.Compact(allow)
		}
	}
}

// share has in use the listener l, too, where they go together.
func (l *inboundListener) share(d *decoder, in *AgentInbound, one mapping, ends *yaml.Node) bool {
	const hint = "give it a port of its own, or write the same"
	switch {
	case !has(one.node, "name") || l.Name == (tunnel.Pattern{}):
		d.errorf(one.node, "give each a name, or a port of its own", "listen %q is already in line %d, and without a name there is one program at a port", in.Listen, l.at.Line)
		return false
	case in.Protocol != l.Protocol:
		d.errorf(one.where("protocol"), hint, "listen %q is already in line %d with the protocol %s, and this is %s", in.Listen, l.at.Line, l.Protocol, in.Protocol)
		return false
	case in.Protocol == registry.PlainTCP: // by the name that a caller asks for
		l.tls = append(l.tls, ends)
	case !slices.Equal(in.Trust, l.Trust):
		d.errorf(one.where("trust"), hint, "listen %q is already in line %d with other trust, and callers are verified before they name a service", in.Listen, l.at.Line)
		return false
	}
	return true
}

// addService adds the service that the program is.
func (in *AgentInbound) addService(d *decoder, c *configuration, one mapping, name *yaml.Node) {
	n := one.node
	served := mappingNode(n, "name", name, "endpoints", sequenceNode(n, one.value("to")))
	if in.Tell == "proxy" {
		tells := mappingNode(n, "position", scalarNode(n, "beforeTLS"), "trustNetwork", booleanNode(n, true))
		served.Content = append(served.Content, scalarNode(n, "forwardIdentity"), tells)
	}
	var s service
	if d.addNode("services", served) {
		into(d, served, "a service", &s)
		c.Services = append(c.Services, s.registered(d.origin(n.Line)))
		d.services = append(d.services, mapping{served})
	}
}

// addInboundPolicy adds a policy that allows whom rules match, and denies all others.
func addInboundPolicy(d *decoder, c *configuration, name string, targets *yaml.Node, rules ...*yaml.Node) {
	n := mappingNode(targets, "name", scalarNode(targets, "agent.inbound "+name), "action", scalarNode(targets, "allow"),
		"targets", targets, "rules", sequenceNode(targets, rules...))
	var p policyEntry
	if d.addNode("policies", n) {
		into(d, n, "a policy", &p)
		c.Policies = append(c.Policies, p.registered(d.origin(n.Line)))
		d.policies = append(d.policies, mapping{n})
	}
}

// copyKeys copies those of keys that from has, and reports whether it has any.
func copyKeys(to *yaml.Node, from mapping, keys ...string) (any bool) {
	for i := 0; i+1 < len(from.node.Content); i += 2 {
		if key := from.node.Content[i]; slices.Contains(keys, key.Value) {
			to.Content = append(to.Content, key, from.node.Content[i+1])
			any = true
		}
	}
	return any
}
