package gatewayapi

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"culvert.dev/internal/kube/client"
)

// applied is the annotation that lists which labels and annotations of a ServiceAccount come from
// its Gateway: they are removed when the Gateway has them no longer, and all others stay.
const applied = "culvert.dev/applied"

// planAccount plans the update of a Gateway's ServiceAccount. It is read when the Gateway or the
// leader changes, and not watched: that would need the permission to read all ServiceAccounts.
func (w *writer) planAccount(ts *[]task, gateway types.NamespacedName, want *corev1.ServiceAccount) {
	state := fmt.Sprint(want.OwnerReferences[0].UID, want.Name, want.Labels, want.Annotations)
	w.mu.Lock()
	known := w.accounts[gateway] == state
	w.mu.Unlock()
	if known {
		return
	}
	*ts = append(*ts, task{"serviceaccounts", key(want), func(ctx context.Context) error {
		if err := w.writeAccount(ctx, want); err != nil {
			return err
		}
		w.mu.Lock()
		w.accounts[gateway] = state
		w.mu.Unlock()
		return nil
	}})
}

// forgetAccounts forgets the ServiceAccounts of Gateways that are gone.
func (w *writer) forgetAccounts(res *Result) {
	w.mu.Lock()
	defer w.mu.Unlock()
	maps.DeleteFunc(w.accounts, func(gateway types.NamespacedName, _ string) bool { return res.Accounts[gateway] == nil })
}

func (w *writer) writeAccount(ctx context.Context, want *corev1.ServiceAccount) error {
	c := w.core.CoreV1().ServiceAccounts(want.Namespace)
	have, err := c.Get(ctx, want.Name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		_, err := c.Create(ctx, want, metav1.CreateOptions{FieldManager: fieldManager})
		return client.Asked("create", corev1.Resource("serviceaccounts"), err)
	}
	if err != nil {
		return client.Asked("get", corev1.Resource("serviceaccounts"), err)
	}
	if have.Labels[managedBy] != fieldManager {
		w.log.Warn("a ServiceAccount of another owner has the name of one for a Gateway; leaving it unchanged", "name", key(want).String())
		return nil
	}
	if !owned(&have.ObjectMeta, want.OwnerReferences[0].UID) {
		return errors.New("it belongs to another Gateway, or to a deleted one, in which case it will be garbage-collected")
	}
	next := have.DeepCopy()
	for _, k := range strings.Fields(have.Annotations[applied]) {
		if l, ok := strings.CutPrefix(k, "label:"); ok {
			delete(next.Labels, l)
		} else if a, ok := strings.CutPrefix(k, "annotation:"); ok {
			delete(next.Annotations, a)
		}
	}
	if next.Annotations == nil {
		next.Annotations = map[string]string{}
	}
	if next.Labels == nil {
		next.Labels = map[string]string{}
	}
	maps.Copy(next.Labels, want.Labels)
	maps.Copy(next.Annotations, want.Annotations)
	if maps.Equal(next.Labels, have.Labels) && maps.Equal(next.Annotations, have.Annotations) {
		return nil
	}
	_, err = c.Update(ctx, next, metav1.UpdateOptions{FieldManager: fieldManager})
	return client.Asked("update", corev1.Resource("serviceaccounts"), err)
}

// keysOf returns the keys of labels and annotations, in one line.
func keysOf(a *corev1.ServiceAccount) string {
	var ks []string
	for k := range a.Labels {
		ks = append(ks, "label:"+k)
	}
	for k := range a.Annotations {
		ks = append(ks, "annotation:"+k)
	}
	slices.Sort(ks)
	return strings.Join(ks, " ")
}

func owned(o *metav1.ObjectMeta, by types.UID) bool {
	return slices.ContainsFunc(o.OwnerReferences, func(r metav1.OwnerReference) bool { return r.UID == by })
}
