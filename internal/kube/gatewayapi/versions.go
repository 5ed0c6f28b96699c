package gatewayapi

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync/atomic"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	apiwatch "k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"
	typed "sigs.k8s.io/gateway-api/pkg/client/clientset/versioned/typed/apis/v1"

	"culvert.dev/internal/kube/watch"
)

// The version of each kind is the newest one that the API server serves: v1, or one of
// these, which have the same fields as far as they are read or written here.
var olderVersions = map[string][]string{
	"gatewayclasses":     {"v1beta1"},
	"gateways":           {"v1beta1"},
	"tlsroutes":          {"v1alpha3", "v1alpha2"},
	"tcproutes":          {"v1alpha2"},
	"udproutes":          {"v1alpha2"},
	"httproutes":         {"v1beta1"},
	"grpcroutes":         {"v1alpha2"},
	"referencegrants":    {"v1beta1"},
	"backendtlspolicies": {"v1alpha3"},
	"listenersets":       nil,
}

const newest = "v1"

// newOlder makes the clients of older versions: those of v1, whose requests and answers
// say another version.
func newOlder(cfg *rest.Config) (map[string]typed.GatewayV1Interface, error) {
	all := map[string]typed.GatewayV1Interface{}
	for _, versions := range olderVersions {
		for _, version := range versions {
			if all[version] != nil {
				continue
			}
			gv := schema.GroupVersion{Group: gwv1.GroupName, Version: version}
			scheme := runtime.NewScheme()
			scheme.AddKnownTypes(gv,
				&gwv1.GatewayClass{}, &gwv1.GatewayClassList{}, &gwv1.Gateway{}, &gwv1.GatewayList{}, &gwv1.TLSRoute{}, &gwv1.TLSRouteList{},
				&gwv1.TCPRoute{}, &gwv1.TCPRouteList{}, &gwv1.UDPRoute{}, &gwv1.UDPRouteList{}, &gwv1.HTTPRoute{}, &gwv1.HTTPRouteList{},
				&gwv1.GRPCRoute{}, &gwv1.GRPCRouteList{}, &gwv1.ReferenceGrant{}, &gwv1.ReferenceGrantList{}, &gwv1.BackendTLSPolicy{}, &gwv1.BackendTLSPolicyList{})
			metav1.AddToGroupVersion(scheme, gv)
			metav1.AddToGroupVersion(scheme, schema.GroupVersion{Version: "v1"})
			c := rest.CopyConfig(cfg)
			c.GroupVersion, c.APIPath = &gv, "/apis"
			c.NegotiatedSerializer = serializer.NewCodecFactory(scheme).WithoutConversion()
			if c.UserAgent == "" {
				c.UserAgent = rest.DefaultKubernetesUserAgent()
			}
			r, err := rest.RESTClientFor(c)
			if err != nil {
				return nil, fmt.Errorf("gatewayapi: %w", err)
			}
			all[version] = typed.New(r)
		}
	}
	return all, nil
}

// A servedAs is the version by which a kind was listed last: "" before that, and none
// where the API server has no version of it that is known.
type servedAs struct{ atomic.Pointer[string] }

func (s *servedAs) version() string {
	if v := s.Load(); v != nil {
		return *v
	}
	return ""
}

// set reports whether that is news.
func (s *servedAs) set(version string) bool {
	was := s.Swap(&version)
	return (was == nil || *was != version) && (was != nil || version != newest)
}

const none = "none"

// versions has the servedAs of each kind of Gateway API.
type versions map[string]*servedAs

func newVersions() versions {
	v := versions{}
	for resource := range olderVersions {
		v[resource] = &servedAs{}
	}
	return v
}

// unusual are the kinds that are not read as v1, and how they are: see Inputs.Versions.
func (v versions) unusual() map[string]string {
	var out map[string]string
	for resource, as := range v {
		if version := as.version(); version != "" && version != newest {
			if out == nil {
				out = map[string]string{}
			}
			out[resource] = version
		}
	}
	return out
}

// all are the versions of all kinds, by the names that people call those: see Report.
func (v versions) all() map[string]string {
	if len(v) == 0 {
		return nil
	}
	out := make(map[string]string, len(v))
	for resource, as := range v {
		out[kindNames[resource]] = cmp.Or(as.version(), "unread")
	}
	return out
}

// api is the client of the version that a resource is served as.
func (c clients) api(resource string) typed.GatewayV1Interface {
	if as := c.versions[resource]; as != nil {
		if older := c.older[as.version()]; older != nil {
			return older
		}
	}
	return c.gw.GatewayV1()
}

// served is from for a resource of Gateway API: it asks for v1, and then for older
// versions, until the API server has one.
func served[L runtime.Object](c clients, resource string, of func(typed.GatewayV1Interface, string) watch.Lists[L]) func(string) *cache.ListWatch {
	as := c.versions[resource]
	if as == nil {
		as = &servedAs{}
	}
	return func(namespace string) *cache.ListWatch {
		names := []string{newest}
		all := []*cache.ListWatch{watch.Source(of(c.gw.GatewayV1(), namespace), nil)}
		for _, version := range olderVersions[resource] {
			if older := c.older[version]; older != nil {
				names = append(names, version)
				all = append(all, watch.Source(of(older, namespace), nil))
			}
		}
		return &cache.ListWatch{
			ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
				return byVersion(c, as, resource, names, 0, func(i int) (runtime.Object, error) { return all[i].ListWithContextFunc(ctx, o) })
			},
			WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (apiwatch.Interface, error) {
				first := 0
				if o.SendInitialEvents == nil { // it goes on from a list
					first = max(0, slices.Index(names, as.version()))
				}
				return byVersion(c, as, resource, names, first, func(i int) (apiwatch.Interface, error) { return all[i].WatchFuncWithContext(ctx, o) })
			},
		}
	}
}

// byVersion asks from the first version on until one is there.
func byVersion[T any](c clients, as *servedAs, resource string, names []string, first int, ask func(int) (T, error)) (out T, err error) {
	for i := first; i < len(names); i++ {
		if out, err = ask(i); err == nil || !apierrors.IsNotFound(err) {
			if err == nil && as.set(names[i]) && c.versionChanged != nil {
				c.versionChanged(resource, names[i])
			}
			return out, err
		}
	}
	if first == 0 && as.set(none) && c.versionChanged != nil {
		c.versionChanged(resource, none)
	}
	return out, err
}

// tellVersion is told when a kind is read by another version than before.
func (r *run) logVersion(resource, version string) {
	if version != none { // which its watch logs
		r.log.Info("a kind of Gateway API is read in another version", "resource", resource, "version", version, "newest", newest)
	}
	r.dirty()
}

// definition is the resource whose CRD says the version of all.
var definition = schema.GroupResource{Group: gwv1.GroupName, Resource: "gatewayclasses"}

// redefined returns what is closed when the version of the CRDs may be another one.
func (r *run) redefined() <-chan struct{} {
	return r.cfg.Definitions.Changed(definition)
}

// kindNames are what people call resources.
var kindNames = map[string]string{
	"gatewayclasses": "GatewayClasses", "gateways": "Gateways", "listenersets": "ListenerSets", "tlsroutes": "TLSRoutes", "tcproutes": "TCPRoutes", "udproutes": "UDPRoutes",
	"httproutes": "HTTPRoutes", "grpcroutes": "GRPCRoutes", "referencegrants": "ReferenceGrants", "backendtlspolicies": "BackendTLSPolicies",
}

// versionRemark says which kinds are read by an older version, and which not at all.
func versionRemark(unusual map[string]string) string {
	older := map[string][]string{}
	for resource, version := range unusual {
		older[version] = append(older[version], kindNames[resource])
	}
	var text strings.Builder
	for _, version := range slices.Sorted(maps.Keys(older)) {
		slices.Sort(older[version])
		what := strings.Join(older[version], ", ")
		if version == none {
			fmt.Fprintf(&text, "; %s are not read: the API server has no version of them that culvert knows", what)
			continue
		}
		fmt.Fprintf(&text, "; %s are read as %s", what, version)
	}
	return text.String()
}
