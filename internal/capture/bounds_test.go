//go:build linux && netns

package capture

import (
	"encoding/binary"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"culvert.dev/internal/testnet/netns"
)

// A program that has become another user by its file is not the captured user's any more, and the
// other way round.
func TestSetuidPrograms(t *testing.T) {
	r := newRig(t)
	path, err := exec.LookPath("nc")
	if err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	dir, err := os.MkdirTemp("", "capture")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	setuid := filepath.Join(dir, "nc")
	if err := os.WriteFile(setuid, text, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Chown(setuid, 64002, 64002); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(setuid, 0o755|os.ModeSetuid); err != nil {
		t.Fatal(err)
	}
	ask := func(program string) string {
		cmd := r.Command(t.Context(), "setpriv", "--reuid", "64001", "--clear-groups", program, "-N", "-w", "20", "10.9.0.2", "80")
		cmd.Dir = "/"
		out, _ := cmd.CombinedOutput()
		return string(out)
	}
	c := r.install(t, Rules{UIDs: []uint32{64001}})
	expect(t, "the user's program", ask(path), "captured 10.9.0.2:80")
	expect(t, "a setuid program", ask(setuid), "direct")
	rules := r.rules
	rules.TransparentPort, rules.UIDs = 0, []uint32{64002}
	if err := c.Update(rules); err != nil {
		t.Fatal(err)
	}
	expect(t, "the setuid program of the other user", ask(setuid), "captured 10.9.0.2:80")
}

// A range that was captured before an exception is left alone after, for connections from then on.
func TestUpdateLeavesConnections(t *testing.T) {
	r := newRig(t)
	c := r.install(t, Rules{All: true})
	rules := r.rules
	rules.TransparentPort, rules.All, rules.Except = 0, true, prefixes("10.9.0.2/32", "fd09::2/128")
	standing, err := r.Dial(t.Context(), "tcp", "10.9.0.2:80")
	if err != nil {
		t.Fatal(err)
	}
	defer standing.Close()
	if err := c.Update(rules); err != nil {
		t.Fatal(err)
	}
	expect(t, "a connection that stands", begin(standing), "captured 10.9.0.2:80")
	expect(t, "a new one", dial(t, r.NS, "10.9.0.2:80"), "direct")
	expect(t, "a new one by IPv6", dial(t, r.NS, "[fd09::2]:80"), "direct")
}

// 10,000 VIPs of each family, from nothing to captured.
func BenchmarkInstall10000VIPs(b *testing.B) {
	ns := netns.New(b, "bench")
	var vips []netip.Addr
	for i := range 10_000 {
		var a [16]byte
		a[0] = 0xfd
		binary.BigEndian.PutUint32(a[12:], uint32(240<<24+2*i))
		vips = append(vips, netip.AddrFrom16(a), netip.AddrFrom4([4]byte(a[12:])))
	}
	for b.Loop() {
		if err := ns.Do(func() error {
			c, err := Install(Rules{VIPs: true, Port: 1})
			if err != nil {
				return err
			}
			defer c.Close()
			return c.SetVIPs(vips)
		}); err != nil {
			b.Fatal(err)
		}
	}
}
