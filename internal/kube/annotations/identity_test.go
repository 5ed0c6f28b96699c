package annotations

import (
	"reflect"
	"strings"
	"testing"

	"culvert.dev/registry"
)

func TestReadIdentity(t *testing.T) {
	inside := registry.ForwardIdentity{InsideTLS: true}
	signed := registry.ForwardIdentity{InsideTLS: true, Assertion: true}
	for _, row := range []struct {
		service, namespace map[string]string
		want               *registry.ForwardIdentity // nil for not told
	}{
		{nil, nil, nil},
		{notes("expose", "true"), notes("expose", "true"), nil},
		{notes(ForwardIdentity, "insideTLS"), nil, &inside},
		{notes(ForwardIdentity, " insideTLS ; assertion = true "), nil, &signed},
		{notes(ForwardIdentity, "insideTLS; assertion=false; trustNetwork=false"), nil, &inside},
		{nil, notes(ForwardIdentity, "insideTLS; assertion=true"), &signed},
		{notes(ForwardIdentity, "beforeTLS; trustNetwork=true"), notes(ForwardIdentity, "insideTLS"), &registry.ForwardIdentity{}},
		{notes(ForwardIdentity, "insideTLS; audience=spiffe://corp.example/a;assertion=true"), nil, &registry.ForwardIdentity{InsideTLS: true, Assertion: true, Audience: "spiffe://corp.example/a"}},
	} {
		id, p := ReadIdentity(row.service, row.namespace)
		var s registry.Service
		id.Apply(&s)
		if p != nil || !reflect.DeepEqual(s.ForwardIdentity, row.want) || (s.ProxyProtocol == 2) != (row.want != nil) {
			t.Errorf("%v and %v: got %+v and version %d, %v; want %+v", row.service, row.namespace, s.ForwardIdentity, s.ProxyProtocol, p, row.want)
		}
	}
	for value, want := range map[string]string{
		"":                                      `"" is no position of a header: write insideTLS`,
		"true":                                  `"true" is no position`,
		"insidetls":                             "is no position",
		"insideTLS;":                            `"" is unknown: write insideTLS`,
		"insideTLS, assertion=true":             "is no position",
		"insideTLS; assertion":                  `assertion is "": write true or false`,
		"insideTLS; assertion=yes":              `assertion is "yes"`,
		"insideTLS; xfcc=sanitizeSet":           `"xfcc" is unknown`,
		"insideTLS; assertion=true;assertion=x": `"assertion" is there twice`,
		"insideTLS; audience=a":                 "audience has no effect",
		"insideTLS; assertion=true; audience=":  "is no name of a service",
		"insideTLS; assertion=true; audience=a\nb":     "is no name of a service",
		"insideTLS; trustNetwork=true":                 "trustNetwork has no effect",
		"beforeTLS":                                    "whoever can connect to the service can say by such a header who it is",
		"beforeTLS; trustNetwork=false":                "whoever can connect",
		"beforeTLS; trustNetwork=true; assertion=true": "assertion needs insideTLS",
		"insideTLS; " + strings.Repeat("x", 100_000):   "is unknown",
	} {
		id, p := ReadIdentity(nil, notes(ForwardIdentity, value))
		if p == nil || id != (Identity{}) || !p.Namespace || p.Key != ForwardIdentity || !strings.Contains(p.Err.Error(), want) || len(p.Value)+len(p.Err.Error()) > 600 {
			t.Errorf("%.80q: got %+v, %+v, want %s", value, id, p, want)
		}
	}
}
