package deploy

import (
	"crypto/sha256"
	"embed"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	"sigs.k8s.io/yaml"
)

// rendered has what the chart makes for each profile, in the order in which the
// objects are created.
//
//go:embed kustomize/base/manifests.yaml kustomize/overlays/*/manifests.yaml
var rendered embed.FS

// Profiles are the names of the kinds of installation; the first is the default.
var Profiles = []string{"default", "daemonset", "dns", "gateway-api", "authorization", "out-of-cluster"}

// Settings are what an installation may have otherwise than the chart's values.
// An empty string keeps the chart's.
type Settings struct {
	Profile         string // one of Profiles
	Name            string // of the release, which the objects are named after
	Namespace       string // that the objects are in
	CreateNamespace bool   // include the Namespace
	Cluster         string // id of the cluster, one label of its services' mesh names
	Image           string // reference of the container image
}

// The names that the rendered manifests have.
const (
	renderedName      = "culvert"
	renderedNamespace = "culvert-system"
)

// Manifests returns the objects of s in the order in which they are created.
func Manifests(s Settings) ([]Object, error) {
	file := "kustomize/overlays/" + s.Profile + "/manifests.yaml"
	switch {
	case s.Profile == "" || s.Profile == Profiles[0]:
		file = "kustomize/base/manifests.yaml"
	case !slices.Contains(Profiles, s.Profile):
		return nil, fmt.Errorf("profile %q: want one of %s", s.Profile, strings.Join(Profiles, ", "))
	}
	for _, n := range []struct {
		what string
		name *string
		or   string
	}{{"release", &s.Name, renderedName}, {"namespace", &s.Namespace, renderedNamespace}, {"cluster", &s.Cluster, "local"}} {
		if *n.name == "" {
			*n.name = n.or
		}
		if !isLabel(*n.name) {
			return nil, fmt.Errorf("%s %q: want lower-case letters, digits and hyphens, 53 at most, such as %s", n.what, *n.name, n.or)
		}
	}
	text, err := rendered.ReadFile(file)
	if err != nil {
		return nil, err
	}
	objects, err := Parse(string(text))
	if err != nil {
		return nil, err
	}
	if !s.CreateNamespace {
		objects = slices.DeleteFunc(objects, func(o Object) bool { return o.Kind() == "Namespace" })
	}
	return objects, s.edit(objects)
}

// isLabel reports whether s can be part of the name of an object: the longest
// suffix that the chart adds leaves it 53 characters.
func isLabel(s string) bool {
	if s == "" || len(s) > 53 || strings.Trim(s, "-") != s {
		return false
	}
	return strings.IndexFunc(s, func(r rune) bool { return r != '-' && (r < 'a' || r > 'z') && (r < '0' || r > '9') }) < 0
}

// edit puts the settings into objects.
func (s Settings) edit(objects []Object) error {
	sums := map[string]string{} // of the configuration of each ConfigMap
	for i, o := range objects {
		if o.Kind() == "ConfigMap" {
			data := o["data"].(map[string]any)
			var config map[string]any
			if err := yaml.UnmarshalStrict([]byte(data["culvert.yaml"].(string)), &config); err != nil {
				return fmt.Errorf("the configuration of ConfigMap %s: %w", o.Name(), err)
			}
			config = s.renamed("", config).(map[string]any)
			config["cluster"] = s.Cluster
			text, err := yaml.Marshal(config)
			if err != nil {
				return err
			}
			data["culvert.yaml"] = string(text)
			if sums[o.Name()], err = restartSum(config); err != nil {
				return err
			}
		}
		if o.Kind() == "Deployment" || o.Kind() == "DaemonSet" {
			pod := o.at("spec", "template")
			pod.at("metadata", "annotations")["culvert.dev/restart-sum"] = sums[o.Name()]
			for _, c := range pod.at("spec")["containers"].([]any) {
				if s.Image != "" {
					c.(map[string]any)["image"] = s.Image
				}
			}
		}
		name := o.Name()
		objects[i] = s.renamed("", map[string]any(o)).(map[string]any)
		if o.Kind() == "GatewayClass" || o.Kind() == "CustomResourceDefinition" { // they are called so whatever the release is
			objects[i].at("metadata")["name"] = name
		}
	}
	return nil
}

// renamed returns a copy of v, which is at key, with the names of s in place of
// those that the manifests are rendered with.
func (s Settings) renamed(key string, v any) any {
	switch v := v.(type) {
	case map[string]any:
		m := make(map[string]any, len(v))
		for k := range v {
			m[k] = s.renamed(k, v[k])
		}
		return m
	case []any:
		l := make([]any, len(v))
		for i := range v {
			l[i] = s.renamed(key, v[i])
		}
		return l
	case string:
		switch key {
		case "app.kubernetes.io/instance":
			return s.Name
		case "app.kubernetes.io/name", "app.kubernetes.io/part-of":
			return v
		}
		full := s.Name
		if !strings.Contains(full, renderedName) {
			full += "-" + renderedName
		}
		// NAMESPACE, NAME, NAMESPACE:NAME of what is in no namespace, and
		// NAMESPACE/NAME in a configuration. The names of the DNS server's
		// objects end in "-dns".
		namespace, name := "", v
		if rest, ok := strings.CutPrefix(v, renderedNamespace); ok {
			if namespace, name = s.Namespace, rest; name == "" {
				return namespace
			}
			if name[0] != ':' && name[0] != '/' {
				return v
			}
			namespace, name = namespace+name[:1], name[1:]
		}
		if base := strings.TrimSuffix(name, "-dns"); base == renderedName {
			return namespace + full + name[len(base):]
		}
	}
	return v
}

// restartSum returns the chart's sum of what of a configuration is taken up only
// by a restart.
func restartSum(config map[string]any) (string, error) {
	var states [2]any
	for i, key := range []string{"servicePorts", "vips"} {
		states[i] = ""
		if object, ok := config[key].(map[string]any); ok && object["state"] != nil {
			states[i] = object["state"]
		}
	}
	text, err := json.Marshal(states)
	sum := sha256.Sum256(text)
	return hex.EncodeToString(sum[:]), err
}
