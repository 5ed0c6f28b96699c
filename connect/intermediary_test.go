package connect

import (
	"net/netip"
	"strings"
	"testing"

	"culvert.dev/tunnel"
)

// The client is where the hops say, counted from the end. What a client writes in front of that,
// in however many fields, changes nothing, and without an address the request is refused.
func TestIntermediaryNamesClient(t *testing.T) {
	const field = "X-Forwarded-For"
	values := func(all ...string) (f Fields) {
		for _, v := range all {
			f = append(f, Field{"x-forwarded-FOR", v}, Field{"X_Forwarded_For", "192.0.2.66"}, Field{"Forwarded", "for=192.0.2.66"})
		}
		return f
	}
	for _, row := range []struct {
		hops   int
		fields Fields
		want   string // "" for a refusal
		says   string // in its text
	}{
		{0, values("203.0.113.7"), "203.0.113.7:0", ""},
		{1, values("203.0.113.7:4711"), "203.0.113.7:4711", ""},
		{1, values("198.51.100.1, 203.0.113.7"), "203.0.113.7:0", ""},
		{1, values("198.51.100.1,203.0.113.7 \t"), "203.0.113.7:0", ""},
		{1, values("198.51.100.1", "203.0.113.7"), "203.0.113.7:0", ""},
		{1, values("unknown, 203.0.113.7"), "203.0.113.7:0", ""},
		{2, values("198.51.100.1, 203.0.113.7, 10.0.0.1"), "203.0.113.7:0", ""},
		{2, values("198.51.100.1, 203.0.113.7", "10.0.0.1"), "203.0.113.7:0", ""},
		{3, values("198.51.100.1, 203.0.113.7", "10.0.0.1"), "198.51.100.1:0", ""},
		{1, values("2001:db8::7"), "[2001:db8::7]:0", ""},
		{1, values("[2001:db8::7]"), "[2001:db8::7]:0", ""},
		{1, values("[2001:db8::7]:4711"), "[2001:db8::7]:4711", ""},
		{1, values("::ffff:203.0.113.7"), "203.0.113.7:0", ""},
		{1, nil, "", "has 0 addresses"},
		{2, values("203.0.113.7"), "", "has 1 addresses, and the client is expected at place 2 from the end"},
		{1, values(""), "", "not an address"},
		{1, values("203.0.113.7,"), "", "not an address"},
		{1, values("203.0.113.7", "unknown"), "", `the client "unknown"`},
		{1, values("fe80::1%eth0"), "", "not an address"},
		{1, values("[203.0.113.7]"), "", "not an address"},
		{1, values("[2001:db8::7"), "", "not an address"},
		{1, values("203.0.113.7:65536"), "", "not an address"},
		{1, values("203.0.113"), "", "not an address"},
	} {
		req := &tunnel.Request{Source: netip.MustParseAddrPort("10.0.0.9:1000")}
		p := &Protocol{Intermediary: Intermediary{ClientField: field, Hops: row.hops}}
		_, err := p.Admit(t.Context(), req, "svc.test:443", row.fields)
		switch {
		case row.want == "":
			if tunnel.ReasonOf(err) != tunnel.BadRequest || err == nil || !strings.Contains(err.Error(), row.says) || !strings.Contains(err.Error(), field) {
				t.Errorf("%d hops, %q: got %v, want bad-request with %q", row.hops, row.fields, err, row.says)
			}
		case err != nil || req.Source.String() != row.want:
			t.Errorf("%d hops, %q: got %v, %v; want %s", row.hops, row.fields, req.Source, err, row.want)
		}
		req = &tunnel.Request{Source: netip.MustParseAddrPort("10.0.0.9:1000")}
		if _, err := new(Protocol).Admit(t.Context(), req, "svc.test:443", row.fields); err != nil || req.Source.String() != "10.0.0.9:1000" {
			t.Errorf("%q, to a listener without a load balancer: got %v, %v; want the connection's peer", row.fields, req.Source, err)
		}
	}
}

// Where a field for credentials is named, no other one counts.
func TestIntermediaryCredentials(t *testing.T) {
	auth := &Bearer{Verify: Tokens(map[string]string{"alice": "good"})}
	for _, row := range []struct {
		fields Fields
		id     string
		says   string
	}{
		{Fields{{"culvert-credentials", "Bearer good"}}, "alice", ""},
		{Fields{{"Culvert-Credentials", "Bearer good"}, {"Proxy-Authorization", "Bearer bad"}, {"Proxy-Authorization", "Bearer bad"}}, "alice", ""},
		{Fields{{"Proxy-Authorization", "Bearer good"}, {"Authorization", "Bearer good"}}, "", "no credentials"},
		{Fields{{"Culvert_Credentials", "Bearer good"}}, "", "no credentials"},
		{Fields{{"Culvert-Credentials", "Bearer bad"}, {"Proxy-Authorization", "Bearer good"}}, "", "not accepted"},
		{Fields{{"Culvert-Credentials", "good"}}, "", "not accepted"},
		{Fields{{"Culvert-Credentials", "Bearer good"}, {"Culvert-Credentials", "Bearer good"}}, "", "2 Culvert-Credentials fields"},
	} {
		p := &Protocol{Auth: auth, Intermediary: Intermediary{CredentialsField: "Culvert-Credentials"}}
		req := &tunnel.Request{}
		_, err := p.Admit(t.Context(), req, "svc.test:443", row.fields)
		if req.Peer.ID != row.id || (err == nil) != (row.says == "") || err != nil && !strings.Contains(err.Error(), row.says) {
			t.Errorf("%q: got %q, %v; want %q, %q", row.fields, req.Peer.ID, err, row.id, row.says)
		}
	}
}
