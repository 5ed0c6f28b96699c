package file

import (
	"fmt"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"culvert.dev/registry"
)

// Gateways on the way, with what they are shown.
func TestVia(t *testing.T) {
	dir := private(t, "testdata/good")
	cfg, err := Load(filepath.Join(dir, "via.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	want := WebSocket{Path: "/edge/", Hosts: []string{"gw.example.com"}, Origins: []string{"https://app.example.com"}}
	if got := cfg.Listeners[0].WebSocket; !reflect.DeepEqual(got, want) {
		t.Errorf("websocket %+v, want %+v", got, want)
	}
	if s := cfg.Services[0]; len(s.Endpoints) != 0 || !reflect.DeepEqual(s.Via, []registry.Hop{{Proto: "connect", Addresses: []string{"gw.west.example.com:443"}}}) {
		t.Errorf("service %+v, want it behind one gateway", s)
	}
	via := cfg.Services[1].Via
	if len(via) != 2 || !strings.HasPrefix(cfg.Credentials.Trust["file:hop-ca.pem"].PEM, "-----BEGIN CERTIFICATE-----") || via[0].TokenFile != filepath.Join(dir, "hop-token.txt") {
		t.Fatalf("via %+v, want two hops, the first with the file of a token, and roots", via)
	}
	via[0].TokenFile = ""
	hops := []registry.Hop{
		{Proto: "websocket", Addresses: []string{"wss://lb1.example.com/", "wss://lb2.example.com/edge/"}, HTTP2: true, TrustNames: []string{"file:hop-ca.pem"}},
		{Proto: "connect", Addresses: []string{"10.0.0.1:3128", "https://gw.inner.example.com:443"}},
	}
	if !reflect.DeepEqual(via, hops) {
		t.Errorf("via %+v, want %+v", via, hops)
	}
	if len(cfg.files) != 3 {
		t.Errorf("files %q, want the tokens and the roots followed too, and not the hop's token", cfg.files)
	}
	hops[0].Token = "t0ken"
	if s := fmt.Sprintf("%v %+v %#v", hops, hops, hops); strings.Contains(s, "t0ken") {
		t.Errorf("a printed hop shows its token: %s", s)
	}
}

// The user that a gateway is shown, by SOCKS and by CONNECT.
func TestViaSOCKS(t *testing.T) {
	cfg, err := Load(filepath.Join(private(t, "testdata/good"), "via-socks5.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	const password = "hunter2 of: this gateway"
	hops := []registry.Hop{
		{Proto: "socks5", Addresses: []string{"proxy.example.com:1080"}, User: "alice", Password: password, Insecure: true},
		{Proto: "connect", Addresses: []string{"gw.example.com:3128"}, User: "alice", Password: password, Insecure: true},
		{Proto: "socks5", Addresses: []string{"10.0.0.1:1080", "10.0.0.2:1080"}},
	}
	if via := cfg.Services[0].Via; !reflect.DeepEqual(via, hops) {
		t.Errorf("via %+v, want %+v", via, hops)
	}
	if len(cfg.files) != 3 {
		t.Errorf("files %q, want that of the user followed too", cfg.files)
	}
	if s := fmt.Sprintf("%v %+v %#v", hops, hops, hops); strings.Contains(s, "hunter2") {
		t.Errorf("a printed hop shows its password: %s", s)
	}
}
