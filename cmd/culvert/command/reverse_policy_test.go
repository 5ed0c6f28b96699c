package command

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"culvert.dev/internal/testnet"
)

// A name is taken from a connector with the policy that has permitted it, and given back with
// it, on the session that stands.
func TestReverseNamesFollowPolicies(t *testing.T) {
	w := newReverseWorld(t)
	connector := w.connector(t, "spiffe://corp.example/ns/edge/sa/one", w.recipe)
	testnet.Eventually(t, patience, func() bool {
		_, err := w.ask(t, "cam.edge.example")
		return err == nil
	}, "the service answers")
	id := w.gateway.Connectors().Sessions[0].ID
	config, err := os.ReadFile(filepath.Join(w.gateway.dir, "culvert.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	reload := func(text string) {
		w.gateway.write(t, "culvert.yaml", text)
		w.gateway.source.Reload()
	}
	denied := strings.Replace(string(config), "verb: register", "verb: join", 1)
	if denied == string(config) {
		t.Fatal("the guide's gateway has no policy with the verb register")
	}
	reload(denied)
	testnet.Eventually(t, patience, func() bool { c, refused := session(connector); return c && refused == 1 }, "the connector has lost the name")
	if got, err := w.ask(t, "cam.edge.example"); err == nil {
		t.Errorf("a request for the name: got %q, want a refusal", got)
	}
	reload(string(config))
	testnet.Eventually(t, patience, func() bool { c, refused := session(connector); return c && refused == 0 }, "the connector has the name again")
	if _, err := w.ask(t, "cam.edge.example"); err != nil {
		t.Errorf("a request for the name: %v", err)
	}
	if s := w.gateway.Connectors().Sessions; len(s) != 1 || s[0].ID != id {
		t.Errorf("the sessions are %+v, want the one with the id %d", s, id)
	}
}
