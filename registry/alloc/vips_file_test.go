package alloc

import (
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

var sampleVIPs = []VIP{
	{Service: "db.example.com", Address: netip.MustParseAddr("240.17.3.9"), Since: noon},
	{Service: "west/default/mail", Address: netip.MustParseAddr("240.17.3.10"), Since: noon, Gone: noon.Add(time.Hour)},
	{Service: "db.example.com", Address: netip.MustParseAddr("fd12:3456:789a::9"), Since: noon.Add(time.Nanosecond)},
}

func TestVIPFile(t *testing.T) {
	s := VIPFile(filepath.Join(t.TempDir(), "vips.json"))
	if got, err := s.Load(); got != nil || err != nil {
		t.Errorf("without a file: got %v, %v, want nothing", got, err)
	}
	for _, want := range [][]VIP{sampleVIPs, nil, sampleVIPs[1:2]} {
		if err := s.Save(want); err != nil {
			t.Fatal(err)
		}
		if got, err := s.Load(); !slices.Equal(got, want) || err != nil {
			t.Errorf("got %v, %v, want %v", got, err, want)
		}
	}
	data, err := os.ReadFile(s.Path)
	want := `{"version": 1, "vips": [
  {"service":"west/default/mail","address":"240.17.3.10","since":"2026-03-01T12:00:00Z","gone":"2026-03-01T13:00:00Z"}
]}
`
	if string(data) != want || err != nil {
		t.Errorf("got %s, %v, want %s", data, err, want)
	}
}

// A state that can't be understood is refused as a whole: nobody's address is
// given anew by itself.
func TestVIPFileRefused(t *testing.T) {
	state := func(text string) string { return `{"version": 1, "vips": [` + text + `]}` }
	const one = `{"service": "a", "address": "240.0.0.1", "since": "2026-03-01T12:00:00Z"}`
	for _, tt := range []struct{ name, text, want string }{
		{"empty", "", "it is empty"},
		{"cut", state(one)[:60], "unexpected end of JSON input"},
		{"zeros", "\x00\x00\x00\x00", "line 1: invalid character '\\x00'"},
		{"the ports", `{"version": 1, "ports": []}`, `unknown field "ports"`},
		{"version 2", `{"version": 2, "vips": {}}`, "it is of version 2, and this culvert reads version 1"},
		{"unknown key of an entry", state(`{"service": "a", "port": 1}`), `unknown field "port"`},
		{"no service", state(one + `, {"address": "240.0.0.2"}`), "entry 2 names no service"},
		{"no address", state(`{"service": "a"}`), "entry 1, a, has no address"},
		{"empty address", state(`{"service": "a", "address": ""}`), "entry 1, a, has no address"},
		{"not an address", state(`{"service": "a", "address": "240.0.0"}`), "240.0.0"},
		{"a zone", state(`{"service": "a", "address": "fd00::1%eth0"}`), `entry 1, a, has the address "fd00::1%eth0"`},
		{"mapped", state(`{"service": "a", "address": "::ffff:240.0.0.1"}`), `entry 1, a, has the address "::ffff:240.0.0.1"`},
		{"time", state(`{"service": "a", "address": "240.0.0.1", "since": "yesterday"}`), "yesterday"},
		{"service twice", state(one + "," + strings.Replace(one, "0.1", "0.2", 1)), "entry 2, a, has an IPv4 address already"},
		{"address twice", state(one + "," + strings.Replace(one, `"a"`, `"b"`, 1)), "entry 2, b, has 240.0.0.1, which is assigned to a"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := VIPFile(filepath.Join(t.TempDir(), "vips.json"))
			if err := os.WriteFile(s.Path, []byte(tt.text), 0o600); err != nil {
				t.Fatal(err)
			}
			got, err := s.Load()
			if err == nil || got != nil || !strings.Contains(err.Error(), tt.want) || !strings.Contains(err.Error(), fmt.Sprintf("%q can't be used", s.Path)) {
				t.Errorf("got %v, %v\nwant %q", got, err, tt.want)
			}
		})
	}
	if _, err := VIPFile(t.TempDir()).Load(); err == nil || !strings.Contains(err.Error(), "not a regular file") {
		t.Errorf("a folder: %v", err)
	}
}

// Whatever is in a file, it is refused or kept as it is by writing and reading.
func FuzzVIPFile(f *testing.F) {
	good, err := VIPFile("").encode([]VIP{
		{Service: "a", Address: netip.MustParseAddr("240.0.0.1"), Since: noon},
		{Service: "a", Address: netip.MustParseAddr("fd00::1"), Since: noon, Gone: noon},
	})
	if err != nil {
		f.Fatal(err)
	}
	f.Add(good)
	f.Add([]byte(`{"version": 1, "vips": [{"service":"b","address":"::","since":"2026-03-01T12:00:00+01:00","gone":"0001-01-01T00:00:00Z"}]}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		all, err := parseVIPs(data)
		if err != nil {
			return
		}
		seen := map[string]bool{}
		for _, a := range all {
			key := a.Service + " " + Family(a.Address)
			if a.Service == "" || !a.Address.IsValid() || a.Address != a.Address.Unmap().WithZone("") || seen[key] || seen[a.Address.String()] {
				t.Errorf("accepted %+v", a)
			}
			seen[key], seen[a.Address.String()] = true, true
		}
		again, err := VIPFile("").encode(all)
		if err != nil {
			return // a year that JSON has no form for
		}
		back, err := parseVIPs(again)
		if err != nil || len(back) != len(all) {
			t.Fatalf("%d of %d come back: %v", len(back), len(all), err)
		}
		for i := range all {
			if back[i].Service != all[i].Service || back[i].Address != all[i].Address || !back[i].Since.Equal(all[i].Since) || !back[i].Gone.Equal(all[i].Gone) {
				t.Errorf("%+v comes back as %+v", all[i], back[i])
			}
		}
	})
}
