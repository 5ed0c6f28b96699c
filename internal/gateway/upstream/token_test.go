package upstream

import (
	"errors"
	"strings"
	"testing"
	"time"

	"culvert.dev/registry"
	"culvert.dev/tunnel"
)

// A token file is read again when it changes, and its last token stays while it cannot be
// used.
func TestTokenFile(t *testing.T) {
	var content string
	var failure error
	reads := 0
	f := &tokenFile{name: "token", readFile: func(string) ([]byte, error) {
		reads++
		return []byte(content), failure
	}}
	now := time.Now()
	for _, step := range []struct {
		name, content string
		failure       error
		after         time.Duration
		want, err     string
	}{
		{"before there is one", "", errors.New("no such file"), 0, "", "no such file"},
		{"at the same moment", "first", nil, tokenFileInterval / 2, "", "no such file"},
		{"the first", "first\n", nil, tokenFileInterval, "first", ""},
		{"at the same moment again", "second", nil, tokenFileInterval / 2, "first", ""},
		{"the second", "second", nil, tokenFileInterval, "second", ""},
		{"while it is written", "", nil, tokenFileInterval, "second", ""},
		{"of two words", "a b", nil, tokenFileInterval, "second", ""},
		{"with a line feed in it", "a\nProxy-Authorization: b", nil, tokenFileInterval, "second", ""},
		{"while it is gone", "third", errors.New("no such file"), tokenFileInterval, "second", ""},
		{"after a clock was set back", "third", nil, -time.Hour, "third", ""},
	} {
		content, failure = step.content, step.failure
		now = now.Add(step.after)
		got, err := f.token(now)
		if got != step.want || step.err == "" && err != nil || step.err != "" && (err == nil || !strings.Contains(err.Error(), step.err)) {
			t.Errorf("%s: got %q and %v, want %q and %q", step.name, got, err, step.want, step.err)
		}
	}
	if reads != 8 {
		t.Errorf("the file was read %d times, want 8", reads)
	}
	bad := &tokenFile{name: "token", readFile: func(string) ([]byte, error) { return []byte("se cret"), nil }}
	if _, err := bad.token(now); err == nil || strings.Contains(err.Error(), "cret") {
		t.Errorf("a file of two words: got %v, want an error that does not quote it", err)
	}
}

// Equal hops share their carriers, and those that show another token do not.
func TestHopTokensDiffer(t *testing.T) {
	up := &Transports{Direct: &tunnel.NetDialer{}}
	hop := func(file string, svid *registry.JWTSVID) *NextHop {
		t.Helper()
		n, err := up.NextHop([]registry.Hop{{Proto: "connect-h2", Addresses: []string{"https://gw.example:1"}, TokenFile: file, JWTSVID: svid}})
		if err != nil {
			t.Fatal(err)
		}
		if got := n.Info().Security; (got == tunnel.Mutual) != (file != "" || svid != nil) {
			t.Errorf("security of %q and %v: got %v", file, svid, got)
		}
		return n
	}
	svid := func(id string, audience ...string) *registry.JWTSVID {
		return &registry.JWTSVID{ID: id, Audience: audience}
	}
	all := []*NextHop{hop("", nil), hop("a", nil), hop("b", nil), hop("", svid("", "a")), hop("", svid("", "b")), hop("", svid("", "a", "b")), hop("", svid("spiffe://a.example/b", "a"))}
	for i, one := range all {
		for j, other := range all[:i] {
			if one == other {
				t.Errorf("hops %d and %d share their carriers", i, j)
			}
		}
	}
	if hop("", svid("", "a")) != all[3] || hop("a", nil) != all[1] {
		t.Error("equal hops do not share their carriers")
	}
	if _, err := up.NextHop([]registry.Hop{{Proto: "connect", Addresses: []string{"gw.example:1"}, JWTSVID: svid("", "a")}}); err == nil || !strings.Contains(err.Error(), "unencrypted") {
		t.Errorf("without TLS: got %v, want an error", err)
	}
	if _, err := all[3].DialContext(t.Context(), "tcp", "a.example:1"); tunnel.ReasonOf(err) != tunnel.DialFailed || !strings.Contains(err.Error(), `no token to show to gateway "https://gw.example:1"`) {
		t.Errorf("without a Workload API: got %v, want %s", err, tunnel.DialFailed)
	}
}
