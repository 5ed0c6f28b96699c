package dns

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"testing"
)

func TestHostsFile(t *testing.T) {
	s := serve(t, "a.test. 60 IN A 192.0.2.1", "b.test. 60 IN A 192.0.2.2")
	r, c := resolver(t, s.addr)
	expect(t, r, "a.test", "192.0.2.1")
	write := func(content string) {
		t.Helper()
		if err := os.WriteFile(r.Hosts, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		c.add(fileCheckInterval)
	}
	write("# a comment\n10.0.0.1 A.test alias # more\n::1%lo a.test\nnonsense b.test\n10.0.0.2\n")
	expect(t, r, "a.test", "10.0.0.1 ::1")
	expect(t, r, "alias", "10.0.0.1 ::1"[:8])
	expect(t, r, "b.test", "192.0.2.2")
	write("10.0.0.22 a.test\n")
	expect(t, r, "a.test", "10.0.0.22")
	if err := os.Remove(r.Hosts); err != nil {
		t.Fatal(err)
	}
	c.add(fileCheckInterval)
	expect(t, r, "a.test", "192.0.2.1")
}

func TestSearchList(t *testing.T) {
	s := serve(t, "db.ns.cluster.test. 60 IN A 192.0.2.1", "db.sub.cluster.test. 60 IN A 192.0.2.2", "db.sub. 60 IN A 192.0.2.3", "a.b.c. 60 IN A 192.0.2.4", "a.b.c.cluster.test. 60 IN A 192.0.2.5", "lone. 60 IN A 192.0.2.6")
	host, port, _ := net.SplitHostPort(s.addr)
	r, c := resolver(t)
	r.ResolvConf = filepath.Join(t.TempDir(), "resolv.conf")
	// resolv.conf has no place for a port.
	if err := os.WriteFile(r.ResolvConf, []byte("nameserver "+host+"\nsearch ns.cluster.test Cluster.test.\noptions ndots:2\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	conf := r.settings()
	if len(conf.servers) != 1 || conf.servers[0] != host+":53" {
		t.Fatalf("servers %v", conf.servers)
	}
	conf.servers[0] = net.JoinHostPort(host, port)
	for _, tt := range []struct{ host, want string }{
		{"db", "192.0.2.1"},
		{"db.sub", "192.0.2.2"}, // found by the second suffix before it is tried as it is
		{"db.sub.", "192.0.2.3"},
		{"lone", "192.0.2.6"},
		{"a.b.c", "192.0.2.4"}, // has ndots dots
		{"no.such.name", "not found"},
		{"nobody", "not found"},
	} {
		expect(t, r, tt.host, tt.want)
	}
	if n := s.count("no.such.name.cluster.test. A"); n != 0 {
		t.Error("a name with enough dots was tried with the search list")
	}
	if err := os.WriteFile(r.ResolvConf, []byte("nameserver 192.0.2.53\nnameserver 2001:db8::53\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	c.add(fileCheckInterval)
	if got := fmt.Sprint(r.settings().servers); got != "[192.0.2.53:53 [2001:db8::53]:53]" {
		t.Errorf("after a change: servers %s", got)
	}
	if got := fmt.Sprint(r.Upstreams()); got != "[192.0.2.53 2001:db8::53]" {
		t.Errorf("upstreams %s", got)
	}
}

func TestServersWithAndWithoutPort(t *testing.T) {
	r, _ := resolver(t, "192.0.2.1", "2001:db8::1", "192.0.2.1:5353", "[2001:db8::1]:5353", "dns.test")
	want := "[192.0.2.1:53 [2001:db8::1]:53 192.0.2.1:5353 [2001:db8::1]:5353 dns.test:53]"
	if got := fmt.Sprint(r.settings().servers); got != want {
		t.Errorf("servers %s, want %s", got, want)
	}
}

// Without resolv.conf the standard library is asked, by way of the cache.
func TestWithoutResolvConf(t *testing.T) {
	s := serve(t, "a.test. 3600 IN A 192.0.2.1")
	old := net.DefaultResolver
	net.DefaultResolver = &net.Resolver{PreferGo: true, Dial: func(ctx context.Context, network, _ string) (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, network, s.addr)
	}}
	defer func() { net.DefaultResolver = old }()
	r, c := resolver(t)
	r.ResolvConf = filepath.Join(t.TempDir(), "none")
	expect(t, r, "a.test", "192.0.2.1")
	s.set(t, "a.test. 3600 IN A 192.0.2.2")
	expect(t, r, "a.test", "192.0.2.1")
	c.add(otherTTL)
	expect(t, r, "a.test", "192.0.2.2")
	expect(t, r, "nobody.test", "not found")
}
