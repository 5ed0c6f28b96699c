package file

import (
	"fmt"
	"path/filepath"
	"slices"
	"testing"

	"culvert.dev/policy"
)

// A program that an agent lets callers reach is a listener that ends mutual TLS, a service on
// loopback, and policies for that listener alone. Programs of one address share the listener, and
// entries of one program the service.
func TestAgentInbound(t *testing.T) {
	c, err := Load(filepath.Join(private(t, "testdata/good"), "agent-inbound.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	listeners := c.Listeners[len(c.Listeners)-3:]
	if l := listeners[0]; l.Address != ":8443" || len(l.TLS) != 1 || len(l.TLS[0].Names) != 1 || l.TLS[0].Optional {
		t.Errorf("the listener for TLS is %+v", l)
	}
	if l := listeners[1]; l.Address != ":15008" || len(l.TLS) != 1 || fmt.Sprint(l.TLS[0].Protocols) != "[hbone]" || !l.any(&l.TLS[0]) || l.TLS[0].Optional {
		t.Errorf("the listener for HBONE is %+v", l)
	}
	services := c.Services[len(c.Services)-3:]
	if s := services[0]; s.Names[0].String() != "gw.example.com" || fmt.Sprint(s.Endpoints) != "[127.0.0.1:8080]" || s.ForwardIdentity == nil {
		t.Errorf("the service is %+v", s)
	}
	if s := services[1]; s.Names[0].String() != "mesh.example.com" || s.ForwardIdentity != nil {
		t.Errorf("the second service is %+v", s)
	}
	if l, s := listeners[2], services[2]; l.Service != s.Names[0].Suffix || l.Service.String() != "inbound-127-0-0-1-8444.invalid" || !l.any(&l.TLS[0]) || fmt.Sprint(s.Endpoints) != "[127.0.0.1:8082]" {
		t.Errorf("without a name the listener is %+v, and the service %+v", l, s)
	}
	const nameless = "127.0.0.1:8444"
	var got []string
	for _, p := range c.Policies {
		if p.Action != policy.Allow || len(p.Targets.Listeners) != 1 {
			t.Errorf("the policy is %+v", p)
		}
		ids := 0
		for _, r := range p.Rules {
			ids += len((*r.Sources)[0].SPIFFE)
		}
		got = append(got, fmt.Sprint(p.Targets.Listeners[0], p.Targets.Names, ids))
	}
	if want := []string{":8443[gw.example.com] 2", ":15008[mesh.example.com] 1", ":15008[gw.example.com] 1", nameless + "[inbound-127-0-0-1-8444.invalid] 1", ":8443[] 0", ":15008[] 0", nameless + "[] 0"}; !slices.Equal(got, want) {
		t.Errorf("the policies are %q, want %q", got, want)
	}
	// By a reverse session they are for the callers of all entries, where that says nothing else.
	var exposed []string
	for _, e := range c.Reverse.Expose {
		exposed = append(exposed, fmt.Sprint(e.Name.String(), e.Allow))
	}
	if want := []string{"gw.example.com[spiffe://corp.example/b spiffe://corp.example/c spiffe://corp.example/ns/*]", "mesh.example.com[spiffe://corp.example/z]", "other.example.com[]"}; !slices.Equal(exposed, want) {
		t.Errorf("exposed are %q, want %q", exposed, want)
	}
}
