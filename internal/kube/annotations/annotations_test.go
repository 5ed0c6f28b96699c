package annotations

import (
	"maps"
	"reflect"
	"strings"
	"testing"
	"time"

	"culvert.dev/registry"
	"culvert.dev/tunnel"
)

// notes makes annotations of keys and values without the prefix.
func notes(pairs ...string) map[string]string {
	m := map[string]string{}
	for i := 0; i < len(pairs); i += 2 {
		m[Prefix+pairs[i]] = pairs[i+1]
	}
	return m
}

func TestReadBalancing(t *testing.T) {
	least := registry.LoadBalancing{Policy: registry.LeastConnections}
	for _, tt := range []struct {
		name               string
		service, namespace map[string]string
		want               registry.Service
		problems           string
	}{
		{name: "nothing"},
		{name: "all", service: notes(LoadBalancing, "sourceHash; stickyFor=30m", Connections, "500", NewPerSecond, "50", PerEndpoint, "100", OutlierEjection, "consecutiveFailures=3"), want: registry.Service{
			LoadBalancing:   registry.LoadBalancing{Policy: registry.SourceHash, StickyFor: 30 * time.Minute},
			Limits:          &tunnel.ServiceLimits{Connections: 500, NewPerSecond: 50, ConnectionsPerEndpoint: 100},
			OutlierEjection: &registry.OutlierEjection{ConsecutiveFailures: 3},
		}},
		{name: "default ejection", service: notes(OutlierEjection, "true"), want: registry.Service{OutlierEjection: &registry.OutlierEjection{}}},
		{name: "of the namespace", namespace: notes(LoadBalancing, "leastConnections", Connections, "7"), want: registry.Service{LoadBalancing: least, Limits: &tunnel.ServiceLimits{Connections: 7}}},
		{
			name: "the service's own, and one of the namespace", service: notes(LoadBalancing, "leastConnections"), namespace: notes(LoadBalancing, "roundRobin", PerEndpoint, "9"),
			want: registry.Service{LoadBalancing: least, Limits: &tunnel.ServiceLimits{ConnectionsPerEndpoint: 9}},
		},
		{
			name: "a malformed one does not give way to the namespace's", service: notes(Connections, "many"), namespace: notes(Connections, "9"),
			problems: `limits-connections "many" false write a number from 1 to 1000000`,
		},
		{
			name: "malformed ones leave the others", service: notes(NewPerSecond, "0", LoadBalancing, "leastConnections"), namespace: notes(OutlierEjection, "false"),
			want: registry.Service{LoadBalancing: least}, problems: `limits-new-per-second "0" false write a number | outlier-ejection "false" true "false" is unknown`,
		},
		{name: "without the prefix, and others", service: map[string]string{Connections: "5", Prefix + "expose": "true", "example.com/" + Connections: "5"}},
	} {
		b, problems := ReadBalancing(tt.service, tt.namespace)
		got := registry.Service{LoadBalancing: least, Limits: &tunnel.ServiceLimits{Connections: 1}, OutlierEjection: &registry.OutlierEjection{}}
		b.Apply(&got) // takes away what was there
		if !reflect.DeepEqual(got, tt.want) {
			t.Errorf("%s:\ngot  %+v\nwant %+v", tt.name, got, tt.want)
		}
		var want []string
		if tt.problems != "" {
			want = strings.Split(tt.problems, " | ")
		}
		if len(problems) != len(want) {
			t.Errorf("%s: got problems %v, want %q", tt.name, problems, want)
			continue
		}
		for i, p := range problems {
			of := " false "
			if p.Namespace {
				of = " true "
			}
			if text := p.Key + ` "` + p.Value + `"` + of + p.Err.Error(); !strings.HasPrefix(text, want[i]) {
				t.Errorf("%s: got problem %q, want %q", tt.name, text, want[i])
			}
		}
	}
}

func TestLongValuesAreClipped(t *testing.T) {
	_, problems := ReadBalancing(notes(LoadBalancing, strings.Repeat("x", 200_000)), nil)
	if len(problems) != 1 || len(problems[0].Value) > 200 || len(problems[0].Err.Error()) > 400 {
		t.Errorf("got %d problems, want one of a few hundred bytes", len(problems))
	}
}

func TestUnknownKey(t *testing.T) {
	var b Balancing
	if err := b.Set("expose", "true"); err == nil || b != (Balancing{}) {
		t.Errorf("got %v and %+v, want an error and no change", err, b)
	}
}

func TestKeep(t *testing.T) {
	used := notes(LoadBalancing, "leastConnections", Connections, "1", NewPerSecond, "2", PerEndpoint, "3", OutlierEjection, "true", ForwardIdentity, "insideTLS")
	all := maps.Clone(used)
	maps.Copy(all, map[string]string{"kubectl.kubernetes.io/last-applied-configuration": "{}", Prefix + "expose": "true", Connections: "9"})
	if got := Keep(all); !maps.Equal(got, used) {
		t.Errorf("got %v, want %v", got, used)
	}
	if got := Keep(notes("expose", "true")); got != nil {
		t.Errorf("got %v, want nil", got)
	}
}
