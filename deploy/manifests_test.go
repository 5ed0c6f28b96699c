package deploy

import (
	"bytes"
	"encoding/json"
	"reflect"
	"strings"
	"testing"
)

// A name is refused before an API server refuses the objects, one after the other.
func TestBadSettings(t *testing.T) {
	for _, s := range []Settings{
		{Name: "A"}, {Namespace: "a.b"}, {Name: "-a"}, {Name: "a\nb: c"}, {Name: strings.Repeat("a", 54)}, {Cluster: "West_1"},
	} {
		if _, err := Manifests(s); err == nil || !strings.Contains(err.Error(), "want lower-case letters, digits and hyphens") {
			t.Errorf("%+v: got %v, want the name refused", s, err)
		}
	}
	if _, err := Manifests(Settings{Profile: "../base"}); err == nil || !strings.Contains(err.Error(), "want one of default, daemonset") {
		t.Errorf("got %v, want the profile refused", err)
	}
}

// YAML and JSON say the same, and every profile is embedded.
func TestWriting(t *testing.T) {
	for _, p := range Profiles {
		objects, err := Manifests(Settings{Profile: p, CreateNamespace: true})
		if err != nil || len(objects) < 5 || objects[0].Kind() != "Namespace" {
			t.Fatalf("%s: got %d objects, %v; want at least 5 and the Namespace first", p, len(objects), err)
		}
		var y, j bytes.Buffer
		if err := WriteYAML(&y, objects); err != nil {
			t.Fatal(err)
		}
		if err := WriteJSON(&j, objects); err != nil {
			t.Fatal(err)
		}
		parsed, err := Parse(y.String())
		if err != nil || !reflect.DeepEqual(parsed, objects) {
			t.Errorf("%s: as YAML: got %v, %v\nwant %v", p, parsed, err, objects)
		}
		var list struct {
			Kind  string
			Items []Object
		}
		if err := json.Unmarshal(j.Bytes(), &list); err != nil || list.Kind != "List" || !reflect.DeepEqual(list.Items, objects) {
			t.Errorf("%s: as JSON: got %v, %v\nwant %v", p, list, err, objects)
		}
	}
}

func TestParseRefuses(t *testing.T) {
	for _, text := range []string{"a: [", "kind: A\nkind: B\n", "kind: Service\napiVersion: v1\n", "- a"} {
		if objects, err := Parse(text); err == nil {
			t.Errorf("%q: got %v, want an error", text, objects)
		}
	}
}
