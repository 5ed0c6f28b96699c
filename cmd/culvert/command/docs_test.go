package command

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"

	"culvert.dev/connect"
	"culvert.dev/registry/file"
	"culvert.dev/sni"
	"culvert.dev/tunnel"
)

// operations is the page that operators read.
func operations(t *testing.T) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("..", "..", "..", "docs", "guides", "gateway.md"))
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// Every reason has its row, in order, and what the row says that clients hear
// is what the protocols say.
func TestTheReasonsTableIsTrue(t *testing.T) {
	_, table, _ := strings.Cut(operations(t), "## Reasons")
	var got []tunnel.Reason
	for _, row := range regexp.MustCompile("(?m)^\\| `([a-z-]+)` \\|([^|]+)\\|([^|]*)\\|([^|]*)\\|([^|]+)\\|$").FindAllStringSubmatch(table, -1) {
		r := tunnel.Reason(row[1])
		got = append(got, r)
		err := tunnel.Refusef(r, "test")
		wantTLS := "close"
		if a := sni.AlertFor(err); a != 0 {
			wantTLS = fmt.Sprint(a)
		}
		known := connect.Answer(&tunnel.Request{Peer: tunnel.Peer{ID: "alice", Method: "basic"}}, err)
		wantConnect := fmt.Sprintf("%d `%s`", known.Status, known.Error)
		switch r {
		case tunnel.Done, tunnel.Reset:
			wantTLS, wantConnect = "", ""
		case tunnel.Idle, tunnel.HalfClosed, tunnel.Killed:
			wantTLS, wantConnect = "reset", "reset"
		case tunnel.NoHello, tunnel.Gone:
			wantConnect = "close"
		}
		if gotTLS, gotConnect := strings.TrimSpace(row[3]), strings.TrimSpace(row[4]); gotTLS != wantTLS || gotConnect != wantConnect {
			t.Errorf("%s: the page says %q and %q, the code %q and %q", r, gotTLS, gotConnect, wantTLS, wantConnect)
		}
	}
	if !slices.Equal(got, tunnel.Reasons()) {
		t.Errorf("rows: got %q\nwant %q", got, tunnel.Reasons())
	}
}

// The configuration of the page is good, has every key there is, and its
// limits are the defaults.
func TestTheConfigurationOfTheDocsIsWholeAndGood(t *testing.T) {
	yaml := regexp.MustCompile("(?ms)^```yaml\n(.*?)^```").FindStringSubmatch(operations(t))
	if yaml == nil {
		t.Fatal("the page has no YAML")
	}
	c, err := file.Parse("gateway.md", []byte(yaml[1]))
	if err != nil {
		t.Fatal(err)
	}
	def := file.Default()
	for _, p := range []struct {
		name      string
		got, want any
	}{
		{"limits", c.Limits, def.Limits},
		{"drain", c.Drain, def.Drain},
		{"log", c.Log, def.Log},
		{"refusal", c.Listeners[0].Refusal, "alert"},
	} {
		if !reflect.DeepEqual(p.got, p.want) {
			t.Errorf("%s: the page says %+v, the default is %+v", p.name, p.got, p.want)
		}
	}
	if _, _, err := gatewayConfig(c); err != nil {
		t.Error(err)
	}
	for _, key := range schemaKeys(t) {
		if !regexp.MustCompile(`(?m)(^[ #-]*|[{ ])` + key + `:`).MatchString(yaml[1]) {
			t.Errorf("the page does not have the key %q", key)
		}
	}
}

// schemaKeys returns every key of the schema.
func schemaKeys(t *testing.T) []string {
	t.Helper()
	var schema any
	if err := json.Unmarshal([]byte(file.Schema), &schema); err != nil {
		t.Fatal(err)
	}
	keys := map[string]bool{}
	var walk func(v any)
	walk = func(v any) {
		m, ok := v.(map[string]any)
		if !ok {
			return
		}
		for k, v := range m {
			if props, ok := v.(map[string]any); ok && k == "properties" {
				for name := range props {
					keys[name] = true
				}
			}
			walk(v)
		}
	}
	walk(schema)
	if len(keys) < 30 {
		t.Fatalf("the schema has %d keys, want at least 30: %v", len(keys), keys)
	}
	return slices.Sorted(maps.Keys(keys))
}

// Every reason that a probe may name is one that refuses, and every one that
// refuses by an alert is named, but those of HTTP.
func TestAProbeNamesReasonsThatRefuse(t *testing.T) {
	named := map[tunnel.Reason]bool{}
	for a := sni.Alert(1); a != 0; a++ { // 0 is close_notify, which refuses nothing
		reasons, _ := reasonsOfAlert(a)
		for _, r := range reasons {
			named[r] = true
		}
	}
	for _, r := range tunnel.Reasons() {
		ends := (&tunnel.Outcome{Reason: r, Endpoint: "any"}).Carried() && r != tunnel.Drain
		alert := sni.AlertFor(&tunnel.Error{Reason: r, Err: errors.New("test")}) != 0
		if want := alert && !ends && !onlyHTTP(r); named[r] != want {
			t.Errorf("%s: named %v, want %v", r, named[r], want)
		}
	}
}
