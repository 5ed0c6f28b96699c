package cluster

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/dynamic"
	"sigs.k8s.io/yaml"
)

// Manager is the field manager of Apply.
const Manager = "culvert-cluster-harness"

// Apply sends YAML documents to the API server by server-side apply, in their
// order, as the administrator; fields that others own are taken from them. What
// has no namespace goes to "default". Resources defined by the same documents
// may be used by the following ones.
func (c *Cluster) Apply(t testing.TB, docs string) {
	t.Helper()
	if err := c.apply(t.Context(), []byte(docs)); err != nil {
		t.Fatalf("cluster %s: %v", c.Name, err)
	}
}

// Delete deletes what the documents name, and does not wait until it is gone.
// What isn't there is no error.
func (c *Cluster) Delete(t testing.TB, docs string) {
	t.Helper()
	err := c.each(t.Context(), []byte(docs), func(ctx context.Context, r dynamic.ResourceInterface, o *unstructured.Unstructured) error {
		err := r.Delete(ctx, o.GetName(), metav1.DeleteOptions{})
		if apierrors.IsNotFound(err) {
			return nil
		}
		return err
	})
	if err != nil {
		t.Fatalf("cluster %s: %v", c.Name, err)
	}
}

func (c *Cluster) apply(ctx context.Context, docs []byte) error {
	return c.each(ctx, docs, func(ctx context.Context, r dynamic.ResourceInterface, o *unstructured.Unstructured) error {
		_, err := r.Apply(ctx, o.GetName(), o, metav1.ApplyOptions{FieldManager: Manager, Force: true})
		return err
	})
}

// each calls f for every object of the documents.
func (c *Cluster) each(ctx context.Context, docs []byte, f func(context.Context, dynamic.ResourceInterface, *unstructured.Unstructured) error) error {
	objects, err := decode(docs)
	if err != nil {
		return err
	}
	for _, o := range objects {
		r, err := c.resource(ctx, o)
		if err == nil {
			err = f(ctx, r, o)
		}
		if err != nil {
			return fmt.Errorf("%s %s/%s: %w", o.GetKind(), o.GetNamespace(), o.GetName(), err)
		}
	}
	return nil
}

// resource finds where an object belongs. A kind that is not known may be of a
// definition that the server has just been given.
func (c *Cluster) resource(ctx context.Context, o *unstructured.Unstructured) (dynamic.ResourceInterface, error) {
	gvk := o.GroupVersionKind()
	deadline := time.Now().Add(10 * time.Second)
	for {
		m, err := c.mapper.RESTMapping(gvk.GroupKind(), gvk.Version)
		switch {
		case err == nil && m.Scope.Name() == meta.RESTScopeNameNamespace:
			ns := o.GetNamespace()
			if ns == "" {
				ns = metav1.NamespaceDefault
			}
			return c.Dynamic.Resource(m.Resource).Namespace(ns), nil
		case err == nil:
			return c.Dynamic.Resource(m.Resource), nil
		case !meta.IsNoMatchError(err) || time.Now().After(deadline):
			return nil, err
		}
		select {
		case <-ctx.Done():
			return nil, err
		case <-time.After(100 * time.Millisecond):
		}
		c.mapper.Reset()
	}
}

// decode reads YAML documents; the items of a List are objects of their own.
func decode(docs []byte) ([]*unstructured.Unstructured, error) {
	var objects []*unstructured.Unstructured
	reader := utilyaml.NewYAMLReader(bufio.NewReader(bytes.NewReader(docs)))
	for {
		doc, err := reader.Read()
		if errors.Is(err, io.EOF) {
			return objects, nil
		}
		if err != nil {
			return nil, err
		}
		o := &unstructured.Unstructured{}
		if err := yaml.Unmarshal(doc, &o.Object); err != nil {
			return nil, fmt.Errorf("%w in\n%s", err, doc)
		}
		switch {
		case len(o.Object) == 0: // comments only
		case o.IsList():
			if err := o.EachListItem(func(item runtime.Object) error {
				objects = append(objects, item.(*unstructured.Unstructured))
				return nil
			}); err != nil {
				return nil, err
			}
		case o.GetKind() == "" || o.GetAPIVersion() == "":
			return nil, fmt.Errorf("a document without kind or apiVersion:\n%s", doc)
		default:
			objects = append(objects, o)
		}
	}
}

// established waits until the API server serves all that was defined.
func (c *Cluster) established(ctx context.Context) error {
	definitions := c.Dynamic.Resource(schema.GroupVersionResource{Group: "apiextensions.k8s.io", Version: "v1", Resource: "customresourcedefinitions"})
	return wait(ctx, 30*time.Second, func(ctx context.Context) error {
		list, err := definitions.List(ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}
		var waiting []string
		for _, d := range list.Items {
			if !HasCondition(d.Object, "Established") {
				waiting = append(waiting, d.GetName())
			}
		}
		if len(waiting) > 0 {
			return fmt.Errorf("not established: %s", strings.Join(waiting, ", "))
		}
		return nil
	})
}

// HasCondition says whether status.conditions of an object has one that is True.
func HasCondition(o map[string]any, name string) bool {
	conditions, _, _ := unstructured.NestedSlice(o, "status", "conditions")
	for _, c := range conditions {
		c, ok := c.(map[string]any)
		if ok && c["type"] == name && c["status"] == "True" {
			return true
		}
	}
	return false
}

// Wait calls cond every 50 ms until it has no error. The test fails with the
// last one when the time is over.
func (c *Cluster) Wait(t testing.TB, timeout time.Duration, cond func(ctx context.Context) error) {
	t.Helper()
	if err := wait(t.Context(), timeout, cond); err != nil {
		t.Fatalf("cluster %s: %v", c.Name, err)
	}
}

func wait(ctx context.Context, timeout time.Duration, cond func(ctx context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	var last error
	for {
		err := cond(ctx)
		if err == nil {
			return nil
		}
		// The end of the time is not what the reader wants to know.
		if ctx.Err() == nil || last == nil {
			last = err
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("after %v: %w", timeout, last)
		case <-tick.C:
		}
	}
}

// WaitReady waits until every pod that a Deployment, DaemonSet or StatefulSet
// of the namespace wants is there, of its newest template and ready.
func (c *Cluster) WaitReady(t testing.TB, timeout time.Duration, namespace string) {
	t.Helper()
	c.Wait(t, timeout, func(ctx context.Context) error { return c.unready(ctx, namespace) })
}

func (c *Cluster) unready(ctx context.Context, namespace string) error {
	deployments, err := c.Client.AppsV1().Deployments(namespace).List(ctx, metav1.ListOptions{})
	if err != nil {
		return err
	}
	for _, d := range deployments.Items {
		want := *d.Spec.Replicas
		if s := d.Status; s.ObservedGeneration < d.Generation || s.UpdatedReplicas < want || s.Replicas != s.UpdatedReplicas || s.ReadyReplicas < want {
			return fmt.Errorf("deployment %s: %d of %d pods are ready", d.Name, s.ReadyReplicas, want)
		}
	}
	daemons, err := c.Client.AppsV1().DaemonSets(namespace).List(ctx, metav1.ListOptions{})
	if err != nil {
		return err
	}
	for _, d := range daemons.Items {
		if s := d.Status; s.ObservedGeneration < d.Generation || s.UpdatedNumberScheduled < s.DesiredNumberScheduled || s.NumberReady < s.DesiredNumberScheduled {
			return fmt.Errorf("daemon set %s: %d of %d pods are ready", d.Name, s.NumberReady, s.DesiredNumberScheduled)
		}
	}
	sets, err := c.Client.AppsV1().StatefulSets(namespace).List(ctx, metav1.ListOptions{})
	if err != nil {
		return err
	}
	for _, d := range sets.Items {
		if s := d.Status; s.ObservedGeneration < d.Generation || s.UpdatedReplicas < *d.Spec.Replicas || s.ReadyReplicas < *d.Spec.Replicas {
			return fmt.Errorf("stateful set %s: %d of %d pods are ready", d.Name, s.ReadyReplicas, *d.Spec.Replicas)
		}
	}
	return nil
}

// Ready says whether a pod is.
func Ready(pod *corev1.Pod) bool {
	return slices.ContainsFunc(pod.Status.Conditions, func(c corev1.PodCondition) bool {
		return c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue
	})
}
