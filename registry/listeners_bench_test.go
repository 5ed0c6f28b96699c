package registry

import (
	"fmt"
	"net/netip"
	"testing"

	"culvert.dev/tunnel"
)

func BenchmarkMergeRules(b *testing.B) {
	var s Snapshot
	for i := range 10000 {
		s.Services = append(s.Services, service(b, fmt.Sprintf("s%d.test", i), 443))
	}
	sec := &Section{Name: "s"}
	for i := range 5000 {
		sec.Rules = append(sec.Rules, ruleOf(b, fmt.Sprint("r", i), []string{fmt.Sprintf("r%d.test", i)}, Backend{Weight: 1, Service: s.Services[i]}, Backend{Weight: 1, Service: s.Services[i+1]}))
	}
	s.Listeners = []*Listener{{Name: "l", Protocol: TLS, Port: 443, Address: netip.Addr{}, Sections: []*Section{sec}}}
	for _, with := range []bool{false, true} {
		b.Run(fmt.Sprint("listeners=", with), func(b *testing.B) {
			s := s
			if !with {
				s.Listeners = nil
			}
			r := &Registry{}
			for b.Loop() {
				t, err := Merge(s)
				if err != nil {
					b.Fatal(err)
				}
				r.Swap(t)
			}
		})
	}
	r := &Registry{}
	t, _ := Merge(s)
	r.Swap(t)
	req := &tunnel.Request{Proto: "sni", Listener: "s", ListenerOnly: true, Name: tunnel.MustParseName("r4711.test")}
	b.Run("resolve=rule", func(b *testing.B) {
		for b.Loop() {
			_, _ = r.Resolve(b.Context(), req)
		}
	})
	plain := byName("s4711.test", 443, 443)
	b.Run("resolve=service", func(b *testing.B) {
		for b.Loop() {
			_, _ = r.Resolve(b.Context(), plain)
		}
	})
	t, _ = Merge(Snapshot{Services: s.Services})
	r.Swap(t)
	b.Run("resolve=service,no listeners", func(b *testing.B) {
		for b.Loop() {
			_, _ = r.Resolve(b.Context(), plain)
		}
	})
}
