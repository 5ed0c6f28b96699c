package hbone

import (
	"regexp"
	"strings"
	"testing"

	"culvert.dev/connect"
	"culvert.dev/internal/testnet"
	"culvert.dev/tunnel"
)

var traceRE = regexp.MustCompile(`^00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}$`)

// FuzzFields reads fields as they come, and what it makes of them it reads
// again the same.
func FuzzFields(f *testing.F) {
	f.Add("baggage", "k8s.cluster.name=west,service.name=web", "traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
	f.Add("forwarded", `for="192.0.2.7:999";host=svc`, "baggage", "\x00")
	f.Add("baggage", strings.Repeat("a", connect.MaxBaggage-2), "baggage", "b")
	f.Add("traceparent", "00-00000000000000000000000000000000-0000000000000000-00", "", "")
	f.Fuzz(func(t *testing.T, name1, value1, name2, value2 string) {
		var s *tunnel.UnverifiedHeaders
		testnet.Bounded(t, 2*(len(name1)+len(value1)+len(name2)+len(value2))+4<<10, func() {
			s = connect.UnverifiedHeaders(connect.Fields{{Name: name1, Value: value1}, {Name: name2, Value: value2}})
		})
		if s == nil {
			return
		}
		if len(s.Baggage) > connect.MaxBaggage || len(s.Forwarded) > connect.MaxForwarded {
			t.Errorf("%d and %d bytes, limits %d and %d", len(s.Baggage), len(s.Forwarded), connect.MaxBaggage, connect.MaxForwarded)
		}
		if s.Trace != "" && (!traceRE.MatchString(s.Trace) || strings.Trim(s.Trace[3:35], "0") == "" || strings.Trim(s.Trace[36:52], "0") == "") {
			t.Errorf("trace %q", s.Trace)
		}
		again := fields(WithRequest(t.Context(), &tunnel.Request{Unverified: s}), "")
		if err := again.Check(); err != nil {
			t.Errorf("%+v can't be passed on: %v", s, err)
		}
		if back := connect.UnverifiedHeaders(again); back == nil || back.Baggage != s.Baggage || back.Forwarded != s.Forwarded || s.Trace != "" && back.Trace != s.Trace {
			t.Errorf("passed on: %+v, want %+v", back, s)
		}
	})
}
