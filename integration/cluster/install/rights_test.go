package install

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"

	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"culvert.dev/integration/cluster"
)

// rare are rights that are needed and hard to have used within a test, with the
// reason.
var rare = map[string]string{
	"get gatewayclasses.gateway.networking.k8s.io":     "after a conflict",
	"get gateways.gateway.networking.k8s.io":           "after a conflict",
	"get listenersets.gateway.networking.k8s.io":       "after a conflict",
	"get tlsroutes.gateway.networking.k8s.io":          "after a conflict",
	"get tcproutes.gateway.networking.k8s.io":          "after a conflict",
	"get udproutes.gateway.networking.k8s.io":          "after a conflict",
	"get httproutes.gateway.networking.k8s.io":         "after a conflict",
	"get grpcroutes.gateway.networking.k8s.io":         "after a conflict",
	"get backendtlspolicies.gateway.networking.k8s.io": "after a conflict",
}

// nothingUnused waits until the account has used every right that it has: one
// that is never used is one too many.
func nothingUnused(t *testing.T, c *cluster.Cluster, a *audit, account string) {
	t.Helper()
	has := granted(t, c, account)
	if len(has) < 4 {
		t.Errorf("%s has no more rights than %q", account, has)
	}
	c.Wait(t, cluster.PodTime, func(context.Context) error {
		_, done := forbidden(a.of(t, "culvert-system", account))
		var unused []string
		for _, right := range has {
			// What is watched may have been listed by that, or may not: it is one right.
			verb, resource, _ := strings.Cut(right, " ")
			used := slices.Contains(done, right) || verb == "list" && slices.Contains(done, "watch "+resource)
			if !used && rare[right] == "" {
				unused = append(unused, right)
			}
		}
		if len(unused) > 0 {
			return fmt.Errorf("%s never used its rights to %q", account, unused)
		}
		return nil
	})
}

// granted are the rights of an account in the words of request.right, each once.
func granted(t *testing.T, c *cluster.Cluster, account string) (all []string) {
	t.Helper()
	ctx, rbac := t.Context(), c.Client.RbacV1()
	add := func(rules []rbacv1.PolicyRule) {
		for _, rule := range rules {
			for _, verb := range rule.Verbs {
				for _, group := range rule.APIGroups {
					for _, resource := range rule.Resources {
						all = append(all, verb+" "+resource+"."+group)
					}
				}
			}
		}
	}
	ours := func(subjects []rbacv1.Subject) bool {
		return slices.ContainsFunc(subjects, func(s rbacv1.Subject) bool {
			return s.Kind == rbacv1.ServiceAccountKind && s.Namespace == "culvert-system" && s.Name == account
		})
	}
	everywhere, err := rbac.ClusterRoleBindings().List(ctx, metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for _, b := range everywhere.Items {
		if ours(b.Subjects) {
			role, err := rbac.ClusterRoles().Get(ctx, b.RoleRef.Name, metav1.GetOptions{})
			if err != nil {
				t.Fatal(err)
			}
			add(role.Rules)
		}
	}
	somewhere, err := rbac.RoleBindings("").List(ctx, metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for _, b := range somewhere.Items {
		if ours(b.Subjects) {
			role, err := rbac.Roles(b.Namespace).Get(ctx, b.RoleRef.Name, metav1.GetOptions{})
			if err != nil {
				t.Fatal(err)
			}
			add(role.Rules)
		}
	}
	slices.Sort(all)
	return slices.Compact(all)
}

// A Service that is refused, for an Event of discovery, and a route, for one of Gateway API.
const (
	badService = `
apiVersion: v1
kind: Service
metadata:
  name: maybe
  namespace: default
  annotations: {culvert.dev/expose: "maybe"}
spec:
  ports: [{name: http, port: 80}]
`
	badRoute = `
apiVersion: gateway.networking.k8s.io/v1
kind: TLSRoute
metadata: {name: nowhere, namespace: default}
spec:
  parentRefs: [{name: gateway, sectionName: tls}]
  hostnames: [nowhere.example.com]
  rules: [{backendRefs: [{name: nobody, port: 80}]}]
`
	export = `
apiVersion: multicluster.x-k8s.io/v1beta1
kind: ServiceExport
metadata: {name: echo, namespace: default}
`
)

// share exports echo, changes it, and takes the export back.
func share(t *testing.T, c *cluster.Cluster) {
	t.Helper()
	imports := c.Dynamic.Resource(resourceOf(object(t, strings.ReplaceAll(export, "ServiceExport", "ServiceImport")))).Namespace("default")
	until := func(what string, good func(text string, there bool) bool) {
		t.Helper()
		c.Wait(t, cluster.PodTime, func(ctx context.Context) error {
			o, err := imports.Get(ctx, "echo", metav1.GetOptions{})
			text := ""
			if err == nil {
				text = fmt.Sprint(o.Object)
			}
			if !good(text, err == nil) {
				return fmt.Errorf("the ServiceImport is not %s: %v %s", what, err, text)
			}
			return nil
		})
	}
	c.Apply(t, export)
	until("there, with a status", func(text string, there bool) bool { return there && strings.Contains(text, "status:") })
	more := []byte(`{"spec": {"ports": [{"name": "http", "port": 80, "targetPort": "web"}, {"name": "more", "port": 81, "targetPort": "web"}]}}`)
	if _, err := c.Client.CoreV1().Services("default").Patch(t.Context(), "echo", types.MergePatchType, more, metav1.PatchOptions{}); err != nil {
		t.Fatal(err)
	}
	until("changed", func(text string, there bool) bool { return there && strings.Contains(text, "more") })
	c.Delete(t, export)
	until("gone", func(_ string, there bool) bool { return !there })
}
