package file

import (
	"strings"

	"culvert.dev/registry"
	"culvert.dev/tunnel"
)

// A reverseSessions has services reached through gateways that this one connects to.
type reverseSessions struct {
	To       []string  `yaml:"to,required,single" what:"a gateway" as:"hostPort" unique:"gateway" empty:"name a gateway"`
	Protocol string    `yaml:"protocol" oneof:"connect connect-h2 connect-h3 websocket hbone" default:"connect"`
	Path     string    `yaml:"path" as:"tunnelPath"` // of websocket; "" means the default
	Replicas int       `yaml:"replicas,min=1,max=16" default:"1"`
	Pool     int       `yaml:"poolConnections,min=0,max=64" default:"0"`
	Expose   []exposed `yaml:"expose,required" what:"a name" empty:"list the names to serve"`
	hopAccess
}

// An exposed is a name that others reach through the gateways.
type exposed struct {
	Name   tunnel.Pattern    `yaml:"name,required" what:"a name" as:"pattern"`
	To     registry.Endpoint `yaml:"to" what:"an endpoint" as:"gateway"` // zero means that the services of this file have the name
	Port   uint16            `yaml:"port,min=1,max=65535"`               // 0 means any
	Group  string            `yaml:"group" as:"label"`
	Weight uint16            `yaml:"weight,min=1,max=1000" default:"1"`
	Allow  []string          `yaml:"allow" what:"an id" unique:"id" empty:"leave the key out to have the gateway's policies decide"`

	Insecure bool `yaml:"insecure"` // what is no TLS may go over pool connections
}

// A Reverse is the gateways that this one keeps sessions to, and the names that it serves by
// them.
type Reverse struct {
	Gateways []registry.Hop // each of one address
	Replicas int            // of each gateway, that get a session each
	Pool     int            // connections to each that wait for requests
	Expose   []Exposed
}

// An Exposed is a name that a Reverse serves.
type Exposed struct {
	Name   tunnel.Pattern
	To     registry.Endpoint // zero means that services of the table have the name
	Port   uint16            // 0 means any
	Group  string
	Weight uint16
	Allow  []string

	Insecure bool // what is no TLS may go over pool connections
}

// registered returns r as the rest of the program has it, without the content of its files.
func (r *reverseSessions) registered() *Reverse {
	if r == nil {
		return nil
	}
	out := &Reverse{Replicas: r.Replicas, Pool: r.Pool}
	for _, to := range readable(r.To) {
		hop := r.hopAccess.registered()
		hop.Proto = r.Protocol
		switch r.Protocol {
		case "connect", "connect-h2":
			to = "https://" + to
		case "websocket":
			to = "wss://" + to + r.Path
		}
		hop.Addresses = []string{to}
		out.Gateways = append(out.Gateways, hop)
	}
	for i := range r.Expose {
		out.Expose = append(out.Expose, Exposed(r.Expose[i]))
	}
	return out
}

// check finds what no gateway takes.
func (r *reverseSessions) check(d *decoder, at mapping) {
	if has(at.node, "path") && r.Protocol != "websocket" {
		d.errorf(keyOf(at.node, "path"), "leave it out", "path has no effect: it is for websocket only")
	}
	if has(at.node, "insecure") {
		d.errorf(keyOf(at.node, "insecure"), "leave it out", "insecure has no effect: sessions are inside of TLS")
	}
	if has(at.node, "forwardIdentity") || has(at.node, "behind") {
		d.errorf(at.node, "leave it out", "forwardIdentity and behind have no effect: a session has no other caller than this gateway")
	}
	if r.Protocol != "" {
		d.checkAccess(at.node, r.Protocol, true)
	}
	h := r.hopAccess.registered()
	d.checkPeers(at.node, &h)
	if at.node != nil && !has(at.node, "key") && !has(at.node, "certificateFile") && !has(at.node, "tokenFile") && !has(at.node, "userFile") && !has(at.node, "jwtSVID") {
		d.errorf(at.node, "add key: NAME with the name of one in identity.keys, or tokenFile", "reverse needs credentials: a name has an owner, which the gateway has to know")
	}
	if r.Pool > 0 && r.Protocol == "connect-h3" {
		d.errorf(keyOf(at.node, "poolConnections"), "use another protocol, or leave it out", "poolConnections are TCP connections, and connect-h3 reaches the gateways by UDP")
	}
	type place struct {
		name tunnel.Pattern
		port uint16
	}
	first := map[place]int{}
	for i := range r.Expose {
		e, n := &r.Expose[i], at.item("expose", i)
		if e.Name.Suffix.IsReserved() {
			d.errorf(n, "give it another name", "name %q: %s", e.Name, registry.ReservedName)
		}
		if e.Insecure && r.Pool == 0 {
			d.errorf(keyOf(n, "insecure"), "leave it out, or add poolConnections", "insecure has no effect: it is about pool connections, and there are none")
		} else if e.Insecure {
			d.warnf(keyOf(n, "insecure"), "", "name %q is insecure: what its clients and the service send goes to the gateways unencrypted, unless it is TLS", e.Name)
		}
		p := place{e.Name, e.Port}
		if j, twice := first[p]; twice && e.Name != (tunnel.Pattern{}) {
			d.errorf(n, "keep one of them", "name %q is already in line %d", e.Name, at.item("expose", j).Line)
			continue
		}
		first[p] = i
		for j, id := range e.Allow {
			if strings.ContainsAny(id, " \t\n") || id == "" {
				d.errorf(mapping{n}.item("allow", j), "write an id as the log has it", "%q is not the id of a caller", clip(id))
			}
		}
	}
}

// checkReverse finds names that nothing here serves.
func (d *decoder) checkReverse() {
	r := d.cfg.Reverse
	if r == nil {
		return
	}
	at := d.root.object("reverse")
	for i := range r.Expose {
		e := &r.Expose[i]
		if n := at.item("expose", i); !has(n, "to") && len(d.cfg.Services) == 0 && d.cfg.Kubernetes == nil && e.Name != (tunnel.Pattern{}) {
			d.errorf(n, "add to: HOST:PORT, or services", "name %q leads nowhere: it has no to, and there are no services", e.Name)
		}
	}
}

// checkGroups finds groups that two services have: the connectors of one would get the
// clients of the other.
func (d *decoder) checkGroups() {
	first := map[string]int{}
	for i, s := range d.cfg.Services {
		for j := range s.Endpoints {
			g := s.Endpoints[j].Group
			if g == "" {
				continue
			}
			if of, taken := first[g]; taken && of != i {
				d.errorf(d.services[i].item("endpoints", j), "give each service a group of its own", "group %q is one of service %q already", clip(g), clip(d.cfg.Services[of].Name))
				continue
			}
			first[g] = i
		}
	}
}
