package file

import (
	"reflect"
	"slices"
	"strings"
	"testing"
)

// changedKeys returns the keys of changes.
func changedKeys(list []Change) (keys []string) {
	for _, c := range list {
		keys = append(keys, c.Key)
	}
	return keys
}

// Every key says whether a running gateway takes up its changes, for itself or for all
// below it, and its description says the same.
func TestEveryKeySaysWhetherItNeedsARestart(t *testing.T) {
	root := schema(t)
	c := schemaComparison{t: t, defs: root["$defs"].(jsonObject), seen: map[string]bool{}}
	const sentence = "A change needs a restart."
	var check func(path string, s jsonObject, typ reflect.Type)
	check = func(path string, s jsonObject, typ reflect.Type) {
		for i := range typ.NumField() {
			f := typ.Field(i)
			key, _, _ := strings.Cut(f.Tag.Get("yaml"), ",")
			if key == "" {
				continue
			}
			property := s["properties"].(jsonObject)[key].(jsonObject)
			tag := f.Tag.Get("reload")
			if path == "" && tag != "live" && tag != "restart" {
				t.Errorf("%s: the field has reload:%q, want live or restart", key, tag)
			}
			text, _ := property["description"].(string)
			if text == "" {
				text, _ = c.resolved(property)["description"].(string)
			}
			if got, want := strings.Contains(text, sentence), tag == "restart"; got != want {
				t.Errorf("%s%s: the description %q says that a change needs a restart: %v, want %v as the field has reload:%q", path, key, text, got, want, tag)
			}
			of := f.Type
			for of.Kind() == reflect.Pointer || of.Kind() == reflect.Slice {
				of = of.Elem()
			}
			if below := c.resolved(property); tag != "restart" && of.Kind() == reflect.Struct && f.Type.Kind() != reflect.Slice && hasKeys(of) && below["properties"] != nil {
				check(path+key+".", below, of)
			}
		}
	}
	check("", root, reflect.TypeFor[configuration]())
}

// RestartNeeded knows every key that needs a restart.
func TestRestartNeededKnowsEveryKey(t *testing.T) {
	var want []string
	typ := reflect.TypeFor[configuration]()
	was, is := defaults[configuration](), defaults[configuration]()
	for i := range typ.NumField() {
		f := typ.Field(i)
		if f.Tag.Get("reload") == "restart" {
			t.Errorf("%s needs a restart, and RestartNeeded looks below the first keys alone", f.Name)
		}
		if f.Type.Kind() != reflect.Pointer || f.Type.Elem().Kind() != reflect.Struct {
			continue
		}
		for _, c := range []*configuration{was, is} {
			reflect.ValueOf(c).Elem().Field(i).Set(reflect.New(f.Type.Elem()))
		}
		for j := range f.Type.Elem().NumField() {
			below := f.Type.Elem().Field(j)
			if below.Tag.Get("reload") != "restart" {
				continue
			}
			if field := reflect.ValueOf(is).Elem().Field(i).Elem().Field(j); field.Kind() == reflect.Pointer { // an object that was not there
				field.Set(reflect.New(field.Type().Elem()))
			} else {
				field.SetString("other")
			}
			key := func(f reflect.StructField) string { key, _, _ := strings.Cut(f.Tag.Get("yaml"), ","); return key }
			want = append(want, key(f)+"."+key(below))
		}
	}
	if got := changedKeys(was.config().RestartNeeded(is.config())); !slices.Equal(got, want) || len(want) != 2 {
		t.Errorf("a restart is needed for %q, want %q, which are two", got, want)
	}
}

// The sockets of an agent that captures have a mark from the start. With it, capture may change,
// go and come back.
func TestCaptureThatComesNeedsARestart(t *testing.T) {
	with, other, without := &Config{Agent: &Agent{Capture: &AgentCapture{VIPs: true}}}, &Config{Agent: &Agent{Capture: &AgentCapture{}}}, &Config{Agent: &Agent{}}
	for _, next := range []*Config{other, without, {}} {
		if got := with.RestartNeeded(next); len(got) > 0 {
			t.Errorf("a restart is needed for %v, want none", got)
		}
	}
	for _, was := range []*Config{without, {}} {
		if got := changedKeys(was.RestartNeeded(with)); !slices.Equal(got, []string{"agent.capture"}) {
			t.Errorf("a restart is needed for %q, want agent.capture", got)
		}
	}
}

// What waits for a restart is named to the key, with both values.
func TestRestartNeeded(t *testing.T) {
	const before = `
cluster: west
servicePorts: {range: 20000-20999, state: /var/lib/culvert/ports.json}
kubernetes: {namespaces: [a, b], discovery: {suffixes: [apps.example.com, {suffix: db.example.com, namespaces: [db]}]}}
limits: {maxTunnels: 7}
listeners: [{address: ":443"}]
services: []
`
	const after = `
cluster: east
servicePorts: {range: 20000-21999, state: /var/lib/other/ports.json}
kubernetes: {namespaces: [a], discovery: {suffixes: [apps.example.com]}}
vips: {ranges: [10.9.0.0/24], state: /var/lib/culvert/vips.json}
limits: {maxTunnels: 8}
drain: {timeout: 9s}
log: {level: debug}
admin: 127.0.0.1:9090
dns: {listen: ["udp://:53"]}
listeners: [{address: ":8443"}]
services: []
`
	parse := func(text string) *Config {
		c, err := Parse("x.yaml", []byte(text))
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	was := parse(before)
	want := []Change{
		{"servicePorts.state", "/var/lib/culvert/ports.json", "/var/lib/other/ports.json"},
	}
	if got := was.RestartNeeded(parse(after)); !slices.Equal(got, want) {
		t.Errorf("got  %q\nwant %q", got, want)
	}
	if got := was.RestartNeeded(parse(before)); len(got) > 0 {
		t.Errorf("a restart is needed for %q, and nothing has changed", got)
	}
	long := parse(strings.Replace(before, "ports.json", strings.Repeat("long", 100), 1))
	if got := was.RestartNeeded(long)[0].Is; len(got) > maxChangeText+len("...") {
		t.Errorf("a value of %d bytes", len(got))
	}
}
