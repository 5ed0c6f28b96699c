package file

import (
	"slices"

	"culvert.dev/tunnel"
	"go.yaml.in/yaml/v3"
)

// An AgentInbound lets callers from elsewhere reach one program of the host: the agent ends
// mutual TLS with its own certificate, and connects to the program where the caller may have it.
// It stands for a listener, a service and a policy.
type AgentInbound struct {
	Name   tunnel.Pattern `yaml:"name,required" as:"servicePattern"`    // of the service; no wildcard
	Listen string         `yaml:"listen,required" as:"inboundListener"` // HOST:PORT
	To     string         `yaml:"to,required" as:"ownProgram"`          // HOST:PORT on loopback
	Allow  []string       `yaml:"allow,required" what:"a SPIFFE id" as:"spiffePattern" unique:"SPIFFE id" empty:"list the ids of callers, or take inbound out"`
	Trust  []string       `yaml:"trust,single" what:"trust" unique:"trust" empty:"name trust of identity.trust"` // empty means that of the agent
	Tell   string         `yaml:"tell" oneof:"nothing proxy" default:"nothing"`                                  // to the program, of the caller
}

// parseInboundListener parses the address of a listener for TLS over TCP.
func parseInboundListener(what, s string) (string, *complaint) {
	if isUDP(s) || isSocket(s) {
		return "", complain("write HOST:PORT, or :PORT for all addresses", "%s %q: callers come by TCP", what, clip(s))
	}
	return parseListenerAddress(what, s)
}

// parseOwnProgram parses the address of a program on this host.
func parseOwnProgram(what, s string) (string, *complaint) {
	if !isLoopback(s) || listenPort(s) == 0 {
		return "", complain("write 127.0.0.1:PORT or [::1]:PORT", "%s %q is no port of loopback: what the agent sends there is not encrypted", what, clip(s))
	}
	return s, nil
}

// check finds what callers cannot ask for.
func (in *AgentInbound) check(d *decoder, at mapping) {
	if in.Name.Wildcard {
		d.errorf(at.value("name"), "write the name that callers ask for", "name %q is a wildcard, and one program has one name", in.Name)
	}
}

// addInbound adds the listeners of programs of the host, with their services and policies.
func (a *Agent) addInbound(d *decoder, c *configuration, at mapping) {
	for i := range a.Inbound {
		in, n := &a.Inbound[i], at.item("inbound", i)
		if n == nil || n.Kind != yaml.MappingNode || in.Name == (tunnel.Pattern{}) || in.To == "" || in.Listen == "" || len(in.Allow) == 0 {
			continue // which is reported
		}
		one := mapping{n}
		name := scalarNode(one.value("name"), in.Name.String())
		ends := mappingNode(n, "names", sequenceNode(n, name), "clientCertificates", scalarNode(n, "required"), "protocols", sequenceNode(n, scalarNode(n, "tcp")))
		if !copyKeys(ends, at, "key", "certificateFile", "keyFile") {
			d.errorf(n, "add key: NAME with the name of one in identity.keys to agent", "inbound needs a certificate of the agent, which callers verify")
			continue
		}
		if !copyKeys(ends, one, "trust") && !copyKeys(ends, at, "trust") {
			d.errorf(n, "add trust: NAME with the name of one in identity.trust", "inbound needs trust, by which callers are verified")
			continue
		}
		addTo(d, "listeners", "a listener", mappingNode(n, "address", scalarNode(one.value("listen"), in.Listen), "tls", ends), &c.Listeners)
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
		rule := mappingNode(n, "sources", sequenceNode(n, mappingNode(n, "spiffe", one.value("allow"))))
		allows := mappingNode(n, "name", scalarNode(n, "agent.inbound "+in.Name.String()), "action", scalarNode(n, "allow"),
			"targets", mappingNode(n, "names", sequenceNode(n, name), "listeners", sequenceNode(n, scalarNode(n, in.Listen))), "rules", sequenceNode(n, rule))
		var p policyEntry
		if d.addNode("policies", allows) {
			into(d, allows, "a policy", &p)
			c.Policies = append(c.Policies, p.registered(d.origin(n.Line)))
			d.policies = append(d.policies, mapping{allows})
		}
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
