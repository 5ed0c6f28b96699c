package discovery

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"testing"

	"culvert.dev/internal/kube/endpoints"
	"culvert.dev/internal/kube/watch"
	"culvert.dev/registry"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"
)

// worker makes a Node; addresses are "internal" or "external/internal".
func worker(name, addrs string, ready bool) *corev1.Node {
	status := corev1.ConditionFalse
	if ready {
		status = corev1.ConditionTrue
	}
	n := &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec:       corev1.NodeSpec{PodCIDRs: []string{"10.244." + strings.TrimPrefix(name, "node-") + ".0/24"}},
		Status:     corev1.NodeStatus{Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: status}}},
	}
	outer, inner, ok := strings.Cut(addrs, "/")
	if !ok {
		outer, inner = "", addrs
	}
	for _, a := range strings.Split(inner, ",") {
		n.Status.Addresses = append(n.Status.Addresses, corev1.NodeAddress{Type: corev1.NodeInternalIP, Address: a})
	}
	if outer != "" {
		n.Status.Addresses = append(n.Status.Addresses, corev1.NodeAddress{Type: corev1.NodeExternalIP, Address: outer})
	}
	return n
}

// door makes a Service that says it is a gateway.
func door(kind corev1.ServiceType, notes ...string) *corev1.Service {
	s := svc(DefaultGatewayNamespace, "door", append([]string{"gateway", "west"}, notes...)...)
	s.Spec.Type = kind
	s.Spec.Ports[0].NodePort = 30443
	return s
}

// ways is how a test has gateways.
func ways(list []registry.Gateway) string {
	var all []string
	for _, g := range list {
		s := g.Address.String()
		if g.Public != (registry.Endpoint{}) {
			s += " public " + g.Public.String()
		}
		if len(g.Transports) > 0 {
			s += fmt.Sprint(" ", g.Protocols())
		}
		if g.Weight > 0 {
			s += fmt.Sprint(" weight ", g.Weight)
		}
		if g.Check.Kind == "" {
			s += " unchecked"
		}
		all = append(all, s)
	}
	return strings.Join(all, "; ")
}

func TestGateways(t *testing.T) {
	balanced := func(in ...corev1.LoadBalancerIngress) func(*corev1.Service) {
		return func(s *corev1.Service) { s.Status.LoadBalancer.Ingress = in }
	}
	ports := func(list ...corev1.ServicePort) func(*corev1.Service) {
		return func(s *corev1.Service) { s.Spec.Ports = list }
	}
	nodes := []*corev1.Node{worker("node-2", "192.0.2.2/10.0.0.2", true), worker("node-1", "10.0.0.1,fd00::1", true), worker("node-3", "10.0.0.3", false)}
	excluded := worker("node-4", "10.0.0.4", true)
	excluded.Labels = map[string]string{corev1.LabelNodeExcludeBalancers: ""}
	nodes = append(nodes, excluded, worker("node-5", "169.254.0.5", true))

	for _, tt := range []struct {
		name    string
		svc     *corev1.Service
		change  func(*corev1.Service)
		on      []string // nodes with ready endpoints
		prefer  string
		want    string
		problem string
	}{
		{name: "a load balancer", svc: door(corev1.ServiceTypeLoadBalancer), change: balanced(corev1.LoadBalancerIngress{IP: "198.51.100.1"}), want: "10.96.0.7:443 public 198.51.100.1:443"},
		{name: "with a name", svc: door(corev1.ServiceTypeLoadBalancer), change: balanced(corev1.LoadBalancerIngress{Hostname: "LB.example.com"}), want: "10.96.0.7:443 public lb.example.com:443"},
		{name: "with two addresses", svc: door(corev1.ServiceTypeLoadBalancer), change: balanced(corev1.LoadBalancerIngress{IP: "198.51.100.1"}, corev1.LoadBalancerIngress{IP: "2001:db8::1"}), want: "10.96.0.7:443 public 198.51.100.1:443; 10.96.0.7:443 public [2001:db8::1]:443"},
		{name: "without one as yet", svc: door(corev1.ServiceTypeLoadBalancer), want: ""},
		{name: "with what can't be one", svc: door(corev1.ServiceTypeLoadBalancer), change: balanced(corev1.LoadBalancerIngress{IP: "127.0.0.1"}, corev1.LoadBalancerIngress{Hostname: "a b"}), want: ""},
		{name: "nodes", svc: door(corev1.ServiceTypeNodePort), want: "10.0.0.1:30443; 10.0.0.2:30443 public 192.0.2.2:30443"},
		{name: "nodes by IPv6", svc: door(corev1.ServiceTypeNodePort), prefer: PreferIPv6, want: "[fd00::1]:30443; 10.0.0.2:30443 public 192.0.2.2:30443"},
		{name: "nodes where it runs", svc: door(corev1.ServiceTypeNodePort), change: func(s *corev1.Service) { s.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyLocal }, on: []string{"node-2", "node-3"}, want: "10.0.0.2:30443 public 192.0.2.2:30443"},
		{name: "nodes without a port as yet", svc: door(corev1.ServiceTypeNodePort), change: func(s *corev1.Service) { s.Spec.Ports[0].NodePort = 0 }, want: ""},
		{name: "external addresses", svc: door(corev1.ServiceTypeClusterIP), change: func(s *corev1.Service) { s.Spec.ExternalIPs = []string{"192.0.2.9"} }, want: "10.96.0.7:443 public 192.0.2.9:443"},
		{name: "external addresses without one inside", svc: door(corev1.ServiceTypeClusterIP), change: func(s *corev1.Service) {
			s.Spec.ExternalIPs, s.Spec.ClusterIP, s.Spec.ClusterIPs = []string{"192.0.2.9"}, "None", []string{"None"}
		}, want: "192.0.2.9:443"},
		{name: "inside only", svc: door(corev1.ServiceTypeClusterIP), want: ""},

		{name: "443 of several", svc: door(corev1.ServiceTypeLoadBalancer), change: func(s *corev1.Service) {
			balanced(corev1.LoadBalancerIngress{IP: "198.51.100.1"})(s)
			ports(port("metrics", 9090, ""), port("tls", 443, ""))(s)
		}, want: "10.96.0.7:443 public 198.51.100.1:443"},
		{name: "by name", svc: door(corev1.ServiceTypeClusterIP, "gateway-port", "hbone"), change: func(s *corev1.Service) {
			s.Spec.ExternalIPs = []string{"192.0.2.9"}
			ports(port("hbone", 15008, ""), port("tls", 443, ""))(s)
		}, want: "10.96.0.7:15008 public 192.0.2.9:15008"},
		{name: "by number", svc: door(corev1.ServiceTypeClusterIP, "gateway-port", "15008"), change: func(s *corev1.Service) {
			s.Spec.ExternalIPs = []string{"192.0.2.9"}
			ports(port("hbone", 15008, ""), port("tls", 443, ""))(s)
		}, want: "10.96.0.7:15008 public 192.0.2.9:15008"},
		{name: "by a name that is not there", svc: door(corev1.ServiceTypeClusterIP, "gateway-port", "tls"), problem: `gateway-port: "tls": which of its 1 ports of TCP is meant`},
		{name: "none of several", svc: door(corev1.ServiceTypeClusterIP), change: ports(port("a", 1, ""), port("b", 2, "")), problem: "which of its 2 ports"},
		{name: "transports", svc: door(corev1.ServiceTypeClusterIP, "gateway-transports", "sni, hbone", "gateway-weight", "3"), change: func(s *corev1.Service) { s.Spec.ExternalIPs = []string{"192.0.2.9"} }, want: "10.96.0.7:443 public 192.0.2.9:443 [hbone sni] weight 3"},
		{name: "UDP", svc: door(corev1.ServiceTypeClusterIP, "gateway-transports", "quic"), change: func(s *corev1.Service) {
			s.Spec.ExternalIPs = []string{"192.0.2.9"}
			ports(port("tls", 443, ""), port("quic", 8443, corev1.ProtocolUDP))(s)
		}, want: "10.96.0.7:8443 public 192.0.2.9:8443 [quic] unchecked"},
		{name: "no transport", svc: door(corev1.ServiceTypeClusterIP, "gateway-transports", "carrier-pigeon"), problem: `"carrier-pigeon" is none of sni`},
		{name: "no weight", svc: door(corev1.ServiceTypeClusterIP, "gateway-weight", "0"), problem: "from 1 to 1000; it is not used as a gateway"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if tt.change != nil {
				tt.change(tt.svc)
			}
			s := serviceOf(tt.svc)
			known := map[string]*node{}
			for _, n := range nodes {
				known[n.Name] = nodeOf(n)
			}
			slices := eps(s.Namespace, s.Name, "a")
			for _, n := range tt.on {
				slices.Endpoints = append(slices.Endpoints, ep("10.1.0.1", on(n)))
			}
			v := view{cluster: "west", network: "west", prefer: tt.prefer, rules: &Rules{}}
			got, problems := v.networkOf([]*service{s}, map[key][]*endpoints.Slice{s.key: {endpoints.SliceOf(slices)}}, known, false)
			if ways(got.Gateways) != tt.want {
				t.Errorf("got  %s\nwant %s", ways(got.Gateways), tt.want)
			}
			if (tt.problem == "") != (len(problems) == 0) || len(problems) > 0 && !strings.Contains(problems[0].String(), tt.problem) {
				t.Errorf("problems %v, want one with %q", problems, tt.problem)
			}
		})
	}
}

// A listed is a store, and the names of what a watch has put there.
type listed struct {
	watch.Store
	names map[key]bool
}

func (l listed) add(o any) {
	l.names[nameOf(o)] = true
	l.Apply([]any{o}, nil)
}

func (l listed) remove(o any) {
	delete(l.names, nameOf(o))
	l.Apply(nil, []key{nameOf(o)})
}

// replace makes all what there is.
func (l listed) replace(all []any) {
	before := maps.Clone(l.names)
	clear(l.names)
	for _, o := range all {
		l.names[nameOf(o)] = true
		delete(before, nameOf(o))
	}
	l.Apply(all, slices.Collect(maps.Keys(before)))
}

func nameOf(o any) key {
	m := o.(metav1.Object)
	return key{Namespace: m.GetNamespace(), Name: m.GetName()}
}

// fresh makes a run that nothing watches.
func fresh(s *Source) (*run, map[string]listed) {
	s.Cluster, s.Client = "west", fake.NewSimpleClientset()
	r := newRun(s, discard)
	r.slices.Use(&endpoints.User{Changed: r.slicesChanged})
	stores := map[string]listed{"endpointslices": {r.slices, map[key]bool{}}}
	for name, k := range map[string]kind{"services": serviceKind, "namespaces": namespaceKind, "nodes": nodeKind} {
		stores[name] = listed{store{r, k}, map[key]bool{}}
	}
	return r, stores
}

// known returns what a run would send.
func known(r *run) registry.Snapshot {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.convert()
	return r.snapshot()
}

func TestNetworkOfWhoIsBelieved(t *testing.T) {
	stranger := door(corev1.ServiceTypeClusterIP)
	stranger.Namespace, stranger.Spec.ExternalIPs = "shop", []string{"192.0.2.66"}
	other := door(corev1.ServiceTypeClusterIP)
	other.Name, other.Annotations[prefix+noteGateway], other.Spec.ExternalIPs = "other", "east", []string{"192.0.2.67"}
	mine := door(corev1.ServiceTypeClusterIP)
	mine.Spec.ExternalIPs = []string{"192.0.2.9"}
	delete(mine.Annotations, prefix+noteGateway)
	mine.Labels = map[string]string{prefix + noteGateway: "west"} // a label will do

	r, stores := fresh(&Source{PodCIDRs: true})
	stores["services"].replace([]any{stranger, other, mine})
	stores["nodes"].replace([]any{worker("node-2", "10.0.0.2", true), worker("node-1", "10.0.0.1", true)})
	got := known(r).Networks[0]
	if want := "10.96.0.7:443 public 192.0.2.9:443"; ways(got.Gateways) != want || got.Name != "west" {
		t.Errorf("network %s has gateways %s, want %s", got.Name, ways(got.Gateways), want)
	}
	if fmt.Sprint(got.CIDRs) != "[10.244.1.0/24 10.244.2.0/24]" {
		t.Errorf("ranges %v", got.CIDRs)
	}
	var said []string
	for _, p := range r.unlogged {
		said = append(said, p.object()+" "+p.Text)
	}
	slices.Sort(said)
	if want := []string{
		"Service culvert-system/other the network of this cluster is west; it is not used as a gateway",
		"Service shop/door gateways are not trusted in this namespace; it is not used as a gateway",
	}; !slices.Equal(said, want) {
		t.Errorf("said %q, want %q", said, want)
	}

	// A gateway that has no address for a while must not make its network one
	// that everybody reaches.
	lost := mine.DeepCopy()
	lost.Spec.ExternalIPs = nil
	stores["services"].add(lost)
	if again := known(r).Networks[0]; ways(again.Gateways) != ways(got.Gateways) {
		t.Errorf("without an address its gateways are %q, want those that were", ways(again.Gateways))
	}
	stores["services"].remove(lost)
	if again := known(r).Networks[0]; len(again.Gateways) != 0 {
		t.Errorf("without a Service its gateways are %q, want none", ways(again.Gateways))
	}
}

// Where podCIDRs finds nothing, that is told once, whatever Nodes come and go; and
// not where one has a range, where nobody asks for them, or before there are Nodes.
func TestNodesWithoutPodCIDR(t *testing.T) {
	bare := func(name string) *corev1.Node {
		n := worker(name, "10.0.0.1", true)
		n.Spec.PodCIDRs = nil
		return n
	}
	r, stores := fresh(&Source{PodCIDRs: true})
	said := func() (n int) {
		_ = known(r)
		for _, p := range r.unlogged {
			if p.object() == "Nodes" && strings.Contains(p.Text, "no Node has a podCIDR") {
				n++
			}
		}
		return n
	}
	if n := said(); n != 0 {
		t.Errorf("told %d times before there are Nodes", n)
	}
	stores["nodes"].add(bare("node-2"))
	if n := said(); n != 1 {
		t.Errorf("told %d times of a Node without a range, want once", n)
	}
	stores["nodes"].add(bare("node-1"))
	_ = said()
	stores["nodes"].remove(bare("node-2"))
	if n := said(); n != 1 {
		t.Errorf("told %d times when Nodes come and go, want once", n)
	}
	stores["nodes"].add(worker("node-3", "10.0.0.3", true))
	if n := said(); n != 1 || len(r.problemCounts) != 0 {
		t.Errorf("told %d times, and %d problems with a Node that has a range, want none", n, len(r.problemCounts))
	}

	r, stores = fresh(&Source{})
	stores["nodes"].add(bare("node-1"))
	if n := said(); n != 0 {
		t.Errorf("told %d times where podCIDRs is not set", n)
	}
}

// Whatever happens in whatever order, what is known is what a new list of the
// same objects would give, and services that have not changed keep their pointers.
func TestAnySequenceIsAsAFreshList(t *testing.T) {
	for seed := range uint64(100) {
		rnd := rand.New(rand.NewPCG(seed, 1))
		r, stores := fresh(&Source{})
		world := map[string]map[string]any{"services": {}, "endpointslices": {}, "namespaces": {}, "nodes": {}}
		before := registry.Snapshot{}
		for step := range 60 {
			kind := []string{"services", "services", "endpointslices", "endpointslices", "endpointslices", "namespaces", "nodes"}[rnd.IntN(7)]
			o := someObject(rnd, kind, step)
			name := nameOf(o).String()
			switch rnd.IntN(5) {
			case 0:
				stores[kind].remove(o)
				delete(world[kind], name)
			case 1: // what a watch that has expired does
				all := []any{o}
				world[kind][name] = o
				for _, k := range keysOf(world[kind]) {
					if k == name {
						continue
					}
					if rnd.IntN(4) == 0 {
						delete(world[kind], k)
						continue
					}
					all = append(all, world[kind][k])
				}
				stores[kind].replace(all)
			default:
				stores[kind].add(o)
				world[kind][name] = o
			}
			if rnd.IntN(3) > 0 {
				continue
			}
			got := known(r)
			again, new := fresh(&Source{})
			for kind, s := range new {
				var all []any
				for _, k := range keysOf(world[kind]) {
					all = append(all, world[kind][k])
				}
				s.replace(all)
			}
			want := known(again)
			if got.Networks[0].Gateways != nil && want.Networks[0].Gateways == nil {
				got.Networks = want.Networks // they stay while there is no other, on purpose
			}
			if !reflect.DeepEqual(got, want) {
				t.Fatalf("seed %d, step %d:\ngot  %s\nwant %s", seed, step, dump(got), dump(want))
			}
			old := map[string]*registry.Service{}
			for _, s := range before.Services {
				old[s.Name] = s
			}
			for _, s := range got.Services {
				if o := old[s.Name]; o != nil && o != s && reflect.DeepEqual(o, s) {
					t.Fatalf("seed %d, step %d: %s has not changed, but its pointer has", seed, step, s.Name)
				}
			}
			before = got
			if len(r.problemCounts) != len(again.problemCounts) {
				t.Fatalf("seed %d, step %d: %d problems are counted, want %d", seed, step, len(r.problemCounts), len(again.problemCounts))
			}
		}
	}
}

func keysOf(m map[string]any) []string {
	var all []string
	for k := range m {
		all = append(all, k)
	}
	slices.Sort(all)
	return all
}

func dump(s registry.Snapshot) string {
	var b strings.Builder
	for _, n := range s.Networks {
		fmt.Fprintf(&b, "%s %v %s\n", n.Name, n.CIDRs, ways(n.Gateways))
	}
	for _, s := range s.Services {
		fmt.Fprintf(&b, "%+v\n", *s)
	}
	return b.String()
}

// someObject makes one of few objects of a kind, in one of many states.
func someObject(rnd *rand.Rand, kind string, step int) any {
	pick := func(list ...string) string { return list[rnd.IntN(len(list))] }
	ns := pick("shop", DefaultGatewayNamespace)
	switch kind {
	case "services":
		s := svc(ns, pick("a", "b", "c"), noteExpose, pick("true", "true", "false", "perhaps"), noteNetworks, pick("x", "x,y", ""))
		if rnd.IntN(2) == 0 {
			delete(s.Annotations, prefix+noteNetworks)
		}
		if rnd.IntN(4) == 0 {
			s.Annotations[prefix+noteGateway], s.Spec.Type, s.Spec.Ports[0].NodePort = pick("west", "east"), corev1.ServiceTypeNodePort, 30000
			if rnd.IntN(2) == 0 {
				s.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyLocal
			}
		}
		if rnd.IntN(5) == 0 {
			s.Spec.Ports[0].Protocol = corev1.ProtocolUDP
		}
		if rnd.IntN(4) == 0 { // made anew
			s.UID, s.CreationTimestamp = types.UID(fmt.Sprint(step)), metav1.NewTime(epoch.AddDate(0, 0, step))
		}
		return s
	case "endpointslices":
		s := eps(ns, pick("a", "b", "c"), pick("s-1", "s-2", "s-3"))
		for i := range rnd.IntN(4) {
			s.Endpoints = append(s.Endpoints, ep(fmt.Sprintf("10.1.0.%d", 1+i), on(pick("node-1", "node-2")), conditions(rnd.IntN(2) == 0, rnd.IntN(2) == 0, rnd.IntN(2) == 0)))
		}
		if rnd.IntN(3) == 0 {
			s.Ports = []discoveryv1.EndpointPort{eport("https", 8443)}
		}
		return s
	case "namespaces":
		n := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: ns}}
		if rnd.IntN(2) == 0 {
			n.Annotations = map[string]string{prefix + noteExpose: pick("true", "false", "no")}
		}
		return n
	}
	return worker(pick("node-1", "node-2"), pick("10.0.0.1", "192.0.2.1/10.0.0.1"), rnd.IntN(3) > 0)
}
