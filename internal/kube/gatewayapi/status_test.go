package gatewayapi

import (
	"fmt"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"
)

var (
	then = metav1.NewTime(time.Unix(1000, 0))
	now  = metav1.NewTime(time.Unix(2000, 0))
)

func cond(kind, status, reason string, generation int64, at metav1.Time) metav1.Condition {
	return metav1.Condition{Type: kind, Status: metav1.ConditionStatus(status), Reason: reason, ObservedGeneration: generation, LastTransitionTime: at}
}

func TestMergeConditions(t *testing.T) {
	none := metav1.Time{}
	for _, tt := range []struct {
		name             string
		have, want, then []metav1.Condition
	}{
		{"new", nil, []metav1.Condition{cond("Accepted", "True", "A", 1, none)}, []metav1.Condition{cond("Accepted", "True", "A", 1, now)}},
		{"the same status keeps its time", []metav1.Condition{cond("Accepted", "True", "A", 1, then)}, []metav1.Condition{cond("Accepted", "True", "B", 2, none)}, []metav1.Condition{cond("Accepted", "True", "B", 2, then)}},
		{"another status", []metav1.Condition{cond("Accepted", "True", "A", 1, then)}, []metav1.Condition{cond("Accepted", "False", "B", 2, none)}, []metav1.Condition{cond("Accepted", "False", "B", 2, now)}},
		{"newer than we know", []metav1.Condition{cond("Accepted", "True", "A", 3, then)}, []metav1.Condition{cond("Accepted", "False", "B", 2, none)}, []metav1.Condition{cond("Accepted", "True", "A", 3, then)}},
		{"foreign, in their order", []metav1.Condition{cond("x.io/X", "True", "X", 1, then), cond("Accepted", "True", "A", 1, then), cond("y.io/Y", "False", "Y", 9, then)}, []metav1.Condition{cond("Accepted", "True", "A", 2, none)},
			[]metav1.Condition{cond("x.io/X", "True", "X", 1, then), cond("Accepted", "True", "A", 2, then), cond("y.io/Y", "False", "Y", 9, then)}},
		{"ours that is wanted no more", []metav1.Condition{cond("InsecureFrontendValidationMode", "True", "A", 1, then)}, nil, nil},
		{"a type of ours twice", []metav1.Condition{cond("Accepted", "True", "A", 1, none)}, []metav1.Condition{cond("Accepted", "True", "A", 1, none)}, []metav1.Condition{cond("Accepted", "True", "A", 1, now)}},
	} {
		if got := mergeConditions(tt.have, tt.want, ownGateway, now); !equality.Semantic.DeepEqual(got, tt.then) {
			t.Errorf("%s: got %+v, want %+v", tt.name, got, tt.then)
		}
	}
}

// Nothing of a Gateway is written by one that knows an older generation of it.
func TestMergeGatewayKnowsItsPlace(t *testing.T) {
	have := gwv1.GatewayStatus{
		Conditions: []metav1.Condition{cond("Accepted", "True", "A", 3, then), cond("Programmed", "True", "A", 3, then)},
		Addresses:  []gwv1.GatewayStatusAddress{{Value: "10.0.0.1"}},
	}
	want := gwv1.GatewayStatus{Conditions: []metav1.Condition{cond("Accepted", "False", "B", 2, metav1.Time{})}}
	if got := mergeGateway(have, want, now); !equality.Semantic.DeepEqual(got, have) {
		t.Errorf("got %+v, want %+v", got, have)
	}
	// A foreign condition says nothing about what we know.
	have.Conditions = []metav1.Condition{cond("x.io/X", "True", "A", 99, then)}
	if got := mergeGateway(have, want, now); len(got.Conditions) != 2 || len(got.Addresses) != 0 {
		t.Errorf("got %+v, want ours beside the foreign one", got)
	}
}

func TestMergeAncestorsHasRoomForSixteen(t *testing.T) {
	ancestor := func(controller, name string) gwv1.PolicyAncestorStatus {
		return gwv1.PolicyAncestorStatus{ControllerName: gwv1.GatewayController(controller), AncestorRef: gwv1.ParentReference{Name: gwv1.ObjectName(name)}, Conditions: []metav1.Condition{cond("Accepted", "True", "A", 1, then)}}
	}
	var have, want []gwv1.PolicyAncestorStatus
	for i := range 14 {
		have = append(have, ancestor("x.io/x", fmt.Sprint("x", i)))
	}
	have = append(have, ancestor(DefaultController, "gone"))
	for i := range 4 {
		want = append(want, ancestor(DefaultController, fmt.Sprint("g", i)))
	}
	got := mergeAncestors(have, want, DefaultController, "a", now)
	if len(got) != 16 {
		t.Fatalf("got %d, want 16", len(got))
	}
	for i := range 14 {
		if !equality.Semantic.DeepEqual(got[i], have[i]) {
			t.Errorf("got %+v, want %+v", got[i], have[i])
		}
	}
	if got[14].AncestorRef.Name != "g0" || got[15].AncestorRef.Name != "g1" {
		t.Errorf("got %v, %v, want our first two", got[14].AncestorRef.Name, got[15].AncestorRef.Name)
	}
	// The same two stay, whoever else wants to come.
	again := mergeAncestors(got, want, DefaultController, "a", now)
	if !equality.Semantic.DeepEqual(again, got) {
		t.Errorf("got %+v, then %+v", got, again)
	}
}

func TestMergeParents(t *testing.T) {
	parent := func(controller, name string, cs ...metav1.Condition) gwv1.RouteParentStatus {
		return gwv1.RouteParentStatus{ControllerName: gwv1.GatewayController(controller), ParentRef: gwv1.ParentReference{Name: gwv1.ObjectName(name)}, Conditions: cs}
	}
	a, b := cond("Accepted", "True", "A", 1, then), cond("Accepted", "True", "A", 1, metav1.Time{})
	have := []gwv1.RouteParentStatus{parent("x.io/x", "edge", a), parent(DefaultController, "edge", a), parent(DefaultController, "edge", a), parent(DefaultController, "gone", a), parent(DefaultController, "elsewhere", a)}
	want := RouteStatus{
		Parents: []gwv1.RouteParentStatus{parent(DefaultController, "edge", b), parent(DefaultController, "new", b)},
		Others:  func(p gwv1.ParentReference) bool { return p.Name == "elsewhere" },
	}
	got := mergeParents(have, want, DefaultController, "a", now)
	var names string
	for _, p := range got {
		names += string(p.ControllerName) + " " + string(p.ParentRef.Name) + "; "
	}
	if w := "x.io/x edge; culvert.dev/gateway edge; culvert.dev/gateway elsewhere; culvert.dev/gateway new; "; names != w {
		t.Errorf("got %s, want %s", names, w)
	}
	if !got[1].Conditions[0].LastTransitionTime.Equal(&then) || !got[3].Conditions[0].LastTransitionTime.Equal(&now) {
		t.Errorf("got times %v, %v", got[1].Conditions, got[3].Conditions)
	}
}
