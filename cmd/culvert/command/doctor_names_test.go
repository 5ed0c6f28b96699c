package command

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"culvert.dev/registry/file"
)

// The doctor says whether the agent answers its names, and whether the resolver of the host asks it.
func TestDoctorLooksAtNames(t *testing.T) {
	path := filepath.Join(t.TempDir(), "agent.yaml")
	load := func(forward, more string) *file.Config {
		t.Helper()
		text := "agent:\n  gateway: 192.0.2.1:443\n  insecure: true\n  names: ['*.shop.test']\n  forwards: {" + forward + "}\n  dns: {listen: ['udp://127.0.0.54:53']" + more + "}\n"
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		c, err := file.Load(path)
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	const forward = `"127.0.7.1:5432": "db.shop.test:5432"`
	one, two := netip.MustParseAddr("127.0.7.1"), netip.MustParseAddr("192.0.2.80")
	for name, c := range map[string]struct {
		config      *file.Config
		agent, host []netip.Addr
		state       string
		text        string
		remedy      string
	}{
		"all is well":         {load(forward, ""), []netip.Addr{one}, []netip.Addr{one}, checkOK, "asks the agent for db.shop.test", ""},
		"no agent":            {load(forward, ""), nil, []netip.Addr{two}, checkFailed, "does not answer db.shop.test by DNS at 127.0.0.54:53", "start the agent"},
		"nothing is told":     {load(forward, ""), []netip.Addr{one}, nil, checkFailed, "does not ask the agent for db.shop.test: it says: lookup db.shop.test: no such host", "add install"},
		"another has it":      {load(forward, ""), []netip.Addr{one}, []netip.Addr{two}, checkFailed, "it says 192.0.2.80", "ask 127.0.0.54:53 for shop.test"},
		"install was undone":  {load(forward, ", install: resolv.conf"), []netip.Addr{one}, []netip.Addr{two}, checkFailed, "it says 192.0.2.80", "changed the resolver since"},
		"no name can be told": {load(`"127.0.7.1:5433": "db.shop.test:5432"`, ""), nil, nil, checkSkipped, "no forward", ""},
	} {
		d := newDoctorOf()
		d.ask = func(_ context.Context, server, host string) ([]netip.Addr, error) {
			if server != "127.0.0.54:53" || host != "db.shop.test" || c.agent == nil {
				return nil, errors.New("refused")
			}
			return c.agent, nil
		}
		d.lookup = func(_ context.Context, host string) (all []string, err error) {
			for _, a := range c.host {
				all = append(all, a.String())
			}
			if len(all) == 0 {
				err = &net.DNSError{Err: "no such host", Name: host, IsNotFound: true}
			}
			return all, err
		}
		d.names(t.Context(), c.config)
		if len(d.report.Checks) != 1 {
			t.Errorf("%s: %+v", name, d.report.Checks)
			continue
		}
		got := d.report.Checks[0]
		if got.Check != "names" || got.State != c.state || !strings.Contains(got.Text, c.text) || !strings.Contains(got.Remedy, c.remedy) || (c.remedy == "") != (got.Remedy == "") {
			t.Errorf("%s: got %+v, want %s, %q and %q", name, got, c.state, c.text, c.remedy)
		}
	}
}
