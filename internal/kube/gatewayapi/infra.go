package gatewayapi

import (
	"crypto/sha256"
	"encoding/hex"
	"path"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"
)

// maxLabel is the limit of a label's value.
const maxLabel = 63

// account is the ServiceAccount that stands for a Gateway among objects of the
// cluster: what it says under infrastructure is found there, as far as w lets it.
func (w *Inputs) account(g *gwv1.Gateway) *corev1.ServiceAccount {
	yes := true
	no := false
	a := &corev1.ServiceAccount{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: g.Namespace, Name: accountName(g), Labels: map[string]string{}, Annotations: map[string]string{},
			OwnerReferences: []metav1.OwnerReference{{
				APIVersion: gwv1.GroupVersion.String(), Kind: "Gateway", Name: g.Name, UID: g.UID, Controller: &yes, BlockOwnerDeletion: &no,
			}},
		},
		AutomountServiceAccountToken: &no, // nothing runs as it
	}
	if in := g.Spec.Infrastructure; in != nil {
		for k, v := range in.Labels {
			if w.mayHave(string(k)) {
				a.Labels[string(k)] = string(v)
			}
		}
		for k, v := range in.Annotations {
			if w.mayHave(string(k)) {
				a.Annotations[string(k)] = string(v)
			}
		}
	}
	a.Labels[gwv1.GatewayNameLabelKey] = short(g.Name, maxLabel)
	a.Labels[gwv1.GatewayClassNameLabelKey] = short(string(g.Spec.GatewayClassName), maxLabel)
	a.Labels[managedBy] = fieldManager
	a.Annotations[applied] = keysOf(a)
	return a
}

// mayHave reports whether a ServiceAccount may have a label or an annotation because a
// Gateway says so. Those that others act on have a domain: "eks.amazonaws.com/role-arn"
// gives pods that run as the account a role of the cloud, and who may make Gateways must
// not hand that out. The administrator lists what is harmless.
func (w *Inputs) mayHave(key string) bool {
	return !strings.Contains(key, "/") || slices.ContainsFunc(w.InfrastructureKeys, func(pattern string) bool {
		ok, err := path.Match(pattern, key)
		return ok && err == nil
	})
}

// reasonInfrastructureLeftOut is no reason of a condition: the Gateway is served.
const reasonInfrastructureLeftOut = "InfrastructureLeftOut"

// noteInfrastructure tells of what a Gateway's ServiceAccount does not get.
func (t *translator) noteInfrastructure(g *gateway) {
	in := g.Spec.Infrastructure
	if in == nil {
		return
	}
	var left []string
	for k := range in.Labels {
		if !t.in.mayHave(string(k)) {
			left = append(left, "label "+string(k))
		}
	}
	for k := range in.Annotations {
		if !t.in.mayHave(string(k)) {
			left = append(left, "annotation "+string(k))
		}
	}
	if left == nil {
		return
	}
	slices.Sort(left)
	text := "infrastructure: ServiceAccount " + accountName(g.Gateway) + " does not get " + strings.Join(left, ", ") + ": gatewayAPI.infrastructureKeys does not list it"
	g.remark += "; " + text
	of := RouteKey{"Gateway", key(g)}
	t.res.Notes[of] = append(t.res.Notes[of], note{reasonInfrastructureLeftOut, truncate(text)})
}

// managedBy is the label by which we know our own objects.
const managedBy = "app.kubernetes.io/managed-by"

// accountName returns a name for a Gateway's ServiceAccount that the account of a workload hardly has.
func accountName(g *gwv1.Gateway) string {
	return short(g.Name+"-"+string(g.Spec.GatewayClassName), 253)
}

// short cuts a name to limit bytes, and says with a hash of the whole which one
// it was.
func short(name string, limit int) string {
	if len(name) <= limit {
		return name
	}
	sum := sha256.Sum256([]byte(name))
	return strings.TrimRight(name[:limit-11], "-.") + "-" + hex.EncodeToString(sum[:5])
}
