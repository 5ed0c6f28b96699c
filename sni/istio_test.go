package sni

import (
	"testing"

	"culvert.dev/tunnel"
)

func TestParseIstio(t *testing.T) {
	for _, c := range []struct {
		name    string
		service string // "" means that it is not Istio's
		port    uint16
		subset  string
	}{
		{"outbound_.443_._.svc.example.test", "svc.example.test", 443, ""},
		{"outbound_.80_._.reviews.default.svc.cluster.local", "reviews.default.svc.cluster.local", 80, ""},
		{"outbound_.80_.v1_.reviews.default.svc.cluster.local", "reviews.default.svc.cluster.local", 80, "v1"},
		{"outbound_.65535_.a-b_.x", "x", 65535, "a-b"},
		{"OUTBOUND_.443_._.SVC.example.test.", "svc.example.test", 443, ""},
		{"outbound_.443_._._tcp.example.test", "_tcp.example.test", 443, ""},

		{"svc.example.test", "", 0, ""},
		{"inbound_.443_._.svc.example.test", "", 0, ""},
		{"xoutbound_.443_._.svc.example.test", "", 0, ""},
		{"outbound_.443_.svc.example.test", "", 0, ""},
		{"outbound_.443_._.v1_.svc.example.test", "", 0, ""},
		{"outbound_.0_._.svc.example.test", "", 0, ""},
		{"outbound_.65536_._.svc.example.test", "", 0, ""},
		{"outbound_.0443_._.svc.example.test", "", 0, ""},
		{"outbound_.http_._.svc.example.test", "", 0, ""},
		{"outbound_.-1_._.svc.example.test", "", 0, ""},
		{"outbound_._._.svc.example.test", "", 0, ""},
	} {
		service, port, subset, ok := ParseIstio(tunnel.MustParseName(c.name))
		if service.String() != c.service || port != c.port || subset != c.subset || ok != (c.service != "") {
			t.Errorf("ParseIstio(%q) = %q, %d, %q, %t, want %q, %d, %q", c.name, service, port, subset, ok, c.service, c.port, c.subset)
		}
	}
}
