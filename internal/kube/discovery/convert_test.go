package discovery

import (
	"fmt"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"culvert.dev/internal/kube/endpoints"
	"culvert.dev/registry"
	"culvert.dev/tunnel"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

func space(name string, notes ...string) *namespace {
	n := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}}
	for i := 0; i < len(notes); i += 2 {
		metav1.SetMetaDataAnnotation(&n.ObjectMeta, prefix+notes[i], notes[i+1])
	}
	return namespaceOf(n)
}

// exposedTo is how a test has who may ask: "nobody", "everyone" or networks.
func exposedTo(s *registry.Service) string {
	switch {
	case !s.Exposed:
		return "nobody"
	case len(s.ExposedTo) == 0:
		return "everyone"
	}
	return strings.Join(s.ExposedTo, ",")
}

func TestExposure(t *testing.T) {
	rules := &Rules{}
	strict := &Rules{Allow: []string{"shop", "stock/api-*"}, Deny: []string{"*/internal-*", "shop/cellar"}}
	for _, tt := range []struct {
		name              string
		svc               []string // annotations
		ns                *namespace
		as                string // NAMESPACE/NAME, "shop/web" if ""
		rules             *Rules
		exported          bool
		set               string // ClusterSet
		namespacesUnknown bool
		want              string
		problem           string // part of the only problem; "" for none
	}{
		{name: "by default", want: "nobody"},
		{name: "exposed", svc: []string{"expose", "true"}, want: "everyone"},
		{name: "by its namespace", ns: space("shop", "expose", "true"), want: "everyone"},
		{name: "not, though its namespace is", svc: []string{"expose", "false"}, ns: space("shop", "expose", "true"), want: "nobody"},
		{name: "though its namespace is not", svc: []string{"expose", "true"}, ns: space("shop", "expose", "false"), want: "everyone"},
		{name: "to networks", svc: []string{"expose", "true", "networks", "b, a,b"}, want: "a,b"},
		{name: "to the networks of its namespace", svc: []string{"expose", "true"}, ns: space("shop", "networks", "a"), want: "a"},
		{name: "to networks of its own", svc: []string{"expose", "true", "networks", "b"}, ns: space("shop", "networks", "a"), want: "b"},
		{name: "to everyone, though its namespace is not", svc: []string{"expose", "true", "networks", "*"}, ns: space("shop", "networks", "a"), want: "everyone"},
		{name: "networks alone", svc: []string{"networks", "a"}, want: "nobody"},
		{name: "neither true nor false", svc: []string{"expose", "yes"}, want: "nobody", problem: `annotation culvert.dev/expose: "yes": write "true" or "false"; the service is not exposed`},
		{name: "neither, at the namespace", ns: space("shop", "expose", "True"), want: "nobody", problem: "not exposed"},
		{name: "neither, at the namespace, and not asked", svc: []string{"expose", "true"}, ns: space("shop", "expose", "True"), want: "everyone"},
		{name: "to no network", svc: []string{"expose", "true", "networks", ""}, want: "nobody", problem: "nobody or everyone"},
		{name: "to an empty one", svc: []string{"expose", "true", "networks", "a,,b"}, want: "nobody", problem: "item 2 is empty"},
		{name: "to what is none", svc: []string{"expose", "true", "networks", "a b"}, want: "nobody", problem: "not the name of a network"},
		{name: "to a list without commas", svc: []string{"expose", "true", "networks", "east;west"}, want: "nobody", problem: `"east;west" is not the name of a network: write letters, digits and any of ._-/:@, and commas between names; the service is not exposed`},
		{name: "to names with marks", svc: []string{"expose", "true", "networks", "aws/eu-1,dc_2.b"}, want: "aws/eu-1,dc_2.b"},
		{name: "to everyone and one", svc: []string{"expose", "true", "networks", "*,a"}, want: "nobody", problem: "must be alone"},
		{name: "to malformed ones of the namespace", svc: []string{"expose", "true"}, ns: space("shop", "networks", ","), want: "nobody", problem: "item 1 is empty"},
		{name: "networks misspelt", svc: []string{"expose", "true", "network", "a"}, want: "nobody", problem: "did you mean culvert.dev/networks?"},
		{name: "expose misspelt", svc: []string{"exposed", "true"}, want: "nobody", problem: "did you mean culvert.dev/expose?"},
		{name: "networks misspelt at the namespace", svc: []string{"expose", "true"}, ns: space("shop", "netwroks", "a"), want: "nobody", problem: "did you mean culvert.dev/networks?"},
		{name: "a key that nothing reads", svc: []string{"expose", "true", "timeout", "90s"}, want: "everyone", problem: `annotation culvert.dev/timeout: "90s": there is no annotation of this name; it is ignored`},
		{name: "an earlier name", svc: []string{"expose", "true", "idle", "90s"}, want: "everyone", problem: "did you mean culvert.dev/idle-timeout? it is ignored"},
		{name: "no protocol that begins TLS", svc: []string{"expose", "true", "start-tls", "smtp"}, want: "nobody", problem: `write "postgres"; the service is not exposed`},
		{name: "no client ranges", svc: []string{"expose", "true", "clients-allow", "all"}, want: "nobody", problem: `item 1 is not an address range: write 192.0.2.0/24 or 2001:db8::/32; the service is not exposed`},
		{name: "no position of the header", svc: []string{"expose", "true", "forward-identity", "true"}, want: "nobody", problem: `"true" is no position of a header: write insideTLS`},
		{name: "no position of the header, at the namespace", svc: []string{"expose", "true"}, ns: space("shop", "forward-identity", "yes"), want: "nobody", problem: "the service is not exposed"},
		{name: "a header that anybody can write", svc: []string{"expose", "true", "forward-identity", "beforeTLS"}, want: "nobody", problem: "whoever can connect to the service can say by such a header who it is"},
		{name: "a header in no TLS", svc: []string{"expose", "true", "forward-identity", "insideTLS; assertion=true"}, want: "nobody", problem: `annotation culvert.dev/forward-identity: "insideTLS; assertion=true": the gateway speaks no TLS to the endpoints of an exposed Service`},
		{name: "a header in the TLS of a route", svc: []string{"forward-identity", "insideTLS"}, want: "nobody"},
		{name: "two headers", svc: []string{"expose", "true", "proxy-protocol", "v2", "forward-identity", "beforeTLS; trustNetwork=true"}, want: "nobody", problem: "there is a header by culvert.dev/forward-identity already"},
		{name: "a header misspelt", svc: []string{"expose", "true", "forward-identitiy", "insideTLS"}, want: "nobody", problem: "did you mean culvert.dev/forward-identity?"},
		{name: "no version of the PROXY protocol", svc: []string{"expose", "true", "proxy-protocol", "3"}, want: "nobody", problem: `write "v1" or "v2"; the service is not exposed`},
		{name: "something harmless is wrong", svc: []string{"expose", "true", "idle-timeout", "long"}, want: "everyone", problem: "90s or 1h30m; it is ignored"},
		{name: "names at a namespace", svc: []string{"expose", "true"}, ns: space("shop", "names", "a.example.com"), want: "everyone", problem: "for a Service, and ignored at a Namespace"},

		{name: "allowed", svc: []string{"expose", "true"}, rules: strict, want: "everyone"},
		{name: "allowed by its name", svc: []string{"expose", "true"}, as: "stock/api-1", rules: strict, want: "everyone"},
		{name: "not allowed", svc: []string{"expose", "true"}, as: "stock/db", rules: strict, want: "nobody", problem: "the administrator does not allow it"},
		{name: "not allowed by the namespace", ns: space("else", "expose", "true"), as: "else/db", rules: strict, want: "nobody", problem: "does not allow"},
		{name: "allowed and denied", svc: []string{"expose", "true"}, as: "shop/cellar", rules: strict, want: "nobody", problem: `the administrator denies "shop/cellar"`},
		{name: "denied by its name", svc: []string{"expose", "true"}, as: "shop/internal-db", rules: strict, want: "nobody", problem: "denies"},
		{name: "denied, and does not ask", as: "shop/cellar", rules: strict, want: "nobody"},
		{name: "denied, and exported", as: "shop/cellar", rules: strict, exported: true, set: "a", want: "nobody", problem: "denies"},

		{name: "exported", exported: true, set: "b,a", want: "a,b"},
		{name: "exported to no networks", exported: true, want: "nobody"},
		{name: "exported and exposed", svc: []string{"expose", "true"}, exported: true, set: "a", want: "everyone"},
		{name: "exported to everyone", exported: true, set: "*", want: "everyone"},
		{name: "exported and exposed to another network", svc: []string{"expose", "true", "networks", "b"}, exported: true, set: "a", want: "b", problem: `networks: "b": it is exported to the cluster set, and this excludes a`},
		{name: "exported and exposed to one of its networks", svc: []string{"expose", "true", "networks", "b"}, exported: true, set: "a,b", want: "b", problem: "excludes a"},
		{name: "exported and exposed to more networks", svc: []string{"expose", "true", "networks", "a,b"}, exported: true, set: "a", want: "a,b"},
		{name: "exported to everyone and exposed to a network", svc: []string{"expose", "true", "networks", "b"}, exported: true, set: "*", want: "b", problem: "excludes all others"},
		{name: "exported to everyone and narrowed by its namespace", ns: space("shop", "networks", "b"), exported: true, set: "*", want: "b", problem: "excludes all others"},
		{name: "exported and narrowed", svc: []string{"networks", "b"}, exported: true, set: "a,b", want: "b", problem: "excludes a"},
		{name: "exported and narrowed to nothing", svc: []string{"networks", "c"}, exported: true, set: "a,b", want: "nobody", problem: "excludes a, b"},
		{name: "exported with networks for everyone", svc: []string{"networks", "*"}, exported: true, set: "a", want: "a"},
		{name: "exported and refused", svc: []string{"expose", "false"}, exported: true, set: "a", want: "nobody", problem: "it keeps the service closed, and its ServiceExport has no effect"},
		{name: "exported and malformed", svc: []string{"networks", ""}, exported: true, set: "a", want: "nobody", problem: "networks"},
		{name: "exported by an annotation alone", svc: []string{"exported", "true"}, set: "a", want: "nobody", problem: `not exported: add culvert.dev/expose: "true"`},
		{name: "exported by an annotation and refused", svc: []string{"expose", "false", "exported", "true"}, set: "a", want: "nobody", problem: "and so it is not exported"},
		{name: "exported by the annotation of its namespace", ns: space("shop", "exported", "true"), set: "a", want: "nobody"},
		{name: "exported and exposed by annotations", svc: []string{"expose", "true", "networks", "a,b", "exported", "true"}, set: "a", want: "a,b"},

		{name: "blind", svc: []string{"expose", "true"}, namespacesUnknown: true, want: "nobody", problem: "Namespaces cannot be read"},
		{name: "blind, and said to whom", svc: []string{"expose", "true", "networks", "a"}, namespacesUnknown: true, want: "a"},
		{name: "blind, and for everyone", svc: []string{"expose", "true", "networks", "*"}, namespacesUnknown: true, want: "everyone"},
		{name: "blind and exported", exported: true, set: "a", namespacesUnknown: true, want: "nobody", problem: "Namespaces cannot be read"},
		{name: "blind, exported and said to whom", svc: []string{"networks", "a"}, exported: true, set: "a", namespacesUnknown: true, want: "a"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			ns, name := "shop", "web"
			if tt.as != "" {
				ns, name, _ = strings.Cut(tt.as, "/")
			}
			v := view{cluster: "west", network: "west", rules: rules, namespacesUnknown: tt.namespacesUnknown}
			if tt.rules != nil {
				v.rules = tt.rules
			}
			if tt.set != "" {
				v.clusterSet = strings.Split(tt.set, ",")
			}
			got, problems := v.convert(serviceOf(svc(ns, name, tt.svc...)), tt.ns, []*endpoints.Slice{endpoints.SliceOf(eps(ns, name, "a", "10.1.0.1"))}, tt.exported)
			if exposedTo(got) != tt.want {
				t.Errorf("exposed to %s, want %s", exposedTo(got), tt.want)
			}
			switch {
			case tt.problem == "" && len(problems) > 0:
				t.Errorf("problems %v, want none", problems)
			case tt.problem != "" && (len(problems) != 1 || !strings.Contains(problems[0].String(), tt.problem)):
				t.Errorf("problems %v, want one with %q", problems, tt.problem)
			}
			if has := len(got.Endpoints) > 0; has != got.Exposed {
				t.Errorf("endpoints %v of a service that is exposed: %v", got.Endpoints, got.Exposed)
			}
			if got.Exported && (!got.Exposed || !tt.exported && !slices.Contains(tt.svc, "exported")) {
				t.Errorf("exported, exposed to %s", exposedTo(got))
			}
			if got.ID != (registry.ID{Service: name, Namespace: ns, Cluster: "west"}) {
				t.Errorf("ID %+v", got.ID)
			}
		})
	}
}

func TestAnnotations(t *testing.T) {
	pattern := func(list ...string) (out []tunnel.Pattern) {
		for _, s := range list {
			p, err := tunnel.ParsePattern(s)
			if err != nil {
				t.Fatal(err)
			}
			out = append(out, p)
		}
		return out
	}
	long := strings.Repeat("a.example.com,", 64) + "a.example.com"
	rules := &Rules{Names: []NameRule{
		{Suffix: tunnel.MustParseName("example.com"), Namespaces: []string{"shop", "st*"}}, {Suffix: tunnel.MustParseName("any.test")},
	}}
	for _, tt := range []struct {
		key, value string
		want       registry.Service // only what the annotation is for
		problem    string
	}{
		{"own-port", "true", registry.Service{Publish: true}, ""},
		{"own-port", "false", registry.Service{}, ""},
		{"own-port", "1", registry.Service{}, "it is ignored"},
		{"vip", "true", registry.Service{VIP: true}, ""},
		{"vip", "", registry.Service{}, "it is ignored"},
		{"proxy-protocol", "v1", registry.Service{ProxyProtocol: 1}, ""},
		{"proxy-protocol", "v2", registry.Service{ProxyProtocol: 2}, ""},
		{"forward-identity", "beforeTLS; trustNetwork=true", registry.Service{ProxyProtocol: 2, ForwardIdentity: &registry.ForwardIdentity{}}, ""},
		{"exported", "true", registry.Service{Exported: true, VIP: true}, ""},
		{"exported", "t", registry.Service{}, "it is ignored"},
		{"idle-timeout", "90s", registry.Service{IdleTimeout: 90 * time.Second}, ""},
		{"idle-timeout", "0s", registry.Service{}, "write a duration"},
		{"idle-timeout", "-1h", registry.Service{}, "write a duration"},
		{"idle-timeout", "90", registry.Service{}, "write a duration"},
		{"half-closed-timeout", "1h30m", registry.Service{HalfClosedTimeout: 90 * time.Minute}, ""},
		{"alpn", "h2, http/1.1,h2", registry.Service{ALPN: []string{"h2", "http/1.1"}}, ""},
		{"alpn", "h2,", registry.Service{}, "item 2"},
		{"alpn", "h 2", registry.Service{}, "item 1"},
		{"alpn", strings.Repeat("x,", 16) + "x", registry.Service{}, "17 items, limit 16"},
		{"load-balancing", "sourceHash; stickyFor=30m", registry.Service{LoadBalancing: registry.LoadBalancing{Policy: registry.SourceHash, StickyFor: 30 * time.Minute}}, ""},
		{"load-balancing", "random", registry.Service{}, `"random" is no policy: write roundRobin`},
		{"clients-allow", "10.0.0.0/8, 2001:db8::/32", registry.Service{Clients: registry.ClientFilter{Allow: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("2001:db8::/32")}}}, ""},
		{"clients-deny", "10.9.0.0/16", registry.Service{Clients: registry.ClientFilter{Deny: []netip.Prefix{netip.MustParsePrefix("10.9.0.0/16")}}}, ""},
		{"start-tls", "postgres", registry.Service{StartTLS: "postgres"}, ""},
		{"limits-connections", "500", registry.Service{Limits: &tunnel.ServiceLimits{Connections: 500}}, ""},
		{"limits-new-per-second", "50", registry.Service{Limits: &tunnel.ServiceLimits{NewPerSecond: 50}}, ""},
		{"limits-connections-per-endpoint", "100", registry.Service{Limits: &tunnel.ServiceLimits{ConnectionsPerEndpoint: 100}}, ""},
		{"outlier-ejection", "true", registry.Service{OutlierEjection: &registry.OutlierEjection{}}, ""},
		{"outlier-ejection", "consecutiveFailures=3; ejectionTime=1m;maxEjectedPercent=30", registry.Service{OutlierEjection: &registry.OutlierEjection{ConsecutiveFailures: 3, EjectionTime: time.Minute, MaxEjectedPercent: 30}}, ""},
		{"outlier-ejection", "false", registry.Service{}, `"false" is unknown: write "true"`},
		{"outlier-ejection", "maxEjectedPercent=101", registry.Service{}, `maxEjectedPercent "101" is not a number from 1 to 100; it is ignored`},
		{"outlier-ejection", "ejectionTime=5", registry.Service{}, `ejectionTime "5" is not a duration from 1s to 1h0m0s; it is ignored`},
		{"limits-connections", "0", registry.Service{}, "write a number from 1 to 1000000; it is ignored"},
		{"limits-connections", "+5", registry.Service{}, "write a number from 1 to 1000000; it is ignored"},
		{"limits-new-per-second", "1000001", registry.Service{}, "write a number from 1 to 1000000; it is ignored"},
		{"check", "tcp", registry.Service{Check: registry.Check{Kind: "tcp"}}, ""},
		{"check", "none", registry.Service{}, ""},
		{"check", "http:/healthz", registry.Service{Check: registry.Check{Kind: "http", Path: "/healthz"}}, ""},
		{"check", "http:8008/primary", registry.Service{Check: registry.Check{Kind: "http", Port: 8008, Path: "/primary"}}, ""},
		{"check", "http:8008", registry.Service{Check: registry.Check{Kind: "http", Port: 8008}}, ""},
		{"check", "tls:9443", registry.Service{Check: registry.Check{Kind: "tls", Port: 9443}}, ""},
		{"check", "tcp:", registry.Service{}, "write tcp, tls"},
		{"check", "tcp:0", registry.Service{}, "write tcp, tls"},
		{"check", "tcp:65536", registry.Service{}, "write tcp, tls"},
		{"check", "http:+80/", registry.Service{}, "write tcp, tls"},
		{"check", "none:1", registry.Service{}, "write tcp, tls"},
		{"check", "http:healthz", registry.Service{}, "write tcp, tls"},
		{"check", "tcp:/x", registry.Service{}, "write tcp, tls"},
		{"check", "http:/a b", registry.Service{}, "write tcp, tls"},
		{"check", "grpc", registry.Service{}, "write tcp, tls"},
		{"names", "shop.example.com", registry.Service{Names: pattern("shop.example.com")}, ""},
		{"names", "*.shop.example.com, a.any.test,A.any.test.", registry.Service{Names: pattern("*.shop.example.com", "a.any.test", "a.any.test")}, ""},
		{"names", "example.com,*.example.com", registry.Service{Names: pattern("*.example.com", "example.com")}, ""},
		{"names", "example.org", registry.Service{}, "does not allow namespace shop the name example.org; that name is left out"},
		{"names", "badexample.com", registry.Service{}, "does not allow"},
		{"names", "*.com", registry.Service{}, "does not allow"},
		{"names", "com", registry.Service{}, "does not allow"},
		{"names", "a.example.com,b.example.net", registry.Service{Names: pattern("a.example.com")}, "b.example.net"},
		{"names", "web.shop.svc.east.mesh.internal", registry.Service{}, "does not allow"},
		{"names", "*", registry.Service{}, "that name is left out"},
		{"names", "10.1.0.1", registry.Service{}, "that name is left out"},
		{"names", "a.example.com,a b", registry.Service{Names: pattern("a.example.com")}, "that name is left out"},
		{"names", "a.example.com,", registry.Service{}, "item 2 is empty"},
		{"names", long, registry.Service{}, "65 items, limit 64"},
	} {
		t.Run(tt.key+"="+clip(tt.value), func(t *testing.T) {
			v := view{cluster: "west", rules: rules}
			got, problems := v.convert(serviceOf(svc("shop", "web", "expose", "true", tt.key, tt.value)), nil, nil, false)
			only := registry.Service{
				Publish: got.Publish, VIP: got.VIP, ProxyProtocol: got.ProxyProtocol, Exported: got.Exported, IdleTimeout: got.IdleTimeout,
				HalfClosedTimeout: got.HalfClosedTimeout, ALPN: got.ALPN, Check: got.Check, Clients: got.Clients, StartTLS: got.StartTLS, Names: got.Names,
				Limits: got.Limits, OutlierEjection: got.OutlierEjection, LoadBalancing: got.LoadBalancing, ForwardIdentity: got.ForwardIdentity,
			}
			if !reflect.DeepEqual(only, tt.want) {
				t.Errorf("got  %+v\nwant %+v", only, tt.want)
			}
			if !got.Exposed {
				t.Error("the service is not exposed")
			}
			switch {
			case tt.problem == "" && len(problems) > 0:
				t.Errorf("problems %v, want none", problems)
			case tt.problem != "" && (len(problems) != 1 || !strings.Contains(problems[0].String(), tt.problem)):
				t.Errorf("problems %v, want one with %q", problems, tt.problem)
			case tt.problem != "" && (problems[0].Key != tt.key || problems[0].Value != clip(tt.value)):
				t.Errorf("the problem is of %s: %q, want %s: %q", problems[0].Key, problems[0].Value, tt.key, tt.value)
			}
		})
	}
}

func TestPorts(t *testing.T) {
	for _, tt := range []struct {
		name  string
		ports []corev1.ServicePort
		want  string
	}{
		{"one", []corev1.ServicePort{port("https", 443, "")}, "[443] [{https tcp 443}]"},
		{"without a name", []corev1.ServicePort{port("", 443, corev1.ProtocolTCP)}, "[443] []"},
		{"UDP beside TCP", []corev1.ServicePort{port("dns", 53, corev1.ProtocolUDP), port("dns-tcp", 53, corev1.ProtocolTCP)}, "[53] [{dns udp 53} {dns-tcp tcp 53}]"},
		{"UDP at a port of its own", []corev1.ServicePort{port("quic", 444, corev1.ProtocolUDP), port("https", 443, corev1.ProtocolTCP)}, "[443] [{https tcp 443}]"},
		{"UDP alone", []corev1.ServicePort{port("dns", 53, corev1.ProtocolUDP)}, "none"},
		{"SCTP alone", []corev1.ServicePort{port("x", 53, corev1.ProtocolSCTP)}, "none"},
		{"out of range", []corev1.ServicePort{port("a", 70000, ""), port("b", 80, "")}, "[80] [{b tcp 80}]"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := svc("shop", "web")
			s.Spec.Ports = tt.ports
			v := view{cluster: "west", rules: &Rules{}}
			out, _ := v.convert(serviceOf(s), nil, nil, false)
			got := "none"
			if out != nil {
				got = fmt.Sprint(out.Ports, out.NamedPorts)
			}
			if got != tt.want {
				t.Errorf("got %s, want %s", got, tt.want)
			}
		})
	}
}

// Who opens a Service that can't be one is told; who opens all of a namespace did
// not mean it.
func TestUDPAlone(t *testing.T) {
	v := view{cluster: "west", rules: &Rules{}}
	for _, tt := range []struct {
		name  string
		notes []string
		ns    *namespace
		want  int
	}{
		{"not exposed", nil, nil, 0},
		{"exposed", []string{"expose", "true"}, nil, 1},
		{"exposed by its namespace", nil, space("shop", "expose", "true"), 0},
		{"said not to be", []string{"expose", "false"}, space("shop", "expose", "true"), 0},
	} {
		s := svc("shop", "dns", tt.notes...)
		s.Spec.Ports = []corev1.ServicePort{port("dns", 53, corev1.ProtocolUDP)}
		out, problems := v.convert(serviceOf(s), tt.ns, nil, false)
		if out != nil || len(problems) != tt.want {
			t.Errorf("%s: %v, problems %v, want no service and %d problems", tt.name, out, problems, tt.want)
		}
		if tt.want > 0 && !strings.Contains(problems[0].String(), `culvert.dev/expose: "true": it has no TCP port`) {
			t.Errorf("%s: it is told %q", tt.name, problems[0])
		}
	}
}

func TestExternalName(t *testing.T) {
	for _, tt := range []struct {
		name, host string
		rules      Rules
		want       string
		problem    string
	}{
		{"a host", "DB.Example.com.", Rules{}, "db.example.com.", ""},
		{"an address", "10.1.0.1", Rules{}, "", "name is an address"},
		{"nothing", "", Rules{}, "", "name is empty"},
		{"localhost", "LocalHost", Rules{}, "", "localhost"},
		{"below localhost", "a.localhost", Rules{}, "", "localhost"},
		{"another service", "db.stock.svc.cluster.local", Rules{}, "db.stock.svc.cluster.local.", ""},
		{"a domain with a label of that name", "svc.stock.example.com", Rules{Deny: []string{"stock"}}, "svc.stock.example.com.", ""},
		{"around the rules", "db.stock.svc.cluster.local", Rules{Deny: []string{"stock/*"}}, "", `service stock/db: the administrator denies "stock/*"`},
		{"around them, in short", "db.stock.svc", Rules{Allow: []string{"shop"}}, "", "does not allow it"},
		{"around them, to an endpoint", "db-0.db.stock.svc.cluster.local", Rules{Deny: []string{"stock/*"}}, "", `service stock/db: the administrator denies "stock/*"`},
		{"around them, to a port", "_pg._tcp.db.stock.svc.cluster.local", Rules{Deny: []string{"stock/*"}}, "", "denies"},
		{"a pod", "10-1-2-3.stock.pod.cluster.local", Rules{}, "", "a name of pods"},
		{"with the gateway's search domains another service", "db.stock", Rules{}, "db.stock.", ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := svc("shop", "web", "expose", "true", "exported", "true")
			s.Spec.Type, s.Spec.ExternalName, s.Spec.ClusterIP, s.Spec.Ports = corev1.ServiceTypeExternalName, tt.host, "", nil
			closed := view{cluster: "west", network: "west", rules: &Rules{}}
			if got, problems := closed.convert(serviceOf(s), nil, nil, false); got.Exposed || len(problems) != 1 || !strings.Contains(problems[0].String(), "allows no ExternalName") {
				t.Errorf("by default it is exposed to %s, problems %v", exposedTo(got), problems)
			}
			tt.rules.ExternalNames = true
			v := view{cluster: "west", network: "west", rules: &tt.rules}
			got, problems := v.convert(serviceOf(s), nil, nil, false)
			if slices.ContainsFunc(got.Endpoints, func(e registry.Endpoint) bool { return !e.Guarded }) {
				t.Error("its addresses are not looked at")
			}
			if written(got.Endpoints) != tt.want || got.Exposed != (tt.want != "") {
				t.Errorf("endpoints %s, exposed to %s; want %q", written(got.Endpoints), exposedTo(got), tt.want)
			}
			if got.Exported {
				t.Error("it is exported, which an ExternalName can't be")
			}
			if (tt.problem == "") != (len(problems) == 0) || len(problems) > 0 && !strings.Contains(problems[0].String(), tt.problem) {
				t.Errorf("problems %v, want one with %q", problems, tt.problem)
			}
		})
	}
}

func TestRulesCheck(t *testing.T) {
	for _, tt := range []struct {
		rules Rules
		want  string
	}{
		{Rules{Allow: []string{"shop", "st?ck/a*"}, Deny: []string{"[a-c]/x"}}, ""},
		{Rules{Allow: []string{"shop["}}, `allow: "shop[" is not a pattern`},
		{Rules{Deny: []string{""}}, `deny: "" is not a pattern`},
		{Rules{Deny: []string{"a/b/c"}}, `deny: "a/b/c" is not a pattern`},
		{Rules{Names: []NameRule{{}}}, "no suffix"},
		{Rules{Names: []NameRule{{Suffix: tunnel.MustParseName("a.b"), Namespaces: []string{"["}}}}, `"[" is not a pattern`},
	} {
		err := tt.rules.Check()
		if tt.want == "" && err != nil || tt.want != "" && (err == nil || !strings.Contains(err.Error(), tt.want)) {
			t.Errorf("Check(%+v) = %v, want %q", tt.rules, err, tt.want)
		}
	}
	// What Check has missed must not open anything.
	if bad := (&Rules{Deny: []string{"shop["}}); bad.Refuses("shop", "web") == "" {
		t.Error("a malformed pattern denies nothing")
	}
	if bad := (&Rules{Allow: []string{"shop["}}); bad.Refuses("shop[", "web") == "" {
		t.Error("a malformed pattern allows something")
	}
}

func FuzzAnnotations(f *testing.F) {
	for _, k := range noteKinds {
		for _, v := range []string{"true", "a,b", "*.x.example.com,y", "v2", "90s", "http:/x", "", ",", "\xff", strings.Repeat("a", 300)} {
			f.Add(k.key, v, "networks", "a")
		}
	}
	rules := &Rules{Deny: []string{"shop/denied"}, Names: []NameRule{{Suffix: tunnel.MustParseName("example.com")}}}
	f.Fuzz(func(t *testing.T, key1, value1, key2, value2 string) {
		v := view{cluster: "west", rules: rules, clusterSet: []string{"set"}}
		notes := []string{key1, value1, key2, value2}
		for _, s := range []*corev1.Service{svc("shop", "web", notes...), svc("shop", "denied", notes...)} {
			c := serviceOf(s)
			got, problems := v.convert(c, space("shop", key2, value1), nil, true)
			if got.Exposed && s.Name == "denied" {
				t.Fatalf("%q exposes what is denied", notes)
			}
			for _, n := range got.Names {
				if n.String() != "example.com" && !strings.HasSuffix(n.String(), ".example.com") {
					t.Fatalf("%q claims %s", notes, n)
				}
			}
			for _, n := range got.ExposedTo {
				if n == "" || n == "*" {
					t.Fatalf("%q exposes to %q", notes, got.ExposedTo)
				}
			}
			if got.Exposed && len(got.ExposedTo) == 0 && c.notes["networks"] != "" && c.notes["networks"] != "*" && strings.TrimSpace(c.notes["networks"]) != "*" {
				t.Fatalf("%q exposes to everyone", notes)
			}
			for _, p := range problems {
				if len(p.String()) > 1000 {
					t.Fatalf("a problem has %d bytes", len(p.String()))
				}
			}
		}
	})
}
