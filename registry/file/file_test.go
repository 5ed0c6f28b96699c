package file

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"culvert.dev/registry"
	"culvert.dev/tunnel"
)

func TestFullFile(t *testing.T) {
	dir := private(t, "testdata/good")
	cfg, err := Load(filepath.Join(dir, "full.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	if cfg.Cluster != "west" || cfg.Admin != "127.0.0.1:9090" {
		t.Errorf("cluster %q, admin %q", cfg.Cluster, cfg.Admin)
	}
	defaults := Default()
	if cfg.Limits != defaults.Limits || cfg.Drain != defaults.Drain || cfg.Log != defaults.Log {
		t.Errorf("the full file writes the defaults out, got %+v %+v %+v", cfg.Limits, cfg.Drain, cfg.Log)
	}
	wantNetworks := []registry.Network{{Name: "office", CIDRs: []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24")}}}
	if !reflect.DeepEqual(cfg.Networks, wantNetworks) {
		t.Errorf("networks %+v, want %+v", cfg.Networks, wantNetworks)
	}
	if len(cfg.Listeners) != 2 {
		t.Fatalf("%d listeners, want 2", len(cfg.Listeners))
	}
	l := cfg.Listeners[0]
	if l.Address != ":443" || !slices.Equal(l.Protocols, []string{"sni", "connect"}) || l.Refusal != "alert" || !l.Service.IsZero() {
		t.Errorf("listener %+v", l)
	}
	if len(l.Auth.Users) != 2 || !strings.HasPrefix(string(l.Auth.Users["alice"]), "$2y$10$a") || !strings.HasPrefix(string(l.Auth.Users["bob"]), "$2y$10$b") {
		t.Errorf("users: %d, want alice of the file and bob of the other", len(l.Auth.Users))
	}
	for d, name := range l.Auth.Tokens {
		if name != "ci" || d[0] != 0x9f {
			t.Errorf("token of %q", name)
		}
	}
	if len(l.Auth.Tokens) != 1 {
		t.Errorf("%d tokens, want 1", len(l.Auth.Tokens))
	}
	if l.Proxy == nil || !slices.Equal(l.Proxy.From, []netip.Prefix{netip.MustParsePrefix("10.0.0.0/24")}) {
		t.Errorf("proxy in front %+v", l.Proxy)
	}
	if l := cfg.Listeners[1]; l.Proxy != nil || cfg.Services[0].ProxyProtocol != 0 || cfg.Services[1].ProxyProtocol != 2 {
		t.Errorf("PROXY protocol: in %+v, out %d and %d; want it only where the file says so", l.Proxy, cfg.Services[0].ProxyProtocol, cfg.Services[1].ProxyProtocol)
	}
	if l := cfg.Listeners[1]; l.Service != tunnel.MustParseName("db.example.com") || l.Port != 5432 {
		t.Errorf("pinned listener %+v", l)
	}
	want := registry.Service{
		Name: "orders.example.com", Names: []tunnel.Pattern{{Suffix: tunnel.MustParseName("orders.example.com")}},
		Ports: []uint16{443}, Addresses: []netip.Addr{netip.MustParseAddr("10.96.0.10")},
		Endpoints: []registry.Endpoint{
			{Addr: netip.MustParseAddr("10.0.1.7"), Port: 8443}, {Host: "orders.internal", Port: 8443}, {Addr: netip.MustParseAddr("2001:db8::1"), Port: 8443},
		},
		Exposed: true, Publish: true, ExposedTo: []string{"office"}, IdleTimeout: time.Hour, Origin: "full.yaml:21",
	}
	if !reflect.DeepEqual(*cfg.Services[0], want) {
		t.Errorf("service\ngot  %+v\nwant %+v", cfg.Services[0], want)
	}
}

func TestNames(t *testing.T) {
	data, err := os.ReadFile("testdata/good/names.yaml")
	if err != nil {
		t.Fatal(err)
	}
	cfg, err := Parse("names.yaml", data)
	if err != nil {
		t.Fatal(err)
	}
	want := "[xn--bcher-kva.example *.xn--bcher-kva.example xn--n3h.example orders.example.com outbound_.443_._.host]"
	if got := fmt.Sprint(cfg.Services[0].Names); got != want {
		t.Errorf("names %s, want %s", got, want)
	}
	want = "[xn--bcher-kva.internal:443 localhost:8443 10.0.0.1:80]"
	if got := fmt.Sprint(cfg.Services[0].Endpoints); got != want {
		t.Errorf("endpoints %s, want %s", got, want)
	}
	if !cfg.Services[1].Exposed || cfg.Services[2].Exposed {
		t.Error("exposed: want true by default and false where the file says so")
	}
	if reflect.TypeFor[registry.Service]().NumField() != 29 {
		t.Error("a service has a new field: is it in the file, the schema and the tests?")
	}
}

func TestLoadBalancing(t *testing.T) {
	cfg, err := Load("testdata/good/load-balancing.yaml")
	if err != nil {
		t.Fatal(err)
	}
	for i, want := range []registry.LoadBalancing{
		{Policy: registry.LeastConnections}, {Policy: registry.SourceHash, StickyFor: 30 * time.Minute}, {StickyFor: time.Second}, {},
	} {
		if got := cfg.Services[i].LoadBalancing; got != want {
			t.Errorf("service %d: %+v, want %+v", i, got, want)
		}
	}
	addr := netip.MustParseAddr
	want := []registry.Endpoint{{Addr: addr("10.0.0.1"), Port: 443, Weight: 3}, {Addr: addr("10.0.0.2"), Port: 443, Draining: true}, {Addr: addr("10.0.0.3"), Port: 443}}
	if got := cfg.Services[0].Endpoints; !reflect.DeepEqual(got, want) {
		t.Errorf("endpoints %+v, want %+v", got, want)
	}
	if eps := cfg.Services[1].Endpoints; eps[0].Zone != "west-1a" || eps[1].Zone != "west-1b" || cfg.Mesh.TopologyZone != "west-1a" {
		t.Errorf("endpoints %+v, gateway in %q; want the zones of the file", eps, cfg.Mesh.TopologyZone)
	}
	if got := cfg.Snapshot().Mesh; *got != cfg.Mesh {
		t.Errorf("the snapshot has %+v, want %+v", got, cfg.Mesh)
	}
	cfg, err = Parse("zone.yaml", []byte("cluster: west\nnetwork: west\nkubernetes: {discovery: {zone: east-2}}\n"))
	if err != nil {
		t.Fatal(err)
	}
	if cfg.Mesh.TopologyZone != "east-2" {
		t.Errorf("gateway in %q, want the zone of discovery", cfg.Mesh.TopologyZone)
	}
}

func TestMesh(t *testing.T) {
	t.Chdir(private(t, "testdata/good"))
	cfg, err := Load("mesh.yaml")
	if err != nil {
		t.Fatal(err)
	}
	if cfg.Mesh != (registry.Mesh{Zone: "mesh.example", Network: "east"}) {
		t.Errorf("mesh %+v", cfg.Mesh)
	}
	if v := cfg.Networks[1].Via; len(v) != 1 || v[0].TokenFile == "" || len(v[0].TrustNames) != 1 || cfg.Credentials.Trust[v[0].TrustNames[0]].PEM == "" || v[0].Proto != "connect-h2" {
		t.Errorf("via of a network: %+v", v)
	}
	cfg.Networks[1].Via = nil
	for i := range cfg.Networks {
		for j := range cfg.Networks[i].Gateways {
			g := &cfg.Networks[i].Gateways[j]
			if g.Check != (registry.Check{Kind: "tcp"}) {
				t.Errorf("gateway %s has the check %+v, want tcp by default", g.Address, g.Check)
			}
			g.Check = registry.Check{}
		}
	}
	want := []registry.Network{
		{Name: "east", CIDRs: []netip.Prefix{netip.MustParsePrefix("10.1.0.0/16")}, Near: []string{"south", "west"}, Gateways: []registry.Gateway{
			{Address: ep("10.1.0.2:443"), Public: ep("192.0.2.1:443")}, {Address: ep("10.1.0.3:443"), Public: ep("192.0.2.2:443")}}},
		{Name: "west", CIDRs: []netip.Prefix{netip.MustParsePrefix("10.2.0.0/16")}, Gateways: []registry.Gateway{
			{Address: ep("gw.west.example:15443"), Weight: 3, Transports: registry.HopsBy("sni", "connect-h2")}, {Address: ep("gw2.west.example:15443")}}},
		{Name: "south", Gateways: []registry.Gateway{{Address: ep("203.0.113.1:443")}}},
	}
	if !reflect.DeepEqual(cfg.Networks, want) {
		t.Errorf("networks\n%+v, want\n%+v", cfg.Networks, want)
	}
	web, db := cfg.Services[0], cfg.Services[1]
	if web.ID != (registry.ID{Service: "web", Namespace: "shop", Cluster: "one"}) || !web.Exported || web.Name != "web.shop.one" ||
		!reflect.DeepEqual(web.NamedPorts, []registry.NamedPort{{Name: "https", Protocol: "tcp", Port: 443}}) || !reflect.DeepEqual(web.Ports, []uint16{443}) {
		t.Errorf("web: %+v", web)
	}
	in := func(e registry.Endpoint, name, network string) registry.Endpoint {
		e.Name, e.Network = name, network
		return e
	}
	if want := []registry.Endpoint{in(ep("10.9.5.1"), "db-0", "west"), in(ep("10.9.5.2"), "db-1", "west"), in(ep("10.3.5.2"), "db-2", "south")}; !reflect.DeepEqual(db.Endpoints, want) || !db.Headless {
		t.Errorf("endpoints of db: %+v, want %+v", db.Endpoints, want)
	}
	if _, err := cfg.Mesh.Merge(cfg.Snapshot()); err != nil {
		t.Error(err)
	}
}

func ep(s string) registry.Endpoint {
	e, c := parseEndpoint(s)
	if c != nil {
		panic(c.msg)
	}
	return e
}

// A slip in any key of a good file is refused, at its place.
func TestTypos(t *testing.T) {
	data, err := os.ReadFile("testdata/good/full.yaml")
	if err != nil {
		t.Fatal(err)
	}
	tried := 0
	for _, keys := range [][]string{keys[configuration](), keys[network](), keys[Listener](), keys[Auth](), keys[Limits](), keys[Drain](), keys[Log](), keys[service](), keys[WebSocket](), keys[hop](), keys[gateway](), keys[meshName](), keys[endpoint]()} {
		for _, key := range keys {
			for _, before := range []string{"\n", " ", "{"} {
				at := bytes.Index(data, []byte(before+key+":"))
				if at < 0 || bytes.LastIndexByte(data[:at], '#') > bytes.LastIndexByte(data[:at], '\n') { // a comment
					continue
				}
				at++
				bad := slices.Concat(data[:at], []byte("x"), data[at:])
				_, err := Parse("full.yaml", bad)
				var e *Error
				if !errors.As(err, &e) {
					t.Errorf("x%s is accepted", key)
					continue
				}
				line := 1 + bytes.Count(data[:at], []byte("\n"))
				column := at - bytes.LastIndexByte(data[:at], '\n')
				place := fmt.Sprintf("full.yaml:%d:%d: unknown key \"x%s\"", line, column, key)
				if !strings.Contains(err.Error(), place) || !strings.Contains(err.Error(), fmt.Sprintf("did you mean %q?", key)) {
					t.Errorf("x%s: got\n%v\nwant %s", key, err, place)
				}
				tried++
				break
			}
		}
	}
	if tried < 30 {
		t.Errorf("%d keys were tried, want 30 and more: the sample lacks some", tried)
	}
}

func TestSizeLimit(t *testing.T) {
	path := filepath.Join(t.TempDir(), "big.yaml")
	if err := os.WriteFile(path, make([]byte, maxSize+1), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, load := range map[string]func(string) (*Config, error){"Load": Load, "LoadRoutes": LoadRoutes} {
		if _, err := load(path); err == nil || !strings.Contains(err.Error(), "16777216") {
			t.Errorf("%s of a file over the limit: %v", name, err)
		}
		if _, err := load(t.TempDir()); err == nil || !strings.Contains(err.Error(), "not a regular file") {
			t.Errorf("%s of a directory: %v", name, err)
		}
	}
	if _, err := Parse("big.yaml", make([]byte, maxSize+1)); err == nil || !strings.Contains(err.Error(), "16777216") {
		t.Errorf("Parse over the limit: %v", err)
	}
	if _, err := ParseRoutes("big", make([]byte, maxSize+1)); err == nil || !strings.Contains(err.Error(), "16777216") {
		t.Errorf("ParseRoutes over the limit: %v", err)
	}
}

// Credentials that others may change are not used.
func TestWritableByOthers(t *testing.T) {
	if runtime.GOOS == "windows" {
		return // modes mean nothing there
	}
	for _, tt := range []struct {
		file string
		mode os.FileMode
		bad  bool
	}{
		{"tokens.txt", 0o600, false}, {"tokens.txt", 0o644, false}, {"tokens.txt", 0o660, true}, {"tokens.txt", 0o602, true},
		{"users.htpasswd", 0o666, true}, {"full.yaml", 0o664, true}, {"full.yaml", 0o644, false},
	} {
		dir := private(t, "testdata/good")
		if err := os.Chmod(filepath.Join(dir, tt.file), tt.mode); err != nil {
			t.Fatal(err)
		}
		_, err := Load(filepath.Join(dir, "full.yaml"))
		if got := err != nil && strings.Contains(err.Error(), "may be written by others"); got != tt.bad {
			t.Errorf("%s with mode %o: %v, want refused %v", tt.file, tt.mode, err, tt.bad)
		}
	}
}

func TestSecretsAreHidden(t *testing.T) {
	auth := &Auth{Users: map[string]Hash{"alice": "$2y$secret"}, Tokens: map[Digest]string{{1, 2, 0xab, 0xcd}: "ci"}}
	var logged bytes.Buffer
	// Without its time, whose digits are anybody's.
	noTime := &slog.HandlerOptions{ReplaceAttr: func(groups []string, a slog.Attr) slog.Attr {
		if len(groups) == 0 && a.Key == slog.TimeKey {
			return slog.Attr{}
		}
		return a
	}}
	slog.New(slog.NewTextHandler(&logged, noTime)).Info("config", "auth", auth)
	slog.New(slog.NewJSONHandler(&logged, noTime)).Info("config", "auth", auth)
	j, err := json.Marshal(auth)
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range []string{fmt.Sprintf("%v %+v %#v %s", *auth, *auth, *auth, *auth), logged.String(), string(j)} {
		for _, secret := range []string{"$2y$secret", "171", "abcd", "0xab"} {
			if strings.Contains(s, secret) {
				t.Errorf("%q is seen in %s", secret, s)
			}
		}
	}
}

func TestTheAdminPortMayBeASocket(t *testing.T) {
	cfg, err := Load(filepath.Join(private(t, "testdata/good"), "socket.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	if cfg.Admin != "unix:/run/culvert/admin.sock" || !cfg.Control {
		t.Errorf("admin %q, control %v", cfg.Admin, cfg.Control)
	}
}

func TestParseMemory(t *testing.T) {
	for _, tt := range []struct {
		in   string
		want Memory
		bad  bool
	}{
		{"auto", 0, false},
		{"none", -1, false},
		{"16MiB", 16 << 20, false},
		{"16384KiB", 16 << 20, false},
		{"2GiB", 2 << 30, false},
		{"15MiB", 0, true},
		{"0GiB", 0, true},
		{"-5GiB", 0, true},
		{"9999999999999GiB", 0, true},
		{"2147483647GiB", 2147483647 << 30, false},
		{"512", 0, true},
		{"512MB", 0, true},
		{"1.5GiB", 0, true},
		{"MiB", 0, true},
		{"", 0, true},
	} {
		got, err := ParseMemory(tt.in)
		if got != tt.want || (err != nil) != tt.bad {
			t.Errorf("ParseMemory(%q) = %d, %v; want %d, an error: %v", tt.in, got, err, tt.want, tt.bad)
		}
	}
}
