package discovery

import (
	"net/netip"
	"strings"
	"testing"
	"testing/synctest"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// An ExternalName leads to no address that the rules keep closed, whatever name
// has it.
func TestAddressesThatExternalNamesMayHave(t *testing.T) {
	inside := func(ns, name, ip string) *corev1.Service {
		s := svc(ns, name)
		s.Spec.ClusterIP, s.Spec.ClusterIPs = ip, []string{ip}
		return s
	}
	balanced := inside("stock", "edge", "10.96.0.4")
	balanced.Spec.ExternalIPs = []string{"198.51.100.7"}
	balanced.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: "198.51.100.8"}}
	node := &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: "n1"},
		Spec:       corev1.NodeSpec{PodCIDRs: []string{"10.244.1.0/24"}},
		Status:     corev1.NodeStatus{Addresses: []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: "192.0.2.1"}, {Type: corev1.NodeExternalIP, Address: "203.0.113.1"}}},
	}
	for _, tt := range []struct {
		name       string
		rules      Rules
		namespaces []string
		addr       string
		want       string // part of the reason; "" for none
	}{
		{"elsewhere", Rules{}, nil, "203.0.113.9", ""},
		{"on premises", Rules{}, nil, "10.7.0.1", ""},
		{"a Service", Rules{}, nil, "10.96.0.2", ""},
		{"a Service that is denied", Rules{Deny: []string{"stock/*"}}, nil, "10.96.0.3", `it is the address of Service stock/db: the administrator denies "stock/*"`},
		{"mapped into IPv6", Rules{Deny: []string{"stock/*"}}, nil, "::ffff:10.96.0.3", "denies"},
		{"a Service that is not allowed", Rules{Allow: []string{"shop"}}, nil, "10.96.0.3", "does not allow it"},
		{"an endpoint of one", Rules{Deny: []string{"stock/db"}}, nil, "10.244.1.3", "it is an endpoint of Service stock/db"},
		{"an external address of one", Rules{Deny: []string{"stock"}}, nil, "198.51.100.7", "Service stock/edge"},
		{"the load balancer of one", Rules{Deny: []string{"stock"}}, nil, "198.51.100.8", "Service stock/edge"},
		{"an endpoint of those that are allowed", Rules{Allow: []string{"shop", "stock/both"}}, nil, "10.244.1.2", ""},
		{"an endpoint of one that is allowed, and of another", Rules{Deny: []string{"stock/both"}}, nil, "10.244.1.2", "Service stock/both"},
		{"a pod of no Service", Rules{}, nil, "10.244.1.77", "an address of pods"},
		{"a node", Rules{}, nil, "192.0.2.1", "the node n1"},
		{"a node from outside", Rules{}, nil, "203.0.113.1", "the node n1"},
		{"the API server", Rules{}, nil, "10.96.0.1", "the API server"},
		{"an endpoint of the API server", Rules{Allow: []string{"*"}}, nil, "192.0.2.250", "the API server"},
		{"the API server, allowed by name", Rules{Allow: []string{"shop", "default/kubernetes"}}, nil, "10.96.0.1", ""},
		{"private, and not all namespaces are known", Rules{}, []string{"shop", "stock"}, "10.96.0.77", "not all namespaces"},
		{"shared, and not all namespaces are known", Rules{}, []string{"shop", "stock"}, "100.64.0.1", "not all namespaces"},
		{"known, though not all namespaces are", Rules{}, []string{"shop", "stock"}, "10.96.0.2", ""},
		{"public, though not all namespaces are known", Rules{}, []string{"shop", "stock"}, "203.0.113.9", ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := newRig(t, node, balanced,
					inside("default", "kubernetes", "10.96.0.1"), eps("default", "kubernetes", "", "192.0.2.250"),
					inside("shop", "web", "10.96.0.2"), eps("shop", "web", "web-1", "10.244.1.2"),
					inside("stock", "both", "10.96.0.5"), eps("stock", "both", "both-1", "10.244.1.2"),
					inside("stock", "db", "10.96.0.3"), eps("stock", "db", "db-1", "10.244.1.3"))
				a := netip.MustParseAddr(tt.addr)
				src := &Source{Client: r.api, Cluster: "west", Rules: tt.rules, Namespaces: tt.namespaces}
				src.Rules.ExternalNames = true
				if why := src.Refuses(a); !strings.Contains(why, "not known yet") {
					t.Errorf("before anything is known: %q", why)
				}
				r.start(src)
				r.one(moment)
				if why := src.Refuses(a); (why == "") != (tt.want == "") || !strings.Contains(why, tt.want) {
					t.Errorf("%s: %q, want %q", tt.addr, why, tt.want)
				}
			})
		})
	}
}

// The networks of the cluster set may change while exports stay.
func TestClusterSetChanges(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, svc("shop", "web"), eps("shop", "web", "web-1", "10.1.0.1"))
		src := &Source{Client: r.api, Cluster: "west", ClusterSet: []string{"partner"}}
		src.SetExports(map[key]bool{{Namespace: "shop", Name: "web"}: true})
		src.SetClusterSet([]string{"west"})
		r.start(src)
		for _, want := range []string{"partner,west", "east,partner,west", "partner,west"} {
			if got := listing(r.one(moment).Snapshot); got != "web.shop.west to "+want+" at [10.1.0.1]" {
				t.Errorf("got %s, want it exposed to %s", got, want)
			}
			next := []string{"west", "east"}
			if want != "partner,west" {
				next = []string{"west"}
			}
			src.SetClusterSet(next)
		}
	})
}
