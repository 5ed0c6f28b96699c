package file

import (
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"culvert.dev/registry"
)

const endpointVias = `services:
  - name: a.test
    network: west
    endpoints:
      - 10.0.0.1:443
      - {address: "10.0.0.2:443", weight: 3, via: {connect: "https://gw.example:443", tokenFile: token}}
      - address: inner.example:443
        via: [{socks5: "proxy.example:1080"}, {connect: "https://gw.example:443", tokenFile: token}]
networks: [{name: west, cidrs: [10.0.0.0/8]}]
`

// An endpoint may have hops of its own: one, or a list. A reload reads their files again.
func TestEndpointVia(t *testing.T) {
	path := filepath.Join(t.TempDir(), "culvert.yaml")
	write := func(path, text string) {
		t.Helper()
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	token := filepath.Join(filepath.Dir(path), "token")
	write(token, "first")
	write(path, endpointVias)
	cfg, err := Load(path)
	if err != nil {
		t.Fatal(err)
	}
	gw := registry.Hop{Proto: "connect", Addresses: []string{"https://gw.example:443"}, TokenFile: token}
	want := []*[]registry.Hop{nil, {gw}, {{Proto: "socks5", Addresses: []string{"proxy.example:1080"}}, gw}}
	vias := func(cfg *Config) (all []*[]registry.Hop) {
		for _, ep := range cfg.Services[0].Endpoints {
			all = append(all, ep.Via)
		}
		return all
	}
	if got := vias(cfg); !reflect.DeepEqual(got, want) {
		t.Errorf("got %+v, want %+v", got, want)
	}
	eps := cfg.Services[0].Endpoints
	if eps[0].Network != "west" || eps[1].Network != "" || eps[1].Weight != 3 || eps[2].String() != "inner.example:443" {
		t.Errorf("endpoints %+v, want the service's network for the one that is reached directly alone", eps)
	}
	write(token, "second")
	if again, err := Reload(path, cfg); again != cfg || err != nil {
		t.Errorf("after the token has changed: got another configuration, %v, want the same", err)
	}
}

// Mistakes of an endpoint's hops are found where they are.
func TestEndpointViaMistakes(t *testing.T) {
	for _, tt := range []struct{ service, want string }{
		{`{name: a.test, endpoints: [{address: "10.0.0.1:1", via: {connect: "gw.example:1", hbone: "gw.example:2"}}]}`, "a hop has one of connect"},
		{`{name: a.test, endpoints: [{address: "10.0.0.1:1", via: {connect: "gw.example:1", tokenFile: token}}]}`, `the credentials for gateway "gw.example:1" would go there unencrypted`},
		{`{name: a.test, endpoints: [{address: "10.0.0.1:1", via: []}]}`, "leave the key out to go there directly"},
		{`{name: a.test, endpoints: [{address: "10.0.0.1:1", network: west, via: {connect: "gw.example:1"}}]}`, "network has no effect: the endpoint has via"},
		{`{name: a.test, via: [{connect: "gw.example:1"}], endpoints: ["10.0.0.2:1", {address: "10.0.0.1:1", via: {connect: "gw.example:1"}}]}`, "an endpoint has via, and so has its service"},
		{`{name: a.test, ports: [1], endpoints: [{address: "10.0.0.1:1", via: {connect: "gw.example:1"}}]}` + "\nlisteners: [{address: \"udp://:1\", service: \"a.test:1\"}]", `all endpoints of service "a.test:1" have via, whose last gateways carry streams alone`},
		{`{name: a.test, endpoints: [{address: "127.0.0.1:443"}]}` + "\nlisteners: [{address: \"127.0.0.1:443\"}]", "leads back to this gateway"},
	} {
		_, err := Parse("culvert.yaml", []byte("networks: [{name: west, cidrs: [10.8.0.0/16]}]\nservices:\n  - "+tt.service+"\n"))
		if err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: got %v, want %s", tt.service, err, tt.want)
		}
	}
	for _, good := range []string{
		`{name: a.test, endpoints: [{address: "127.0.0.1:443", via: {connect: "https://gw.example:1"}}]}` + "\nlisteners: [{address: \"127.0.0.1:443\"}]",
		`{name: a.test, ports: [1], endpoints: [{address: "10.0.0.1:1", via: {connect: "gw.example:1"}}, "10.0.0.2:1"]}` + "\nlisteners: [{address: \"udp://:1\", service: \"a.test:1\"}]",
		`{name: a.test, ports: [1], endpoints: [{address: "10.0.0.1:1", via: {connect-h2: "https://gw.example:1"}}]}` + "\nlisteners: [{address: \"udp://:1\", service: \"a.test:1\"}]",
	} {
		if _, err := Parse("culvert.yaml", []byte("services:\n  - "+good+"\n")); err != nil {
			t.Errorf("%s: %v", good, err)
		}
	}
}

// A weak hop of an endpoint is warned of, as one of a service is.
func TestEndpointViaInsecureIsWarnedOf(t *testing.T) {
	path := filepath.Join(t.TempDir(), "culvert.yaml")
	if err := os.WriteFile(path, []byte(`listeners: [{address: ":1", protocols: [connect]}]
services:
  - {name: a.test, endpoints: ["10.0.0.2:1", {address: "10.0.0.1:1", via: {connect: "gw.example:1"}}, {address: "10.0.0.3:1", via: {connect: "gw2.example:1", insecure: true}}]}
`), 0o600); err != nil {
		t.Fatal(err)
	}
	cfg, err := Load(path)
	if err != nil {
		t.Fatal(err)
	}
	const want = `gateway "gw.example:1" is reached without TLS for endpoint 10.0.0.1:1 of service "a.test": plaintext from listener :1 (connect) is refused there`
	if n := strings.Count(cfg.Warnings.Error(), "is reached without"); n != 1 || !strings.Contains(cfg.Warnings.Error(), want) {
		t.Errorf("got %v, want %s", cfg.Warnings, want)
	}
}

// A check that would go in the clear over a weak hop is not made, and that is warned of.
func TestEndpointViaUncheckedIsWarnedOf(t *testing.T) {
	for check, want := range map[string]bool{"http": true, "tcp": false, "tls": false} {
		path := filepath.Join(t.TempDir(), "culvert.yaml")
		if err := os.WriteFile(path, []byte(`listeners: [{address: ":1", protocols: [sni]}]
services:
  - {name: a.test, ports: [1], check: `+check+`, endpoints: ["10.0.0.2:1", {address: "10.0.0.1:1", via: {connect: "gw.example:1"}}, {address: "10.0.0.3:1", via: {connect: "gw2.example:1", insecure: true}}]}
`), 0o600); err != nil {
			t.Fatal(err)
		}
		cfg, err := Load(path)
		if err != nil {
			t.Fatal(err)
		}
		const text = `endpoint 10.0.0.1:1 is not checked: an http check would go to gateway "gw.example:1" without TLS`
		got := ""
		if cfg.Warnings != nil {
			got = cfg.Warnings.Error()
		}
		if strings.Contains(got, text) != want || strings.Count(got, "is not checked") > 1 {
			t.Errorf("check %s: got warnings %q, want %q: %t", check, got, text, want)
		}
	}
}
