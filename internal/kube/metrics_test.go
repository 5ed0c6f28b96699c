package kube

import (
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"culvert.dev/internal/kube/discovery"
	"culvert.dev/internal/kube/gatewayapi"
)

// Gauges count what the Status has, and the reference has each of them.
func TestMetricsOfKubernetes(t *testing.T) {
	lost := time.Now().Add(-time.Hour)
	status := &Status{
		Clusters: []discovery.Report{{Cluster: "west", Known: true, Services: 7, Exposed: 2, Problems: 3}, {Cluster: "east", Lost: &lost}},
		GatewayAPI: &gatewayapi.Report{
			Routes: 5, More: 4, Refusals: make([]gatewayapi.Refusal, 2),
			Gateways: []gatewayapi.GatewayReport{
				{Ready: true, Listeners: []gatewayapi.ListenerReport{{State: gatewayapi.ListenerOpen}, {State: gatewayapi.ListenerFailed}}},
				{Listeners: []gatewayapi.ListenerReport{{State: gatewayapi.ListenerPending}}}, {},
			},
		},
		Lease: &LeaseStatus{Name: "system/culvert", Leads: true},
	}
	page, err := os.ReadFile("../../docs/reference/metrics.md")
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]float64{}
	names := 0
	addGauges(func(name, help string, labels []string, read func(func([]string, float64))) {
		names++
		if !strings.Contains(string(page), "| `"+name+"` |") || help == "" {
			t.Errorf("%s is not on the page, or has no help", name)
		}
		read(func(values []string, v float64) {
			if len(values) != len(labels) {
				t.Errorf("%s has labels %v and values %v", name, labels, values)
			}
			got[strings.TrimSpace(strings.TrimPrefix(name, "culvert_kubernetes_")+" "+strings.Join(values, " "))] = v
		})
	}, func() *Status { return status })
	for name, want := range map[string]float64{
		"gateways true": 1, "gateways false": 2, "gateway_listeners open": 1, "gateway_listeners failed": 1, "gateway_listeners pending": 1, "routes": 5,
		"services west true": 2, "services west false": 5, "refusals west": 3, "refusals east": 0, "refusals gateway-api": 6, "lost_seconds west": 0, "lost_seconds gateway-api": 0,
		"leader system/culvert": 1,
	} {
		if v, ok := got[name]; !ok || v != want {
			t.Errorf("%s is %v, %v, want %v", name, v, ok, want)
		}
	}
	if v := got["lost_seconds east"]; v < 3600 || v > 3700 || strings.Count(string(page), "| `culvert_kubernetes_") != names {
		t.Errorf("the API server of east is lost for %v s, and there are %d gauges: %s", v, names, fmt.Sprint(got))
	}
	// Of what is not configured there is nothing.
	addGauges(func(name, _ string, _ []string, read func(func([]string, float64))) {
		read(func(values []string, v float64) { t.Errorf("%s %v is %v", name, values, v) })
	}, func() *Status { return &Status{} })
}
