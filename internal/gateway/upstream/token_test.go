package upstream

import (
	"errors"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"culvert.dev/connect"
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

// Credentials are sent in the header that the hop names, and in no other one.
func TestCredentialsField(t *testing.T) {
	got := make(chan string, 1)
	srv := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var sent []string
		for name, values := range r.Header {
			for _, v := range values {
				if strings.HasPrefix(v, "Bearer ") || strings.HasPrefix(v, "Basic ") {
					sent = append(sent, name+": "+v)
				}
			}
		}
		got <- strings.Join(sent, "; ")
		w.WriteHeader(http.StatusForbidden)
	}))
	srv.Config.Protocols = new(http.Protocols)
	srv.Config.Protocols.SetHTTP1(true)
	srv.Config.Protocols.SetUnencryptedHTTP2(true)
	srv.Start()
	t.Cleanup(srv.Close)
	at := srv.Listener.Addr().String()
	for proto, address := range map[string]string{"connect": at, "connect-h2": at, "websocket": "ws://" + at + "/"} {
		for _, h := range []registry.Hop{{Token: "secret"}, {TokenFile: "token"}, {User: "alice", Password: "secret"}} {
			h.Proto, h.Addresses, h.CredentialsField = proto, []string{address}, "Culvert-Credentials"
			up := &Transports{Direct: &tunnel.NetDialer{}, ReadFile: func(string) ([]byte, error) { return []byte("secret\n"), nil }}
			n, err := up.NextHop([]registry.Hop{h})
			if err != nil {
				t.Fatal(err)
			}
			if c, err := n.DialContext(t.Context(), "tcp", "svc.test:443"); err == nil {
				_ = c.Close()
				t.Errorf("%s: a request that was answered 403 has a tunnel", proto)
			}
			want := "Culvert-Credentials: Bearer secret"
			if h.User != "" {
				want = "Culvert-Credentials: " + connect.BasicCredentials("alice", "secret")
			}
			if sent := <-got; sent != want {
				t.Errorf("%s: got %q, want %q", proto, sent, want)
			}
			up.Close()
		}
	}
}
