package cluster

import (
	"context"
	"encoding/json"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// keepStatus writes the pod's status after each change, until the pod is to be
// deleted or ctx ends.
func (w *worker) keepStatus(ctx context.Context) {
	var retry <-chan time.Time
	for {
		if w.spec().DeletionTimestamp != nil {
			return
		}
		retry = nil
		if err := ignoreGone(w.writeStatus(ctx)); err != nil {
			retry = time.After(100 * time.Millisecond)
		}
		select {
		case <-ctx.Done():
			return
		case <-w.unwanted:
			return
		case <-w.changed:
		case <-retry:
		}
	}
}

// writeStatus patches what differs from the object that was last seen.
func (w *worker) writeStatus(ctx context.Context) error {
	w.mu.Lock()
	pod := w.pod
	status := w.status()
	w.mu.Unlock()
	if same(&pod.Status, status) {
		return nil
	}
	patch, err := json.Marshal(map[string]any{
		"metadata": map[string]any{"uid": pod.UID},
		"status":   status,
	})
	if err != nil {
		return err
	}
	now, err := w.k.c.Client.CoreV1().Pods(w.namespace).Patch(ctx, w.name, types.StrategicMergePatchType, patch, metav1.PatchOptions{}, "status")
	if err != nil {
		return err
	}
	// The informer's may be older: it must not be taken for the difference.
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.pod == pod {
		w.pod = now
	}
	return nil
}

// same compares what status has.
func same(old, status *corev1.PodStatus) bool {
	if old.Phase != status.Phase || len(old.PodIPs) != len(status.PodIPs) || old.ObservedGeneration != status.ObservedGeneration {
		return false
	}
	for _, c := range status.Conditions {
		if !slices.ContainsFunc(old.Conditions, func(o corev1.PodCondition) bool {
			return o.Type == c.Type && o.Status == c.Status && o.Message == c.Message
		}) {
			return false
		}
	}
	a, _ := json.Marshal([][]corev1.ContainerStatus{old.InitContainerStatuses, old.ContainerStatuses})
	b, _ := json.Marshal([][]corev1.ContainerStatus{status.InitContainerStatuses, status.ContainerStatuses})
	return string(a) == string(b)
}

// status is what the kubelet says of the pod. w.mu is held.
func (w *worker) status() *corev1.PodStatus {
	pod := w.pod
	s := &corev1.PodStatus{Phase: w.phase, ObservedGeneration: pod.Generation}
	if !w.started.IsZero() {
		started := w.started
		s.StartTime = &started
	}
	for _, a := range w.k.nodeIPs(pod.Spec.NodeName) {
		s.HostIPs = append(s.HostIPs, corev1.HostIP{IP: a})
		if s.HostIP == "" {
			s.HostIP = a
		}
	}
	for _, a := range w.ips {
		s.PodIPs = append(s.PodIPs, corev1.PodIP{IP: a})
		if s.PodIP == "" {
			s.PodIP = a
		}
	}
	ready, finished, failed := true, true, false
	for i := range pod.Spec.InitContainers {
		s.InitContainerStatuses = append(s.InitContainerStatuses, w.containerStatus(&pod.Spec.InitContainers[i]))
	}
	for i := range pod.Spec.Containers {
		c := w.containerStatus(&pod.Spec.Containers[i])
		s.ContainerStatuses = append(s.ContainerStatuses, c)
		ready = ready && c.Ready
		finished = finished && c.State.Terminated != nil
		failed = failed || c.State.Terminated != nil && c.State.Terminated.ExitCode != 0
	}
	over := pod.DeletionTimestamp != nil || pod.Spec.RestartPolicy == corev1.RestartPolicyNever ||
		pod.Spec.RestartPolicy == corev1.RestartPolicyOnFailure && !failed
	if finished && over && w.phase == corev1.PodRunning {
		s.Phase = corev1.PodSucceeded
		if failed {
			s.Phase = corev1.PodFailed
		}
	}
	condition := func(name corev1.PodConditionType, ok bool, reason, message string) bool {
		c := corev1.PodCondition{Type: name, Status: corev1.ConditionTrue, ObservedGeneration: pod.Generation, LastTransitionTime: metav1.Now()}
		if !ok {
			c.Status, c.Reason, c.Message = corev1.ConditionFalse, reason, message
		}
		for _, old := range pod.Status.Conditions {
			if old.Type == name && old.Status == c.Status {
				c.LastTransitionTime = old.LastTransitionTime
			}
		}
		s.Conditions = append(s.Conditions, c)
		return ok
	}
	condition(corev1.PodReadyToStartContainers, len(w.ips) > 0, "", "")
	condition(corev1.PodInitialized, w.phase == corev1.PodRunning, "ContainersNotInitialized", w.reason)
	ready = condition(corev1.ContainersReady, ready, "ContainersNotReady", w.reason)
	for _, gate := range pod.Spec.ReadinessGates {
		ready = ready && slices.ContainsFunc(pod.Status.Conditions, func(c corev1.PodCondition) bool {
			return c.Type == gate.ConditionType && c.Status == corev1.ConditionTrue
		})
	}
	condition(corev1.PodReady, ready, "ContainersNotReady", w.reason)
	return s
}

// containerStatus is of a container that may not be there yet.
func (w *worker) containerStatus(spec *corev1.Container) corev1.ContainerStatus {
	for _, c := range w.containers {
		if c.spec.Name == spec.Name {
			return c.status()
		}
	}
	return corev1.ContainerStatus{
		Name: spec.Name, Image: spec.Image,
		State: corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: "ContainerCreating", Message: w.reason}},
	}
}
