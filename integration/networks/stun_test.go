//go:build linux && netns

package networks

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"syscall"
	"testing"

	"culvert.dev/internal/testnet"
	"culvert.dev/nat"
)

// startCoturn runs coturn as a STUN server beside the second gateway, until the end of the
// test.
func (s *hiddenSite) startCoturn() (at string) {
	s.t.Helper()
	stop := s.background("turnserver", s.gw[1].Command(context.Background(), "turnserver", "-n", "--stun-only", "-L", "11.0.2.1", "-p", "3478",
		"--no-cli", "--no-tls", "--no-dtls", "--log-file", "stdout", "--pidfile", s.file("turnserver.pid"), "--db", s.file("turn.db")))
	s.t.Cleanup(func() { stop(syscall.SIGKILL) })
	return "11.0.2.1:3478"
}

// probe returns what culvert nat probe says on the hidden host.
func (s *hiddenSite) probe(server string) (out nat.Status) {
	s.t.Helper()
	b, _ := s.host.Command(s.t.Context(), culvert, "nat", "probe", "-o", "json", "--stun", server, "--timeout", "10s").Output() // 1 where nothing can be mapped
	if err := json.Unmarshal(b, &out); err != nil {
		s.t.Fatalf("culvert nat probe: %v in %q", err, b)
	}
	return out
}

// A gateway is told by coturn from where it is seen, as coturn's client is by a gateway; and it
// knows what that means.
func TestKindsOfNAT(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		kind
		want nat.Kind
		seen string
		says string
	}{
		{kinds[0], nat.NoNAT, "11.0.9.10", "no mapping is needed"},
		{kinds[1], nat.SingleNAT, "11.0.0.1", "the router does not say"},
		{kinds[2], nat.SingleNAT, "11.0.0.1", "the router does not say"},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := newHiddenSite(t, c.kind)
			server := s.startCoturn()
			var got nat.Status
			testnet.Eventually(t, patience, func() bool { got = s.probe(server); return got.Kind == c.want && got.Seen.IsValid() }, "this is %s: %+v", c.want, &got)
			if got.Seen.String() != c.seen || !strings.Contains(got.Explanation, c.says) {
				t.Errorf("seen at %s, %q; want %s and %q", got.Seen, got.Explanation, c.seen, c.says)
			}
			out, err := s.host.Command(t.Context(), "turnutils_stunclient", "-p", "3478", "11.0.1.1").CombinedOutput()
			if err != nil || !strings.Contains(string(out), "UDP reflexive addr: "+c.seen+":") {
				t.Errorf("turnutils_stunclient at a gateway: %v\n%s\nwant %s", err, out, c.seen)
			}
		})
	}
}

// A port that another host has at the router stays that one's, and the gateway is reached at
// another port. Other programs see its mapping.
func TestPortsOfOthers(t *testing.T) {
	t.Parallel()
	h := newHomeSite(t)
	h.startRouter("enable_natpmp=yes\nenable_upnp=yes\n")
	ip := func(args ...string) { t.Helper(); h.home.must(h.home.ns.Command(t.Context(), "ip", args...)) }
	dev := strings.Fields(h.home.must(h.home.ns.Command(t.Context(), "ip", "route", "get", "192.168.1.1")))[2]
	ip("addr", "add", "192.168.1.66/32", "dev", dev)
	ip("route", "add", "192.168.1.1/32", "dev", dev, "src", "192.168.1.66")
	testnet.Eventually(t, patience, func() bool {
		out, err := h.home.ns.Command(t.Context(), "natpmpc", "-g", "192.168.1.1", "-a", "443", "443", "tcp", "3600").CombinedOutput()
		return err == nil && strings.Contains(string(out), "Mapped public port 443 protocol TCP to local port 443")
	}, "another host has the port 443 of the router")
	ip("route", "del", "192.168.1.1/32", "dev", dev)

	h.join("pcp, nat-pmp, upnp")
	var s nat.Status
	testnet.Eventually(t, moved, func() bool {
		s = h.home.nat()
		return len(s.Mappings) > 0 && s.Mappings[0].State == nat.Verified && s.Mappings[0].External.Port() != 443
	}, "the gateway has another port: %+v", &s)
	h.reached(patience)
	out := h.home.must(h.home.ns.Command(t.Context(), "upnpc", "-l"))
	for _, want := range []string{"443->192.168.1.66:443", fmt.Sprintf("%d->192.168.1.10:443", s.Mappings[0].External.Port())} {
		if !strings.Contains(out, want) {
			t.Errorf("upnpc -l does not list %s:\n%s", want, out)
		}
	}
}
