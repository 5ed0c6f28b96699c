package deploy

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"regexp"
	"slices"
	"strings"

	"sigs.k8s.io/yaml"
)

// An Object is one object of Kubernetes.
type Object struct {
	APIVersion, Kind, Namespace, Name string

	Text   string         // YAML as the chart has it, with its comments, ending in a line feed
	Fields map[string]any // what the Text says
}

// order is that of Helm: what others refer to comes first. What is not listed
// comes last, as nothing here refers to it.
var order = []string{
	"Namespace", "NetworkPolicy", "PodDisruptionBudget", "ServiceAccount", "ConfigMap",
	"ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding", "Service", "DaemonSet", "Deployment",
}

func inOrder(a, b Object) int {
	place := func(o Object) int {
		if i := slices.Index(order, o.Kind); i >= 0 {
			return i
		}
		return len(order)
	}
	return cmp.Or(cmp.Compare(place(a), place(b)), cmp.Compare(a.Kind, b.Kind), cmp.Compare(a.Name, b.Name), cmp.Compare(a.Namespace, b.Namespace))
}

var separator = regexp.MustCompile(`(?m)^---\s*$`)

// split parses the documents of a rendered file.
func split(name, text string) ([]Object, error) {
	var objects []Object
	for _, doc := range separator.Split(text, -1) {
		doc = strings.TrimSpace(doc) + "\n"
		o := Object{Text: doc}
		if err := yaml.UnmarshalStrict([]byte(doc), &o.Fields); err != nil {
			return nil, fmt.Errorf("render the chart: %s: %w", name, err)
		}
		if len(o.Fields) == 0 {
			continue
		}
		o.APIVersion, _ = o.Fields["apiVersion"].(string)
		o.Kind, _ = o.Fields["kind"].(string)
		meta, _ := o.Fields["metadata"].(map[string]any)
		o.Namespace, _ = meta["namespace"].(string)
		o.Name, _ = meta["name"].(string)
		if o.APIVersion == "" || o.Kind == "" || o.Name == "" {
			return nil, fmt.Errorf("render the chart: %s: an object without a kind or a name: %q", name, doc[:min(len(doc), 200)])
		}
		objects = append(objects, o)
	}
	return objects, nil
}

// WriteYAML writes objects as documents, for kubectl apply.
func WriteYAML(w io.Writer, objects []Object) error {
	var b bytes.Buffer
	for i, o := range objects {
		if i > 0 {
			b.WriteString("---\n")
		}
		b.WriteString(o.Text)
	}
	_, err := w.Write(b.Bytes())
	return err
}

// WriteJSON writes objects as one List, for kubectl apply.
func WriteJSON(w io.Writer, objects []Object) error {
	items := make([]map[string]any, 0, len(objects))
	for _, o := range objects {
		items = append(items, o.Fields)
	}
	enc := json.NewEncoder(w)
	enc.SetIndent("", "  ")
	return enc.Encode(map[string]any{"apiVersion": "v1", "kind": "List", "items": items})
}
