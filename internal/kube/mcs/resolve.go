package mcs

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	mcsv1 "sigs.k8s.io/mcs-api/pkg/apis/v1beta1"
)

// A Name is of a service, in whatever cluster.
type Name = types.NamespacedName

// A Member is the state of one cluster.
type Member struct {
	Exports  map[Name]Export
	Services map[Name]Service
	Unseen   bool // it has not been read
}

// An Export is a ServiceExport.
type Export struct {
	Created    time.Time
	Generation int64
}

// A Service has the fields of a Service that matter for its export.
type Service struct {
	Kind           corev1.ServiceType
	Headless       bool
	Ports          []mcsv1.ServicePort
	Affinity       corev1.ServiceAffinity
	AffinityConfig *corev1.SessionAffinityConfig
	Families       []corev1.IPFamily
	Internal       *corev1.ServiceInternalTrafficPolicy
	Distribution   *string
}

// ServiceOf returns what matters of s.
func ServiceOf(s *corev1.Service) Service {
	out := Service{
		Kind: s.Spec.Type, Headless: s.Spec.Type != corev1.ServiceTypeExternalName && s.Spec.ClusterIP == corev1.ClusterIPNone,
		Affinity: cmp.Or(s.Spec.SessionAffinity, corev1.ServiceAffinityNone), AffinityConfig: s.Spec.SessionAffinityConfig.DeepCopy(),
		Families: slices.Clone(s.Spec.IPFamilies), Internal: copied(s.Spec.InternalTrafficPolicy), Distribution: copied(s.Spec.TrafficDistribution),
	}
	for _, p := range s.Spec.Ports {
		port := mcsv1.ServicePort{Name: p.Name, Protocol: cmp.Or(p.Protocol, corev1.ProtocolTCP), Port: p.Port}
		if p.AppProtocol != nil {
			app := *p.AppProtocol
			port.AppProtocol = &app
		}
		out.Ports = append(out.Ports, port)
	}
	return out
}

// A Set is what follows from all members together.
type Set struct {
	Exported   map[string]map[Name]bool               // by cluster: what is part of the cluster set
	Conditions map[string]map[Name][]metav1.Condition // by cluster, of each ServiceExport; without times
	Imports    map[Name]Import
	Clusters   map[string]bool // those that are there
}

// An Import is what a ServiceImport is to say, in every cluster.
type Import struct {
	Spec     mcsv1.ServiceImportSpec
	Clusters []string // those that export it, sorted
	Ready    metav1.Condition
}

// A part is one valid export of a service.
type part struct {
	cluster string
	Export
	Service
}

func copied[T any](p *T) *T {
	if p == nil {
		return nil
	}
	v := *p
	return &v
}

func same[T comparable](a, b *T) bool { return a == b || a != nil && b != nil && *a == *b }

// Resolve finds out what members export together. It is pure. vips returns the
// addresses of a service in the cluster set, and refuses why one may not be
// exported, or ""; either may be nil.
func Resolve(members map[string]*Member, vips func(Name) []netip.Addr, refuses func(Name) string) Set {
	set := Set{Exported: map[string]map[Name]bool{}, Conditions: map[string]map[Name][]metav1.Condition{}, Imports: map[Name]Import{}, Clusters: map[string]bool{}}
	parts := map[Name][]part{}
	for _, cluster := range slices.Sorted(maps.Keys(members)) {
		m := members[cluster]
		set.Clusters[cluster] = !m.Unseen
		set.Exported[cluster], set.Conditions[cluster] = map[Name]bool{}, map[Name][]metav1.Condition{}
		for name, e := range m.Exports {
			s, ok := m.Services[name]
			valid, ready := judge(name, s, ok, refuses)
			set.Conditions[cluster][name] = observed(e.Generation, valid, ready)
			if valid.Status == metav1.ConditionTrue && ready.Status == metav1.ConditionTrue {
				parts[name] = append(parts[name], part{cluster, e, s})
			}
		}
	}
	for name, list := range parts {
		slices.SortStableFunc(list, func(a, b part) int { // clusters are sorted already
			return a.Created.Compare(b.Created)
		})
		spec, clusters, conflict := join(list)
		if vips != nil && spec.Type == mcsv1.ClusterSetIP {
			for _, a := range vips(name) {
				if a.IsValid() && len(spec.IPs) < 2 {
					spec.IPs = append(spec.IPs, a.String())
					spec.IPFamilies = append(spec.IPFamilies, family(a))
				}
			}
		}
		set.Imports[name] = Import{Spec: spec, Clusters: clusters, Ready: importReady(&spec)}
		for _, p := range list {
			if slices.Contains(clusters, p.cluster) {
				set.Exported[p.cluster][name] = true
			}
			set.Conditions[p.cluster][name] = append(set.Conditions[p.cluster][name], observed(p.Generation, conflict)...)
		}
	}
	return set
}

func family(a netip.Addr) corev1.IPFamily {
	if a.Is6() {
		return corev1.IPv6Protocol
	}
	return corev1.IPv4Protocol
}

// judge says whether a service can be exported.
func judge(name Name, s Service, there bool, refuses func(Name) string) (valid, ready metav1.Condition) {
	valid = condition(mcsv1.ServiceExportConditionValid, metav1.ConditionTrue, mcsv1.ServiceExportReasonValid, "the Service can be exported")
	ready = condition(mcsv1.ServiceExportConditionReady, metav1.ConditionTrue, mcsv1.ServiceExportReasonExported, "the Service is part of the cluster set")
	switch {
	case !there:
		valid = condition(mcsv1.ServiceExportConditionValid, metav1.ConditionFalse, mcsv1.ServiceExportReasonNoService, "there is no Service of this name")
	case s.Kind == corev1.ServiceTypeExternalName:
		valid = condition(mcsv1.ServiceExportConditionValid, metav1.ConditionFalse, mcsv1.ServiceExportReasonInvalidServiceType, "a Service of the type ExternalName can't be exported")
	}
	if valid.Status == metav1.ConditionFalse {
		return valid, condition(mcsv1.ServiceExportConditionReady, metav1.ConditionFalse, mcsv1.ServiceExportReasonPending, valid.Message)
	}
	why := ""
	if refuses != nil {
		why = refuses(name)
	}
	if why == "" && len(s.Ports) > 0 && !slices.ContainsFunc(s.Ports, func(p mcsv1.ServicePort) bool { return p.Protocol == corev1.ProtocolTCP }) {
		why = "it has no TCP port, and gateways carry no other between clusters"
	}
	if why != "" {
		ready = condition(mcsv1.ServiceExportConditionReady, metav1.ConditionFalse, mcsv1.ServiceExportReasonFailed, why)
	}
	return valid, ready
}

func condition[T, R ~string](kind T, status metav1.ConditionStatus, reason R, message string) metav1.Condition {
	return metav1.Condition{Type: string(kind), Status: status, Reason: string(reason), Message: message}
}

func observed(generation int64, list ...metav1.Condition) []metav1.Condition {
	for i := range list {
		list[i].ObservedGeneration = generation
	}
	return list
}

// join makes one service of those that clusters export, the oldest first, and
// says what they do not agree on.
func join(list []part) (spec mcsv1.ServiceImportSpec, clusters []string, conflict metav1.Condition) {
	first := &list[0]
	spec = mcsv1.ServiceImportSpec{
		Type: mcsv1.ClusterSetIP, SessionAffinity: first.Affinity, SessionAffinityConfig: first.AffinityConfig,
		InternalTrafficPolicy: first.Internal, TrafficDistribution: first.Distribution, Ports: []mcsv1.ServicePort{},
	}
	if first.Headless { // its clients reach endpoints, and no address in the cluster set
		spec.Type, spec.SessionAffinity, spec.SessionAffinityConfig, spec.InternalTrafficPolicy = mcsv1.Headless, "", nil, nil
		spec.IPFamilies = slices.Clone(first.Families)
	}
	var reasons, texts []string
	differ := func(reason mcsv1.ServiceExportConditionReason, p *part, what string) {
		if !slices.Contains(reasons, string(reason)) {
			reasons = append(reasons, string(reason))
		}
		if len(texts) < 8 {
			texts = append(texts, fmt.Sprintf("%s of cluster %q", what, p.cluster))
		}
	}
	for i := range list {
		p := &list[i]
		if p.Headless != first.Headless {
			// Its endpoints can't be both behind one address and each by its name.
			differ(mcsv1.ServiceExportReasonTypeConflict, p, "the type")
			continue
		}
		clusters = append(clusters, p.cluster)
		if !samePorts(p.Ports, first.Ports) {
			differ(mcsv1.ServiceExportReasonPortConflict, p, "the ports")
		}
		if !first.Headless && p.Affinity != first.Affinity {
			differ(mcsv1.ServiceExportReasonSessionAffinityConflict, p, "the session affinity")
		} else if !first.Headless && !reflect.DeepEqual(p.AffinityConfig, first.AffinityConfig) {
			differ(mcsv1.ServiceExportReasonSessionAffinityConfigConflict, p, "the configuration of the session affinity")
		}
		if !first.Headless && !same(p.Internal, first.Internal) {
			differ(mcsv1.ServiceExportReasonInternalTrafficPolicyConflict, p, "the internal traffic policy")
		}
		if !same(p.Distribution, first.Distribution) {
			differ(mcsv1.ServiceExportReasonTrafficDistributionConflict, p, "the traffic distribution")
		}
		if first.Headless && !sameFamilies(p.Families, first.Families) {
			differ(mcsv1.ServiceExportReasonIPFamilyConflict, p, "the IP families")
		}
		spec.Ports = unite(spec.Ports, p.Ports)
	}
	slices.Sort(clusters)
	if len(reasons) == 0 {
		return spec, clusters, condition(mcsv1.ServiceExportConditionConflict, metav1.ConditionFalse, mcsv1.ServiceExportReasonNoConflicts, "all exports agree")
	}
	return spec, clusters, condition(mcsv1.ServiceExportConditionConflict, metav1.ConditionTrue, strings.Join(reasons, ","),
		fmt.Sprintf("the oldest export, that of cluster %q, decides; different are %s", first.cluster, strings.Join(texts, ", ")))
}

// samePorts reports whether two services have the same ports, in any order.
func samePorts(a, b []mcsv1.ServicePort) bool {
	return len(a) == len(b) && !slices.ContainsFunc(a, func(p mcsv1.ServicePort) bool {
		return !slices.ContainsFunc(b, func(o mcsv1.ServicePort) bool { return reflect.DeepEqual(p, o) })
	})
}

// sameFamilies reports whether two services have the same families, in any order.
func sameFamilies(a, b []corev1.IPFamily) bool {
	return len(a) == len(b) && !slices.ContainsFunc(a, func(f corev1.IPFamily) bool { return !slices.Contains(b, f) })
}

// unite adds those ports whose name and number are not used yet.
func unite(to, more []mcsv1.ServicePort) []mcsv1.ServicePort {
	have := len(to) // those of one service may share a number, of one that is older they may not
	for _, p := range more {
		if !slices.ContainsFunc(to[:have], func(o mcsv1.ServicePort) bool {
			return p.Name == o.Name || p.Port == o.Port && p.Protocol == o.Protocol
		}) {
			to = append(to, p)
		}
	}
	return to
}

func importReady(spec *mcsv1.ServiceImportSpec) metav1.Condition {
	if spec.Type == mcsv1.ClusterSetIP && len(spec.IPs) == 0 {
		return condition(mcsv1.ServiceImportConditionReady, metav1.ConditionFalse, mcsv1.ServiceImportReasonPending, "it has no address in the cluster set; the name leads to gateways")
	}
	return condition(mcsv1.ServiceImportConditionReady, metav1.ConditionTrue, mcsv1.ServiceImportReasonReady, "the name leads to the service")
}
