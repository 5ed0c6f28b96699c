package command

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// The policies in the guide decide as its expectations say.
func TestRecipeOfPolicies(t *testing.T) {
	text, err := os.ReadFile(filepath.Join("..", "..", "..", "docs", "guides", "policy.md"))
	if err != nil {
		t.Fatal(err)
	}
	var blocks []string
	for _, part := range strings.Split(string(text), "```yaml\n")[1:] {
		block, _, ok := strings.Cut(part, "```\n")
		if !ok {
			t.Fatal("a recipe has no end")
		}
		blocks = append(blocks, block)
	}
	if len(blocks) != 3 {
		t.Fatalf("the guide has %d recipes, want policies, those of DNS, and expectations", len(blocks))
	}
	dir := t.TempDir()
	config, expectations := filepath.Join(dir, "culvert.yaml"), filepath.Join(dir, "expectations.yaml")
	const rest = `
cluster: west
listeners: [{address: "127.0.0.1:3128", protocols: [connect]}]
services:
  - {name: db.shop.example, mesh: {service: db, namespace: shop}, endpoints: ["10.0.0.1:5432"]}
  - {name: a.pay.example, endpoints: ["10.0.0.2:443"]}
`
	for name, data := range map[string]string{config: blocks[0] + rest, expectations: blocks[2]} {
		if err := os.WriteFile(name, []byte(data), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	var out bytes.Buffer
	o := &policyOptions{sourceOptions: sourceOptions{config: config}}
	if err := runPolicyTest(t.Context(), &out, o, expectations); err != nil || out.String() != "3 of 3 expectations are met\n" {
		t.Errorf("got %v and\n%s\nwant all of them met", err, &out)
	}

	// The policies about seeing services show what they say.
	const guest = "\nnetworks: [{name: guest, cidrs: [10.9.0.0/16]}]\n"
	seen := blocks[1] + guest + strings.Replace(rest, "services:", "services:\n  - {name: x.lab.example, endpoints: [\"10.0.0.3:443\"]}", 1)
	if err := os.WriteFile(config, []byte(seen), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, row := range []struct {
		name, from string
		seen       bool
	}{
		{"a.pay.example", "10.2.0.1", true}, {"a.pay.example", "10.9.0.1", true}, {"db.shop.example", "10.1.0.1", true},
		{"db.shop.example", "10.2.0.1", false}, {"x.lab.example", "10.2.0.1", true}, {"x.lab.example", "10.9.0.1", false},
	} {
		var out bytes.Buffer
		o := &resolveOptions{config: config, from: row.from}
		err := runResolve(t.Context(), &out, o, row.name)
		if hidden := strings.Contains(out.String(), "the verb catalog"); hidden == row.seen {
			t.Errorf("%s from %s: got %v and\n%s\nwant seen %v", row.name, row.from, err, &out, row.seen)
		}
	}
}
