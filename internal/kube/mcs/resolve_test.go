package mcs

import (
	"fmt"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"culvert.dev/internal/testnet"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	mcsv1 "sigs.k8s.io/mcs-api/pkg/apis/v1beta1"
)

func TestMain(m *testing.M) { testnet.GoroutinesEnd(m) }

var epoch = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

var web = Name{Namespace: "shop", Name: "web"}

func ports(list ...any) (out []mcsv1.ServicePort) {
	for i := 0; i < len(list); i += 2 {
		out = append(out, mcsv1.ServicePort{Name: list[i].(string), Port: int32(list[i+1].(int)), Protocol: corev1.ProtocolTCP})
	}
	return out
}

// with makes a member that exports web since day, with changes to a Service that
// has port 443.
func with(day int, change ...func(*Service)) *Member {
	s := Service{Kind: corev1.ServiceTypeClusterIP, Ports: ports("https", 443), Affinity: corev1.ServiceAffinityNone}
	for _, f := range change {
		f(&s)
	}
	return &Member{Exports: map[Name]Export{web: {Created: epoch.AddDate(0, 0, day), Generation: 3}}, Services: map[Name]Service{web: s}}
}

func at(list ...any) func(*Service) { return func(s *Service) { s.Ports = ports(list...) } }
func headless(s *Service)           { s.Headless = true }
func sticky(s *Service)             { s.Affinity = corev1.ServiceAffinityClientIP }
func udp(s *Service)                { s.Ports[0].Protocol = corev1.ProtocolUDP }

// conditions is how a test has those of web: "Valid Ready Conflict/PortConflict".
func conditions(list []metav1.Condition) string {
	var all []string
	for _, c := range list {
		s := c.Type
		if c.Status != metav1.ConditionTrue {
			s = "!" + s
		}
		switch mcsv1.ServiceExportConditionReason(c.Reason) {
		case mcsv1.ServiceExportReasonValid, mcsv1.ServiceExportReasonExported, mcsv1.ServiceExportReasonNoConflicts:
		default:
			s += "/" + c.Reason
		}
		all = append(all, s)
	}
	return strings.Join(all, " ")
}

// imported is how a test has an import: "ClusterSetIP https:443 by a,b".
func imported(i Import, ok bool) string {
	if !ok {
		return "none"
	}
	s := string(i.Spec.Type)
	for _, p := range i.Spec.Ports {
		s += fmt.Sprintf(" %s:%d", p.Name, p.Port)
		if p.Protocol != corev1.ProtocolTCP {
			s += "/" + string(p.Protocol)
		}
	}
	if i.Spec.SessionAffinity == corev1.ServiceAffinityClientIP {
		s += " sticky"
	}
	return s + " by " + strings.Join(i.Clusters, ",")
}

func TestResolve(t *testing.T) {
	external := func(s *Service) { s.Kind = corev1.ServiceTypeExternalName }
	seconds := func(n int32) func(*Service) {
		return func(s *Service) {
			s.Affinity = corev1.ServiceAffinityClientIP
			s.AffinityConfig = &corev1.SessionAffinityConfig{ClientIP: &corev1.ClientIPConfig{TimeoutSeconds: &n}}
		}
	}
	lonely := with(0)
	delete(lonely.Services, web)
	none := &Member{}
	for _, tt := range []struct {
		name       string
		a, b       *Member // "a" and "b" of three clusters, the third of which exports nothing
		conditA    string
		conditB    string
		want       string
		exportedBy string
	}{
		{"nobody exports", none, none, "", "", "none", ""},
		{"one does", with(0), none, "Valid Ready !Conflict", "", "ClusterSetIP https:443 by a", "a"},
		{"both do", with(0), with(1), "Valid Ready !Conflict", "Valid Ready !Conflict", "ClusterSetIP https:443 by a,b", "a,b"},
		{"headless", with(0, headless), with(1, headless), "Valid Ready !Conflict", "Valid Ready !Conflict", "Headless https:443 by a,b", "a,b"},
		{"no Service", lonely, none, "!Valid/NoService !Ready/Pending", "", "none", ""},
		{"no Service in one of them", lonely, with(0), "!Valid/NoService !Ready/Pending", "Valid Ready !Conflict", "ClusterSetIP https:443 by b", "b"},
		{"ExternalName", with(0, external), none, "!Valid/InvalidServiceType !Ready/Pending", "", "none", ""},
		{"UDP alone", with(0, udp), none, "Valid !Ready/Failed", "", "none", ""},
		{"headless without ports", with(0, headless, at()), none, "Valid Ready !Conflict", "", "Headless by a", "a"},

		{"the oldest decides the type", with(1), with(0, headless), "Valid Ready Conflict/TypeConflict", "Valid Ready Conflict/TypeConflict", "Headless https:443 by b", "b"},
		{"of those of one age the first by name", with(0), with(0, headless), "Valid Ready Conflict/TypeConflict", "Valid Ready Conflict/TypeConflict", "ClusterSetIP https:443 by a", "a"},
		{"more ports", with(0), with(1, at("https", 443, "http", 80)), "Valid Ready Conflict/PortConflict", "Valid Ready Conflict/PortConflict", "ClusterSetIP https:443 http:80 by a,b", "a,b"},
		{"other ports", with(0), with(1, at("http", 80)), "Valid Ready Conflict/PortConflict", "Valid Ready Conflict/PortConflict", "ClusterSetIP https:443 http:80 by a,b", "a,b"},
		{"another number", with(1), with(0, at("https", 8443)), "Valid Ready Conflict/PortConflict", "Valid Ready Conflict/PortConflict", "ClusterSetIP https:8443 by a,b", "a,b"},
		{"another name", with(0), with(1, at("tls", 443)), "Valid Ready Conflict/PortConflict", "Valid Ready Conflict/PortConflict", "ClusterSetIP https:443 by a,b", "a,b"},
		{"another order", with(0, at("x", 1, "y", 2)), with(1, at("y", 2, "x", 1)), "Valid Ready !Conflict", "Valid Ready !Conflict", "ClusterSetIP x:1 y:2 by a,b", "a,b"},
		{"affinity", with(0, sticky), with(1), "Valid Ready Conflict/SessionAffinityConflict", "Valid Ready Conflict/SessionAffinityConflict", "ClusterSetIP https:443 sticky by a,b", "a,b"},
		{"affinity of headless ones", with(0, sticky, headless), with(1, headless), "Valid Ready !Conflict", "Valid Ready !Conflict", "Headless https:443 by a,b", "a,b"},
		{"how long it lasts", with(0, seconds(1)), with(1, seconds(2)), "Valid Ready Conflict/SessionAffinityConfigConflict", "Valid Ready Conflict/SessionAffinityConfigConflict", "ClusterSetIP https:443 sticky by a,b", "a,b"},
		{"ports and affinity", with(0, sticky), with(1, at("http", 80)), "Valid Ready Conflict/PortConflict,SessionAffinityConflict", "Valid Ready Conflict/PortConflict,SessionAffinityConflict", "ClusterSetIP https:443 http:80 sticky by a,b", "a,b"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			set := Resolve(map[string]*Member{"a": tt.a, "b": tt.b, "c": none}, nil, nil)
			if got := conditions(set.Conditions["a"][web]); got != tt.conditA {
				t.Errorf("conditions in a: %s, want %s", got, tt.conditA)
			}
			if got := conditions(set.Conditions["b"][web]); got != tt.conditB {
				t.Errorf("conditions in b: %s, want %s", got, tt.conditB)
			}
			i, ok := set.Imports[web]
			if got := imported(i, ok); got != tt.want {
				t.Errorf("import %s, want %s", got, tt.want)
			}
			var by []string
			for _, c := range []string{"a", "b", "c"} {
				if set.Exported[c][web] {
					by = append(by, c)
				}
				for _, cond := range set.Conditions[c][web] {
					if cond.ObservedGeneration != 3 || cond.Message == "" {
						t.Errorf("condition %+v", cond)
					}
				}
			}
			if got := strings.Join(by, ","); got != tt.exportedBy {
				t.Errorf("exported by %s, want %s", got, tt.exportedBy)
			}
		})
	}
}

func TestResolveAddresses(t *testing.T) {
	vips := func(n Name) []netip.Addr {
		if n != web {
			t.Errorf("asked for %s", n)
		}
		return []netip.Addr{netip.MustParseAddr("240.0.0.7"), {}, netip.MustParseAddr("fd12::7"), netip.MustParseAddr("fd12::8")}
	}
	i := Resolve(map[string]*Member{"a": with(0)}, vips, nil).Imports[web]
	if !slices.Equal(i.Spec.IPs, []string{"240.0.0.7", "fd12::7"}) || !reflect.DeepEqual(i.Spec.IPFamilies, []corev1.IPFamily{"IPv4", "IPv6"}) || i.Ready.Status != metav1.ConditionTrue {
		t.Errorf("import %+v", i)
	}
	if i = Resolve(map[string]*Member{"a": with(0)}, nil, nil).Imports[web]; len(i.Spec.IPs) != 0 || i.Ready.Status != metav1.ConditionFalse || i.Ready.Reason != "Pending" {
		t.Errorf("without an address: %+v", i)
	}
	if i = Resolve(map[string]*Member{"a": with(0, headless)}, vips, nil).Imports[web]; len(i.Spec.IPs) != 0 || i.Ready.Status != metav1.ConditionTrue {
		t.Errorf("headless: %+v", i)
	}
}

func TestResolveRefuses(t *testing.T) {
	set := Resolve(map[string]*Member{"a": with(0)}, nil, func(n Name) string { return "the administrator denies " + n.Name })
	if got := conditions(set.Conditions["a"][web]); got != "Valid !Ready/Failed" || len(set.Imports) > 0 || set.Exported["a"][web] {
		t.Errorf("conditions %s, imports %v", got, set.Imports)
	}
	if got := set.Conditions["a"][web][1].Message; got != "the administrator denies web" {
		t.Errorf("message %q", got)
	}
}

func TestServiceOf(t *testing.T) {
	app := "kubernetes.io/h2c"
	got := ServiceOf(&corev1.Service{Spec: corev1.ServiceSpec{ClusterIP: "None", Ports: []corev1.ServicePort{{Name: "x", Port: 1, AppProtocol: &app}}}})
	if !got.Headless || got.Affinity != corev1.ServiceAffinityNone || len(got.Ports) != 1 || got.Ports[0].Protocol != corev1.ProtocolTCP || *got.Ports[0].AppProtocol != app {
		t.Errorf("got %+v", got)
	}
}
