package admin

import (
	"net/netip"
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"

	"culvert.dev/tunnel"
)

// lives are open tunnels of all sorts, at now.
func lives(now time.Time) []tunnel.Live {
	return []tunnel.Live{
		{
			ID: 1, Start: now.Add(-time.Hour), Age: time.Hour, Proto: "sni", Listener: ":443", Source: netip.MustParseAddrPort("192.0.2.7:4001"),
			Target: "a.example.com", Service: "a", Pattern: "a.example.com", Endpoint: "10.0.0.1:8443", In: 10, Out: 20, Quiet: time.Minute,
		},
		{
			ID: 2, Start: now.Add(-time.Minute), Age: time.Minute, Proto: "connect", Listener: "127.0.0.1:3128", Source: netip.MustParseAddrPort("[::ffff:192.0.2.8]:4002"),
			Peer: tunnel.Peer{ID: "alice", Method: "basic"}, Target: "a.example.com:443", Service: "a", Pattern: "*.example.com",
			Endpoint: "orders.internal (10.0.0.2:8443)", In: 1 << 20, Out: 1 << 20, HalfClosed: true,
		},
		{
			ID: 30, Start: now.Add(-2 * time.Hour), Age: 2 * time.Hour, Proto: "tcp", Listener: ":5432", Source: netip.MustParseAddrPort("[2001:db8::7]:4003"),
			Target: "[2001:db8::1]:5432", Service: "db", Endpoint: "[2001:db8::1]:5432", Out: 5 << 20, Quiet: 2 * time.Hour,
		},
		{ID: 31, Start: now, Proto: "sni", Target: "b.example.com", Service: "b\x1b[31m", Endpoint: "10.0.0.1:9443"},
	}
}

func TestTunnelFilter(t *testing.T) {
	now := time.Now()
	for _, tt := range []struct {
		query string
		want  []uint64
	}{
		{"", []uint64{1, 2, 30, 31}},
		{"limit=2", []uint64{1, 2, 30, 31}}, // which is for others to keep
		{"id=2", []uint64{2}},
		{"id=30&id=1&id=99", []uint64{1, 30}},
		{"service=a", []uint64{1, 2}},
		{"service=A", []uint64{1, 2}},
		{"service=a.example.com", nil},
		{"target=a.example.com", []uint64{1, 2}},
		{"target=A.example.com.", []uint64{1, 2}},
		{"target=a.example.com:443", []uint64{2}},
		{"target=example.com", nil},
		{"target=2001:db8::1", []uint64{30}},
		{"target=[2001:db8::1]:5432", []uint64{30}},
		{"source=192.0.2.7", []uint64{1}},
		{"source=192.0.2.8", []uint64{2}}, // mapped
		{"source=::ffff:192.0.2.8", []uint64{2}},
		{"source=192.0.2.0/24", []uint64{1, 2}},
		{"source=192.0.2.9/31", []uint64{2}},
		{"source=0.0.0.0/0", []uint64{1, 2}},
		{"source=2001:db8::/64", []uint64{30}},
		{"source=198.51.100.0/24", nil},
		{"peer=alice", []uint64{2}},
		{"peer=Alice", nil},
		{"proto=sni", []uint64{1, 31}},
		{"listener=:443", []uint64{1}},
		{"endpoint=10.0.0.1", []uint64{1, 31}},
		{"endpoint=10.0.0.1:8443", []uint64{1}},
		{"endpoint=10.0.0.2", []uint64{2}},
		{"endpoint=10.0.0.2:8443", []uint64{2}},
		{"endpoint=orders.internal", []uint64{2}},
		{"endpoint=orders.internal (10.0.0.2:8443)", []uint64{2}},
		{"endpoint=2001:db8::1", []uint64{30}},
		{"older-than=1h", []uint64{1, 30}},
		{"older-than=61m", []uint64{30}},
		{"quiet-for=1m", []uint64{1, 30}},
		{"min-bytes=30", []uint64{1, 2, 30}},
		{"min-bytes=31B", []uint64{2, 30}},
		{"min-bytes=2MiB", []uint64{2, 30}},
		{"min-bytes=5MB", []uint64{30}},
		{"service=a&proto=sni", []uint64{1}},
		{"service=a&proto=tcp", nil},
	} {
		q, err := url.ParseQuery(tt.query)
		if err != nil {
			t.Fatal(err)
		}
		f, err := ParseTunnelFilter(q)
		if err != nil {
			t.Errorf("%s: %v", tt.query, err)
			continue
		}
		var got []uint64
		for _, l := range lives(now) {
			if f.Match(&l) {
				got = append(got, l.ID)
			}
		}
		if !slices.Equal(got, tt.want) {
			t.Errorf("%s: got %v, want %v", tt.query, got, tt.want)
		}
		if want := tt.query != "" && tt.query != "limit=2"; f.Narrows() != want {
			t.Errorf("%s narrows: %v, want %v", tt.query, f.Narrows(), want)
		}
	}
}

// What is not understood is an error: a filter that is left out would let
// through what nobody meant.
func TestTunnelFilterRefuses(t *testing.T) {
	for _, tt := range []struct{ query, want string }{
		{"servce=a", `unknown filter "servce"; the filters are id, service, `},
		{"=a", `unknown filter ""`},
		{"Service=a", `unknown filter "Service"`},
		{"service", "filter service has no value"},
		{"service=", "filter service has no value"},
		{"id=", "filter id has no value"},
		{"service=a&service=b", "filter service is given 2 times"},
		{"limit=1&limit=2", "filter limit is given 2 times"},
		{"id=0", "number from 1"}, {"id=-1", "number from 1"}, {"id=1.0", "number from 1"}, {"id=+1", "number from 1"}, {"id=x", "number from 1"},
		{"id=18446744073709551616", "number from 1"}, {"id=1&id=x", "number from 1"},
		{"source=office", "address or a range"}, {"source=192.0.2.0/33", "address or a range"}, {"source=192.0.2", "address or a range"},
		{"source=192.0.2.7:443", "address or a range"}, {"source=fe80::1%25eth0", "address or a range"}, {"source=::ffff:192.0.2.0/120", "IPv4 range"},
		{"older-than=5", "duration"}, {"older-than=0s", "more than 0"}, {"older-than=-1h", "more than 0"}, {"quiet-for=soon", "duration"}, {"quiet-for=9999999h", "duration"},
		{"min-bytes=0", "from 1"}, {"min-bytes=-1", "from 1"}, {"min-bytes=MiB", "from 1"}, {"min-bytes=1.5MiB", "from 1"}, {"min-bytes=9223372036854775807KiB", "from 1"}, {"min-bytes=1e3", "from 1"},
		{"limit=0", "from 1"}, {"limit=-5", "from 1"}, {"limit=all", "from 1"},
	} {
		q, err := url.ParseQuery(tt.query)
		if err != nil {
			t.Fatal(err)
		}
		if f, err := ParseTunnelFilter(q); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: got %+v, %v, want an error with %q", tt.query, f, err, tt.want)
		}
	}
}
