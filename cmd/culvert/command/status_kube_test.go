//go:build !nokube

package command

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	"culvert.dev/internal/gateway"
	"culvert.dev/internal/kube"
	"culvert.dev/internal/kube/discovery"
	"culvert.dev/internal/kube/gatewayapi"
)

// What a gateway knows of Kubernetes comes as it was sent, and says first what
// is old, and who writes.
func TestStatusOfKubernetes(t *testing.T) {
	lost := time.Now().Add(-3 * time.Hour)
	sent := gateway.Status{Ready: true, Kubernetes: &kube.Status{
		Clusters: []discovery.Report{
			{Cluster: "west", Known: true, Services: 7, Exposed: 2, Exported: 1, Problems: 3, Refusals: []string{`Service shop/web: annotation culvert.dev/expose: "maybe": no`}},
			{Cluster: "east", Known: true, Lost: &lost, Error: "connection refused"},
			{Cluster: "north"},
		},
		GatewayAPI: &gatewayapi.Report{
			Known: true, Routes: 2, More: 4,
			Kinds: map[string]string{"Gateways": "v1", "TLSRoutes": "v1alpha2", "GatewayClasses": "v1", "UDPRoutes": "none", "TCPRoutes": "none", "HTTPRoutes": "unread"},
			Gateways: []gatewayapi.GatewayReport{
				{Name: "shop/edge", Addresses: []string{"10.96.0.7"}, Ready: true, Listeners: []gatewayapi.ListenerReport{
					{Name: "tls", Protocol: "TLS", Port: 443, State: gatewayapi.ListenerOpen, Routes: 2},
					{Name: "more", Set: "shop/set", Protocol: "TCP", Port: 5432, State: gatewayapi.ListenerFailed, Why: "PortUnavailable: another\nhas it"},
				}},
				{Name: "shop/none", Why: "Invalid: no listener"},
			},
			Refusals: []gatewayapi.Refusal{{Object: "TLSRoute shop/db", Reason: "NoMatchingParent", Message: "Accepted: no such listener"}},
		},
		Lease: &kube.LeaseStatus{Name: "system/culvert", Self: "a_1", Holder: "b_1"},
	}}
	raw, err := json.Marshal(sent)
	if err != nil {
		t.Fatal(err)
	}
	var got runningStatus
	if err := json.Unmarshal(raw, &got); err != nil {
		t.Fatal(err)
	}
	var b strings.Builder
	if err := kubeStatus(&b, &got, false); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"cluster:   west, in touch: 7 services found, 2 exposed, 1 exported, 3 problems\n",
		"cluster:   east, 3h00m old: it does not answer (connection refused): 0 services found",
		"cluster:   north, not seen yet: ",
		"gateways:  in touch: 2 Gateways, 2 routes\n",
		"kinds:     not served by the API server: TCPRoutes, UDPRoutes; not read yet, or no permission: HTTPRoutes; v1: GatewayClasses, Gateways; v1alpha2: TLSRoutes\n",
		"writes:    b_1, by the lease system/culvert; this replica is a_1\n",
		"shop/set:more", "5432/TCP", "failed", "PortUnavailable: another�has it", "Invalid: no listener",
		"TLSRoute shop/db", "NoMatchingParent: Accepted: no such listener", "Service shop/web", "and 6 more\n",
	} {
		if !strings.Contains(b.String(), want) {
			t.Errorf("not there: %q\n%s", want, b.String())
		}
	}
	got.Kubernetes.Lease.Leads = true
	b.Reset()
	if err := kubeStatus(&b, &got, false); err != nil || !strings.Contains(b.String(), "writes:    this replica, a_1, by the lease system/culvert\n") {
		t.Errorf("of the leader: %v\n%s", err, b.String())
	}
	got.Kubernetes.Lease.Leads, got.Kubernetes.Lease.Error = false, "may not get leases.coordination.k8s.io: no right"
	b.Reset()
	if err := kubeStatus(&b, &got, false); err != nil || !strings.Contains(b.String(), "writes:    not this replica, a_1: may not get leases.coordination.k8s.io: no right (lease system/culvert)\n") {
		t.Errorf("of one that may not have the lease: %v\n%s", err, b.String())
	}
	got.Ready = false
	if err := kubeStatus(&b, &got, true); err != errSilent {
		t.Errorf("of one that is not ready: %v, want the exit code alone", err)
	}
	if err := kubeStatus(&b, &runningStatus{}, false); err == nil || !strings.Contains(err.Error(), "no Kubernetes configuration") {
		t.Errorf("without Kubernetes: got %v, want an error that says so", err)
	}
}
