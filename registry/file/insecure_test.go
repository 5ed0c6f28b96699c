package file

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// Each way by which plaintext would be refused is warned of, with what it would come
// by; TLS by name alone needs no warning.
func TestInsecureWaysAreWarnedOf(t *testing.T) {
	const rest = `network: home
networks:
  - {name: home, cidrs: [10.0.0.0/8]}
  - {name: lab, cidrs: [10.9.0.0/16]}
  - {name: inner, cidrs: [10.9.9.0/24], insecure: true}
  - {name: unused, cidrs: [192.0.2.0/24]}
  - {name: plain, gateways: [{address: "gw.plain.example:1", transports: [sni, connect]}]}
services:
  - {name: a.test, ports: [1], endpoints: ["10.0.0.2:1"]}
  - {name: b.test, ports: [1], endpoints: ["10.9.9.1:1", "10.9.0.1:1", "10.9.0.2:1"]}
  - {name: c.test, ports: [1], via: [{connect: "gw.example:1"}]}
  - {name: d.test, ports: [1], via: [{connect: "gw.example:1"}, {connect-h2: "https://gw.example:1", certificateFile: gw.crt, keyFile: gw.key}]}
  - {name: bare.test, ports: [1], via: [{connect-h2: "https://gw.example:1"}]}
  - {name: open.test, ports: [1], via: [{connect: "gw.example:1"}], insecure: true}
  - {name: e.test, ports: [1], via: [{socks5: "gw.example:1", insecure: true}]}
  - {name: f.test, ports: [1], via: [{socks5: "127.0.0.1:1"}]}
  - {name: g.test, ports: [1], via: [{connect: "127.0.0.1:1"}, {connect: "[::1]:1"}]}
  - {name: h.test, ports: [1], via: [{connect: "https://gw.example:1"}, {connect: "127.0.0.1:1"}]}
`
	always := []string{
		`network "inner" is insecure: plaintext may go there without mutual TLS`,
		`service "open.test" is insecure: plaintext may go to other networks and gateways without mutual TLS`,
	}
	ways := []string{
		`gateway "gw.plain.example:1" of network "plain" is reached without TLS`,
		`network "lab" has no gateway, and endpoint 10.9.0.1:1 of service "b.test" there is reached unencrypted`,
		`gateway "gw.example:1" is reached without TLS for service "c.test"`,
		`gateway "https://gw.example:1" is reached without credentials for service "bare.test"`,
		`gateway "127.0.0.1:1" is reached without TLS for service "h.test"`,
	}
	dir := t.TempDir()
	for _, name := range []string{"gw.crt", "gw.key"} {
		pem, err := os.ReadFile(filepath.Join("testdata", "bad", name))
		if err == nil {
			err = os.WriteFile(filepath.Join(dir, name), pem, 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	for listeners, by := range map[string]string{
		`[{address: ":1", protocols: [sni]}]`:                                                                                                      "",
		`[{address: ":1", protocols: [sni, connect]}, {address: ":2", service: a.test}]`:                                                           "listener :1 (connect), listener :2 (service)",
		`[{address: ":1", tls: {certificateFile: gw.crt, keyFile: gw.key, names: [gw.example.com], protocols: [hbone], clientCAFile: gw.crt}}]`:    "listener :1 (hbone)",
		`[{address: ":1", protocols: [connect]}, {address: ":2"}, {address: ":3"}, {address: ":4"}, {address: ":5"}, {address: "127.0.0.1:3128"}]`: "listener :1 (connect), listener :2 (connect, connect-h2), listener :3 (connect, connect-h2), listener :4 (connect, connect-h2), 2 more",
	} {
		path := filepath.Join(dir, "culvert.yaml")
		if err := os.WriteFile(path, []byte("listeners: "+listeners+"\n"+rest), 0o600); err != nil {
			t.Fatal(err)
		}
		c, err := Load(path)
		if err != nil {
			t.Fatal(err)
		}
		got := c.Warnings.Error()
		want := slices.Clone(always)
		if by != "" {
			for _, way := range ways {
				want = append(want, way+": plaintext from "+by+` is refused there with "insecure", and only TLS is carried`)
			}
		}
		n := 0
		for _, w := range c.Warnings {
			if strings.Contains(w.Msg, "insecure") {
				n++
			}
		}
		for _, w := range want {
			if !strings.Contains(got, w) {
				t.Errorf("%s: the warnings are\n%s\nwant %s", listeners, got, w)
			}
		}
		if n != len(want) {
			t.Errorf("%s: %d warnings\n%s\nwant %d", listeners, n, got, len(want))
		}
	}
}
