package policy

import (
	"encoding/json"
	"fmt"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"
)

// The API group and its resources.
const (
	group       = "policy.culvert.dev"
	version     = "v1alpha1"
	kind        = "AuthorizationPolicy"
	clusterKind = "ClusterAuthorizationPolicy"
)

var (
	resource        = schema.GroupVersionResource{Group: group, Version: version, Resource: "authorizationpolicies"}
	clusterResource = schema.GroupVersionResource{Group: group, Version: version, Resource: "clusterauthorizationpolicies"}
)

// An object is an AuthorizationPolicy or a ClusterAuthorizationPolicy.
type object struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata"`
	Spec              spec              `json:"spec"`
	Status            gwv1.PolicyStatus `json:"status"`
}

// objectOf decodes what the API server sent, of whose spec the definition has checked the shape.
func objectOf(u *unstructured.Unstructured) (*object, error) {
	text, err := u.MarshalJSON()
	if err != nil {
		return nil, err
	}
	o := &object{}
	if err := json.Unmarshal(text, o); err != nil {
		return nil, fmt.Errorf("its fields cannot be read: %w", err)
	}
	return o, nil
}

// isOfCluster reports whether o is a ClusterAuthorizationPolicy.
func (o *object) isOfCluster() bool { return o.Kind == clusterKind }

// String returns the kind with the name, for people.
func (o *object) String() string {
	if o.isOfCluster() {
		return clusterKind + " " + o.Name
	}
	return kind + " " + o.Namespace + "/" + o.Name
}

// A spec is that of both kinds. Tier and Targets are of a ClusterAuthorizationPolicy, and TargetRefs
// are of an AuthorizationPolicy.
type spec struct {
	EnforcementLevel string      `json:"enforcementLevel"`
	Action           string      `json:"action"`
	Verb             string      `json:"verb"`
	DryRun           bool        `json:"dryRun"`
	TargetRefs       []targetRef `json:"targetRefs"`
	Tier             string      `json:"tier"`
	Targets          *targets    `json:"targets"`
	Rules            []rule      `json:"rules"`

	broken error // that kept it from being read
}

// A targetRef names an object of the policy's own namespace, or selects Pods of it.
type targetRef struct {
	Group       string                `json:"group"`
	Kind        string                `json:"kind"`
	Name        string                `json:"name"`
	SectionName string                `json:"sectionName"`
	Selector    *metav1.LabelSelector `json:"selector"`
}

// Targets of a whole cluster. All fields must match, and nil matches everything.
type targets struct {
	Names             []string              `json:"names"`
	Namespaces        []string              `json:"namespaces"`
	NamespaceSelector *metav1.LabelSelector `json:"namespaceSelector"`
	PodSelector       *metav1.LabelSelector `json:"podSelector"`
}

// A rule matches if one of its sources and one of its ports do.
type rule struct {
	Sources           *[]source          `json:"sources"` // nil is anybody, an empty list nobody
	NetworkAttributes *networkAttributes `json:"networkAttributes"`
}

type networkAttributes struct {
	Ports     []int32  `json:"ports"`
	Protocols []string `json:"protocols"`
}

// A source is a caller of some Type, on all further conditions.
type source struct {
	Type           string          `json:"type"`
	ServiceAccount *serviceAccount `json:"serviceAccount"`
	SPIFFE         string          `json:"spiffe"`
	TrustDomain    string          `json:"trustDomain"`
	User           string          `json:"user"`

	CIDRs    []string            `json:"cidrs"`
	Networks []string            `json:"networks"`
	Actors   []string            `json:"actors"`
	Claims   map[string][]string `json:"claims"`
}

// A serviceAccount is one of a namespace, or with the name "*" any.
type serviceAccount struct {
	Namespace string `json:"namespace"` // "" means the policy's own
	Name      string `json:"name"`
}
