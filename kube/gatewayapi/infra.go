package gatewayapi

import (
	"crypto/sha256"
	"encoding/hex"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"
)

// maxLabel is the limit of a label's value.
const maxLabel = 63

// account is the ServiceAccount that stands for a Gateway among objects of the
// cluster: what it says under infrastructure is found there.
func account(g *gwv1.Gateway) *corev1.ServiceAccount {
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
			a.Labels[string(k)] = string(v)
		}
		for k, v := range in.Annotations {
			a.Annotations[string(k)] = string(v)
		}
	}
	a.Labels[gwv1.GatewayNameLabelKey] = short(g.Name, maxLabel)
	a.Labels[gwv1.GatewayClassNameLabelKey] = short(string(g.Spec.GatewayClassName), maxLabel)
	a.Labels[managedBy] = fieldManager
	a.Annotations[applied] = keysOf(a)
	return a
}

// managedBy is the label by which we know our own objects.
const managedBy = "app.kubernetes.io/managed-by"

// accountName does not take that of the ServiceAccount of somebody's pods.
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
