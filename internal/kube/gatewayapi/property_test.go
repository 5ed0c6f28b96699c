package gatewayapi

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"reflect"
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"
	mcsv1 "sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	"culvert.dev/internal/kube/endpoints"
	"culvert.dev/registry"
	"culvert.dev/tunnel"
)

// dice makes objects out of few names, so that they meet. What it makes the API
// server would take, and some of it would not.
type dice struct{ *rand.Rand }

func pick[T any](d dice, from ...T) T { return from[d.IntN(len(from))] }

func maybe[T any](d dice, from ...T) *T {
	if d.IntN(3) == 0 {
		return nil
	}
	v := pick(d, from...)
	return &v
}

func many[T any](d dice, limit int, one func() T) []T {
	var out []T
	for range d.IntN(limit + 1) {
		out = append(out, one())
	}
	return out
}

func (d dice) name() string { return pick(d, "x", "y", "z") }

func (d dice) meta() metav1.ObjectMeta {
	m := metav1.ObjectMeta{
		Namespace: pick(d, "a", "b"), Name: d.name(), Generation: int64(d.IntN(4)),
		CreationTimestamp: metav1.NewTime(time.Unix(int64(d.IntN(3)), 0)),
		Labels:            map[string]string{"team": pick(d, "red", "blue")},
	}
	m.UID = types.UID(fmt.Sprint(m.Namespace, m.Name, d.IntN(1000)))
	return m
}

func (d dice) host() gwv1.Hostname {
	return pick[gwv1.Hostname](d, "", "a.example.com", "b.example.com", "*.example.com", "*.a.example.com", "example.com", "*.com", "a.1", "*", "huh huh")
}

func (d dice) port() int32 { return pick[int32](d, 1, 53, 80, 443, 443, 443, 65535, 0, 70000) }

func (d dice) selector() *metav1.LabelSelector {
	return pick(d, nil, &metav1.LabelSelector{}, &metav1.LabelSelector{MatchLabels: map[string]string{"team": "red"}},
		&metav1.LabelSelector{MatchExpressions: []metav1.LabelSelectorRequirement{{Key: "team", Operator: "Huh"}}})
}

func (d dice) from() *gwv1.FromNamespaces {
	return maybe(d, gwv1.NamespacesFromAll, gwv1.NamespacesFromSame, gwv1.NamespacesFromSelector, gwv1.NamespacesFromNone, "Huh")
}

func (d dice) secretRef() gwv1.SecretObjectReference {
	return gwv1.SecretObjectReference{Group: maybe[gwv1.Group](d, "", "", "huh"), Kind: maybe[gwv1.Kind](d, "Secret", "Secret", "Huh"), Name: gwv1.ObjectName(d.name()), Namespace: maybe[gwv1.Namespace](d, "a", "b")}
}

func (d dice) listener() gwv1.Listener {
	l := gwv1.Listener{Name: pick[gwv1.SectionName](d, "x", "y", "z", "v", "w"), Hostname: maybe(d, d.host()), Port: d.port(), Protocol: pick[gwv1.ProtocolType](d, "HTTP", "HTTPS", "TLS", "TLS", "TLS", "TCP", "UDP", "HUH")}
	if d.IntN(4) > 0 {
		l.TLS = &gwv1.ListenerTLSConfig{
			Mode: maybe[gwv1.TLSModeType](d, "Terminate", "Passthrough", "Huh"), CertificateRefs: many(d, 2, d.secretRef),
			Options: map[gwv1.AnnotationKey]gwv1.AnnotationValue{autoPassthrough: pick[gwv1.AnnotationValue](d, "true", "false")},
		}
	}
	if d.IntN(2) > 0 {
		l.AllowedRoutes = &gwv1.AllowedRoutes{Kinds: many(d, 2, func() gwv1.RouteGroupKind {
			return gwv1.RouteGroupKind{Group: maybe[gwv1.Group](d, gwv1.GroupName, "huh"), Kind: pick[gwv1.Kind](d, "TLSRoute", "TCPRoute", "Huh")}
		})}
		if d.IntN(2) > 0 {
			l.AllowedRoutes.Namespaces = &gwv1.RouteNamespaces{From: d.from(), Selector: d.selector()}
		}
	}
	return l
}

// distinct has each name once, as the API server sees to.
func distinct(ls []gwv1.Listener) []gwv1.Listener {
	seen := map[gwv1.SectionName]bool{}
	return slices.DeleteFunc(ls, func(l gwv1.Listener) bool {
		was := seen[l.Name]
		seen[l.Name] = true
		return was
	})
}

func (d dice) validation() *gwv1.FrontendTLSValidation {
	return pick(d, nil, &gwv1.FrontendTLSValidation{
		Mode: pick[gwv1.FrontendValidationModeType](d, "", gwv1.AllowValidOnly, gwv1.AllowInsecureFallback),
		CACertificateRefs: many(d, 2, func() gwv1.ObjectReference {
			return gwv1.ObjectReference{Kind: pick[gwv1.Kind](d, "ConfigMap", "Huh"), Name: gwv1.ObjectName(d.name()), Namespace: maybe[gwv1.Namespace](d, "a", "b")}
		}),
	})
}

func (d dice) gateway() *gwv1.Gateway {
	g := &gwv1.Gateway{ObjectMeta: d.meta()}
	g.Spec.GatewayClassName = pick[gwv1.ObjectName](d, "culvert", "culvert", "culvert", "second", "other", "none")
	g.Spec.Listeners = distinct(many(d, 5, d.listener))
	g.Spec.Addresses = many(d, 2, func() gwv1.GatewaySpecAddress {
		return gwv1.GatewaySpecAddress{Type: maybe[gwv1.AddressType](d, "IPAddress", "IPAddress", "Hostname"), Value: pick(d, "", "10.0.0.1", "10.0.0.2", "::ffff:10.0.0.1", "huh")}
	})
	if d.IntN(2) > 0 {
		g.Spec.AllowedListeners = &gwv1.AllowedListeners{Namespaces: pick(d, nil, &gwv1.ListenerNamespaces{From: d.from(), Selector: d.selector()})}
	}
	if d.IntN(3) == 0 {
		g.Spec.TLS = &gwv1.GatewayTLSConfig{Frontend: pick(d, nil, &gwv1.FrontendTLSConfig{
			Default: gwv1.TLSConfig{Validation: d.validation()},
			PerPort: many(d, 2, func() gwv1.TLSPortConfig {
				return gwv1.TLSPortConfig{Port: d.port(), TLS: gwv1.TLSConfig{Validation: d.validation()}}
			}),
		})}
		if d.IntN(2) == 0 {
			ref := d.secretRef()
			g.Spec.TLS.Backend = &gwv1.GatewayBackendTLS{ClientCertificateRef: pick(d, nil, &ref)}
		}
	}
	if d.IntN(8) == 0 {
		g.Spec.Infrastructure = &gwv1.GatewayInfrastructure{ParametersRef: pick(d, nil, &gwv1.LocalParametersReference{Kind: "Huh"})}
	}
	g.Status.Addresses = many(d, 2, func() gwv1.GatewayStatusAddress {
		return gwv1.GatewayStatusAddress{Value: pick(d, "", "10.0.0.1", "10.0.0.2", "huh")}
	})
	g.Status.Listeners = many(d, 2, func() gwv1.ListenerStatus {
		return gwv1.ListenerStatus{Name: gwv1.SectionName(d.name()), Conditions: conditions("Programmed")}
	})
	return g
}

func (d dice) parent() gwv1.ParentReference {
	return gwv1.ParentReference{
		Group: maybe[gwv1.Group](d, gwv1.GroupName, gwv1.GroupName, ""), Kind: maybe[gwv1.Kind](d, "Gateway", "Gateway", "ListenerSet", "Service"),
		Namespace: maybe[gwv1.Namespace](d, "a", "b"), Name: gwv1.ObjectName(d.name()), SectionName: maybe[gwv1.SectionName](d, "x", "y", ""), Port: maybe[int32](d, 443, 80),
	}
}

func (d dice) backendRef() gwv1.BackendRef {
	return gwv1.BackendRef{
		BackendObjectReference: gwv1.BackendObjectReference{
			Group: maybe[gwv1.Group](d, "", "", mcsv1.GroupName, "huh"), Kind: maybe[gwv1.Kind](d, "Service", "Service", "ServiceImport", "Huh"),
			Name: gwv1.ObjectName(d.name()), Namespace: maybe[gwv1.Namespace](d, "a", "b"), Port: maybe(d, d.port()),
		},
		Weight: maybe[int32](d, 0, 1, 1000000, -1),
	}
}

func (d dice) common() gwv1.CommonRouteSpec {
	return gwv1.CommonRouteSpec{ParentRefs: many(d, 3, d.parent)}
}

func (d dice) inputs(cert, key string) *Inputs {
	f := &fixture{map[string]*corev1.Namespace{}, map[string]*corev1.Service{}, map[string]*corev1.Secret{}, map[string]*corev1.ConfigMap{}, map[string]*mcsv1.ServiceImport{}, nil, map[*discoveryv1.EndpointSlice]*endpoints.Slice{}, nil, false}
	w := &Inputs{Objects: f, Bundle: pick(d, "", "v1.6.3", "huh")}
	for _, c := range []gwv1.GatewayClass{{ObjectMeta: metav1.ObjectMeta{Name: "culvert", Generation: 1}, Spec: gwv1.GatewayClassSpec{ControllerName: DefaultController}}, {ObjectMeta: metav1.ObjectMeta{Name: "second", Generation: 1}, Spec: gwv1.GatewayClassSpec{ControllerName: DefaultController}}, {ObjectMeta: metav1.ObjectMeta{Name: "other", Generation: 1}, Spec: gwv1.GatewayClassSpec{ControllerName: "x.example/y"}}} {
		w.Classes = append(w.Classes, &c)
	}
	seen := map[string]bool{}
	fresh := func(kind string, o metav1.Object) bool {
		k := kind + key2(o)
		was := seen[k]
		seen[k] = true
		return !was
	}
	for range 6 {
		if g := d.gateway(); fresh("g", g) {
			w.Gateways = append(w.Gateways, g)
		}
		if s := (&gwv1.ListenerSet{ObjectMeta: d.meta(), Spec: gwv1.ListenerSetSpec{ParentRef: gwv1.ParentGatewayReference{Name: gwv1.ObjectName(d.name()), Namespace: maybe[gwv1.Namespace](d, "a", "b")}}}); fresh("s", s) {
			for _, l := range distinct(many(d, 3, d.listener)) {
				s.Spec.Listeners = append(s.Spec.Listeners, gwv1.ListenerEntry(l))
			}
			w.ListenerSets = append(w.ListenerSets, s)
		}
		if r := (&gwv1.TLSRoute{ObjectMeta: d.meta(), Spec: gwv1.TLSRouteSpec{CommonRouteSpec: d.common(), Hostnames: many(d, 3, d.host), Rules: many(d, 2, func() gwv1.TLSRouteRule { return gwv1.TLSRouteRule{BackendRefs: many(d, 3, d.backendRef)} })}}); fresh("tls", r) {
			w.TLSRoutes = append(w.TLSRoutes, r)
		}
		if r := (&gwv1.TCPRoute{ObjectMeta: d.meta(), Spec: gwv1.TCPRouteSpec{CommonRouteSpec: d.common(), Rules: many(d, 2, func() gwv1.TCPRouteRule { return gwv1.TCPRouteRule{BackendRefs: many(d, 3, d.backendRef)} })}}); fresh("tcp", r) {
			w.TCPRoutes = append(w.TCPRoutes, r)
		}
		if r := (&gwv1.UDPRoute{ObjectMeta: d.meta(), Spec: gwv1.UDPRouteSpec{CommonRouteSpec: d.common(), Rules: many(d, 2, func() gwv1.UDPRouteRule { return gwv1.UDPRouteRule{BackendRefs: many(d, 3, d.backendRef)} })}}); fresh("udp", r) {
			w.UDPRoutes = append(w.UDPRoutes, r)
		}
		if r := (&gwv1.HTTPRoute{ObjectMeta: d.meta(), Spec: gwv1.HTTPRouteSpec{CommonRouteSpec: d.common(), Hostnames: many(d, 2, d.host)}}); fresh("http", r) {
			w.HTTPRoutes = append(w.HTTPRoutes, r)
		}
		if r := (&gwv1.GRPCRoute{ObjectMeta: d.meta(), Spec: gwv1.GRPCRouteSpec{CommonRouteSpec: d.common(), Hostnames: many(d, 2, d.host)}}); fresh("grpc", r) {
			w.GRPCRoutes = append(w.GRPCRoutes, r)
		}
		if g := (&gwv1.ReferenceGrant{ObjectMeta: d.meta()}); fresh("grant", g) {
			g.Spec.From = []gwv1.ReferenceGrantFrom{{Group: gwv1.GroupName, Kind: pick[gwv1.Kind](d, "Gateway", "ListenerSet", "TLSRoute", "TCPRoute"), Namespace: pick[gwv1.Namespace](d, "a", "b")}}
			g.Spec.To = []gwv1.ReferenceGrantTo{{Kind: pick[gwv1.Kind](d, "Secret", "Service", "ConfigMap"), Name: maybe[gwv1.ObjectName](d, "x", "y", "")}}
			w.Grants = append(w.Grants, g)
		}
		if p := (&gwv1.BackendTLSPolicy{ObjectMeta: d.meta()}); fresh("policy", p) {
			p.Spec.TargetRefs = many(d, 2, func() gwv1.LocalPolicyTargetReferenceWithSectionName {
				return gwv1.LocalPolicyTargetReferenceWithSectionName{LocalPolicyTargetReference: gwv1.LocalPolicyTargetReference{Kind: pick[gwv1.Kind](d, "Service", "Service", "Huh"), Name: gwv1.ObjectName(d.name())}, SectionName: maybe[gwv1.SectionName](d, "", "tls", "p1")}
			})
			p.Spec.Validation.Hostname = "x.example.com"
			p.Spec.Validation.WellKnownCACertificates = maybe[gwv1.WellKnownCACertificatesType](d, "System", "", "huh")
			p.Spec.Validation.CACertificateRefs = many(d, 2, func() gwv1.LocalObjectReference {
				return gwv1.LocalObjectReference{Kind: pick[gwv1.Kind](d, "ConfigMap", "Huh"), Name: gwv1.ObjectName(d.name())}
			})
			w.Policies = append(w.Policies, p)
		}
		n := &corev1.Namespace{ObjectMeta: d.meta()}
		n.Name = pick(d, "a", "b")
		f.namespaces[n.Name] = n
		s := &corev1.Service{ObjectMeta: d.meta(), Spec: corev1.ServiceSpec{Type: pick[corev1.ServiceType](d, "", "ClusterIP", "ExternalName")}}
		s.Spec.Ports = many(d, 3, func() corev1.ServicePort {
			return corev1.ServicePort{Name: pick(d, "", "tls", "p1"), Port: d.port(), Protocol: pick[corev1.Protocol](d, "", "TCP", "UDP", "SCTP")}
		})
		f.services[key2(s)] = s
		f.imports[key2(s)] = &mcsv1.ServiceImport{ObjectMeta: s.ObjectMeta, Spec: mcsv1.ServiceImportSpec{Ports: many(d, 2, func() mcsv1.ServicePort { return mcsv1.ServicePort{Name: pick(d, "", "p1"), Port: d.port()} })}}
		f.slices = append(f.slices, &discoveryv1.EndpointSlice{
			ObjectMeta:  metav1.ObjectMeta{Namespace: s.Namespace, Name: "s", Labels: map[string]string{pick(d, discoveryv1.LabelServiceName, mcsv1.LabelServiceName): s.Name}},
			AddressType: pick[discoveryv1.AddressType](d, "IPv4", "IPv6", "FQDN"),
			Ports: many(d, 2, func() discoveryv1.EndpointPort {
				return discoveryv1.EndpointPort{Name: maybe(d, "", "tls", "p1"), Port: maybe(d, d.port()), Protocol: maybe[corev1.Protocol](d, "TCP", "UDP")}
			}),
			Endpoints: many(d, 3, func() discoveryv1.Endpoint {
				return discoveryv1.Endpoint{Addresses: many(d, 2, func() string { return pick(d, "10.1.1.1", "10.1.1.2", "::1", "huh") }), Conditions: discoveryv1.EndpointConditions{Ready: maybe(d, true, false), Serving: maybe(d, true, false), Terminating: maybe(d, true, false)}}
			}),
		})
		sec := &corev1.Secret{ObjectMeta: d.meta(), Type: pick(d, corev1.SecretTypeTLS, corev1.SecretTypeTLS, corev1.SecretTypeOpaque), Data: map[string][]byte{"tls.crt": []byte(pick(d, cert, "huh")), "tls.key": []byte(key)}}
		f.secrets[key2(sec)] = sec
		m := &corev1.ConfigMap{ObjectMeta: d.meta(), Data: pick(d, nil, map[string]string{"ca.crt": pick(d, cert, "huh")})}
		f.configMaps[key2(m)] = m
	}
	switch d.IntN(3) {
	case 0:
		w.Addresses = []Address{{Bind: netip.MustParseAddr("10.0.0.1")}, {Bind: netip.MustParseAddr("10.0.0.2")}}
	case 1:
		w.PublicAddresses = addrs("10.0.0.1")
	}
	return w
}

func key2(o metav1.Object) string { return o.GetNamespace() + "/" + o.GetName() }

// shuffled is the same world in another order.
func (d dice) shuffled(w *Inputs) *Inputs {
	s := *w
	shuffle(d, &s.Gateways)
	shuffle(d, &s.ListenerSets)
	shuffle(d, &s.TLSRoutes)
	shuffle(d, &s.TCPRoutes)
	shuffle(d, &s.UDPRoutes)
	shuffle(d, &s.HTTPRoutes)
	shuffle(d, &s.GRPCRoutes)
	shuffle(d, &s.Grants)
	shuffle(d, &s.Policies)
	f := *w.Objects.(*fixture)
	shuffle(d, &f.slices)
	s.Objects = &f
	return &s
}

func shuffle[T any](d dice, s *[]T) {
	*s = slices.Clone(*s)
	d.Shuffle(len(*s), func(i, j int) { (*s)[i], (*s)[j] = (*s)[j], (*s)[i] })
}

// check finds what must never be in a Result, whatever the world.
func check(res *Result) error {
	listeners, sections, sockets := map[string]bool{}, map[string]bool{}, map[string]bool{}
	for _, l := range res.Snapshot.Listeners {
		at := fmt.Sprint(l.Protocol == registry.UDP, l.Address, l.Port)
		if listeners[l.Name] || sockets[at] || l.Port == 0 {
			return fmt.Errorf("listener %q at %s is there twice, or nowhere", l.Name, at)
		}
		listeners[l.Name], sockets[at] = true, true
		hosts := map[tunnel.Pattern]bool{}
		for _, s := range l.Sections {
			if sections[s.Name] || hosts[s.Host] {
				return fmt.Errorf("section %q for %v is there twice", s.Name, s.Host)
			}
			sections[s.Name], hosts[s.Host] = true, true
			if s.TLS != nil && (len(s.TLS.Keys) == 0 || slices.ContainsFunc(s.TLS.Keys, func(name string) bool { return res.Keys[name] == nil })) {
				return fmt.Errorf("section %q ends TLS without a certificate", s.Name)
			}
			if s.TLS != nil && s.TLS.ClientCertOptional && s.TLS.ClientCAs == "" {
				return fmt.Errorf("section %q: a certificate that is optional, of nobody", s.Name)
			}
			if l.Protocol != registry.TLS && len(s.Rules) > 1 {
				return fmt.Errorf("section %q of %s has %d rules", s.Name, l.Protocol, len(s.Rules))
			}
			names := map[tunnel.Pattern]bool{}
			for _, r := range s.Rules {
				for _, n := range r.Names {
					if names[n] {
						return fmt.Errorf("name %v of section %q is there twice", n, s.Name)
					}
					names[n] = true
					if both, ok := intersect(n, s.Host); !ok || both != n {
						return fmt.Errorf("name %v is none of section %q for %v", n, s.Name, s.Host)
					}
				}
				for _, b := range r.Backends {
					if (b.Service == nil) == (b.Broken == "") {
						return fmt.Errorf("backend of rule %q is neither broken nor whole: %+v", r.Name, b)
					}
				}
			}
		}
	}
	for n, g := range res.Gateways {
		if len(g.Conditions) < 3 {
			return fmt.Errorf("gateway %s has conditions %v", n, g.Conditions)
		}
		for _, l := range g.Listeners {
			if len(l.Conditions) < 4 || l.SupportedKinds == nil {
				return fmt.Errorf("listener %s of %s: %+v", l.Name, n, l)
			}
		}
	}
	for k, r := range res.Routes {
		for _, p := range r.Parents {
			if len(p.Conditions) != 2 {
				return fmt.Errorf("%v: %+v", k, p)
			}
		}
	}
	return nil
}

func FuzzTranslate(f *testing.F) {
	for i := range uint64(300) {
		f.Add(i)
	}
	cert, key := pair()
	f.Fuzz(func(t *testing.T, seed uint64) {
		d := dice{rand.New(rand.NewPCG(seed, 1))}
		w := d.inputs(cert, key)
		one := Translate(w)
		if err := check(one); err != nil {
			t.Fatal(err)
		}
		two := Translate(d.shuffled(w))
		if err := sameResult(one, two); err != nil {
			t.Fatalf("another order gives another result: %v", err)
		}
	})
}

func sameResult(a, b *Result) error {
	strip := func(r *Result) Result {
		c := *r
		c.Routes = map[RouteKey]RouteStatus{}
		for k, s := range r.Routes {
			s.Others = nil
			c.Routes[k] = s
		}
		return c
	}
	x, y := strip(a), strip(b)
	for i := range reflect.TypeFor[Result]().NumField() {
		if p, q := reflect.ValueOf(x).Field(i).Interface(), reflect.ValueOf(y).Field(i).Interface(); !reflect.DeepEqual(p, q) {
			return fmt.Errorf("%s: %+v and %+v", reflect.TypeFor[Result]().Field(i).Name, p, q)
		}
	}
	return nil
}

// BenchmarkTranslate has 5,000 TLSRoutes at one listener, each with a Service.
func BenchmarkTranslate(b *testing.B) {
	w := inputsOf(b, base, edge(passthrough))
	f := w.Objects.(*fixture)
	bySlice := map[string][]*endpoints.Slice{}
	for i := range 5000 {
		name := fmt.Sprint("s", i)
		f.services["a/"+name] = &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "a", Name: name}, Spec: corev1.ServiceSpec{Ports: []corev1.ServicePort{{Port: 443, Protocol: "TCP"}}}}
		port := int32(8443)
		bySlice[name] = []*endpoints.Slice{endpoints.SliceOf(&discoveryv1.EndpointSlice{ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{discoveryv1.LabelServiceName: name}}, AddressType: "IPv4", Ports: []discoveryv1.EndpointPort{{Port: &port}}, Endpoints: []discoveryv1.Endpoint{{Addresses: []string{"10.1.1.1"}}, {Addresses: []string{"10.1.1.2"}}}})}
		r := &gwv1.TLSRoute{ObjectMeta: metav1.ObjectMeta{Namespace: "a", Name: name, CreationTimestamp: metav1.NewTime(time.Unix(int64(i), 0))}}
		r.Spec.ParentRefs = []gwv1.ParentReference{{Name: "edge"}}
		r.Spec.Hostnames = []gwv1.Hostname{gwv1.Hostname(name + ".example.com")}
		r.Spec.Rules = []gwv1.TLSRouteRule{{BackendRefs: []gwv1.BackendRef{{BackendObjectReference: gwv1.BackendObjectReference{Name: gwv1.ObjectName(name), Port: &[]int32{443}[0]}}}}}
		w.TLSRoutes = append(w.TLSRoutes, r)
	}
	w.Objects = indexed{f, bySlice}
	w.memo = newMemo()
	b.ReportAllocs()
	for b.Loop() {
		if n := len(Translate(w).Snapshot.Listeners[0].Sections[0].Rules); n != 5000 {
			b.Fatalf("got %d rules", n)
		}
	}
}

// indexed finds slices as fast as an informer does.
type indexed struct {
	*fixture
	by map[string][]*endpoints.Slice
}

func (x indexed) Slices(o endpoints.Owner) []*endpoints.Slice { return x.by[o.Name] }
