package mcs_test

import (
	"context"
	"encoding/base64"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"culvert.dev/integration/cluster"
)

func TestMain(m *testing.M) { cluster.Main(m) }

const soon = time.Minute // on two cores that others use, too

// suite is the path of the suite's test program; "" for none.
var suite = os.Getenv("MCS_CONFORMANCE")

// TestConformance asks for what the API requires: what a ServiceImport says of one
// export and of two, and of each kind of Service.
func TestConformance(t *testing.T) {
	images := map[string]cluster.Image{}
	for _, name := range []string{"netshoot", "socat"} {
		images[name] = cluster.Image{Path: cluster.Program("inspect")}
	}
	west := cluster.Start(t, cluster.Options{Name: "west", Images: images})
	east := cluster.Start(t, cluster.Options{Name: "east", Images: images})
	gateway(t, west, east)

	t.Run("fields", func(t *testing.T) { fields(t, west, east) })
	if suite == "" {
		t.Log("the suite itself is not run: MCS_CONFORMANCE has no path of its test program")
		return
	}
	t.Run("suite", func(t *testing.T) {
		// Its case of a Service that is not exported runs a command in a pod, which no
		// pod of these clusters does.
		cmd := exec.CommandContext(t.Context(), suite, "-contexts", "west,east", "-ginkgo.label-filter", "Required", "-ginkgo.no-color", "-ginkgo.v")
		cmd.Dir = t.TempDir() // where it puts its report
		cmd.Env = append(os.Environ(), "KUBECONFIG="+admin(t, west)+":"+admin(t, east))
		out, err := cmd.CombinedOutput()
		t.Logf("%s", out)
		if err != nil {
			t.Error(err)
		}
	})
}

// admin returns a kubeconfig whose user is not that of another cluster's.
func admin(t *testing.T, c *cluster.Cluster) string {
	t.Helper()
	text, err := os.ReadFile(c.AdminKubeconfig(t))
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), c.Name+".kubeconfig")
	if err := os.WriteFile(file, []byte(strings.ReplaceAll(string(text), `"admin"`, `"admin of `+c.Name+`"`)), 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

// gateway runs culvert in its own cluster, with its rights in both.
func gateway(t *testing.T, own, further *cluster.Cluster) {
	t.Helper()
	own.Apply(t, cluster.Manifests(t, fmt.Sprintf(`
cluster: %s
discovery: {clusters: culvert-system}
multiCluster: {enabled: true, importedServices: {enabled: true}}
config: {vips: {ranges: [240.0.0.0/4], state: /var/lib/culvert/vips.json}}
gateway: {replicas: 1, listeners: [{address: ":8443"}], service: {type: ClusterIP, ports: [{name: tls, port: 8443}]}}
`, own.Name)))
	further.Apply(t, cluster.Manifests(t, fmt.Sprintf("cluster: %s\ndiscovery: {clusters: culvert-system}\nmultiCluster: {enabled: true}\ngateway: {enabled: false}\n", further.Name)))
	kubeconfig, err := os.ReadFile(further.ServiceAccountKubeconfig(t, "culvert-system", "culvert"))
	if err != nil {
		t.Fatal(err)
	}
	own.Apply(t, fmt.Sprintf(`
apiVersion: v1
kind: Secret
metadata: {name: %[1]s, namespace: culvert-system, labels: {culvert.dev/cluster: %[1]s}}
data: {kubeconfig: %[2]s}
`, further.Name, base64.StdEncoding.EncodeToString(kubeconfig)))
	own.WaitReady(t, 2*soon, "culvert-system")
	t.Cleanup(func() {
		if !t.Failed() {
			return
		}
		pods, err := own.Pods(context.WithoutCancel(t.Context()), "culvert-system", "app.kubernetes.io/component=gateway")
		if err != nil {
			t.Error(err)
		}
		for _, p := range pods {
			t.Logf("culvert:\n%s", own.PodLog(&p, ""))
		}
	})
}

var (
	imports = schema.GroupVersionResource{Group: "multicluster.x-k8s.io", Version: "v1beta1", Resource: "serviceimports"}
	exports = schema.GroupVersionResource{Group: "multicluster.x-k8s.io", Version: "v1beta1", Resource: "serviceexports"}
)

// A service is one that is exported, as the Services of the clusters have it.
type service struct {
	name       string
	west, east string // the Service's spec; "" for none
	imported   string
	conflict   string // the condition Conflict of the exports; "" where they are not Ready
}

func fields(t *testing.T, west, east *cluster.Cluster) {
	for _, c := range []*cluster.Cluster{west, east} {
		c.Apply(t, "apiVersion: v1\nkind: Namespace\nmetadata: {name: shop}\n")
	}
	const port = "{name: tcp, port: 42}"
	all := []service{
		{"one", "{selector: {app: none}, ports: [" + port + ", {name: udp, port: 42, protocol: UDP}], sessionAffinity: ClientIP, sessionAffinityConfig: {clientIP: {timeoutSeconds: 10}}, trafficDistribution: PreferClose}", "",
			"ClusterSetIP tcp:42/TCP udp:42/UDP ClientIP 10s Cluster PreferClose [IPv4] 1 address", "False"},
		{"headless", "{clusterIP: None, selector: {app: none}, ports: [" + port + "]}", "", "Headless tcp:42/TCP [IPv4] 0 address", "False"},
		{"more", "{selector: {app: none}, ports: [" + port + "]}", "{selector: {app: none}, ports: [" + port + ", {name: stcp, port: 142, protocol: SCTP}]}", "ClusterSetIP tcp:42/TCP stcp:142/SCTP None Cluster [IPv4] 1 address", "True"},
		{"other", "{selector: {app: none}, ports: [" + port + "]}", "{selector: {app: none}, ports: [{name: tcp, port: 43}]}", "ClusterSetIP tcp:42/TCP None Cluster [IPv4] 1 address", "True"},
		{"types", "{selector: {app: none}, ports: [" + port + "]}", "{clusterIP: None, selector: {app: none}, ports: [" + port + "]}", "ClusterSetIP tcp:42/TCP None Cluster [IPv4] 1 address", "True"},
		{"external", "{type: ExternalName, externalName: example.com}", "", "none", ""},
	}
	export := func(c *cluster.Cluster, name, spec string) {
		if spec != "" {
			c.Apply(t, fmt.Sprintf("apiVersion: v1\nkind: Service\nmetadata: {name: %[1]s, namespace: shop}\nspec: %[2]s\n---\n"+
				"apiVersion: multicluster.x-k8s.io/v1beta1\nkind: ServiceExport\nmetadata: {name: %[1]s, namespace: shop}\n", name, spec))
		}
	}
	for _, s := range all {
		export(west, s.name, s.west)
	}
	// An export is older by whole seconds.
	west.Wait(t, soon, func(ctx context.Context) error {
		e, err := west.Dynamic.Resource(exports).Namespace("shop").Get(ctx, "external", metav1.GetOptions{})
		if err == nil && time.Since(e.GetCreationTimestamp().Time) < 2*time.Second {
			err = fmt.Errorf("it is not old yet")
		}
		return err
	})
	for _, s := range all {
		export(east, s.name, s.east)
	}
	for _, s := range all {
		for _, c := range []*cluster.Cluster{west, east} {
			c.Wait(t, soon, func(ctx context.Context) error {
				got := "none"
				i, err := c.Dynamic.Resource(imports).Namespace("shop").Get(ctx, s.name, metav1.GetOptions{})
				if err == nil {
					got = imported(i)
				}
				want := s.imported
				if c == west && strings.HasPrefix(want, "ClusterSetIP") { // a ClusterIP of each family
					want = strings.Replace(want, "[IPv4] 1 address", "[IPv4 IPv6] 2 address", 1)
				}
				if got != want {
					return fmt.Errorf("%s in %s: imported as %q, want %q", s.name, c.Name, got, want)
				}
				if err := address(i, c, c == west); err != nil {
					return err
				}
				if c == east && s.east == "" {
					return nil
				}
				e, err := c.Dynamic.Resource(exports).Namespace("shop").Get(ctx, s.name, metav1.GetOptions{})
				if err != nil {
					return err
				}
				if got := condition(e, "Conflict"); got != s.conflict {
					return fmt.Errorf("%s in %s: Conflict is %q, want %q", s.name, c.Name, got, s.conflict)
				}
				if valid := condition(e, "Valid"); (valid == "True") != (s.conflict != "") {
					return fmt.Errorf("%s in %s: Valid is %q", s.name, c.Name, valid)
				}
				return nil
			})
		}
	}
	for _, c := range []*cluster.Cluster{west, east} {
		for _, s := range all {
			err := c.Dynamic.Resource(exports).Namespace("shop").Delete(t.Context(), s.name, metav1.DeleteOptions{})
			if err != nil && (c == west || s.east != "") {
				t.Fatal(err)
			}
		}
	}
	for _, c := range []*cluster.Cluster{west, east} {
		c.Wait(t, soon, func(ctx context.Context) error {
			l, err := c.Dynamic.Resource(imports).Namespace("shop").List(ctx, metav1.ListOptions{})
			if err == nil && len(l.Items) > 0 {
				err = fmt.Errorf("%d imports are left in %s", len(l.Items), c.Name)
			}
			return err
		})
	}
}

// imported is how a test has an import.
func imported(i *unstructured.Unstructured) string {
	spec, _, _ := unstructured.NestedMap(i.Object, "spec")
	text := fmt.Sprint(spec["type"])
	ports, _, _ := unstructured.NestedSlice(spec, "ports")
	for _, p := range ports {
		m, _ := p.(map[string]any)
		text += fmt.Sprintf(" %v:%v/%v", m["name"], m["port"], m["protocol"])
	}
	for _, key := range []string{"sessionAffinity", "", "internalTrafficPolicy", "trafficDistribution"} {
		if v, ok := spec[key]; ok {
			text += fmt.Sprint(" ", v)
		} else if seconds, ok, _ := unstructured.NestedInt64(spec, "sessionAffinityConfig", "clientIP", "timeoutSeconds"); ok && key == "" {
			text += fmt.Sprintf(" %ds", seconds)
		}
	}
	families, _, _ := unstructured.NestedStringSlice(spec, "ipFamilies")
	ips, _, _ := unstructured.NestedStringSlice(spec, "ips")
	return fmt.Sprintf("%s [%s] %d address", text, strings.Join(families, " "), len(ips))
}

// address returns what is wrong with the address of an import: a ClusterIP in the gateway's own
// cluster, and a VIP elsewhere.
func address(i *unstructured.Unstructured, c *cluster.Cluster, own bool) error {
	if i == nil {
		return nil
	}
	ips, _, _ := unstructured.NestedStringSlice(i.Object, "spec", "ips")
	for _, text := range ips {
		a, err := netip.ParseAddr(text)
		if err != nil {
			return err
		}
		if (c.ServiceCIDR.Contains(a) || c.ServiceCIDR6.Contains(a)) != own {
			return fmt.Errorf("%s in %s is at %s, and ClusterIPs are of %s and %s", i.GetName(), c.Name, a, c.ServiceCIDR, c.ServiceCIDR6)
		}
	}
	return nil
}

// condition returns the status of an object's condition; "" for none.
func condition(o *unstructured.Unstructured, kind string) string {
	list, _, _ := unstructured.NestedSlice(o.Object, "status", "conditions")
	for _, c := range list {
		if m, ok := c.(map[string]any); ok && m["type"] == kind {
			return fmt.Sprint(m["status"])
		}
	}
	return ""
}
