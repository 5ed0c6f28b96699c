package gatewayapi

import (
	"slices"
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"
)

func TestByNameIsTheOrderOfWholeNames(t *testing.T) {
	names := []string{"a/x", "a/y", "a-b/x", "a-b/a", "ab/x", "b/a", "a.b/x", "/x"}
	for _, a := range names {
		for _, b := range names {
			an, aname, _ := strings.Cut(a, "/")
			bn, bname, _ := strings.Cut(b, "/")
			if got, want := byName(an, aname, bn, bname), strings.Compare(a, b); got != want {
				t.Errorf("%s and %s: got %d, want %d", a, b, got, want)
			}
		}
	}
}

func TestSortedIsByAgeAndName(t *testing.T) {
	var all []*gwv1.TLSRoute
	for i := range 60 {
		all = append(all, &gwv1.TLSRoute{ObjectMeta: metav1.ObjectMeta{
			Namespace: []string{"a", "a-b", "ab"}[i%3], Name: string(rune('a' + i*7%26)),
			CreationTimestamp: metav1.NewTime(time.Unix(int64(1_700_000_000+i*11%4), int64(i)*10_000_000)),
		}})
	}
	all = append(all, &gwv1.TLSRoute{}) // of no time
	said := func(o *gwv1.TLSRoute) string {
		return o.CreationTimestamp.UTC().Format(time.RFC3339) + " " + o.Namespace + "/" + o.Name
	}
	got, want := sorted(all), slices.Clone(all)
	slices.SortStableFunc(want, func(a, b *gwv1.TLSRoute) int { return strings.Compare(said(a), said(b)) })
	for i := range want {
		if said(got[i]) != said(want[i]) {
			t.Fatalf("the %dth is %s, want %s", i, said(got[i]), said(want[i]))
		}
	}
}

// A service is made again when its slices are others, and only then.
func TestReachedServicesAreKept(t *testing.T) {
	w := inputsOf(t, base, edge(passthrough), `
kind: TLSRoute
metadata: {namespace: a, name: r}
spec:
  parentRefs: [{name: edge}]
  hostnames: [x.example.com]
  rules: [{backendRefs: [{name: web, port: 443}]}]
`)
	w.PublicAddresses, w.memo = addrs("192.0.2.1"), newMemo()
	service := func() any { return Translate(w).Snapshot.Listeners[0].Sections[0].Rules[0].Backends[0].Service }
	first := service()
	if again := service(); again != first {
		t.Error("the service of slices that are the same was made again")
	}
	f := w.Objects.(*fixture)
	for i, s := range f.slices {
		if s.Namespace == "a" && s.Name == "web-1" {
			f.slices[i] = s.DeepCopy()
			f.slices[i].Endpoints[0].Addresses[0] = "10.244.0.77"
		}
	}
	next := Translate(w).Snapshot.Listeners[0].Sections[0].Rules[0].Backends[0].Service
	if got := next.Endpoints[0].Addr.String(); got != "10.244.0.77" {
		t.Errorf("the endpoint is %s, want the new one", got)
	}
	w.TLSRoutes = nil
	Translate(w)
	if n := len(w.memo.reached); n != 0 {
		t.Errorf("%d services are kept that no route leads to", n)
	}
}

// written must not be true where there is something to write.
func TestWrittenAgreesWithMerge(t *testing.T) {
	const us = gwv1.GatewayController(DefaultController)
	now := metav1.NewTime(time.Unix(1_800_000_000, 0))
	ref, other := gwv1.ParentReference{Name: "edge"}, gwv1.ParentReference{Name: "other"}
	group := gwv1.Group(gwv1.GroupName)
	want := RouteStatus{Parents: []gwv1.RouteParentStatus{{ParentRef: ref, ControllerName: us, Conditions: observe(3, conditions("Accepted", "ResolvedRefs"))}}}
	whole := mergeParents(nil, want, us, "a", now)
	for name, row := range map[string]struct {
		change func([]gwv1.RouteParentStatus) []gwv1.RouteParentStatus
		want   bool
	}{
		"the same":    {func(p []gwv1.RouteParentStatus) []gwv1.RouteParentStatus { return p }, true},
		"nothing yet": {func([]gwv1.RouteParentStatus) []gwv1.RouteParentStatus { return nil }, false},
		"another's, too": {func(p []gwv1.RouteParentStatus) []gwv1.RouteParentStatus {
			return append([]gwv1.RouteParentStatus{{ParentRef: ref, ControllerName: "x/y"}}, p...)
		}, true},
		"one too many": {func(p []gwv1.RouteParentStatus) []gwv1.RouteParentStatus {
			return append(p, gwv1.RouteParentStatus{ParentRef: other, ControllerName: us})
		}, false},
		"another parent": {func(p []gwv1.RouteParentStatus) []gwv1.RouteParentStatus { p[0].ParentRef = other; return p }, false},
		"other spelling": {func(p []gwv1.RouteParentStatus) []gwv1.RouteParentStatus { p[0].ParentRef.Group = &group; return p }, false},
		"older": {func(p []gwv1.RouteParentStatus) []gwv1.RouteParentStatus {
			p[0].Conditions[0].ObservedGeneration--
			return p
		}, false},
		"another status": {func(p []gwv1.RouteParentStatus) []gwv1.RouteParentStatus {
			p[0].Conditions[1].Status = "False"
			return p
		}, false},
		"another message": {func(p []gwv1.RouteParentStatus) []gwv1.RouteParentStatus { p[0].Conditions[1].Message = "x"; return p }, false},
		"no time": {func(p []gwv1.RouteParentStatus) []gwv1.RouteParentStatus {
			p[0].Conditions[1].LastTransitionTime = metav1.Time{}
			return p
		}, false},
		"one condition": {func(p []gwv1.RouteParentStatus) []gwv1.RouteParentStatus {
			p[0].Conditions = p[0].Conditions[:1]
			return p
		}, false},
	} {
		st := gwv1.RouteStatus{Parents: whole}
		have := row.change(st.DeepCopy().Parents)
		if got := written(have, want, us); got != row.want {
			t.Errorf("%s: got %v, want %v", name, got, row.want)
		}
		if merged := mergeParents(have, want, us, "a", now); written(have, want, us) && !equality.Semantic.DeepEqual(merged, have) {
			t.Errorf("%s: it is written, and yet merging makes %+v of %+v", name, merged, have)
		}
	}
}
