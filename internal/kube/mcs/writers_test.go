package mcs

import (
	"net/netip"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	mcsv1 "sigs.k8s.io/mcs-api/pkg/apis/v1beta1"
)

// writerOf returns who writes the import of web.
func (s *site) writerOf() string {
	s.t.Helper()
	i, err := s.api.MulticlusterV1beta1().ServiceImports(web.Namespace).Get(s.t.Context(), web.Name, metav1.GetOptions{})
	s.must(err)
	writer, _, _ := strings.Cut(i.Annotations[NoteWriter], "/")
	return writer
}

// Two gateways that know each other's clusters, or of which one knows both, agree on
// who writes what: at rest nobody writes.
func TestTwoGateways(t *testing.T) {
	for _, tt := range []struct {
		name    string
		knows   string // clusters that the west's gateway knows; the east's knows both
		ranges  bool   // of addresses: each gateway has its own
		exports string // clusters
		west    string // the import there, and its writer
		east    string
	}{
		{"one knows both, and exports", "west", false, "east", "ClusterSetIP[240.0.0.7] east Ready, by east", "ClusterSetIP[240.0.0.7] east Ready, by east"},
		{"one knows both, and the other exports", "west", false, "west", "ClusterSetIP[240.0.0.7] west Ready, by west", "ClusterSetIP[240.0.0.7] west Ready, by east"},
		{"one knows both, and both export", "west", false, "east west", "ClusterSetIP[240.0.0.7] east west Ready, by east", "ClusterSetIP[240.0.0.7] east west Ready, by east"},
		{"one knows both, and has other addresses", "west", true, "east west", "ClusterSetIP[240.2.0.7] east west Ready, by east", "ClusterSetIP[240.2.0.7] east west Ready, by east"},
		{"each knows both", "east west", false, "east", "ClusterSetIP[240.0.0.7] east Ready, by west", "ClusterSetIP[240.0.0.7] east Ready, by east"},
		{"each knows both, and has other addresses", "east west", true, "east", "ClusterSetIP[240.1.0.7] east Ready, by west", "ClusterSetIP[240.2.0.7] east Ready, by east"},
		{"each knows both, has other addresses, and both export", "east west", true, "east west", "ClusterSetIP[240.1.0.7] east west Ready, by west", "ClusterSetIP[240.2.0.7] east west Ready, by east"},
	} {
		for _, first := range []string{"west", "east"} {
			t.Run(tt.name+", the "+first+" first", func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					sites := map[string]*site{"west": newSite(t), "east": newSite(t)}
					for i, cluster := range strings.Fields(tt.exports) {
						sites[cluster].export(web, i)
					}
					worlds := map[string]*world{"west": newWorldOf(t, "west"), "east": newWorldOf(t, "east")}
					for cluster, ip := range map[string]string{"west": "240.1.0.7", "east": "240.2.0.7"} {
						if !tt.ranges {
							ip = "240.0.0.7"
						}
						worlds[cluster].vips = []netip.Addr{netip.MustParseAddr(ip)}
					}
					order := []string{"west", "east"}
					if first == "east" {
						order = []string{"east", "west"}
					}
					for _, gateway := range order {
						for cluster, s := range sites {
							if gateway == "east" || strings.Contains(tt.knows, cluster) {
								worlds[gateway].add(cluster, s)
							}
						}
						worlds[gateway].settle()
					}
					worlds[first].settle()
					for cluster, wanted := range map[string]string{"west": tt.west, "east": tt.east} {
						want(t, "import in "+cluster, strings.Join(sites[cluster].imports(), "; ")+", by "+sites[cluster].writerOf(), "shop/web "+wanted)
						sites[cluster].written()
					}
					for range 100 { // as it is while nothing happens
						time.Sleep(2 * time.Second)
						worlds["west"].c.Changed()
						worlds["east"].c.Changed()
					}
					synctest.Wait()
					want(t, "writes at rest", sites["west"].written()+sites["east"].written(), "")

					for _, cluster := range strings.Fields(tt.exports) {
						sites[cluster].unexport(web)
					}
					worlds["west"].settle()
					worlds["east"].settle()
					want(t, "imports at the end", len(sites["west"].imports())+len(sites["east"].imports()), 0)
				})
			})
		}
	}
}

// What a cluster exports that this gateway does not know stays, and so does what
// another gateway writes.
func TestImportsOfOtherGateways(t *testing.T) {
	imported := func(writer, cluster string) *mcsv1.ServiceImport {
		i := &mcsv1.ServiceImport{
			ObjectMeta: metav1.ObjectMeta{Namespace: web.Namespace, Name: web.Name, Labels: map[string]string{LabelManagedBy: ManagedBy}},
			Spec:       mcsv1.ServiceImportSpec{Type: mcsv1.Headless},
			Status:     mcsv1.ServiceImportStatus{Clusters: []mcsv1.ClusterStatus{{Cluster: cluster}}},
		}
		if writer != "" {
			i.Annotations = map[string]string{NoteWriter: writer}
		}
		return i
	}
	for _, tt := range []struct {
		name            string
		writer, cluster string // of the import that is there
		exports         bool
		want            string
	}{
		{"of an older version", "", "west", false, ""},
		{"of an older version, of a cluster that is not known", "", "north", false, "shop/web Headless[] north"},
		{"of another gateway", "north/culvert-system/culvert", "north", false, "shop/web Headless[] north"},
		{"of another gateway, of a cluster that both know", "north/culvert-system/culvert", "west", false, "shop/web Headless[] west"},
		{"of our own", "west/culvert-system/culvert", "north", false, ""},
		{"of an older version, and wanted", "", "west", true, "shop/web ClusterSetIP[] west Pending"},
		{"of another gateway, and wanted", "north/culvert-system/culvert", "north", true, "shop/web Headless[] north"},
		{"of another gateway, and wanted in the gateway's own cluster", "north/culvert-system/culvert", "west", true, "shop/web ClusterSetIP[] west Pending"},
		{"of another gateway of this cluster, and wanted", "west/edge/culvert", "west", true, "shop/web Headless[] west"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w, west := newWorldOf(t, "west"), newSite(t)
				if tt.exports {
					west.export(web, 0)
				}
				west.must(west.api.Tracker().Add(imported(tt.writer, tt.cluster)))
				w.add("west", west)
				w.settle()
				want(t, "imports", strings.Join(west.imports(), "; "), tt.want)
			})
		})
	}
}

// Two gateways that refuse an export for reasons of their own say each its own once.
func TestTwoRefusals(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		east := newSite(t)
		east.export(web, 0)
		for _, cluster := range []string{"west", "east"} {
			w := newWorldOf(t, cluster)
			w.c.Refuses = func(string, string) string { return "the administrator of " + cluster + " denies it" }
			w.add("east", east)
			defer w.settle()
		}
		time.Sleep(time.Minute)
		east.written()
		time.Sleep(time.Hour)
		want(t, "writes at rest", east.written(), "")
		want(t, "conditions", east.conditions(web), "Valid !Ready/Failed")
	})
}

// What an import says of a service beside its ports and its affinity.
func TestFields(t *testing.T) {
	local, cluster, near := corev1.ServiceInternalTrafficPolicyLocal, corev1.ServiceInternalTrafficPolicyCluster, "PreferClose"
	internal := func(p corev1.ServiceInternalTrafficPolicy) func(*Service) {
		return func(s *Service) { s.Internal = &p }
	}
	closest := func(s *Service) { s.Distribution = &near }
	families := func(list ...corev1.IPFamily) func(*Service) { return func(s *Service) { s.Families = list } }
	for _, tt := range []struct {
		name     string
		a, b     *Member
		want     string // internal traffic policy, distribution, families
		conflict string
	}{
		{"nothing", with(0), with(1), "  []", "!Conflict"},
		{"policy", with(0, internal(local)), with(1, internal(local)), "Local  []", "!Conflict"},
		{"policies", with(0, internal(cluster)), with(1, internal(local)), "Cluster  []", "Conflict/InternalTrafficPolicyConflict"},
		{"policy of a headless one", with(0, headless, internal(cluster)), with(1, headless, internal(local)), "  []", "!Conflict"},
		{"distribution", with(0, closest), with(1, closest), " PreferClose []", "!Conflict"},
		{"distributions", with(0), with(1, closest), "  []", "Conflict/TrafficDistributionConflict"},
		{"families", with(0, families("IPv4")), with(1, families("IPv6")), "  []", "!Conflict"}, // those of its addresses count
		{"families of a headless one", with(0, headless, families("IPv6", "IPv4")), with(1, headless, families("IPv4", "IPv6")), "  [IPv6 IPv4]", "!Conflict"},
		{"other families of a headless one", with(0, headless, families("IPv4")), with(1, headless, families("IPv4", "IPv6")), "  [IPv4]", "Conflict/IPFamilyConflict"},
	} {
		set := Resolve(map[string]*Member{"a": tt.a, "b": tt.b}, nil, nil)
		text := func(policy *corev1.ServiceInternalTrafficPolicy, distribution *string) (s string) {
			if policy != nil {
				s = string(*policy)
			}
			if s += " "; distribution != nil {
				s += *distribution
			}
			return s
		}
		spec := set.Imports[web].Spec
		all := text(spec.InternalTrafficPolicy, spec.TrafficDistribution) + " ["
		for i, f := range spec.IPFamilies {
			if i > 0 {
				all += " "
			}
			all += string(f)
		}
		want(t, tt.name, all+"]", tt.want)
		for _, c := range []string{"a", "b"} {
			want(t, tt.name+": conditions", conditions(set.Conditions[c][web]), "Valid Ready "+tt.conflict)
		}
	}
}

// A Service's fields reach its import.
func TestServiceOfHasTheFields(t *testing.T) {
	local, near := corev1.ServiceInternalTrafficPolicyLocal, "PreferClose"
	got := ServiceOf(&corev1.Service{Spec: corev1.ServiceSpec{IPFamilies: []corev1.IPFamily{"IPv4"}, InternalTrafficPolicy: &local, TrafficDistribution: &near}})
	if len(got.Families) != 1 || got.Internal == nil || *got.Internal != local || got.Distribution == nil || *got.Distribution != near {
		t.Errorf("got %+v", got)
	}
}
