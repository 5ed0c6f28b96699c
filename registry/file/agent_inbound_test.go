package file

import (
	"fmt"
	"path/filepath"
	"testing"

	"culvert.dev/policy"
)

// An inbound listener of an agent is a listener that ends mutual TLS for one name, a service on
// loopback, and a policy for that listener alone.
func TestAgentInbound(t *testing.T) {
	c, err := Load(filepath.Join(private(t, "testdata/good"), "agent-inbound.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	l := c.Listeners[len(c.Listeners)-1]
	if l.Address != ":8443" || len(l.TLS) != 1 || len(l.TLS[0].Names) != 1 {
		t.Errorf("the listener is %+v", l)
	}
	s := c.Services[len(c.Services)-1]
	if s.Names[0].String() != "gw.example.com" || fmt.Sprint(s.Endpoints) != "[127.0.0.1:8080]" || s.ForwardIdentity == nil {
		t.Errorf("the service is %+v", s)
	}
	p := c.Policies[0]
	if p.Action != policy.Allow || len(p.Targets.Names) != 1 || p.Targets.Listeners[0] != ":8443" || len((*p.Rules[0].Sources)[0].SPIFFE) != 2 {
		t.Errorf("the policy is %+v", p)
	}
}
