package file

import (
	"cmp"
	"net/netip"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	"culvert.dev/registry"
	"culvert.dev/tunnel"
	"go.yaml.in/yaml/v3"
)

// A service is an element of services.
type service struct {
	Name              tunnel.Pattern   `yaml:"name" what:"the name of a service" as:"servicePattern"`
	Names             []tunnel.Pattern `yaml:"names" what:"the name of a service" as:"servicePattern" empty:"list names, or write name"`
	Ports             []port           `yaml:"ports" what:"a port" empty:"list ports, or leave the key out for any port"`
	Match             helloMatch       `yaml:"match"`
	Mesh              meshName         `yaml:"mesh"`
	Exported          bool             `yaml:"exported"`
	Headless          bool             `yaml:"headless"`
	ALPN              []string         `yaml:"alpn" what:"a protocol" as:"alpn" unique:"protocol"`
	Network           string           `yaml:"network"` // of endpoints that name none
	Exposed           bool             `yaml:"exposed" default:"true"`
	OwnPort           bool             `yaml:"ownPort" default:"true"`
	VIP               bool             `yaml:"vip"`
	ExposedTo         []string         `yaml:"exposedTo" empty:"leave the key out for everyone, or write exposed: false for nobody"`
	Clients           clientFilter     `yaml:"clients"`
	Insecure          bool             `yaml:"insecure"`
	Addresses         []netip.Addr     `yaml:"addresses" what:"an address" as:"destination"`
	Endpoints         []endpoint       `yaml:"endpoints" what:"an endpoint" empty:"list where it is served: [\"host:port\"]"`
	ProxyProtocol     string           `yaml:"proxyProtocol" oneof:"v1 v2"`
	ForwardIdentity   *forwardIdentity `yaml:"forwardIdentity"`
	StartTLS          string           `yaml:"startTLS" oneof:"postgres"`
	TLS               *serviceTLS      `yaml:"tls"`
	LoadBalancing     loadBalancing    `yaml:"loadBalancing"`
	Check             healthCheck      `yaml:"check"`
	Via               []hop            `yaml:"via" what:"a hop" empty:"leave the key out to go there directly"`
	IdleTimeout       time.Duration    `yaml:"idleTimeout,min=1ms"`
	HalfClosedTimeout time.Duration    `yaml:"halfClosedTimeout,min=1ms"`
	Limits            serviceLimits    `yaml:"limits"`
	OutlierEjection   *outlierEjection `yaml:"outlierEjection"`
}

// A port is a number, or one with a name for SRV records.
type port struct {
	Port     uint16 `yaml:"port,required,short,min=1,max=65535" what:"a port"`
	Name     string `yaml:"name,required" what:"the name of a port" as:"portName"`
	Protocol string `yaml:"protocol" oneof:"tcp udp" default:"tcp"`
}

// A meshName is what a service is called in its cluster.
type meshName struct {
	Service   string `yaml:"service,required" as:"label"`
	Namespace string `yaml:"namespace" as:"label"`
	Cluster   string `yaml:"cluster" as:"label"`
}

// An endpoint is host:port, or an object with what else is known of it.
type endpoint struct {
	Address registry.Endpoint `yaml:"address,short" what:"an endpoint" as:"endpoint"`
	Group   string            `yaml:"group" what:"a group" as:"label"` // in place of Address: of connectors
	Port    uint16            `yaml:"port,min=1,max=65535"`            // of Group; 0 means the one that was asked for
	Name    string            `yaml:"name" what:"the name of an endpoint" as:"label"`
	Network string            `yaml:"network"`
	Weight  uint16            `yaml:"weight,max=1000" default:"1"`
	Zone    string            `yaml:"zone"`
	Via     []hop             `yaml:"via,single" what:"a hop" empty:"leave the key out to go there directly"`
}

// check finds mistakes of hops, and what has no effect beside them.
func (e *endpoint) check(d *decoder, at mapping) {
	e.checkGroup(d, at)
	if at.value("via") == nil {
		return
	}
	d.checkVia(at, e.Via)
	if has(at.node, "network") {
		d.errorf(keyOf(at.node, "network"), "leave it out", "network has no effect: the endpoint has via, whose last gateway knows where it is")
	}
}

// checkGroup finds endpoints that are in several places, or nowhere.
func (e *endpoint) checkGroup(d *decoder, at mapping) {
	if at.node.Kind != yaml.MappingNode {
		return
	}
	group := has(at.node, "group")
	switch {
	case group == has(at.node, "address"):
		d.errorf(at.node, "write address: HOST:PORT, or group: NAME for connectors that have a session", "an endpoint has either address or group")
	case has(at.node, "port") && !group:
		d.errorf(keyOf(at.node, "port"), "write it behind the address", "port has no effect: it is for group")
	}
	for _, key := range []string{"network", "via"} {
		if group && has(at.node, key) {
			d.errorf(keyOf(at.node, key), "leave it out", "%s has no effect: the endpoint has group, whose sessions lead there", key)
		}
	}
}

// A loadBalancing says which endpoint a new connection goes to: a policy, or an object
// with it.
type loadBalancing struct {
	Policy    string        `yaml:"policy,short" what:"policy" oneof:"roundRobin leastConnections sourceHash" default:"roundRobin"`
	HashOn    string        `yaml:"hashOn" oneof:"address"` // which sourceHash is on anyway
	StickyFor time.Duration `yaml:"stickyFor,min=1s"`
}

// registered returns l as the registry has it.
func (l *loadBalancing) registered() registry.LoadBalancing {
	out := registry.LoadBalancing{Policy: l.Policy, StickyFor: l.StickyFor}
	if out.Policy == registry.RoundRobin {
		out.Policy = ""
	}
	return out
}

// check finds keys that do not go with the policy.
func (l *loadBalancing) check(d *decoder, at mapping) {
	if at.value("hashOn") != nil && l.Policy != "" && l.Policy != registry.SourceHash {
		d.errorf(keyOf(at.node, "hashOn"), "leave it out, or write policy: sourceHash", "hashOn has no effect: it is for sourceHash")
	}
	if l.StickyFor > registry.MaxStickyFor {
		d.errorf(at.value("stickyFor"), "", "stickyFor is %v, limit %v", l.StickyFor, registry.MaxStickyFor)
	}
}

// A helloMatch says which ClientHellos of its names are for a service.
type helloMatch struct {
	ALPN  []string `yaml:"alpn" what:"a protocol" as:"alpn" unique:"protocol" empty:"leave the key out for any protocol"`
	NoSNI bool     `yaml:"noSNI"`
}

// A clientFilter says which clients may connect, by their addresses.
type clientFilter struct {
	Allow []netip.Prefix `yaml:"allow" what:"a range" as:"cidr" empty:"leave the key out to allow every address, or write exposed: false for nobody"`
	Deny  []netip.Prefix `yaml:"deny" what:"a range" as:"cidr" empty:"leave the key out to deny none"`
}

// serviceLimits bound what a service has in one gateway.
type serviceLimits struct {
	Connections            int `yaml:"connections,min=1"`
	ConnectionsPerEndpoint int `yaml:"connectionsPerEndpoint,min=1"`
	NewPerSecond           int `yaml:"newPerSecond,min=1,max=1000000"`
}

// check finds a limit that another one hides.
func (l *serviceLimits) check(d *decoder, at mapping) {
	if l.Connections > 0 && l.ConnectionsPerEndpoint > l.Connections {
		d.errorf(at.value("connectionsPerEndpoint"), "leave it out, or raise connections", "connectionsPerEndpoint %d is never reached: connections is %d", l.ConnectionsPerEndpoint, l.Connections)
	}
}

// An outlierEjection says when an endpoint that fails again and again is tried last.
type outlierEjection struct {
	ConsecutiveFailures int           `yaml:"consecutiveFailures,min=1,max=1000" default:"5"`
	EjectionTime        time.Duration `yaml:"ejectionTime,min=1s" default:"30s"`
	MaxEjectedPercent   int           `yaml:"maxEjectedPercent,min=1,max=100" default:"50"`
}

// check finds a time that is too long.
func (e *outlierEjection) check(d *decoder, at mapping) {
	if e.EjectionTime > registry.MaxEjectionTime {
		d.errorf(at.value("ejectionTime"), "", "ejectionTime is %v, limit %v", e.EjectionTime, registry.MaxEjectionTime)
	}
}

// services are registered one by one, so that the structs of a large file are not in
// memory all at once.
type services []*registry.Service

func (l *services) decode(d *decoder, n *yaml.Node, key string) {
	if !d.is(n, yaml.SequenceNode, key) {
		return
	}
	*l = make(services, len(n.Content))
	d.services = make([]mapping, len(n.Content))
	var s service
	for i, n := range n.Content {
		if isNull(n) {
			s = service{}
			d.errorf(n, "give it a value, or take it out", "%s has an empty element", key)
		} else {
			into(d, n, "a service", &s)
		}
		d.services[i] = mapping{n}
		(*l)[i] = s.registered(d.origin(n.Line))
	}
}

// registered returns s as the registry has it.
func (s *service) registered(origin string) *registry.Service {
	out := &registry.Service{
		Names: s.Names, Addresses: s.Addresses, Via: registeredHops(s.Via),
		ID:       registry.ID{Service: s.Mesh.Service, Namespace: s.Mesh.Namespace, Cluster: s.Mesh.Cluster},
		Exported: s.Exported, Headless: s.Headless, ALPN: s.ALPN, VIP: s.VIP, Check: s.Check.registered(),
		Exposed: s.Exposed, ExposedTo: s.ExposedTo, Clients: registry.ClientFilter(s.Clients), Publish: s.OwnPort && len(s.Match.ALPN) == 0,
		LoadBalancing: s.LoadBalancing.registered(), Insecure: s.Insecure, Match: registry.HelloMatch(s.Match),
		OutlierEjection: (*registry.OutlierEjection)(s.OutlierEjection),
		StartTLS:        s.StartTLS, IdleTimeout: s.IdleTimeout, HalfClosedTimeout: s.HalfClosedTimeout, Origin: origin,
	}
	if s.Name != (tunnel.Pattern{}) {
		out.Names = append([]tunnel.Pattern{s.Name}, s.Names...)
	}
	if len(out.Names) > 0 {
		out.Name = out.Names[0].String()
	}
	out.TLS = s.TLS.registered(out.Names)
	for _, p := range s.Ports {
		if p.Port != 0 && !slices.Contains(out.Ports, p.Port) {
			out.Ports = append(out.Ports, p.Port)
		}
		if p.Name != "" {
			out.NamedPorts = append(out.NamedPorts, registry.NamedPort{Name: p.Name, Protocol: p.Protocol, Port: p.Port})
		}
	}
	if len(s.Endpoints) > 0 {
		out.Endpoints = make([]registry.Endpoint, len(s.Endpoints))
	}
	for i, e := range s.Endpoints {
		out.Endpoints[i] = e.Address
		ep := &out.Endpoints[i]
		if e.Group != "" {
			ep.Group, ep.Port = e.Group, e.Port
		}
		ep.Name, ep.Network, ep.Zone, ep.Draining = e.Name, cmp.Or(e.Network, s.Network), e.Zone, e.Weight == 0
		if e.Group != "" {
			ep.Network = ""
		}
		if e.Weight > 1 {
			ep.Weight = e.Weight
		}
		if len(e.Via) > 0 {
			via := registeredHops(e.Via)
			ep.Via, ep.Network = &via, ""
		}
	}
	if l := s.Limits; l != (serviceLimits{}) {
		limits := tunnel.ServiceLimits(l)
		out.Limits = &limits
	}
	if s.ProxyProtocol != "" {
		out.ProxyProtocol = int(s.ProxyProtocol[1] - '0')
	}
	if s.ForwardIdentity != nil {
		out.ProxyProtocol, out.ForwardIdentity = 2, s.ForwardIdentity.registered()
	}
	return out
}

// check finds ports that are listed twice, and mistakes of hops.
func (s *service) check(d *decoder, at mapping) {
	d.checkVia(at, s.Via)
	if s.ForwardIdentity != nil {
		s.ForwardIdentity.checkIn(d, s, at)
	}
	for i := range s.Endpoints {
		if n := at.item("endpoints", i); at.value("via") != nil && has(n, "via") {
			d.errorf(keyOf(n, "via"), "keep one of them: the endpoint's, or the service's for all", "an endpoint has via, and so has its service")
		}
	}
	if m := at.value("match"); m != nil && (s.VIP || s.Mesh != (meshName{}) || len(s.Addresses) > 0 || s.Headless || s.Exported) && len(s.Match.ALPN) > 0 {
		d.errorf(m, "give the protocols a service of their own", "match.alpn is for names alone: not with mesh, addresses, vip, headless or exported")
	}
	for i, p := range s.Ports {
		n := at.item("ports", i)
		for _, q := range s.Ports[:i] {
			switch {
			case p.Name == "" && p.Port == q.Port && p.Port != 0 && n.Kind == yaml.ScalarNode:
				d.errorf(n, "keep one of them", "port %d is listed twice", p.Port)
			case p.Name != "" && p.Name == q.Name && p.Protocol == q.Protocol:
				d.errorf(n, "give one of them another", "two ports are called %q", p.Name)
			default:
				continue
			}
			break
		}
	}
}

// nameAt returns where the name with an index is in a service.
func nameAt(at mapping, i int) *yaml.Node {
	if n := at.value("name"); n != nil {
		if i--; i < 0 {
			return n
		}
	}
	return at.item("names", i)
}

// portless reports whether an endpoint of a service has no port.
func portless(s *registry.Service) bool {
	return slices.ContainsFunc(s.Endpoints, func(e registry.Endpoint) bool { return e.Port == 0 && (e.Host != "" || e.Addr.IsValid()) })
}

// origin says where a service is, for people.
func (d *decoder) origin(line int) string {
	return filepath.Base(d.file) + ":" + strconv.Itoa(line)
}
