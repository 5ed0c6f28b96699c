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
	if len(blocks) != 2 {
		t.Fatalf("the guide has %d recipes, want policies and expectations", len(blocks))
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
	for name, data := range map[string]string{config: blocks[0] + rest, expectations: blocks[1]} {
		if err := os.WriteFile(name, []byte(data), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	var out bytes.Buffer
	o := &policyOptions{sourceOptions: sourceOptions{config: config}}
	if err := runPolicyTest(t.Context(), &out, o, expectations); err != nil || out.String() != "3 of 3 expectations are met\n" {
		t.Errorf("got %v and\n%s\nwant all of them met", err, &out)
	}
}
