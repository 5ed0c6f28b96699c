package metrics

import (
	"fmt"
	"strings"
	"testing"
	"time"
)

func TestDNSQuestions(t *testing.T) {
	m := New()
	if strings.Contains(scrape(t, m), "culvert_dns_") {
		t.Error("there are metrics of DNS where there is no DNS")
	}
	d := m.DNS()
	q := Question{Transport: "udp", View: "east", Rcode: "NOERROR", Source: "table"}
	d.Observe(q, 20*time.Microsecond)
	d.Observe(q, time.Second)
	d.Observe(Question{Transport: "tcp", Rcode: "REFUSED"}, 0)
	d.Observe(Question{Transport: "tcp", View: "\xff", Rcode: "none"}, 0)
	text := scrape(t, m)
	for _, want := range []string{
		`culvert_dns_queries_total{rcode="NOERROR",source="table",transport="udp",view="east"} 2`,
		`culvert_dns_queries_total{rcode="REFUSED",source="",transport="tcp",view=""} 1`,
		`culvert_dns_queries_total{rcode="none",source="",transport="tcp",view="` + "\uFFFD" + `"} 1`,
		`culvert_dns_query_duration_seconds_bucket{source="table",le="5e-05"} 1`,
		`culvert_dns_query_duration_seconds_count{source="table"} 2`,
	} {
		if !strings.Contains(text, want+"\n") {
			t.Errorf("no %s", want)
		}
	}
	if n := testing.AllocsPerRun(100, func() { d.Observe(q, time.Millisecond) }); n > 0 {
		t.Errorf("%v allocations for a question of a known kind", n)
	}
}

// Networks that come and go don't use up the memory.
func TestDNSQuestionsAreBounded(t *testing.T) {
	m := New()
	d := m.DNS()
	for i := range 2 * maxQuestions {
		d.Observe(Question{Transport: "udp", View: fmt.Sprint(i), Rcode: "NOERROR"}, 0)
	}
	text := scrape(t, m)
	if n := strings.Count(text, "culvert_dns_queries_total{"); n > maxQuestions+1 {
		t.Errorf("%d time series", n)
	}
	if want := fmt.Sprintf(`transport="udp",view="other"} %d`, maxQuestions); !strings.Contains(text, want+"\n") {
		t.Errorf("no %s", want)
	}
}
