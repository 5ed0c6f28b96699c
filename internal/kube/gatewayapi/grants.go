package gatewayapi

import (
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"
)

// A referrer is an object that refers to another one.
type referrer struct {
	group, kind, namespace string
}

// readGrants sorts the grants by the namespace whose objects they are about.
func (t *translator) readGrants() {
	t.grants = map[string][]*gwv1.ReferenceGrant{}
	for _, g := range t.in.Grants {
		t.grants[g.Namespace] = append(t.grants[g.Namespace], g)
	}
}

// granted reports whether from may refer to an object. Within a namespace it may; from another
// namespace it needs a grant there. That is checked before the object is looked for, because without
// a grant nobody may learn whether it exists.
func (t *translator) granted(from referrer, group, kind, namespace, name string) bool {
	if from.namespace == namespace {
		return true
	}
	for _, g := range t.grants[namespace] {
		if grantFrom(g, from) && grantTo(g, group, kind, name) {
			return true
		}
	}
	return false
}

func grantFrom(g *gwv1.ReferenceGrant, from referrer) bool {
	for _, f := range g.Spec.From {
		if string(f.Group) == from.group && string(f.Kind) == from.kind && string(f.Namespace) == from.namespace {
			return true
		}
	}
	return false
}

func grantTo(g *gwv1.ReferenceGrant, group, kind, name string) bool {
	for _, to := range g.Spec.To {
		if string(to.Group) == group && string(to.Kind) == kind && (to.Name == nil || *to.Name == "" || string(*to.Name) == name) {
			return true
		}
	}
	return false
}
