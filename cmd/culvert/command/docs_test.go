package command

import (
	"errors"
	"os"
	"path/filepath"
	"regexp"
	"testing"

	"culvert.dev/registry/file"
	"culvert.dev/sni"
	"culvert.dev/tunnel"
)

// The configurations of the guides are good.
func TestConfigurationsOfGuides(t *testing.T) {
	for _, guide := range []string{"behind-load-balancer.md", "fallback.md", "gateway.md", "load-balancing.md", "nat.md", "reverse.md", "sites.md", "ssh.md", "tls.md", "tokens.md"} {
		text, err := os.ReadFile(filepath.Join("..", "..", "..", "docs", "guides", guide))
		if err != nil {
			t.Fatal(err)
		}
		blocks := regexp.MustCompile("(?ms)^```yaml\n(.*?)^```").FindAllSubmatch(text, -1)
		if len(blocks) == 0 {
			t.Errorf("%s has no YAML", guide)
		}
		for _, block := range blocks {
			if _, err := file.Parse(guide, block[1]); err != nil {
				t.Errorf("%s: %v", guide, err)
			}
		}
	}
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
