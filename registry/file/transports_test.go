package file

import (
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"culvert.dev/registry"
	"culvert.dev/tunnel"
)

// What is asked of a gateway is what its transports say, in their order.
func TestTransportsOfGateways(t *testing.T) {
	cfg, err := Load(filepath.Join("testdata", "good", "transports.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	pem := func(name string) string {
		b, err := os.ReadFile(filepath.Join("testdata", "good", name))
		if err != nil {
			t.Fatal(err)
		}
		return string(b)
	}
	crt, key, ca := pem("gw.crt"), registry.Secret(pem("gw.key")), pem("hop-ca.pem")
	north := []string{"file:hop-ca.pem#north.example"}
	if got := cfg.Credentials; got.Keys["file:gw.crt"] != (KeyPair{crt, key}) || got.Trust[north[0]] != (CAs{"north.example", ca}) || got.Trust["file:hop-ca.pem"] != (CAs{"", ca}) {
		t.Errorf("the credentials are %+v, want those of the files", got)
	}
	user, password, _ := strings.Cut(strings.TrimSpace(pem("hop-user.txt")), ":")
	want := []registry.Hop{
		{Proto: "connect-h3", Addresses: []string{"gw.north.example:443"}, KeyName: "file:gw.crt", TrustNames: north, Peers: []string{"spiffe://north.example/gw"}},
		{Proto: "connect-h2", Addresses: []string{"https://gw.north.example:443"}, TLS: true, ServerName: "gw.example.com", User: user, Password: registry.Secret(password)},
		{Proto: "websocket", Addresses: []string{"wss://gw.north.example:443/tunnels/"}, TLS: true, Path: "/tunnels/", HTTP2: true, TokenFile: filepath.Join("testdata", "good", "hop-token.txt")},
		{Proto: "connect", Addresses: []string{"gw.north.example:443"}, Insecure: true},
	}
	gateways := cfg.Networks[0].Gateways
	if got := gateways[0].Carriers(gateways[0].Address); !reflect.DeepEqual(got, want) {
		t.Errorf("the carriers are\n%+v\nwant\n%+v", got, want)
	}
	if !gateways[0].Supports("sni") || gateways[1].Supports("sni") || !gateways[1].Supports("quic") {
		t.Error("sni and quic are not those of the list")
	}
	if got, want := gateways[1].Carriers(gateways[1].Address), []registry.Hop{{Proto: "connect", Addresses: []string{"gw2.north.example:443"}}, {Proto: "connect-h3", Addresses: []string{"gw2.north.example:443"}}}; !reflect.DeepEqual(got, want) {
		t.Errorf("the carriers of the short form are %+v, want %+v", got, want)
	}
	if got := gateways[2].Carriers(gateways[2].Address); len(got) != 1 || !slices.Equal(got[0].TrustNames, north) || got[0].Security(got[0].Addresses[0]) != tunnel.Mutual {
		t.Errorf("the carriers of hbone are %+v, want one with the roots of its trust domain", got)
	}
	if got, want := cfg.Snapshot().GatewayTransport, (&registry.Hop{KeyName: "file:gw.crt", TrustNames: []string{"file:hop-ca.pem"}, ServerName: "gw.example.com", Path: "/tunnels/"}); !reflect.DeepEqual(got, want) {
		t.Errorf("gateways that are found are asked by %+v, want %+v", got, want)
	}
	if shown := fmt.Sprintf("%+v %#v", cfg.Networks, cfg.Networks); strings.Contains(shown, string(key)) || strings.Contains(shown, password) {
		t.Error("a secret prints itself")
	}
}

// Keys of gateways are read again while the gateway runs, and so is how those are asked
// that discovery finds.
func TestTransportsAreReadAgain(t *testing.T) {
	dir := t.TempDir()
	write := func(name, content string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	path := filepath.Join(dir, "culvert.yaml")
	write("culvert.yaml", `
cluster: home
networks:
  - {name: north, gateways: [{address: "gw.test:443", transports: [{protocol: connect-h2, tls: true, userFile: user}]}]}
services: [{name: a.test, ports: [1], network: north, endpoints: [10.2.5.1]}]
kubernetes: {discovery: {gatewayTransport: {userFile: user}}}
`)
	write("user", "gw:first")
	first, err := Load(path)
	if err != nil {
		t.Fatal(err)
	}
	write("user", "gw:second")
	second, err := Reload(path, first)
	if err != nil {
		t.Fatal(err)
	}
	for i, password := range []registry.Secret{second.Networks[0].Gateways[0].Transports[0].Password, second.GatewayTransport.Password} {
		if password != "second" {
			t.Errorf("password %d is %q, want the new one", i, string(password))
		}
	}
	if first.GatewayTransport.Password != "first" {
		t.Error("a reload has changed the configuration before it")
	}
	if parts := first.RestartNeeded(second); len(parts) > 0 {
		t.Errorf("a restart is needed for %q, want none", parts)
	}
}

// A network is reported unless one of its gateways is reached by mutual transports alone.
func TestInsecureTransports(t *testing.T) {
	for transports, want := range map[string]string{
		`{protocol: connect-h2, tls: true, tokenFile: hop-token.txt}`:                                                              "",
		`{protocol: connect-h3, tokenFile: hop-token.txt}, sni`:                                                                    "",
		`{protocol: connect-h2, tls: true}`:                                                                                        `gateway "gw.test:443" of network "north" is reached without credentials`,
		`{protocol: connect-h3, tokenFile: hop-token.txt}, {protocol: websocket, tls: true}`:                                       `gateway "gw.test:443" of network "north" is reached without credentials`,
		`connect, {protocol: connect-h3, tokenFile: hop-token.txt}`:                                                                `gateway "gw.test:443" of network "north" is reached without TLS`,
		`{protocol: connect-h3, tokenFile: hop-token.txt}, {protocol: connect, insecure: true}`:                                    "",
		`{protocol: connect-h3, tokenFile: hop-token.txt}, {protocol: connect, insecure: true}, {protocol: connect-h2, tls: true}`: `gateway "gw.test:443" of network "north" is reached without TLS`,
		`sni`: "",
	} {
		name := filepath.Join("testdata", "good", "of a test")
		cfg, err := LoadFrom(name, strings.NewReader(`
listeners: [{address: ":1", protocols: [connect]}]
network: home
networks:
  - {name: home, cidrs: [10.1.0.0/16]}
  - {name: north, gateways: [{address: "gw.test:443", transports: [`+transports+`]}]}
services: [{name: a.test, ports: [1], network: north, endpoints: [10.2.5.1]}]
`))
		if err != nil {
			t.Errorf("%s: %v", transports, err)
			continue
		}
		got := slices.DeleteFunc(cfg.Warnings, func(e *Error) bool { return strings.Contains(e.Msg, "may be read by everybody") })
		if (len(got) > 0) != (want != "") || len(got) > 0 && !strings.Contains(got[0].Msg, want) {
			t.Errorf("%s: got the warnings %v, want %q", transports, got, want)
		}
	}
}
