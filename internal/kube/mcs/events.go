package mcs

import (
	"context"
	"maps"
	"slices"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	mcsv1 "sigs.k8s.io/mcs-api/pkg/apis/v1beta1"
)

// maxLogLines is how many new refusals are logged one by one; of more only the number is logged.
const maxLogLines = 32

// wrong returns those conditions of a ServiceExport that its owner should know of.
func wrong(all []metav1.Condition) []metav1.Condition {
	return slices.DeleteFunc(slices.Clone(all), func(c metav1.Condition) bool {
		switch c.Type {
		case string(mcsv1.ServiceExportConditionConflict):
			return c.Status != metav1.ConditionTrue
		case string(mcsv1.ServiceExportConditionReady):
			// Pending is what one says whose Valid says more.
			return c.Status != metav1.ConditionFalse || c.Reason == string(mcsv1.ServiceExportReasonPending)
		}
		return c.Status != metav1.ConditionFalse
	})
}

// logRefusals logs what is newly wrong, on every replica. Only Run calls it.
func (c *Controller) logRefusals(set *Set) {
	now := map[string]string{}
	said, more := 0, 0
	for _, cluster := range slices.Sorted(maps.Keys(set.Conditions)) {
		for _, name := range sorted(set.Conditions[cluster]) {
			for _, w := range wrong(set.Conditions[cluster][name]) {
				subject, text := cluster+" "+name.String()+" "+w.Type, w.Reason+": "+w.Message
				if !set.Clusters[cluster] { // what is said of it now may be wrong
					if was, ok := c.refused[subject]; ok {
						now[subject] = was
					}
					continue
				}
				now[subject] = text
				if c.refused[subject] == text {
					continue
				}
				if said++; said > maxLogLines {
					more++
					continue
				}
				c.log.Warn("Kubernetes object refused", "cluster", cluster, "object", "ServiceExport "+name.String(), "why", text)
			}
		}
	}
	if more > 0 {
		c.log.Warn("refused Kubernetes objects suppressed in the log; see their conditions", "suppressed", more)
	}
	c.refused = now
}

// note writes Events in the member's cluster of what is wrong with e and was not before.
func (m *member) note(ctx context.Context, before, e *mcsv1.ServiceExport) {
	object := corev1.ObjectReference{APIVersion: mcsv1.GroupVersion.String(), Kind: "ServiceExport", Namespace: e.Namespace, Name: e.Name, UID: e.UID}
	for _, w := range wrong(e.Status.Conditions) {
		if b := meta.FindStatusCondition(before.Status.Conditions, w.Type); b != nil && b.Status == w.Status && b.Reason == w.Reason && b.Message == w.Message {
			continue
		}
		if err := m.events.Warn(ctx, object, "Refused", w.Reason+": "+w.Message, metav1.NamespaceAll); apierrors.IsForbidden(err) {
			return
		}
	}
}

// controllerName is what Events say they are by.
const controllerName = "culvert.dev/multi-cluster"
