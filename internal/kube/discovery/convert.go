package discovery

import (
	"slices"
	"strings"

	"culvert.dev/internal/kube/annotations"
	"culvert.dev/internal/kube/endpoints"
	"culvert.dev/registry"
	"culvert.dev/tunnel"
	corev1 "k8s.io/api/core/v1"
)

// A view has everything that a conversion depends on besides the objects.
type view struct {
	cluster           string
	network           string
	zone              string
	prefer            string
	clusterSet        []string
	rules             *Rules
	namespacesUnknown bool // Namespaces can't be read
}

// convert returns the registry's service for a Service, or nil if it has no TCP port. It is pure. ns
// is nil if the Namespace does not exist or is not known. A service that is not exposed has neither
// names nor endpoints.
func (v *view) convert(s *service, ns *namespace, of []*endpoints.Slice, exported bool) (*registry.Service, []Problem) {
	x, problems := parseNotes(s, ns)
	if len(s.ports) > 0 && !servesTCP(s) {
		if !x.expose || !x.mine {
			return nil, nil // it was not meant to be a service
		}
		return nil, []Problem{{
			Kind: "Service", Namespace: s.Namespace, Name: s.Name, Key: noteExpose, Value: clip(s.notes[noteExpose]),
			Text: "it has no TCP port, so it is not a service here; use a UDPRoute for UDP",
		}}
	}
	out := &registry.Service{
		Name:     s.Name + "." + s.Namespace + "." + v.cluster,
		ID:       registry.ID{Service: s.Name, Namespace: s.Namespace, Cluster: v.cluster},
		Headless: s.headless,
		Origin:   v.cluster + ": Service " + s.Namespace + "/" + s.Name,
	}
	v.addPorts(out, s)
	refuse := func(key, text string) {
		p := Problem{Kind: "Service", Namespace: s.Namespace, Name: s.Name, Key: key, Text: text}
		if key != "" {
			p.Value = clip(s.notes[key])
		}
		problems = append(problems, p)
	}
	v.expose(out, s, &x, exported, refuse)
	if !out.Exposed {
		return out, problems
	}
	for _, p := range x.names {
		if !v.rules.claims(s.Namespace, p) {
			refuse(noteNames, "the administrator does not allow namespace "+s.Namespace+" the name "+p.String()+"; that name is left out")
			continue
		}
		out.Names = append(out.Names, p)
	}
	out.Publish, out.ALPN = x.ownPort, x.alpn
	out.VIP = x.vip || out.Exported && !out.Headless // the address of it in the cluster set
	out.ProxyProtocol, out.IdleTimeout, out.HalfClosedTimeout, out.Check, out.Clients, out.StartTLS = x.proxy, x.idle, x.halfClosed, x.check, x.clients, x.startTLS
	x.balancing.Apply(out)
	x.identity.Apply(out)
	if s.kind == corev1.ServiceTypeExternalName {
		out.Endpoints = v.externalName(s)
		return out, problems
	}
	out.Endpoints = v.endpoints(s, of)
	return out, problems
}

// expose decides which networks may reach a service.
func (v *view) expose(out *registry.Service, s *service, x *exposure, exported bool, refuse func(key, text string)) {
	switch {
	case exported && x.refused:
		refuse(noteExpose, "it keeps the service closed, and its ServiceExport has no effect")
	case x.exported && !x.expose && s.notes[noteExported] != "":
		refuse(noteExported, "the service is not exposed, and so it is not exported: add culvert.dev/expose: \"true\"")
	}
	exported = (exported || x.exported && x.expose) && !x.refused
	if x.closed || !x.expose && !exported {
		return
	}
	switch {
	case x.identity.InsideTLS:
		refuse(annotations.ForwardIdentity, "the gateway speaks no TLS to the endpoints of an exposed Service: write \"beforeTLS; trustNetwork=true\", or reach it by a TLSRoute and a BackendTLSPolicy; the service is not exposed")
		return
	case x.identity.Told && x.proxy != 0:
		refuse(noteProxyProtocol, "there is a header by "+prefix+annotations.ForwardIdentity+" already: remove one of the annotations; the service is not exposed")
		return
	}
	if v.namespacesUnknown && !x.everyone && len(x.networks) == 0 {
		refuse(noteExpose, "Namespaces cannot be read, and an annotation of this one may restrict the service: add culvert.dev/networks; the service is not exposed")
		return
	}
	if why := v.rules.Refuses(s.Namespace, s.Name); why != "" {
		refuse(noteExpose, why+"; the service is not exposed")
		return
	}
	if why := v.external(s); why != "" {
		refuse("", why+"; the service is not exposed")
		return
	}
	if !exported || x.expose && len(x.networks) == 0 {
		out.ExposedTo = slices.Clone(x.networks)
	} else if out.ExposedTo = v.exportedTo(x, refuse); len(out.ExposedTo) == 0 && !v.everyone(x) {
		return
	}
	slices.Sort(out.ExposedTo)
	out.ExposedTo = slices.Compact(out.ExposedTo)
	out.Exposed, out.Exported = true, exported && s.kind != corev1.ServiceTypeExternalName
}

// exportedTo returns the networks of an exported service that is not exposed to
// everyone by its annotations: those of the cluster set, or those that it names
// itself. An export does not widen what an annotation says.
func (v *view) exportedTo(x *exposure, refuse func(key, text string)) []string {
	if len(x.networks) == 0 {
		if v.everyone(x) {
			return nil
		}
		return slices.Clone(v.clusterSet)
	}
	left := slices.DeleteFunc(slices.Clone(v.clusterSet), func(n string) bool { return slices.Contains(x.networks, n) })
	if len(left) > 0 {
		if left[0] == Everyone {
			left[0] = "all others"
		}
		refuse(noteNetworks, "it is exported to the cluster set, and this excludes "+strings.Join(left, ", ")+"; the networks named here apply")
	}
	if x.expose || slices.Contains(v.clusterSet, Everyone) {
		return slices.Clone(x.networks)
	}
	return slices.DeleteFunc(slices.Clone(x.networks), func(n string) bool { return !slices.Contains(v.clusterSet, n) })
}

// everyone reports whether the cluster set is everyone, for an exported service.
func (v *view) everyone(x *exposure) bool {
	return len(x.networks) == 0 && slices.Contains(v.clusterSet, Everyone)
}

// external returns what is wrong with an ExternalName, or "".
func (v *view) external(s *service) string {
	if s.kind != corev1.ServiceTypeExternalName {
		return ""
	}
	if !v.rules.ExternalNames {
		return "the administrator allows no ExternalName (kubernetes.discovery.externalNames)"
	}
	name, err := tunnel.ParseName(s.external)
	if err != nil {
		return "its externalName: " + err.Error()
	}
	if name.String() == "localhost" || strings.HasSuffix(name.String(), ".localhost") {
		return "its externalName is localhost"
	}
	// The name of another Service must not circumvent the rules. Nor can its address: see
	// Source.Refuses.
	labels := strings.Split(name.String(), ".")
	for i, l := range labels {
		switch {
		case l == "pod" && i > 0:
			return "its externalName is a name of pods"
		case l == "svc" && i > 1:
			if why := v.rules.Refuses(labels[i-1], labels[i-2]); why != "" {
				return "its externalName is service " + labels[i-1] + "/" + labels[i-2] + ": " + why
			}
		}
	}
	return ""
}

// externalName returns the endpoint of an ExternalName. The name is absolute, because with the search
// domains of the gateway it could be the name of a Service.
func (v *view) externalName(s *service) []registry.Endpoint {
	name, _ := tunnel.ParseName(s.external) // external has checked it
	return []registry.Endpoint{{Host: name.String() + ".", Network: v.network, Cluster: v.cluster, Guarded: true}}
}

func servesTCP(s *service) bool {
	return slices.ContainsFunc(s.ports, func(p servicePort) bool { return p.protocol == corev1.ProtocolTCP })
}

// addPorts sets the TCP ports and their names, and the names of UDP ports whose number is also that
// of a TCP port. The table does not distinguish ports by protocol, and a port that is UDP only must
// not be offered to clients of TCP.
func (v *view) addPorts(out *registry.Service, s *service) {
	for _, p := range s.ports {
		if p.protocol == corev1.ProtocolTCP {
			out.Ports = append(out.Ports, p.port)
		}
	}
	for _, p := range s.ports {
		if p.name == "" || !slices.Contains(out.Ports, p.port) {
			continue
		}
		switch p.protocol {
		case corev1.ProtocolTCP:
			out.NamedPorts = append(out.NamedPorts, registry.NamedPort{Name: p.name, Protocol: "tcp", Port: p.port})
		case corev1.ProtocolUDP:
			out.NamedPorts = append(out.NamedPorts, registry.NamedPort{Name: p.name, Protocol: "udp", Port: p.port})
		}
	}
}
