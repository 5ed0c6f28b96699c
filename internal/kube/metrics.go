package kube

import (
	"cmp"
	"sync"
	"time"

	"culvert.dev/internal/kube/gatewayapi"
)

// measureAgain is how old the Status may be that gauges are made of: a scrape reads them
// one after the other.
const measureAgain = time.Second

// Metrics adds gauges about the state read from Kubernetes by the current Kube, by a function such as
// GaugeSet of package metrics.
func Metrics(current func() *Kube, add func(name, help string, labels []string, read func(yield func(labels []string, v float64)))) {
	var (
		mu   sync.Mutex
		last *Status
		at   time.Time
	)
	status := func() *Status {
		mu.Lock()
		defer mu.Unlock()
		if last == nil || time.Since(at) > measureAgain {
			last, at = cmp.Or(current().Status(), &Status{}), time.Now()
		}
		return last
	}
	addGauges(add, status)
}

func addGauges(add func(name, help string, labels []string, read func(yield func(labels []string, v float64))), status func() *Status) {
	api := func(read func(r *gatewayapi.Report, yield func([]string, float64))) func(func([]string, float64)) {
		return func(yield func([]string, float64)) {
			if r := status().GatewayAPI; r != nil {
				read(r, yield)
			}
		}
	}
	add("culvert_kubernetes_gateways", "Gateways of Gateway API. ready is true if accepted and programmed.", []string{"ready"}, api(func(r *gatewayapi.Report, yield func([]string, float64)) {
		ready := 0
		for i := range r.Gateways {
			if r.Gateways[i].Ready {
				ready++
			}
		}
		yield([]string{"true"}, float64(ready))
		yield([]string{"false"}, float64(len(r.Gateways)-ready))
	}))
	add("culvert_kubernetes_gateway_listeners", "Listeners of Gateways and ListenerSets. state is open, pending or failed.", []string{"state"}, api(func(r *gatewayapi.Report, yield func([]string, float64)) {
		n := map[string]int{}
		for i := range r.Gateways {
			for _, l := range r.Gateways[i].Listeners {
				n[l.State]++
			}
		}
		for _, state := range []string{gatewayapi.ListenerOpen, gatewayapi.ListenerPending, gatewayapi.ListenerFailed} {
			yield([]string{state}, float64(n[state]))
		}
	}))
	add("culvert_kubernetes_routes", "Routes with a Gateway of this gateway as a parent.", nil, api(func(r *gatewayapi.Report, yield func([]string, float64)) {
		yield(nil, float64(r.Routes))
	}))
	add("culvert_kubernetes_services", "Services that discovery has found.", []string{"cluster", "exposed"}, func(yield func([]string, float64)) {
		for _, c := range status().Clusters {
			yield([]string{c.Cluster, "true"}, float64(c.Exposed))
			yield([]string{c.Cluster, "false"}, float64(c.Services-c.Exposed))
		}
	})
	add("culvert_kubernetes_refusals", "Refused Kubernetes objects. source is a cluster, or gateway-api.", []string{"source"}, func(yield func([]string, float64)) {
		for _, c := range status().Clusters {
			yield([]string{c.Cluster}, float64(c.Problems))
		}
		if r := status().GatewayAPI; r != nil {
			yield([]string{sourceOfGateways}, float64(len(r.Refusals)+r.More))
		}
	})
	add("culvert_kubernetes_lost_seconds", "Seconds since the API server last answered usefully. 0 while it does.", []string{"source"}, func(yield func([]string, float64)) {
		since := func(at *time.Time) float64 {
			if at == nil {
				return 0
			}
			return max(0, time.Since(*at).Seconds())
		}
		for _, c := range status().Clusters {
			yield([]string{c.Cluster}, since(c.Lost))
		}
		if r := status().GatewayAPI; r != nil {
			yield([]string{sourceOfGateways}, since(r.Lost))
		}
	})
	add("culvert_kubernetes_leader", "1 while this replica holds the Lease and writes status. The sum over replicas is 1.", []string{"lease"}, func(yield func([]string, float64)) {
		if l := status().Lease; l != nil {
			v := 0.0
			if l.Leads {
				v = 1
			}
			yield([]string{cmp.Or(l.Name, "none")}, v)
		}
	})
}

// sourceOfGateways is the label of what Gateway API's source says. No cluster is called so.
const sourceOfGateways = "gateway-api"
