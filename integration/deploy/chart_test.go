package deploy

import (
	"encoding/json"
	"fmt"
	"maps"
	mathbits "math/bits"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	culvert "culvert.dev/deploy"
	"culvert.dev/integration/deploy/chart"
	"culvert.dev/registry/file"
)

// render returns the objects that Helm makes of assignments over the values.
func render(t *testing.T, sets ...string) []culvert.Object {
	t.Helper()
	values, err := chart.Values("", sets)
	if err != nil {
		t.Fatal(err)
	}
	return rendered(t, chart.Release{Name: "culvert", Namespace: "culvert-system"}, values)
}

func rendered(t *testing.T, r chart.Release, values map[string]any) []culvert.Object {
	t.Helper()
	text, err := chart.Render(loadChart(t), r, values)
	if err != nil {
		t.Fatal(err)
	}
	if strings.Contains(text, "\t") || strings.Contains(text, " \n") {
		t.Errorf("tabs, or spaces at the end of a line:\n%s", text)
	}
	objects, err := culvert.Parse(text)
	if err != nil {
		t.Fatal(err)
	}
	return objects
}

// ids are the kinds and names of objects.
func ids(objects []culvert.Object) []string {
	var out []string
	for _, o := range objects {
		id := o.Kind() + " " + o.Name()
		if o.Namespace() != "" && o.Namespace() != "culvert-system" {
			id = o.Kind() + " " + o.Namespace() + "/" + o.Name()
		}
		out = append(out, id)
	}
	return out
}

// at returns what of fields is at a path, nil if there is nothing.
func at(fields any, path ...string) any {
	for _, key := range path {
		if o, ok := fields.(culvert.Object); ok {
			fields = map[string]any(o)
		}
		m, _ := fields.(map[string]any)
		fields = m[key]
	}
	return fields
}

// Each feature brings its objects and takes away none: alone, with one other and
// with all.
func TestEveryVariantHasItsObjects(t *testing.T) {
	features := []struct{ set, name string }{
		{"gateway.kind=DaemonSet", "daemonset"}, {"dns.enabled=true", "dns"}, {"namespaces=[shop, stock]", "namespaces"},
		{"gatewayAPI.enabled=true", "gatewayAPI"}, {"multiCluster.enabled=true", "multiCluster"},
		{"gateway.hostNetwork=true", "hostNetwork"}, {"serviceMonitor.enabled=true", "monitor"}, {"discovery.clusters=remote", "clusters"},
		{"gateway.autoscaling.enabled=true", "autoscaling"},
		{"authorizationPolicies.enabled=true", "policies"},
	}
	for bits := range 1 << len(features) {
		if n := mathbits.OnesCount(uint(bits)); n > 2 && n < len(features) {
			continue
		}
		on, sets := map[string]bool{}, []string(nil)
		for i, f := range features {
			if bits>>i&1 == 1 {
				on[f.name], sets = true, append(sets, f.set)
			}
		}
		want := []string{"NetworkPolicy culvert", "PodDisruptionBudget culvert", "ServiceAccount culvert", "ConfigMap culvert",
			"ClusterRole culvert-system:culvert", "ClusterRoleBinding culvert-system:culvert", "Role culvert", "RoleBinding culvert", "Service culvert"}
		if on["daemonset"] {
			want = append(want, "DaemonSet culvert")
		} else {
			want = append(want, "Deployment culvert")
		}
		if on["policies"] {
			want = append(want, "CustomResourceDefinition authorizationpolicies.policy.culvert.dev", "CustomResourceDefinition clusterauthorizationpolicies.policy.culvert.dev")
		}
		accounts := []string{"culvert-system:culvert"}
		if on["dns"] {
			want = append(want, "NetworkPolicy culvert-dns", "PodDisruptionBudget culvert-dns", "ServiceAccount culvert-dns", "ConfigMap culvert-dns",
				"ClusterRole culvert-system:culvert-dns", "ClusterRoleBinding culvert-system:culvert-dns", "Service culvert-dns", "Deployment culvert-dns")
			accounts = append(accounts, "culvert-system:culvert-dns")
		}
		for _, a := range accounts {
			if on["namespaces"] {
				want = append(want, "Role shop/"+a, "Role stock/"+a, "RoleBinding shop/"+a, "RoleBinding stock/"+a)
			}
			if on["clusters"] {
				want = append(want, "Role remote/"+a+":clusters", "RoleBinding remote/"+a+":clusters")
			}
		}
		if on["autoscaling"] && !on["daemonset"] {
			want = append(want, "HorizontalPodAutoscaler culvert")
		}
		if on["gatewayAPI"] {
			want = append(want, "GatewayClass culvert")
		}
		if on["monitor"] {
			want = append(want, "ServiceMonitor culvert", "Service culvert-metrics")
			if on["dns"] {
				want = append(want, "ServiceMonitor culvert-dns", "Service culvert-dns-metrics")
			}
		}
		name := strings.Join(slices.Sorted(maps.Keys(on)), "+")
		t.Run(name, func(t *testing.T) {
			objects := render(t, sets...)
			got := ids(objects)
			slices.Sort(got)
			slices.Sort(want)
			if !slices.Equal(got, want) {
				t.Errorf("got  %q\nwant %q", got, want)
			}
			whole(t, objects)
		})
	}
}

// The ports of imported services are let in from the cluster, and the selector is that of the gateway's pods.
func TestImportedServices(t *testing.T) {
	objects := render(t, "multiCluster.enabled=true", "multiCluster.importedServices.enabled=true", "multiCluster.importedServices.ports=21000-21099", "dns.enabled=true")
	for _, id := range []string{"NetworkPolicy culvert", "ConfigMap culvert", "NetworkPolicy culvert-dns", "ConfigMap culvert-dns"} {
		if !slices.Contains(ids(objects), id) {
			t.Errorf("there is no %s", id)
		}
	}
	for _, o := range objects {
		text := fmt.Sprint(o)
		switch o.Kind() + " " + o.Name() {
		case "NetworkPolicy culvert":
			if !strings.Contains(text, "endPort:21099 port:21000 protocol:TCP") || !strings.Contains(text, "namespaceSelector:map[]") {
				t.Errorf("the NetworkPolicy does not let in imported services: %s", text)
			}
		case "ConfigMap culvert":
			if !strings.Contains(text, "ports: 21000-21099") || !strings.Contains(text, "app.kubernetes.io/component: gateway") {
				t.Errorf("the configuration does not name the range and the pods: %s", text)
			}
		case "ConfigMap culvert-dns", "NetworkPolicy culvert-dns":
			if strings.Contains(text, "21000") {
				t.Errorf("%s %s has the ports of the gateway: %s", o.Kind(), o.Name(), text)
			}
		}
	}
}

// Replicas that share sessions find each other by a headless Service, as their configuration says.
func TestSharedSessions(t *testing.T) {
	objects := render(t, "gateway.sharedSessions.enabled=true", "gateway.sharedSessions.port=8443", "gateway.sharedSessions.key=gw",
		"gateway.sharedSessions.trust=corp.example", "gateway.sharedSessions.ids=[spiffe://corp.example/gw]",
		`gateway.config={"identity": {"keys": {"gw": {"certificateFile": "/keys/tls.crt", "keyFile": "/keys/tls.key"}}, "trust": {"corp.example": {"caFile": "/keys/ca.crt"}}}}`)
	if !slices.Contains(ids(objects), "Service culvert-replicas") {
		t.Errorf("there is no Service of the replicas: %q", ids(objects))
	}
	for _, o := range objects {
		switch o.Kind() + " " + o.Name() {
		case "Service culvert-replicas":
			if at(o, "spec", "clusterIP") != "None" || at(o, "spec", "selector", "app.kubernetes.io/component") != "gateway" {
				t.Errorf("the Service is %v", o)
			}
		case "ConfigMap culvert":
			text, _ := at(o, "data", "culvert.yaml").(string)
			for _, want := range []string{"- culvert-replicas.culvert-system.svc:8443", "- spiffe://corp.example/gw", "key: gw", "trust: corp.example"} {
				if !strings.Contains(text, want) {
					t.Errorf("the configuration lacks %q:\n%s", want, text)
				}
			}
		}
	}
	whole(t, objects)
}

// The files of values in testdata/good are good, whole, and have other values
// than the defaults for everything that is a choice.
func TestGoodValues(t *testing.T) {
	files, err := filepath.Glob("testdata/good/*.yaml")
	if err != nil || len(files) < 5 {
		t.Fatalf("%d files, %v", len(files), err)
	}
	for _, f := range files {
		t.Run(filepath.Base(f), func(t *testing.T) {
			values, err := chart.Values(f, nil)
			if err != nil {
				t.Fatal(err)
			}
			whole(t, rendered(t, chart.Release{Name: "culvert", Namespace: "culvert-system"}, values))
		})
	}
}

// whole finds what of objects does not fit together.
func whole(t *testing.T, objects []culvert.Object) {
	t.Helper()
	there := map[string]bool{}
	for _, id := range ids(objects) {
		if there[id] {
			t.Errorf("%s is there twice", id)
		}
		there[id] = true
	}
	for _, o := range objects {
		if at(o, "metadata", "labels", "app.kubernetes.io/name") != "culvert" {
			t.Errorf("%s %s has no labels", o.Kind(), o.Name())
		}
		if namespaced := o.Namespace() != ""; namespaced == slices.Contains([]string{"ClusterRole", "ClusterRoleBinding", "GatewayClass", "CustomResourceDefinition"}, o.Kind()) {
			t.Errorf("%s %s is in namespace %q", o.Kind(), o.Name(), o.Namespace())
		}
		switch o.Kind() {
		case "ConfigMap":
			if at(o, "data", "culvert.json") != nil {
				continue // TestDashboard
			}
			if _, err := file.Parse("culvert.yaml", []byte(fmt.Sprint(at(o, "data", "culvert.yaml")))); err != nil {
				t.Errorf("%s: %v", o.Name(), err)
			}
		case "RoleBinding", "ClusterRoleBinding":
			ref := fmt.Sprintf("%s %s", at(o, "roleRef", "kind"), at(o, "roleRef", "name"))
			if o.Namespace() != "" && o.Namespace() != "culvert-system" {
				ref = fmt.Sprintf("%s %s/%s", at(o, "roleRef", "kind"), o.Namespace(), at(o, "roleRef", "name"))
			}
			if !there[ref] {
				t.Errorf("%s %s gives %s, which is not there", o.Kind(), o.Name(), ref)
			}
		case "Deployment", "DaemonSet":
			wholeWorkload(t, o, objects)
		}
	}
}

// wholeWorkload finds what a workload refers to that is not there.
func wholeWorkload(t *testing.T, o culvert.Object, objects []culvert.Object) {
	t.Helper()
	pod := at(o, "spec", "template", "spec")
	labels, _ := at(o, "spec", "template", "metadata", "labels").(map[string]any)
	ports := map[string]bool{}
	containers := at(pod, "containers").([]any)
	for _, p := range at(containers[0], "ports").([]any) {
		name := fmt.Sprint(at(p, "name"))
		if ports[name] {
			t.Errorf("%s %s has two ports %q", o.Kind(), o.Name(), name)
		}
		ports[name] = true
	}
	selects := func(selector any) bool {
		m, _ := selector.(map[string]any)
		for k, v := range m {
			if labels[k] != v {
				return false
			}
		}
		return len(m) > 0
	}
	if !selects(at(o, "spec", "selector", "matchLabels")) {
		t.Errorf("%s %s does not select its own pods", o.Kind(), o.Name())
	}
	selected := map[string]bool{}
	for _, s := range objects {
		switch s.Kind() {
		case "Service":
			if !selects(at(s, "spec", "selector")) {
				continue
			}
			list, ok := at(s, "spec", "ports").([]any)
			if !ok && at(s, "spec", "clusterIP") != "None" { // which alone may have none
				t.Errorf("service %s has no ports", s.Name())
			}
			for _, p := range list {
				if !ports[fmt.Sprint(at(p, "targetPort"))] {
					t.Errorf("service %s leads to port %v, which pods of %s do not have", s.Name(), at(p, "targetPort"), o.Name())
				}
			}
		case "PodDisruptionBudget":
			selected[s.Kind()] = selected[s.Kind()] || selects(at(s, "spec", "selector", "matchLabels"))
		case "NetworkPolicy":
			selected[s.Kind()] = selected[s.Kind()] || selects(at(s, "spec", "podSelector", "matchLabels"))
		}
	}
	for _, s := range objects {
		if (s.Kind() == "PodDisruptionBudget" || s.Kind() == "NetworkPolicy") && !selected[s.Kind()] {
			t.Errorf("no %s is of the pods of %s", s.Kind(), o.Name())
		}
	}
	id := slices.IndexFunc(objects, func(s culvert.Object) bool {
		return s.Kind() == "ServiceAccount" && s.Name() == at(pod, "serviceAccountName")
	})
	made := slices.ContainsFunc(objects, func(s culvert.Object) bool { return s.Kind() == "ServiceAccount" })
	if made && id < 0 {
		t.Errorf("%s runs as %v, which is not there", o.Name(), at(pod, "serviceAccountName"))
	}
}

// What the chart says of a pod is what Pod Security calls restricted, but where
// it has the node's network.
func TestPodsAreRestricted(t *testing.T) {
	for _, o := range render(t, "dns.enabled=true") {
		if o.Kind() != "Deployment" {
			continue
		}
		pod := at(o, "spec", "template", "spec")
		container := at(pod, "containers").([]any)[0]
		for _, want := range []struct {
			of    any
			path  string
			value any
		}{
			{pod, "securityContext runAsNonRoot", true}, {pod, "securityContext runAsUser", 65532.0},
			{pod, "securityContext seccompProfile type", "RuntimeDefault"}, {pod, "hostNetwork", nil},
			{container, "securityContext allowPrivilegeEscalation", false},
			{container, "securityContext readOnlyRootFilesystem", true}, {container, "securityContext privileged", nil},
			{container, "securityContext capabilities add", nil}, {container, "livenessProbe httpGet path", "/healthz"},
			{container, "readinessProbe httpGet path", "/readyz"}, {pod, "terminationGracePeriodSeconds", 40.0},
		} {
			if got := at(want.of, strings.Fields(want.path)...); got != want.value {
				t.Errorf("%s: %s is %v, want %v", o.Name(), want.path, got, want.value)
			}
		}
		if got := fmt.Sprint(at(container, "securityContext", "capabilities", "drop")); got != "[ALL]" {
			t.Errorf("%s drops %s, want all capabilities", o.Name(), got)
		}
	}
}

// A change that a running gateway takes up starts no new pods, and one that it
// does not take up does.
func TestPodsRestartWhereTheyMust(t *testing.T) {
	sum := func(sets ...string) any {
		for _, o := range render(t, sets...) {
			if o.Kind() == "Deployment" {
				return at(o, "spec", "template", "metadata", "annotations", "culvert.dev/restart-sum")
			}
		}
		return nil
	}
	const ports, vips = "config.servicePorts={range: 20000-20010, state: /run/culvert/a.json}", "config.vips={state: /run/culvert/b.json}"
	base := sum(ports, vips)
	for _, set := range []string{
		`config.services=[{name: a.example.com, endpoints: ["10.0.0.1:1"]}]`, "config.networks=[{name: a, cidrs: [10.0.0.0/8]}]",
		"cluster=east", "config.limits.idleTimeout=2h", "gateway.listeners=[{address: ':8443'}]", "discovery.allow=[a/b]", "log.level=warn", "config.servicePorts.range=20000-20020",
	} {
		if got := sum(ports, vips, set); got != base || base == nil {
			t.Errorf("%s: got %v, want %v", set, got, base)
		}
	}
	for _, set := range []string{"config.servicePorts.state=/run/culvert/c.json", "config.vips.state=/run/culvert/c.json"} {
		if got := sum(ports, vips, set); got == base {
			t.Errorf("%s: the sum is the same", set)
		}
	}
}

// The namespace allows the pods that come to it.
func TestNamespace(t *testing.T) {
	for set, want := range map[string]string{"gateway.hostNetwork=false": "restricted", "gateway.hostNetwork=true": "privileged"} {
		values, err := chart.Values("", []string{set})
		if err != nil {
			t.Fatal(err)
		}
		objects := rendered(t, chart.Release{Name: "culvert", Namespace: "edge", CreateNamespace: true}, values)
		got := at(objects[0], "metadata", "labels", "pod-security.kubernetes.io/enforce")
		if objects[0].Kind() != "Namespace" || objects[0].Name() != "edge" || got != want {
			t.Errorf("%s: got %s %s, %v; want it first, and %s", set, objects[0].Kind(), objects[0].Name(), got, want)
		}
	}
}

// Nothing but the autoscaler says how many replicas there are, where there is one.
func TestAutoscaling(t *testing.T) {
	replicas := func(sets ...string) (fixed any, scaled bool) {
		for _, o := range render(t, sets...) {
			switch o.Kind() {
			case "Deployment":
				fixed = at(o, "spec", "replicas")
			case "HorizontalPodAutoscaler":
				scaled = true
				if n := at(o, "spec", "scaleTargetRef", "name"); n != "culvert" {
					t.Errorf("it scales %v", n)
				}
			}
		}
		return fixed, scaled
	}
	if fixed, scaled := replicas(); fmt.Sprint(fixed) != "2" || scaled {
		t.Errorf("by default: replicas %v, autoscaler %v", fixed, scaled)
	}
	if fixed, scaled := replicas("gateway.autoscaling.enabled=true"); fixed != nil || !scaled {
		t.Errorf("with an autoscaler: replicas %v, autoscaler %v", fixed, scaled)
	}
	if err := refused(t, "gateway.autoscaling.enabled=true", "gateway.autoscaling.cpu=0"); !strings.Contains(err, "autoscaling needs cpu or memory") {
		t.Errorf("by nothing: got %q, want it refused", err)
	}
}

// The dashboard is JSON, and asks for metrics that the reference has.
func TestDashboard(t *testing.T) {
	var text string
	for _, o := range render(t, "dashboard.enabled=true") {
		if o.Name() == "culvert-dashboard" {
			text, _ = at(o, "data", "culvert.json").(string)
			if at(o, "metadata", "labels", "grafana_dashboard") != "1" {
				t.Errorf("Grafana does not find it: %v", at(o, "metadata", "labels"))
			}
		}
	}
	var board struct {
		Panels []struct {
			ID      int
			Title   string
			Targets []struct{ Expr string }
		}
	}
	if err := json.Unmarshal([]byte(text), &board); err != nil || len(board.Panels) < 10 {
		t.Fatalf("%d panels, %v", len(board.Panels), err)
	}
	page, err := os.ReadFile(filepath.Join(root, "docs", "reference", "metrics.md"))
	if err != nil {
		t.Fatal(err)
	}
	pages := string(page)
	seen := map[int]bool{}
	for _, p := range board.Panels {
		if seen[p.ID] {
			t.Errorf("two panels have the id %d", p.ID)
		}
		seen[p.ID] = true
		for _, target := range p.Targets {
			for _, metric := range regexp.MustCompile(`culvert_[a-z_]+`).FindAllString(target.Expr, -1) {
				if !strings.Contains(pages, "| `"+strings.TrimSuffix(metric, "_bucket")+"` |") {
					t.Errorf("%s: there is no metric %s", p.Title, metric)
				}
			}
		}
	}
}

// A chart that has this one as a part may say by a value whether it is installed.
func TestAConditionOfAnotherChart(t *testing.T) {
	render(t, "enabled=true", "global={a: b}")
	for _, o := range render(t, "enabled=true") {
		if o.Kind() == "Deployment" {
			return
		}
	}
	t.Error("there is no Deployment")
}

// Each namespace of agents has their configuration, and what the values say of it comes last.
func TestConfigurationOfAgents(t *testing.T) {
	if text := refused(t, "agents.namespaces=[shop]"); !strings.Contains(text, "agents.gateway") {
		t.Errorf("namespaces without a gateway: %q", text)
	}
	objects := render(t, "agents.namespaces=[shop, bank]", `agents.gateway=["gw.example:443"]`, "agents.ca=PEM", "agents.config.agent.tokenFile=/keys/token")
	for _, id := range []string{"ConfigMap shop/culvert-agent", "ConfigMap bank/culvert-agent"} {
		i := slices.Index(ids(objects), id)
		if i < 0 {
			t.Fatalf("no %s among %q", id, ids(objects))
		}
		if got := at(objects[i], "data", "ca.crt"); got != "PEM\n" {
			t.Errorf("%s: ca.crt is %q", id, got)
		}
		text := fmt.Sprint(at(objects[i], "data", "culvert.yaml"))
		c, err := file.Parse("culvert.yaml", []byte(text))
		if err != nil {
			t.Fatal(err)
		}
		if a := c.Agent; !slices.Equal(a.Gateway, []string{"gw.example:443"}) || !a.AnyLocalUser || a.TokenFile != "/keys/token" || !strings.Contains(text, "caFile: /etc/culvert/ca.crt") {
			t.Errorf("%s: the configuration is\n%s", id, text)
		}
	}
	whole(t, objects)
}
