package deploy

import (
	"bytes"
	"embed"
	"fmt"
	"io/fs"
	"maps"
	"path"
	"slices"
	"strings"
	"text/template"

	"sigs.k8s.io/yaml"
)

// chartFiles is the chart; its file names begin with chartRoot.
//
//go:embed all:helm/culvert
var chartFiles embed.FS

const chartRoot = "helm/culvert"

// A Release is what one installation is called.
type Release struct {
	Name            string // of the release, and so of what it consists of
	Namespace       string // that it is installed to
	CreateNamespace bool   // render the Namespace, too, as Helm's --create-namespace makes one
}

// A chart is what the files of the chart say of it.
type chart struct {
	Name       string `json:"name"`
	Version    string `json:"version"`
	AppVersion string `json:"appVersion"`
}

// Defaults returns the chart's values, a copy for the caller to change.
func Defaults() (map[string]any, error) {
	data, err := ValuesFile()
	if err != nil {
		return nil, err
	}
	return ParseValues(data)
}

// Render makes the objects of r in the order in which they are to be created.
// The values are whole: those of Defaults, and what was changed in them. They
// are not changed here.
func Render(r Release, values map[string]any) ([]Object, error) {
	if err := checkRelease(r); err != nil {
		return nil, err
	}
	if err := Validate(values); err != nil {
		return nil, err
	}
	data, err := chartFiles.ReadFile(path.Join(chartRoot, "Chart.yaml"))
	if err != nil {
		return nil, err
	}
	var c chart
	if err := yaml.Unmarshal(data, &c); err != nil {
		return nil, fmt.Errorf("the chart's Chart.yaml: %w", err)
	}
	t, names, err := parse()
	if err != nil {
		return nil, err
	}
	top := map[string]any{
		"Values":  copied(values),
		"Chart":   map[string]any{"Name": c.Name, "Version": c.Version, "AppVersion": c.AppVersion},
		"Files":   files{},
		"Release": map[string]any{"Name": r.Name, "Namespace": r.Namespace, "Service": "Helm"},
	}
	var objects []Object
	for _, name := range names {
		var b bytes.Buffer
		if err := t.ExecuteTemplate(&b, name, top); err != nil {
			return nil, renderError(err)
		}
		// What is missing is nothing, as in Helm.
		text := strings.ReplaceAll(b.String(), "<no value>", "")
		made, err := split(name, text)
		if err != nil {
			return nil, err
		}
		objects = append(objects, made...)
	}
	if r.CreateNamespace {
		ns, err := namespace(r, values)
		if err != nil {
			return nil, err
		}
		objects = append(objects, ns)
	}
	slices.SortStableFunc(objects, inOrder)
	return objects, nil
}

// files are those of the chart, for templates.
type files struct{}

// Get returns a file, or nothing, as in Helm.
func (files) Get(name string) string {
	data, err := chartFiles.ReadFile(path.Join(chartRoot, name))
	if err != nil {
		return ""
	}
	return string(data)
}

// parse reads the templates, and returns the names of those that make objects.
func parse() (*template.Template, []string, error) {
	t := template.New("culvert").Option("missingkey=zero")
	t.Funcs(functions(t))
	files, err := fs.Glob(chartFiles, path.Join(chartRoot, "templates", "*"))
	if err != nil {
		return nil, nil, err
	}
	var names []string
	for _, file := range files {
		base := path.Base(file)
		if base == "NOTES.txt" {
			continue // for people who use Helm
		}
		data, err := chartFiles.ReadFile(file)
		if err != nil {
			return nil, nil, err
		}
		name := path.Join("culvert", "templates", base)
		if _, err := t.New(name).Parse(string(data)); err != nil {
			return nil, nil, err
		}
		if !strings.HasPrefix(base, "_") {
			names = append(names, name)
		}
	}
	return t, names, nil
}

// A Failure is what the chart says of values that can't be installed.
type Failure struct{ Msg string }

func (f *Failure) Error() string { return f.Msg }

// checkRelease holds names against what objects can be called.
func checkRelease(r Release) error {
	for _, n := range []struct{ what, name string }{{"release", r.Name}, {"namespace", r.Namespace}} {
		if !isLabel(n.name) {
			return fmt.Errorf("%s %q: want letters, digits and hyphens, 53 at most, such as culvert", n.what, n.name)
		}
	}
	return nil
}

// isLabel reports whether s can be a name of an object, with room behind it for
// what the chart adds.
func isLabel(s string) bool {
	if s == "" || len(s) > 53 || strings.Trim(s, "-") != s {
		return false
	}
	return strings.IndexFunc(s, func(r rune) bool { return r != '-' && (r < 'a' || r > 'z') && (r < '0' || r > '9') }) < 0
}

// namespace is what r is installed to. Pods that have the node's network are
// refused where Pod Security is not "privileged".
func namespace(r Release, values map[string]any) (Object, error) {
	level := "restricted"
	if g, ok := values["gateway"].(map[string]any); ok && g["hostNetwork"] == true {
		level = "privileged"
	}
	data, err := yaml.Marshal(map[string]any{
		"apiVersion": "v1", "kind": "Namespace",
		"metadata": map[string]any{
			"name":   r.Namespace,
			"labels": map[string]any{"pod-security.kubernetes.io/enforce": level, "pod-security.kubernetes.io/warn": level},
		},
	})
	if err != nil {
		return Object{}, err
	}
	made, err := split("namespace", string(data))
	if err != nil {
		return Object{}, err
	}
	return made[0], nil
}

// copied is a copy of what YAML decodes to.
func copied(v any) any {
	switch v := v.(type) {
	case map[string]any:
		c := maps.Clone(v)
		for k := range c {
			c[k] = copied(c[k])
		}
		return c
	case []any:
		c := slices.Clone(v)
		for i := range c {
			c[i] = copied(c[i])
		}
		return c
	}
	return v
}

// ValuesFile returns the chart's values with their comments.
func ValuesFile() ([]byte, error) { return chartFiles.ReadFile(path.Join(chartRoot, "values.yaml")) }
