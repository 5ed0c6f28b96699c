package file

import (
	"net"
	"reflect"
	"runtime"
	"slices"
	"strconv"

	"go.yaml.in/yaml/v3"

	"culvert.dev/registry"
	"culvert.dev/tunnel"
)

// An Agent is what lets the programs of one host, or of one user of it, reach the services
// behind gateways. It stands for parts that the rest of the file could say, too: a network
// that is reached over the gateways, a service with the names there, and listeners on this
// host. They are made of it by expand, and are read and checked like those of the file.
type Agent struct {
	Gateway    []string `yaml:"gateway,required,single" what:"a gateway" as:"hostPort" unique:"gateway" empty:"name a gateway"`
	Transports []string `yaml:"transports" what:"a protocol" oneof:"connect connect-h2 connect-h3 websocket hbone" unique:"protocol" empty:"leave the key out for all but hbone"`
	Path       string   `yaml:"path" as:"tunnelPath"` // of websocket; "" means the default

	// Names are those that go to the gateways, of all that no service of the file has;
	// empty means every name.
	Names []tunnel.Pattern `yaml:"names" what:"a name" as:"servicePattern" unique:"name" empty:"leave the key out for every name"`

	// Catalog has the names that the gateways offer beside Names.
	Catalog AgentCatalog `yaml:"catalog"`

	Proxy    string   `yaml:"proxy" as:"localListener" default:"127.0.0.1:1080"` // where programs ask by CONNECT and SOCKS5
	Forwards Forwards `yaml:"forwards"`

	// Who may connect to the two by TCP. Root always may. Unix sockets are for the own user.
	LocalUsers   []LocalUser `yaml:"localUsers" what:"a user" as:"localUser" unique:"user" empty:"leave the key out for the own user"`
	AnyLocalUser bool        `yaml:"anyLocalUser"`
	Auth         *Auth       `yaml:"auth"` // of Proxy

	Capture *AgentCapture `yaml:"capture"` // nil means that programs have to ask

	DNS *AgentDNS `yaml:"dns"` // nil means that nothing is answered by DNS

	Inbound []AgentInbound `yaml:"inbound" what:"an inbound listener" empty:"leave the key out to accept no callers"`
	hopAccess

	own []string // the DNS names by which the gateways are reached
}

// An AgentCatalog is the catalog of an agent's gateways, from which it knows the names of services.
type AgentCatalog struct {
	Enabled bool             `yaml:"enabled,short" default:"true" what:"catalog"`
	Zones   []tunnel.Pattern `yaml:"zones" what:"a zone" as:"servicePattern" unique:"zone" empty:"leave the key out for all names but those of this host and its link"`
	State   string           `yaml:"state"` // the folder where the last catalog is kept; an absolute path once it is read, "" for none
}

// AcceptedZones are the names that the gateways may offer.
func (c *AgentCatalog) AcceptedZones() []tunnel.Pattern {
	if len(c.Zones) == 0 {
		return []tunnel.Pattern{tunnel.AnyName}
	}
	return c.Zones
}

// check finds keys without an effect.
func (c *AgentCatalog) check(d *decoder, at mapping) {
	for _, key := range []string{"zones", "state"} {
		if n := at.value(key); n != nil && !c.Enabled {
			d.errorf(keyOf(at.node, key), "leave it out, or make enabled true", "%s has no effect: the catalog is not read", key)
		}
	}
	for i, zone := range c.Zones {
		if zone.Suffix.IsReserved() {
			d.errorf(at.item("zones", i), "leave it out", "zone %q: %s", zone, registry.ReservedName)
		}
	}
}

// Forwards are listeners of this host that lead to one service each.
type Forwards struct{ All []Forward }

// A Forward is a listener and the service that it leads to.
type Forward struct {
	Listener string // HOST:PORT on loopback, or unix:PATH
	Target

	key, value *yaml.Node
}

// AgentNetwork is the name of the network that an agent's gateways lead into.
const AgentNetwork = "gateways"

// agentTransports are how gateways are asked where the file does not say it. The first
// shares connections; the others are for networks that do not let it through.
var agentTransports = []string{"connect-h2", "connect-h3", "websocket", "connect"}

// decode reads a mapping of local addresses to services.
func (f *Forwards) decode(d *decoder, n *yaml.Node, key string) {
	if !d.is(n, yaml.MappingNode, key) {
		return
	}
	for i := 0; i+1 < len(n.Content); i += 2 {
		k, v := n.Content[i], n.Content[i+1]
		local, ok := d.text(k, "the local address of a forward")
		if !ok {
			continue
		}
		name, ok := d.text(v, "the service of a forward")
		if !ok {
			continue
		}
		one := Forward{key: k, value: v}
		var c *complaint
		if _, bad := parsePort(local); bad == nil {
			local = net.JoinHostPort("127.0.0.1", local)
		}
		if one.Listener, c = parseLocalListener("forward", local); c != nil {
			d.errorf(k, c.hint, "%s", c.msg)
			continue
		}
		if one.Target, c = parseTarget("", name); c != nil {
			d.errorf(v, c.hint, "%s", c.msg)
			continue
		}
		if one.Port == 0 {
			if one.Port = listenPort(one.Listener); one.Port == 0 {
				d.errorf(v, "write NAME:PORT", "%s has no port here, so its service %q needs one", clip(one.Listener), clip(name))
				continue
			}
		}
		f.All = append(f.All, one)
	}
}

// parseLocalListener parses the address of a listener that other hosts cannot reach.
func parseLocalListener(what, s string) (string, *complaint) {
	if isUDP(s) {
		return "", complain("write 127.0.0.1:PORT or unix:PATH", "%s %q: only TCP and Unix sockets are taken here", what, clip(s))
	}
	address, c := parseListenerAddress(what, s)
	if c != nil || isSocket(address) || isInherited(address) {
		return address, c
	}
	if !registry.OnLoopback(address) {
		return "", complain("write 127.0.0.1:PORT, [::1]:PORT or unix:PATH; for other hosts, add listeners with auth to the file", "%s %q is not on loopback, so other hosts could use the identity of this agent", what, clip(s))
	}
	return address, nil
}

// parseLocalUser parses "own", or the number of a user.
func parseLocalUser(what, s string) (u registry.LocalUser, c *complaint) {
	if s == "own" {
		return registry.LocalUser{Own: true}, nil
	}
	uid, err := strconv.ParseUint(s, 10, 32)
	if err != nil || uid == 1<<32-1 {
		return u, complain("write own, or the number of a user, as id -u prints it", "%s %q is no user", what, clip(s))
	}
	return registry.LocalUser{UID: uint32(uid)}, nil
}

// check finds keys that do not go together.
func (a *Agent) check(d *decoder, at mapping) {
	a.Transports = readable(a.Transports)
	if len(a.Transports) == 0 {
		a.Transports = agentTransports
	}
	if has(at.node, "path") && !slices.Contains(a.Transports, "websocket") {
		d.errorf(keyOf(at.node, "path"), "leave it out", "path has no effect: it is for websocket only")
	}
	for _, key := range []string{"forwardIdentity", "behind"} {
		if has(at.node, key) {
			d.errorf(keyOf(at.node, key), "leave it out, or write the network in networks", "%s has no effect: the agent asks its gateways for itself alone", key)
		}
	}
	if !a.Insecure && !slices.ContainsFunc([]string{"key", "certificateFile", "tokenFile", "userFile", "jwtSVID"}, func(key string) bool { return has(at.node, key) }) {
		d.errorf(at.node, "add key: NAME with the name of one in identity.keys, certificateFile and keyFile, or tokenFile", "agent needs credentials: gateways let no unknown caller in")
	}
	if a.AnyLocalUser && has(at.node, "localUsers") {
		d.errorf(keyOf(at.node, "localUsers"), "keep one of them", "localUsers has no effect: anyLocalUser is true")
	}
	if runtime.GOOS != "linux" && !a.AnyLocalUser {
		const why = "every user of this machine could use the agent at %s: %s does not tell which user has connected"
		if a.Auth == nil && !isSocket(a.Proxy) {
			d.errorf(at.where("proxy"), "add auth, write proxy: unix:PATH, or add anyLocalUser: true", why, a.Proxy, runtime.GOOS)
		}
		for _, f := range a.Forwards.All {
			if !isSocket(f.Listener) {
				d.errorf(f.key, "write unix:PATH, or add anyLocalUser: true", why, f.Listener, runtime.GOOS)
			}
		}
	}
	if slices.Contains(a.Names, tunnel.AnyName) && len(a.Names) > 1 {
		d.errorf(at.value("names"), `keep "*", or leave it out`, `"*" has every name, and there are others`)
	}
}

// expand adds what the agent of c stands for to c and to the document, where it has the
// positions of the keys that it comes from.
func (a *Agent) expand(d *decoder, c *configuration) {
	at := d.root.object("agent")
	if at.node == nil || at.node.Kind != yaml.MappingNode {
		return
	}
	if d.root.object("drain").value("delay") == nil {
		c.Drain.Delay = 0 // nothing sends programs to another agent meanwhile
	}
	a.addGateways(d, c, at)
	a.addService(d, c, at)
	a.addListeners(d, c, at)
	a.addInbound(d, c, at)
	a.addDNS(d, c, at)
	a.checkVIPs(d, c, at)
}

// addGateways adds the network behind the gateways.
func (a *Agent) addGateways(d *decoder, c *configuration, at mapping) {
	var transports, gateways []*yaml.Node
	for _, protocol := range a.Transports {
		transports = append(transports, a.transport(at, protocol))
	}
	for i := range a.Gateway {
		if a.Gateway[i] == "" {
			continue
		}
		n := at.item("gateway", i)
		gateways = append(gateways, mappingNode(n, "address", scalarNode(n, a.Gateway[i]), "transports", sequenceNode(n, transports...), "check", scalarNode(n, "none")))
	}
	if len(gateways) == 0 {
		return
	}
	n := at.where("gateway")
	if c.Network == AgentNetwork {
		d.errorf(d.root.value("network"), "call it otherwise", "network %q is that of the agent's gateways", AgentNetwork)
	}
	addTo(d, "networks", "a network", mappingNode(n, "name", scalarNode(n, AgentNetwork), "gateways", sequenceNode(n, gateways...)), &c.Networks)
}

// transport returns how the gateways are asked by a protocol, as it would be in the file.
func (a *Agent) transport(at mapping, protocol string) *yaml.Node {
	n := mappingNode(at.where("gateway"), "protocol", scalarNode(at.where("transports"), protocol), "tls", booleanNode(at.where("transports"), true))
	none := []string{"http2", "forwardIdentity", "behind", "path"}
	switch protocol {
	case "hbone": // which knows its callers by their certificates
		none = append(none, "tokenFile", "userFile", "jwtSVID", "credentialsHeader", "serverName")
	case "websocket":
		none = none[1:3]
	}
	for i := 0; i+1 < len(at.node.Content); i += 2 {
		key := at.node.Content[i]
		if slices.Contains(accessKeys(), key.Value) && !slices.Contains(none, key.Value) || key.Value == "path" && protocol == "websocket" {
			n.Content = append(n.Content, key, at.node.Content[i+1])
		}
	}
	return n
}

// addService adds the service that has the names behind the gateways.
func (a *Agent) addService(d *decoder, c *configuration, at mapping) {
	names := at.value("names")
	n := at.where("names")
	if names == nil {
		names = sequenceNode(n, scalarNode(n, tunnel.AnyName.String()))
	}
	// The gateways are asked for the name that the client asks for: the endpoint says no
	// more than that it is behind them.
	endpoint := mappingNode(n, "address", scalarNode(n, agentEndpoint), "network", scalarNode(n, AgentNetwork))
	node := mappingNode(n, "names", names, "endpoints", sequenceNode(n, endpoint))
	var s service
	if d.addNode("services", node) {
		into(d, node, "a service", &s)
		s.OwnPort = false
		c.Services = append(c.Services, s.registered(d.origin(n.Line)))
		d.services = append(d.services, mapping{node})
	}
}

// agentEndpoint stands for what is behind the gateways. It is never looked up.
const agentEndpoint = "gateways.invalid:443"

// addListeners adds the listeners of the host.
func (a *Agent) addListeners(d *decoder, c *configuration, at mapping) {
	if a.Proxy != "" {
		n := at.where("proxy")
		protocols := sequenceNode(n, scalarNode(n, "connect"), scalarNode(n, "socks5"), scalarNode(n, "http"))
		l := mappingNode(n, "address", scalarNode(n, a.Proxy), "protocols", protocols)
		if auth := at.value("auth"); auth != nil {
			l.Content = append(l.Content, scalarNode(n, "auth"), auth)
		}
		a.addListener(d, c, at, a.Proxy, l)
	}
	for _, f := range a.Forwards.All {
		target := net.JoinHostPort(f.Service.String(), strconv.Itoa(int(f.Port)))
		a.addListener(d, c, at, f.Listener, mappingNode(f.key, "address", scalarNode(f.key, f.Listener), "service", scalarNode(f.value, target)))
	}
}

// addListener adds a listener of the host, for the users that may connect to it.
func (a *Agent) addListener(d *decoder, c *configuration, at mapping, address string, l *yaml.Node) {
	a.checkAnyLocalUser(d, address, l)
	if !isSocket(address) && !a.AnyLocalUser && runtime.GOOS == "linux" {
		n := at.where("localUsers")
		users := at.value("localUsers")
		if users == nil {
			users = sequenceNode(n, scalarNode(n, "own"))
		}
		l.Content = append(l.Content, scalarNode(n, "localUsers"), users)
	}
	addTo(d, "listeners", "a listener", l, &c.Listeners)
}

// accessKeys are the keys that say how a gateway is verified and what is shown to it.
func accessKeys() []string { return planOf(reflect.TypeFor[hopAccess]()).keys }
