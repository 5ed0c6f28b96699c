package deploy

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	culvert "culvert.dev/deploy"
)

// rights are what an account may do, as "verb group/resource" with the
// namespace in front if it is not the whole cluster, and names behind.
func rights(objects []culvert.Object, account string) []string {
	roles := map[string]culvert.Object{}
	for _, o := range objects {
		if o.Kind() == "Role" || o.Kind() == "ClusterRole" {
			roles[o.Kind()+o.Namespace()+"/"+o.Name()] = o
		}
	}
	got := map[string]bool{}
	for _, o := range objects {
		if o.Kind() != "RoleBinding" && o.Kind() != "ClusterRoleBinding" || at(o["subjects"].([]any)[0], "name") != account {
			continue
		}
		role := roles[fmt.Sprintf("%s%s/%s", at(o, "roleRef", "kind"), o.Namespace(), at(o, "roleRef", "name"))]
		for _, rule := range role["rules"].([]any) {
			names := ""
			if n := at(rule, "resourceNames"); n != nil {
				names = fmt.Sprintf(" %v", n)
			}
			for _, group := range at(rule, "apiGroups").([]any) {
				for _, resource := range at(rule, "resources").([]any) {
					for _, verb := range at(rule, "verbs").([]any) {
						where := o.Namespace()
						if where != "" {
							where += ": "
						}
						got[fmt.Sprintf("%s%s %s/%s%s", where, verb, group, resource, names)] = true
					}
				}
			}
		}
	}
	return slices.Sorted(maps.Keys(got))
}

// reads are the verbs of who watches resources.
func reads(resources ...string) (out []string) {
	for _, r := range resources {
		out = append(out, "list "+r, "watch "+r)
	}
	return out
}

func do(verbs string, resources ...string) (out []string) {
	for v := range strings.FieldsSeq(verbs) {
		for _, r := range resources {
			out = append(out, v+" "+r)
		}
	}
	return out
}

func in(namespace string, rights ...string) (out []string) {
	for _, r := range rights {
		out = append(out, namespace+": "+r)
	}
	return out
}

// Each account may do what is enabled needs, and nothing else.
func TestRightsAreTheLeast(t *testing.T) {
	services := reads("/services", "discovery.k8s.io/endpointslices")
	cluster := reads("/namespaces", "/nodes")
	named := do("list watch", "/namespaces [shop stock]")
	events := do("create", "/events")
	lease := in("culvert-system", "create coordination.k8s.io/leases", "get coordination.k8s.io/leases [culvert]", "update coordination.k8s.io/leases [culvert]")
	const group = "gateway.networking.k8s.io/"
	gatewayAPI := slices.Concat(
		reads(group+"gateways", group+"listenersets", group+"tlsroutes", group+"tcproutes", group+"udproutes", group+"httproutes", group+"grpcroutes", group+"referencegrants", group+"backendtlspolicies", "/secrets", "/configmaps"),
		do("get", group+"gateways", group+"listenersets", group+"tlsroutes", group+"tcproutes", group+"udproutes", group+"httproutes", group+"grpcroutes", group+"backendtlspolicies"),
		do("update", group+"gateways/status", group+"listenersets/status", group+"tlsroutes/status", group+"tcproutes/status", group+"udproutes/status", group+"httproutes/status", group+"grpcroutes/status", group+"backendtlspolicies/status"),
		reads("multicluster.x-k8s.io/serviceimports"), do("get create update", "/serviceaccounts"))
	class := slices.Concat(do("get list watch", group+"gatewayclasses"), do("update", group+"gatewayclasses/status"), do("get list watch", "apiextensions.k8s.io/customresourcedefinitions"))
	definitions := reads("apiextensions.k8s.io/customresourcedefinitions")
	const mcs = "multicluster.x-k8s.io/"
	exports := slices.Concat(reads(mcs+"serviceexports", mcs+"serviceimports"), do("create update delete", mcs+"serviceimports"), do("update", mcs+"serviceexports/status", mcs+"serviceimports/status"))
	const authz = "policy.culvert.dev/"
	policies := slices.Concat(do("get list watch", authz+"authorizationpolicies"), do("update", authz+"authorizationpolicies/status"), reads("/pods"))
	ofCluster := slices.Concat(do("get list watch", authz+"clusterauthorizationpolicies"), do("update", authz+"clusterauthorizationpolicies/status"))
	for _, tt := range []struct {
		name, account string
		sets          []string
		want          [][]string
	}{
		{"discovery", "culvert", nil, [][]string{services, cluster, events, lease}},
		{"nothing", "culvert", []string{"discovery.enabled=false"}, nil},
		{"DNS", "culvert-dns", []string{"dns.enabled=true"}, [][]string{services, cluster}},
		{"DNS without discovery", "culvert-dns", []string{"dns.enabled=true", "discovery.enabled=false", "gatewayAPI.enabled=true"}, nil},
		{"Gateway API", "culvert", []string{"gatewayAPI.enabled=true", "discovery.enabled=false"},
			[][]string{services, reads("/namespaces"), events, lease, gatewayAPI, class}},
		{"Gateway API at ports of nodes", "culvert", []string{"gatewayAPI.enabled=true", "discovery.enabled=false", "gateway.service.type=NodePort"},
			[][]string{services, cluster, events, lease, gatewayAPI, class}},
		{"Gateway API leaves DNS alone", "culvert-dns", []string{"gatewayAPI.enabled=true", "dns.enabled=true"}, [][]string{services, cluster}},
		{"multi-cluster", "culvert", []string{"multiCluster.enabled=true"}, [][]string{services, cluster, events, lease, exports, definitions}},
		{"imported services", "culvert", []string{"multiCluster.enabled=true", "multiCluster.importedServices.enabled=true"},
			[][]string{services, cluster, events, lease, exports, definitions, in("culvert-system", do("get list watch create update delete", "/services")...)}},
		{"imported services leave DNS alone", "culvert-dns", []string{"multiCluster.enabled=true", "multiCluster.importedServices.enabled=true", "dns.enabled=true"},
			[][]string{services, cluster, reads(mcs+"serviceexports", mcs+"serviceimports"), definitions}},
		{"multi-cluster of DNS", "culvert-dns", []string{"multiCluster.enabled=true", "dns.enabled=true"}, [][]string{services, cluster, reads(mcs+"serviceexports", mcs+"serviceimports"), definitions}},
		{"policies", "culvert", []string{"authorizationPolicies.enabled=true"}, [][]string{services, cluster, events, lease, policies, ofCluster, definitions}},
		{"policies alone", "culvert", []string{"authorizationPolicies.enabled=true", "discovery.enabled=false"}, [][]string{services, reads("/namespaces"), events, lease, policies, ofCluster, definitions}},
		{"policies of a namespace", "culvert", []string{"authorizationPolicies.enabled=true", "namespaces=[shop]"}, [][]string{in("shop", slices.Concat(services, events, policies)...), do("list watch", "/namespaces [shop]"), reads("/nodes"), lease, ofCluster, definitions}},
		{"policies leave DNS alone", "culvert-dns", []string{"authorizationPolicies.enabled=true", "dns.enabled=true"}, [][]string{services, cluster}},
		{"a namespace", "culvert", []string{"namespaces=[shop]", "gatewayAPI.enabled=true"},
			[][]string{in("shop", slices.Concat(services, events, gatewayAPI)...), cluster, class, lease}},
		{"two namespaces", "culvert", []string{"namespaces=[shop, stock]"}, [][]string{in("shop", slices.Concat(services, events)...), in("stock", slices.Concat(services, events)...), named, reads("/nodes"), lease}},
		{"further clusters", "culvert", []string{"discovery.clusters=remote"}, [][]string{services, cluster, events, lease, in("remote", reads("/secrets")...)}},
		{"further clusters of DNS", "culvert-dns", []string{"discovery.clusters=remote", "dns.enabled=true"}, [][]string{services, cluster, in("remote", reads("/secrets")...)}},
		{"out of the cluster", "culvert", []string{"gateway.enabled=false"}, [][]string{services, cluster, events, lease}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got := rights(render(t, tt.sets...), tt.account)
			want := slices.Concat(tt.want...)
			slices.Sort(want)
			if want = slices.Compact(want); !slices.Equal(got, want) {
				t.Errorf("too many: %q\ntoo few: %q", minus(got, want), minus(want, got))
			}
		})
	}
}

// minus are those of a that b does not have.
func minus(a, b []string) (out []string) {
	for _, s := range a {
		if !slices.Contains(b, s) {
			out = append(out, s)
		}
	}
	return out
}
