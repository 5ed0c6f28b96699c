//go:build linux && netns

package networks

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"culvert.dev/internal/testnet"
)

// With the command and the capabilities of its unit, and no others, the agent of a host captures
// programs of another user and answers at port 53. Its rules go with it by kill -9.
func TestUnitOfTheAgentOfAHost(t *testing.T) {
	t.Parallel()
	r := newCaptureRun(t)
	text, err := os.ReadFile("../../deploy/systemd/culvert-agent-host.service")
	if err != nil {
		t.Fatal(err)
	}
	value := func(key string) string {
		m := regexp.MustCompile(`(?m)^` + key + `=(.+)$`).FindSubmatch(text)
		if m == nil {
			t.Fatalf("the unit has no %s", key)
		}
		return string(m[1])
	}
	capabilities := func(key string) string {
		list := "-all"
		for _, c := range strings.Fields(value(key)) {
			list += ",+" + strings.ToLower(strings.TrimPrefix(c, "CAP_"))
		}
		return list
	}
	if value("NoNewPrivileges") != "yes" {
		t.Error("the unit lets the agent get privileges")
	}
	config, admin := filepath.Join(r.s.dir, "unit.yaml"), r.s.socket("unit")
	content := fmt.Sprintf(captureAgent, "unit", "10.20.0.254:443", 20053, 53, fmt.Sprintf(`{vips: true, cidrs: [10.96.0.0/16], uids: [%d]}`, capturedUser), r.key)
	if err := os.WriteFile(config, []byte(content), 0o644); err != nil {
		t.Fatal(err)
	}
	args := []string{
		"--inh-caps=" + capabilities("AmbientCapabilities"), "--ambient-caps=" + capabilities("AmbientCapabilities"),
		"--bounding-set=" + capabilities("CapabilityBoundingSet"), "--no-new-privs",
	}
	places := strings.NewReplacer("/usr/local/bin/culvert", r.binary, "/etc/culvert/agent.yaml", config, "/run/culvert-agent/admin.sock", admin)
	args = append(args, strings.Fields(places.Replace(value("ExecStart")))...)
	table := fmt.Sprintf("culvert-agent-%d", captureUser)
	rules := func() string {
		out, _ := r.host.Command(t.Context(), "nft", "list", "tables").CombinedOutput()
		return string(out)
	}
	if strings.Contains(rules(), table) {
		t.Fatalf("%s is there before the agent", table)
	}
	kill := background(t, r.as(captureUser, args...))
	testnet.Eventually(t, 2*patience, func() bool {
		out, _ := exec.Command(culvert, "status", "--admin", "unix:"+admin).CombinedOutput()
		return strings.Contains(string(out), "capture:") && r.ready(captureUser)
	}, "the agent captures")
	vip := strings.TrimSpace(r.s.must(r.host.Command(t.Context(), "dig", "+short", "@127.0.0.54", "A", "web.shop.test")))
	r.want("a VIP", r.curl(capturedUser, to(vip)), "by the gateway")
	r.want("a range", r.curl(capturedUser, to("10.96.0.80")), "by the gateway")
	r.want("another user", r.curl(otherUser, to("10.96.0.80")), "direct")
	kill()
	testnet.Eventually(t, patience, func() bool { return !strings.Contains(rules(), table) }, "%s is gone", table)
	r.want("without the agent", r.curl(capturedUser, to("10.96.0.80")), "direct")
}
