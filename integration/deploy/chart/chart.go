// Package chart renders culvert's Helm chart with Helm's own engine: into the
// manifests that deploy/kustomize and the program have, and for tests.
package chart

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"helm.sh/helm/v4/pkg/chart/common"
	"helm.sh/helm/v4/pkg/chart/common/util"
	helm "helm.sh/helm/v4/pkg/chart/v2"
	"helm.sh/helm/v4/pkg/chart/v2/loader"
	"helm.sh/helm/v4/pkg/engine"
	release "helm.sh/helm/v4/pkg/release/v1/util"
	"helm.sh/helm/v4/pkg/strvals"
	"sigs.k8s.io/yaml"
)

// A Release is one installation of the chart.
type Release struct {
	Name            string
	Namespace       string
	CreateNamespace bool // render the Namespace, too, as Helm's --create-namespace makes one
}

// Profiles are the folders of deploy/kustomize, the profile of "culvert install"
// that each is embedded for, and the values that it is rendered with.
var Profiles = []struct {
	Name, Folder string
	Sets         []string
}{
	{"default", "base", nil},
	{"daemonset", "overlays/daemonset", []string{"gateway.kind=DaemonSet", "gateway.hostNetwork=true", "gateway.service.enabled=false"}},
	{"dns", "overlays/dns", []string{"dns.enabled=true"}},
	{"gateway-api", "overlays/gateway-api", []string{"gatewayAPI.enabled=true"}},
	{"authorization", "overlays/authorization", []string{"authorizationPolicies.enabled=true"}},
	{"out-of-cluster", "overlays/out-of-cluster", []string{"gateway.enabled=false"}},
}

// Load reads the chart in the repository at root.
func Load(root string) (*helm.Chart, error) {
	c, err := loader.LoadDir(filepath.Join(root, "deploy", "helm", "culvert"))
	if err != nil {
		return nil, err
	}
	return c, c.Validate()
}

// Render returns what Helm makes of c and values over its own, as documents of
// YAML in the order in which Helm creates the objects. Helm validates values by
// the chart's schema.
func Render(c *helm.Chart, r Release, values map[string]any) (string, error) {
	all, err := util.ToRenderValues(c, values, common.ReleaseOptions{Name: r.Name, Namespace: r.Namespace, Revision: 1, IsInstall: true}, nil)
	if err != nil {
		return "", err
	}
	files, err := engine.Render(c, all)
	if err != nil {
		return "", err
	}
	var docs []string
	if r.CreateNamespace {
		docs = append(docs, namespace(r, all))
	}
	for name := range files {
		if strings.HasSuffix(name, "NOTES.txt") {
			if strings.Contains(files[name], "<no value>") {
				return "", fmt.Errorf("notes: %s", files[name])
			}
			delete(files, name)
		}
	}
	_, manifests, err := release.SortManifests(files, nil, release.InstallOrder)
	if err != nil {
		return "", err
	}
	for _, m := range manifests {
		docs = append(docs, strings.TrimSpace(m.Content)+"\n")
	}
	return strings.Join(docs, "---\n"), nil
}

// namespace is the Namespace of r. Pod Security refuses pods that have the
// node's network where it is not "privileged".
func namespace(r Release, values common.Values) string {
	level := "restricted"
	if host, err := values.PathValue("Values.gateway.hostNetwork"); err == nil && host == true {
		level = "privileged"
	}
	return fmt.Sprintf(`apiVersion: v1
kind: Namespace
metadata:
  labels:
    pod-security.kubernetes.io/enforce: %[2]s
    pod-security.kubernetes.io/warn: %[2]s
  name: %[1]s
`, r.Namespace, level)
}

// Set puts an assignment into values: KEY.KEY=VALUE, where VALUE is YAML.
func Set(values map[string]any, assignment string) error {
	key, text, ok := strings.Cut(assignment, "=")
	if !ok {
		return fmt.Errorf("%q is not KEY=VALUE", assignment)
	}
	var v any
	if err := yaml.Unmarshal([]byte(text), &v); err != nil {
		return fmt.Errorf("%q: %w", assignment, err)
	}
	data, err := json.Marshal(v)
	if err != nil {
		return err
	}
	return strvals.ParseJSON(key+"="+string(data), values)
}

// Values returns what a file of values, "" for none, and then assignments say.
func Values(file string, sets []string) (map[string]any, error) {
	values := map[string]any{}
	if file != "" {
		data, err := os.ReadFile(file)
		if err != nil {
			return nil, err
		}
		if err := yaml.UnmarshalStrict(data, &values); err != nil {
			return nil, fmt.Errorf("%s: %w", file, err)
		}
	}
	if values == nil {
		values = map[string]any{}
	}
	for _, s := range sets {
		if err := Set(values, s); err != nil {
			return nil, err
		}
	}
	return values, nil
}

// header is in the first line of every file that is rendered from the chart.
const header = "# Rendered from the chart in deploy/helm by \"make manifests\": do not edit.\n"

// Files returns the files of deploy/kustomize, by their paths in it.
func Files(c *helm.Chart) (map[string]string, error) {
	files := map[string]string{}
	for _, p := range Profiles {
		values, err := Values("", p.Sets)
		if err != nil {
			return nil, err
		}
		text, err := Render(c, Release{Name: "culvert", Namespace: "culvert-system", CreateNamespace: true}, values)
		if err != nil {
			return nil, err
		}
		files[p.Folder+"/manifests.yaml"] = header + text
		files[p.Folder+"/kustomization.yaml"] = header + "apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\nresources:\n  - manifests.yaml\n"
	}
	return files, nil
}
