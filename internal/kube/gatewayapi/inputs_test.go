package gatewayapi

import (
	"cmp"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"
	mcsv1 "sigs.k8s.io/mcs-api/pkg/apis/v1beta1"
	"sigs.k8s.io/yaml"

	"culvert.dev/internal/kube/endpoints"
	"culvert.dev/internal/testnet"
	"culvert.dev/registry"
)

func TestMain(m *testing.M) { testnet.GoroutinesEnd(m) }

// base is what is there in every fixture: two namespaces with the same Services.
const base = `
kind: GatewayClass
metadata: {name: culvert, generation: 1}
spec: {controllerName: culvert.dev/gateway}
---
kind: Namespace
metadata: {name: a, labels: {team: red}}
---
kind: Namespace
metadata: {name: b, labels: {team: blue}}
---
kind: Service
metadata: {namespace: a, name: web}
spec:
  ports:
  - {name: tls, port: 443, targetPort: 8443}
  - {name: plain, port: 80, targetPort: 3000}
  - {name: dns, port: 53, protocol: UDP, targetPort: 5353}
---
kind: EndpointSlice
metadata: {namespace: a, name: web-1, labels: {kubernetes.io/service-name: web}}
addressType: IPv4
ports:
- {name: tls, port: 8443, protocol: TCP}
- {name: plain, port: 3000, protocol: TCP}
- {name: dns, port: 5353, protocol: UDP}
endpoints:
- {addresses: [10.244.0.1], conditions: {ready: true}}
---
kind: Service
metadata: {namespace: a, name: other}
spec:
  ports:
  - {name: tls, port: 443, targetPort: 8443}
---
kind: EndpointSlice
metadata: {namespace: a, name: other-1, labels: {kubernetes.io/service-name: other}}
addressType: IPv4
ports:
- {name: tls, port: 8443, protocol: TCP}
endpoints:
- {addresses: [10.244.0.9], conditions: {ready: true}}
---
kind: Service
metadata: {namespace: b, name: web}
spec:
  ports:
  - {name: tls, port: 443}
---
kind: EndpointSlice
metadata: {namespace: b, name: web-1, labels: {kubernetes.io/service-name: web}}
addressType: IPv4
ports:
- {name: tls, port: 443, protocol: TCP}
endpoints:
- {addresses: [10.244.1.1]}
`

// fixture is Objects, made of YAML.
type fixture struct {
	namespaces map[string]*corev1.Namespace
	services   map[string]*corev1.Service
	secrets    map[string]*corev1.Secret
	configMaps map[string]*corev1.ConfigMap
	imports    map[string]*mcsv1.ServiceImport
	slices     []*discoveryv1.EndpointSlice
	kept       map[*discoveryv1.EndpointSlice]*endpoints.Slice // as a store keeps them
	nodes      []*corev1.Node
	nodeless   bool // it is not known yet which nodes there are
}

func (f *fixture) Namespace(n string) *corev1.Namespace     { return f.namespaces[n] }
func (f *fixture) Service(ns, n string) *corev1.Service     { return f.services[ns+"/"+n] }
func (f *fixture) Secret(ns, n string) *corev1.Secret       { return f.secrets[ns+"/"+n] }
func (f *fixture) ConfigMap(ns, n string) *corev1.ConfigMap { return f.configMaps[ns+"/"+n] }
func (f *fixture) Import(ns, n string) *mcsv1.ServiceImport { return f.imports[ns+"/"+n] }
func (f *fixture) Nodes() ([]*corev1.Node, bool)            { return slices.Clone(f.nodes), !f.nodeless }
func (f *fixture) Slices(o endpoints.Owner) (out []*endpoints.Slice) {
	for _, s := range f.slices {
		if f.kept[s] == nil {
			f.kept[s] = endpoints.SliceOf(s)
		}
		if kept := f.kept[s]; kept != nil && slices.Contains(kept.Owners, o) {
			out = append(out, kept)
		}
	}
	return out
}

// worldOf reads YAML documents. CERT in one stands for a pair of PEM and CA for a CA.
func inputsOf(t testing.TB, docs ...string) *Inputs {
	t.Helper()
	f := &fixture{map[string]*corev1.Namespace{}, map[string]*corev1.Service{}, map[string]*corev1.Secret{}, map[string]*corev1.ConfigMap{}, map[string]*mcsv1.ServiceImport{}, nil, map[*discoveryv1.EndpointSlice]*endpoints.Slice{}, nil, false}
	w := &Inputs{Objects: f}
	cert, private := pair()
	for n, doc := range strings.Split(strings.Join(docs, "\n---\n"), "\n---\n") {
		if strings.TrimSpace(doc) == "" {
			continue
		}
		var head metav1.TypeMeta
		if err := yaml.Unmarshal([]byte(doc), &head); err != nil {
			t.Fatalf("%v in\n%s", err, doc)
		}
		read := func(o metav1.Object) {
			if err := yaml.UnmarshalStrict([]byte(doc), o); err != nil {
				t.Fatalf("%v in\n%s", err, doc)
			}
			if o.GetUID() == "" {
				o.SetUID(uidOf(head.Kind, o))
			}
			if o.GetGeneration() == 0 {
				o.SetGeneration(7)
			}
			if ts := o.GetCreationTimestamp(); ts.IsZero() {
				o.SetCreationTimestamp(metav1.NewTime(time.Date(2026, 1, 1, 0, 0, n, 0, time.UTC)))
			}
		}
		switch head.Kind {
		case "GatewayClass":
			w.Classes = append(w.Classes, with(read, &gwv1.GatewayClass{}))
		case "Gateway":
			w.Gateways = append(w.Gateways, with(read, &gwv1.Gateway{}))
		case "ListenerSet":
			w.ListenerSets = append(w.ListenerSets, with(read, &gwv1.ListenerSet{}))
		case "TLSRoute":
			w.TLSRoutes = append(w.TLSRoutes, with(read, &gwv1.TLSRoute{}))
		case "TCPRoute":
			w.TCPRoutes = append(w.TCPRoutes, with(read, &gwv1.TCPRoute{}))
		case "UDPRoute":
			w.UDPRoutes = append(w.UDPRoutes, with(read, &gwv1.UDPRoute{}))
		case "HTTPRoute":
			w.HTTPRoutes = append(w.HTTPRoutes, with(read, &gwv1.HTTPRoute{}))
		case "GRPCRoute":
			w.GRPCRoutes = append(w.GRPCRoutes, with(read, &gwv1.GRPCRoute{}))
		case "ReferenceGrant":
			w.Grants = append(w.Grants, with(read, &gwv1.ReferenceGrant{}))
		case "BackendTLSPolicy":
			w.Policies = append(w.Policies, with(read, &gwv1.BackendTLSPolicy{}))
		case "Node":
			f.nodes = append(f.nodes, with(read, &corev1.Node{}))
		case "Namespace":
			o := with(read, &corev1.Namespace{})
			f.namespaces[o.Name] = o
		case "Service":
			o := with(read, &corev1.Service{})
			f.services[key(o).String()] = o
		case "EndpointSlice":
			f.slices = append(f.slices, with(read, &discoveryv1.EndpointSlice{}))
		case "ServiceImport":
			o := with(read, &mcsv1.ServiceImport{})
			f.imports[key(o).String()] = o
		case "Secret":
			o := with(read, &corev1.Secret{})
			if o.Type == "" {
				o.Type = corev1.SecretTypeTLS
			}
			if o.StringData["tls.crt"] == "CERT" {
				o.Data = map[string][]byte{"tls.crt": []byte(cert), "tls.key": []byte(private)}
			} else {
				o.Data = map[string][]byte{"tls.crt": []byte(o.StringData["tls.crt"]), "tls.key": []byte(o.StringData["tls.key"])}
			}
			f.secrets[key(o).String()] = o
		case "ConfigMap":
			o := with(read, &corev1.ConfigMap{})
			if o.Data["ca.crt"] == "CERT" {
				o.Data["ca.crt"] = cert
			}
			f.configMaps[key(o).String()] = o
		default:
			t.Fatalf("kind %q in\n%s", head.Kind, doc)
		}
	}
	return w
}

func uidOf(kind string, o metav1.Object) types.UID {
	return types.UID(kind + "/" + o.GetNamespace() + "/" + o.GetName())
}

func with[T metav1.Object](read func(metav1.Object), o T) T {
	read(o)
	return o
}

// pair is a certificate with its key, the same in all tests.
var pair = sync.OnceValues(func() (cert, key string) {
	k, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		panic(err)
	}
	tmpl := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "test"}, DNSNames: []string{"*.example.com"},
		NotAfter: time.Date(2100, 1, 1, 0, 0, 0, 0, time.UTC), IsCA: true, BasicConstraintsValid: true,
	}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, k.Public(), k)
	if err != nil {
		panic(err)
	}
	kder, err := x509.MarshalPKCS8PrivateKey(k)
	if err != nil {
		panic(err)
	}
	return string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})), string(pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: kder}))
})

// dump says in lines what a Result says.
func dump(res *Result) []string {
	var out []string
	add := func(format string, args ...any) { out = append(out, fmt.Sprintf(format, args...)) }
	conds := func(who string, cs []metav1.Condition) {
		for _, c := range cs {
			add("%s %s=%s/%s", who, c.Type, c.Status, c.Reason)
			if c.Type == "" || c.Reason == "" || c.ObservedGeneration == 0 {
				add("%s broken condition %v", who, c)
			}
		}
	}
	kinds := func(ks []gwv1.RouteGroupKind) string {
		var s []string
		for _, k := range ks {
			s = append(s, string(k.Kind))
		}
		return strings.Join(s, ",")
	}
	for n, s := range res.Classes {
		conds("class "+n, s.Conditions)
		for _, f := range s.Features {
			add("class %s feature %s", n, f.Name)
		}
	}
	for n, s := range res.Gateways {
		who := "gateway " + n.String()
		conds(who, s.Conditions)
		add("%s sets=%d", who, *s.AttachedListenerSets)
		for _, a := range s.Addresses {
			add("%s address %s %s", who, *a.Type, a.Value)
		}
		add("%s addresses=%d", who, len(s.Addresses))
		for _, l := range s.Listeners {
			who := fmt.Sprintf("listener %s %s", n, l.Name)
			conds(who, l.Conditions)
			add("%s kinds=%s attached=%d", who, kinds(l.SupportedKinds), l.AttachedRoutes)
			if l.SupportedKinds == nil {
				add("%s has nil kinds", who)
			}
		}
	}
	for n, s := range res.ListenerSets {
		conds("set "+n.String(), s.Conditions)
		for _, l := range s.Listeners {
			who := fmt.Sprintf("entry %s %s", n, l.Name)
			conds(who, l.Conditions)
			add("%s kinds=%s attached=%d", who, kinds(l.SupportedKinds), l.AttachedRoutes)
		}
	}
	for k, s := range res.Routes {
		add("%s %s parents=%d", k.Kind, k.NamespacedName, len(s.Parents))
		for _, p := range s.Parents {
			who := fmt.Sprintf("%s %s %s", k.Kind, k.NamespacedName, p.ParentRef.Name)
			if p.ParentRef.SectionName != nil {
				who += "#" + string(*p.ParentRef.SectionName)
			}
			if p.ParentRef.Port != nil {
				who += fmt.Sprint(":", *p.ParentRef.Port)
			}
			conds(who, p.Conditions)
		}
	}
	for n, as := range res.Policies {
		add("policy %s ancestors=%d", n, len(as))
		for _, a := range as {
			conds(fmt.Sprintf("policy %s %s", n, a.AncestorRef.Name), a.Conditions)
		}
	}
	for _, l := range res.Snapshot.Listeners {
		add("open %s %s", l.Name, l.Protocol)
		for _, s := range l.Sections {
			host := cmp.Or(s.Host.String(), "*")
			ends := ""
			if s.TLS != nil {
				ends = fmt.Sprintf(" ends %d", len(s.TLS.Keys))
				if s.TLS.ClientCAs != "" {
					ends += " verify"
				}
				if s.TLS.ClientCertOptional {
					ends += " optional"
				}
			}
			if s.Istio {
				ends += " istio"
			}
			add("section %s %s %s%s%s", l.Name, host, s.Name, ends, clientsText(s.Clients))
			for _, r := range s.Rules {
				var names, to []string
				for _, n := range r.Names {
					names = append(names, n.String())
				}
				for _, b := range r.Backends {
					to = append(to, dumpBackend(b))
				}
				add("rule %s %s [%s] %s%s", s.Name, r.Name, strings.Join(names, " "), strings.Join(to, " "), clientsText(r.Clients))
			}
			add("rules %s=%d", s.Name, len(s.Rules))
		}
	}
	return out
}

func dumpBackend(b registry.Backend) string {
	if b.Broken != "" {
		return fmt.Sprintf("%d:broken", b.Weight)
	}
	var es []string
	for _, e := range b.Service.Endpoints {
		es = append(es, e.String())
	}
	s := fmt.Sprintf("%d:%s(%s)", b.Weight, b.Service.Name, strings.Join(es, ","))
	if !b.ServiceName.IsZero() {
		s += "=" + b.ServiceName.String()
	}
	if b.Service.TLS != nil {
		s += "+tls:" + b.Service.TLS.ServerName
		if len(b.Service.TLS.SANs) > 0 {
			s += "|" + strings.Join(b.Service.TLS.SANs, "|")
		}
		if b.Service.TLS.Roots != "" {
			s += "+roots"
		}
		if b.Service.TLS.KeyName != "" {
			s += "+cert"
		}
		if v := b.Service.TLS.MinVersion; v != 0 {
			s += "+min:" + tls.VersionName(v)
		}
		if v := b.Service.TLS.MaxVersion; v != 0 {
			s += "+max:" + tls.VersionName(v)
		}
		if n := len(b.Service.TLS.CipherSuites); n > 0 {
			s += fmt.Sprintf("+suites:%d", n)
		}
	}
	return s
}

// expect looks for lines in a dump; those that begin with "!" must not be there.
func expect(t *testing.T, res *Result, want string) {
	t.Helper()
	got := dump(res)
	fail := false
	for line := range strings.Lines(want) {
		line = strings.TrimSpace(line)
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		if not, ok := strings.CutPrefix(line, "!"); ok {
			if slices.ContainsFunc(got, func(l string) bool { return strings.HasPrefix(l, not) }) {
				t.Errorf("got %q in %q, want no such line", not, got)
				fail = true
			}
			continue
		}
		if !slices.Contains(got, line) {
			t.Errorf("missing %q", line)
			fail = true
		}
	}
	for _, l := range got {
		if strings.Contains(l, "broken condition") || strings.Contains(l, "nil kinds") {
			t.Error(l)
		}
	}
	if fail {
		slices.Sort(got)
		t.Logf("got\n%s", strings.Join(got, "\n"))
	}
}

type row struct {
	name string
	docs string
	set  func(*Inputs)
	want string
}

func runRows(t *testing.T, rows []row) {
	t.Helper()
	for _, r := range rows {
		t.Run(r.name, func(t *testing.T) {
			w := inputsOf(t, base, r.docs)
			w.PublicAddresses = addrs("192.0.2.1")
			if r.set != nil {
				r.set(w)
			}
			expect(t, Translate(w), r.want)
		})
	}
}

func addrs(ss ...string) []netip.Addr {
	var as []netip.Addr
	for _, s := range ss {
		as = append(as, netip.MustParseAddr(s))
	}
	return as
}

// pool is for settings: Gateways have addresses of their own.
func pool(ss ...string) func(*Inputs) {
	return func(w *Inputs) {
		w.PublicAddresses = nil
		for _, a := range addrs(ss...) {
			w.Addresses = append(w.Addresses, Address{Bind: a})
		}
	}
}

// conditions that are true.
func conditions(kinds ...string) []metav1.Condition {
	var cs []metav1.Condition
	for _, k := range kinds {
		cs = append(cs, condition(k, true, k, ""))
	}
	return cs
}
