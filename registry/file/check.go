package file

import (
	"fmt"
	"net/netip"
	"runtime"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"

	"culvert.dev/registry"
	"culvert.dev/tunnel"
)

// check finds mistakes in how the parts of a configuration fit together.
func (d *decoder) check(root *yaml.Node) {
	if d.cfg.Kubernetes == nil && d.cfg.Reverse == nil { // which may bring them, or need none
		d.need(root, "the configuration", "services")
	}
	d.checkNetworks()
	d.checkMesh()
	d.checkPeerEntries()
	d.checkSite()
	d.checkEnrollment()
	for i := range d.cfg.Services {
		d.checkService(i)
	}
	d.checkClaims()
	d.checkListeners()
	d.checkIssuers()
	d.checkServicePorts()
	d.checkVIPs()
	d.checkNAT()
	d.checkKubernetes()
	d.checkIdentity()
	d.checkCredentialNames()
	d.checkLoops()
	d.checkReverse()
	d.checkGroups()
	d.useReplicas()
	d.checkPolicies()
	if l := d.cfg.Limits; l.ConnectTimeout > l.ConnectTotalTimeout {
		d.errorf(keyOf(root, "limits"), "connectTotalTimeout covers every attempt: raise it, or lower connectTimeout", "connectTimeout %v is longer than connectTotalTimeout %v", l.ConnectTimeout, l.ConnectTotalTimeout)
	}
	if dr := d.cfg.Drain; dr.Delay > dr.Timeout {
		d.errorf(keyOf(root, "drain"), "the timeout counts from the signal and covers the delay", "delay %v is longer than timeout %v", dr.Delay, dr.Timeout)
	}
}

func (d *decoder) checkNetworks() {
	names := map[string]*yaml.Node{}
	ranges := map[netip.Prefix]*yaml.Node{}
	for i, network := range d.cfg.Networks {
		at := d.network(i)
		if first := names[network.Name]; first != nil && network.Name != "" {
			d.errorf(at.where("name"), "list all its cidrs together", "network %q is already in line %d", clip(network.Name), first.Line)
		} else {
			names[network.Name] = at.where("name")
		}
		for j, p := range network.CIDRs {
			n := at.item("cidrs", j)
			if !p.IsValid() {
				continue
			}
			if first := ranges[p]; first != nil {
				d.errorf(n, "an address belongs to one network, the one with the longest range", "range %s is already in line %d", p, first.Line)
				continue
			}
			ranges[p] = n
		}
	}
}

// checkService checks one service by itself.
func (d *decoder) checkService(i int) {
	s, at := d.cfg.Services[i], d.services[i]
	if at.node == nil || at.node.Kind != yaml.MappingNode { // it was read before, or can't be read
		return
	}
	switch {
	case has(at.node, "name") && has(at.node, "names"):
		d.errorf(keyOf(at.node, "names"), "keep names", "a service has either name or names")
	case !has(at.node, "name") && !has(at.node, "names") && !has(at.node, "mesh"):
		d.errorf(at.node, `add name: host.example.com, or "*.example.com"`, "a service needs a name")
	}
	if !has(at.node, "endpoints") && at.value("via") != nil {
		// The last gateway is asked for what this one was asked for.
	} else if !has(at.node, "endpoints") {
		d.errorf(at.node, `add endpoints: ["host:port"]`, "a service needs endpoints")
	}
	if at.value("via") != nil && len(s.Endpoints) == 0 && at.value("ports") == nil {
		switch {
		case d.carriesSNI():
			d.errorf(at.value("via"), "add ports to the service, or endpoints", "a ClientHello has no port, and the service lists none to ask the next gateway for")
		case d.hasOwnPort(s):
			d.errorf(at.value("via"), "add ports to the service, or endpoints, or ownPort: false", "a connection to the service's own port names no port, and the service lists none to ask the next gateway for")
		}
	}
	d.checkOwnPort(s, at.value("ownPort"))
	d.checkVIP(s, at)
	d.checkHealthCheck(s, at)
	d.checkServiceTLS(s, at)
	for j, name := range s.ExposedTo {
		d.knownNetwork(at.item("exposedTo", j), name)
	}
	d.checkPlaces(s, at)
	if portless(s) && !has(at.node, "ports") && (d.carriesSNI() || d.hasOwnPort(s)) {
		// A TLS hello carries no port, and who connects to a service's own says
		// nothing at all, so there would be none to dial.
		d.errorf(at.value("endpoints"), "add the port to the endpoint, or ports to the service", "an endpoint has no port and the service lists none")
	}
}

// carriesSNI reports whether a listener takes requests that name no port. One
// may be given on the command line, so no listener counts as any.
func (d *decoder) carriesSNI() bool {
	for _, l := range d.cfg.Listeners {
		if l.Service.IsZero() && slices.ContainsFunc(l.spoken(), namesNoPort) {
			return true
		}
	}
	return len(d.cfg.Listeners) == 0
}

// checkClaims finds names and addresses that two services have. Those that
// were read before have no two among themselves, and add none.
func (d *decoder) checkClaims() {
	type claim struct {
		what string
		port uint16
	}
	first := map[claim]*yaml.Node{}
	check := func(n *yaml.Node, kind, what string, ports []uint16, add bool) {
		if len(ports) == 0 {
			ports = []uint16{0}
		}
		for _, port := range ports {
			c := claim{what, port}
			if f := first[c]; f != nil {
				with := "for any port"
				if port != 0 {
					with = fmt.Sprintf("with port %d", port)
				}
				d.errorf(n, "give one of them other ports, or put the endpoints together", "%s %q %s is already in line %d", kind, what, with, f.Line)
				break
			}
			if add {
				first[c] = n
			}
		}
	}
	for _, before := range []bool{false, true} {
		for i := range d.cfg.Services {
			s, at := d.cfg.Services[i], d.services[i]
			if (at.node == nil) != before || at.value("ports") != nil && len(s.Ports) == 0 {
				continue // not its turn; or the ports are wrong, so what it claims is not known
			}
			for j, p := range s.Names {
				if p == (tunnel.Pattern{}) {
					continue
				}
				for _, protocol := range s.Match.ALPN {
					check(nameAt(at, j), "name", p.String()+" with ALPN "+protocol, s.Ports, !before)
				}
				if len(s.Match.ALPN) == 0 {
					check(nameAt(at, j), "name", p.String(), s.Ports, !before)
				}
			}
			if s.Match.NoSNI && len(s.Match.ALPN) == 0 {
				check(at.value("match"), "match.noSNI", "true", s.Ports, !before)
			}
			for _, name := range d.meshNames(s, at) {
				check(at.value("mesh"), "name", name, s.Ports, !before)
			}
			for j, a := range s.Addresses {
				if !a.IsValid() {
					continue
				}
				check(at.item("addresses", j), "address", a.String(), s.Ports, !before)
			}
		}
	}
}

// A place is a listening address and where the file says so.
type place struct {
	address string
	node    *yaml.Node
}

func (d *decoder) checkListeners() {
	var taken []place
	take := func(address string, n *yaml.Node) {
		if address == "" {
			return
		}
		for _, p := range taken {
			if overlap(p.address, address) {
				d.errorf(n, "one listener serves any number of services; a listener with a service needs a port of its own", "%s is already in use: %s in line %d", address, p.address, p.node.Line)
				return
			}
		}
		taken = append(taken, place{address, n})
	}
	sound := len(d.errs) == 0 // else a service that was not understood would seem to be missing
	var merged *registry.Table
	table := func() *registry.Table {
		if merged == nil {
			merged, _ = d.cfg.Mesh.Merge(registry.Snapshot{Networks: d.cfg.Networks, Services: d.cfg.Services})
		}
		return merged
	}
	for i := range d.cfg.Listeners {
		l, at := &d.cfg.Listeners[i], d.listener(i)
		take(l.Address, at.value("address"))
		d.checkNetwork(l, at)
		d.checkSocket(l, at)
		d.checkLocalUsers(l, at)
		d.checkCaptured(l, at)
		if slices.Contains(l.Protocols, "proxy") {
			switch {
			case len(l.Protocols) > 1:
				d.errorf(at.value("protocols"), "give it a listener of its own", "proxy can't be told apart from other protocols")
			case l.Proxy == nil:
				d.errorf(at.value("protocols"), "add proxyProtocol: {from: [...]}", "proxy takes the name from a PROXY header, and no address is trusted to send one")
			}
		}
		d.checkTLS(l, at)
		d.checkLoadBalancer(l, at)
		d.checkSSH(l, at)
		asks := at.value("auth") != nil || at.value("ssh") != nil || slices.ContainsFunc(tlsItems(at), func(m mapping) bool { return m.value("clientCAFile") != nil || m.value("trust") != nil })
		if l.EndWithCredential && !asks {
			d.errorf(at.value("endWithCredential"), "add auth, or clientCAFile or trust to tls", "endWithCredential has no effect: the listener asks for no credentials")
		}
		if l.RequireTLS && l.UDP() {
			d.errorf(at.value("requireTLS"), "leave it out", "requireTLS is for TCP, and this listener is of UDP: QUIC is always encrypted, and nothing is read of other datagrams")
		}
		if at.value("service") == nil {
			if sound {
				d.checkPlain(l, at, table)
			}
			if at.value("auth") != nil && !l.UDP() && !slices.ContainsFunc(l.spoken(), hasCredentials) {
				d.errorf(at.value("auth"), "add connect, socks5 or websocket to its protocols, or leave auth out", "auth has no effect: only CONNECT, SOCKS and WebSocket clients have credentials")
			}
			for _, open := range []string{"sni", "quic", "postgres"} {
				if at.value("auth") != nil && slices.Contains(l.Protocols, open) && slices.ContainsFunc(l.spoken(), hasCredentials) {
					d.warnf(at.value("protocols"), "leave it out, or give it a listener of its own", "%s asks for no credentials: whoever can connect reaches services by it, in spite of auth", open)
				}
			}
			if at.value("websocket") != nil && !l.UDP() && !slices.Contains(l.spoken(), "websocket") {
				d.errorf(at.value("websocket"), "add it to protocols: [sni, connect, websocket]", "websocket has no effect: it is not among the listener's protocols")
			}
			continue
		}
		for key, n := range map[string]*yaml.Node{"protocols": at.value("protocols"), "refusal": at.value("refusal"), "auth": at.value("auth"), "websocket": at.value("websocket"), "ssh": at.value("ssh")} {
			if n != nil {
				d.errorf(n, "leave it out", "%s has no effect: a listener with a service reads nothing from its clients", key)
			}
		}
		d.checkServiceListenerTLS(l, at)
		if l.Service.IsZero() || !sound {
			continue
		}
		req := &tunnel.Request{Name: l.Service, Port: l.Port, LocalPort: listenPort(l.Address)}
		s, err := table().Find(req)
		switch {
		case err == nil && len(l.TLS) > 0 && s.StartTLS != "" && s.TLS == nil:
			d.errorf(at.value("service"), "add tls to the service, or leave its startTLS out", "TLS of clients ends for service %q, and by startTLS its endpoints expect TLS, which the gateway does not begin without tls", clip(at.value("service").Value))
		case err != nil:
			d.errorf(at.value("service"), "name a service of this file, with its port", "service %q is not served: %v", clip(at.value("service").Value), strings.TrimPrefix(err.Error(), "registry: "))
		case l.UDP() && len(s.Via) > 0 && !s.Via[len(s.Via)-1].CarriesDatagrams():
			d.errorf(at.value("service"), "ask the last gateway of via by connect-h2 or connect-h3, or listen at UDP where the service is", "service %q has via, whose last gateway carries streams alone, and this listener is of UDP", clip(at.value("service").Value))
		case l.UDP() && !endpointsCarryDatagrams(&s):
			d.errorf(at.value("service"), "ask the last gateway of their via by connect-h2 or connect-h3, or leave via out of an endpoint", "all endpoints of service %q have via, whose last gateways carry streams alone, and this listener is of UDP", clip(at.value("service").Value))
		case l.UDP() && s.TLS != nil:
			d.errorf(at.value("service"), "leave tls out of the service", "service %q has tls: TLS is of streams, and this listener is of UDP", clip(at.value("service").Value))
		case l.UDP() && s.ProxyProtocol != 0:
			d.errorf(at.value("service"), "leave proxyProtocol out of the service", "service %q has proxyProtocol: its header is of streams, and this listener is of UDP", clip(at.value("service").Value))
		}
	}
	if d.root.value("admin") != nil {
		take(d.cfg.Admin, d.root.value("admin"))
	}
	d.checkDNS(taken)
}

// endpointsCarryDatagrams reports whether datagrams can go to an endpoint of s.
func endpointsCarryDatagrams(s *registry.Service) bool {
	for i := range s.Endpoints {
		via := s.Endpoints[i].Hops()
		if len(via) == 0 || via[len(via)-1].CarriesDatagrams() {
			return true
		}
	}
	return len(s.Endpoints) == 0
}

// checkNetwork finds what goes with TCP alone at a listener of UDP, and the
// other way round.
func (d *decoder) checkNetwork(l *Listener, at mapping) {
	if !l.UDP() {
		if slices.Contains(l.Protocols, "quic") {
			hint := "give it a listener of its own: address: " + udpPrefix + l.Address
			if l.Address == "" || l.Inherited() {
				hint = "give it a listener of its own"
			}
			d.errorf(at.value("protocols"), hint, "quic is carried by UDP, and this listener is of TCP")
		}
		if l.STUN {
			d.errorf(at.value("stun"), "leave it out, or give it a listener at "+udpPrefix, "stun has no effect: this listener is of TCP")
		}
		return
	}
	if l.STUN && (!slices.Contains(l.Outer(), "quic") || at.value("service") != nil) {
		d.errorf(at.value("stun"), "add protocols: [quic], or leave it out", "stun is answered beside QUIC that is passed on, and this listener has none")
	}
	for _, p := range l.Protocols {
		if p != "quic" {
			d.errorf(at.value("protocols"), "leave protocols out, or write [quic]", "%s is carried by TCP, and this listener is of UDP", p)
		}
	}
	for _, key := range []struct {
		name string
		node *yaml.Node
	}{{"auth", at.value("auth")}, {"proxyProtocol", at.value("proxyProtocol")}, {"websocket", at.value("websocket")}, {"ssh", at.value("ssh")}} {
		if key.name == "auth" && len(l.TLS) > 0 {
			continue // of connect-h3
		}
		if key.node != nil && (at.value("service") == nil || key.name == "proxyProtocol") { // else another error below covers it
			d.errorf(key.node, "leave it out", "%s has no effect: this listener is of UDP", key.name)
		}
	}
}

// checkSocket finds what goes with Unix sockets alone, or does not go with them.
func (d *decoder) checkSocket(l *Listener, at mapping) {
	if l.Inherited() {
		d.checkInheritedListener(l, at)
		return
	}
	if !l.UnixSocket() {
		for _, key := range []string{"mode", "group", "peerCredentials"} {
			if n := at.value(key); n != nil && l.Address != "" {
				d.errorf(n, "leave it out", "%s has no effect: this listener is no Unix socket", key)
			}
		}
		return
	}
	if n := at.value("proxyProtocol"); n != nil {
		d.errorf(n, "leave it out", "proxyProtocol has no effect: a client of a Unix socket has no address that could be trusted")
	}
	abstract := strings.HasPrefix(l.Address, socketPrefix+"@")
	for _, key := range []string{"mode", "group"} {
		if n := at.value(key); n != nil && abstract {
			d.errorf(n, "leave it out, or listen at the path of a file", "%s has no effect: an abstract socket has no file", key)
		}
	}
	if l.PeerCredentials && runtime.GOOS != "linux" && runtime.GOOS != "darwin" {
		d.errorf(at.value("peerCredentials"), "leave it out", "peerCredentials needs Linux or macOS: %s does not tell which user has connected", runtime.GOOS)
	}
	if (abstract || l.Mode&0o002 != 0) && !l.PeerCredentials && l.Auth == nil {
		d.warnf(at.value("address"), "set a group and mode: \"0660\", or identify the callers by peerCredentials or auth", "every user of this machine may connect to %s", clip(l.Address))
	}
}

// checkLocalUsers finds listeners that other machines reach, for which no user is known.
func (d *decoder) checkLocalUsers(l *Listener, at mapping) {
	n := at.value("localUsers")
	switch {
	case n == nil || l.Address == "" || l.Inherited():
	case l.UnixSocket():
		d.errorf(n, "write mode and group, or peerCredentials and policies", "localUsers has no effect: who may connect to a Unix socket is said by its file")
	case l.UDP():
		d.errorf(n, "leave it out", "localUsers has no effect: this listener is of UDP")
	case !registry.OnLoopback(l.Address):
		d.errorf(n, "listen on 127.0.0.1 or ::1", "localUsers is for loopback: the user of another machine is not known")
	case runtime.GOOS != "linux":
		d.errorf(n, "listen at a Unix socket, or ask for credentials by auth", "localUsers needs Linux: %s does not tell which user has connected", runtime.GOOS)
	}
}

// namesNoPort reports whether requests by a protocol name no port.
func namesNoPort(protocol string) bool {
	return protocol == "sni" || protocol == "proxy" || protocol == "quic" || protocol == "postgres" || protocol == "reverse-pool" || protocol == registry.PlainTCP
}

// hasCredentials reports whether the clients of a protocol can show who they are.
func hasCredentials(protocol string) bool {
	return protocol == "connect" || protocol == "connect-h2" || protocol == "connect-h3" || protocol == "connect-udp" || protocol == "socks5" || protocol == "http" || protocol == "websocket"
}
