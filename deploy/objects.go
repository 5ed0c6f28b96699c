package deploy

import (
	"encoding/json"
	"fmt"
	"io"
	"regexp"
	"strings"

	"sigs.k8s.io/yaml"
)

// An Object is one object of Kubernetes, as JSON decodes it.
type Object map[string]any

// Kind returns the kind of o.
func (o Object) Kind() string { s, _ := o["kind"].(string); return s }

// Name returns the name of o.
func (o Object) Name() string { s, _ := o.at("metadata")["name"].(string); return s }

// Namespace returns the namespace of o, or "" if it is in none.
func (o Object) Namespace() string { s, _ := o.at("metadata")["namespace"].(string); return s }

// at returns the map at a path of keys, nil if there is none.
func (o Object) at(path ...string) Object {
	for _, key := range path {
		o, _ = o[key].(map[string]any)
	}
	return o
}

var separator = regexp.MustCompile(`(?m)^---\s*$`)

// Parse decodes documents of YAML, each an object or empty.
func Parse(text string) ([]Object, error) {
	var objects []Object
	for _, doc := range separator.Split(text, -1) {
		var o map[string]any
		if err := yaml.UnmarshalStrict([]byte(doc), &o); err != nil {
			return nil, fmt.Errorf("manifests: %w", err)
		}
		if len(o) == 0 {
			continue
		}
		if obj := Object(o); obj["apiVersion"] == nil || obj.Kind() == "" || obj.Name() == "" {
			return nil, fmt.Errorf("manifests: an object without a version, a kind or a name: %q", doc[:min(len(doc), 200)])
		}
		objects = append(objects, o)
	}
	return objects, nil
}

// WriteYAML writes objects as documents, for kubectl apply.
func WriteYAML(w io.Writer, objects []Object) error {
	var docs []string
	for _, o := range objects {
		doc, err := yaml.Marshal(o)
		if err != nil {
			return err
		}
		docs = append(docs, string(doc))
	}
	_, err := io.WriteString(w, strings.Join(docs, "---\n"))
	return err
}

// WriteJSON writes objects as one List, for kubectl apply.
func WriteJSON(w io.Writer, objects []Object) error {
	enc := json.NewEncoder(w)
	enc.SetIndent("", "  ")
	return enc.Encode(map[string]any{"apiVersion": "v1", "kind": "List", "items": objects})
}
