package kube

import (
	"fmt"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	"culvert.dev/registry"
)

// slice is an EndpointSlice of a Service with one endpoint.
func slice(service, address string) string {
	return fmt.Sprintf(`{"apiVersion":"discovery.k8s.io/v1","kind":"EndpointSlice","metadata":{"namespace":"a","name":"%[1]s-1","uid":"%[1]s-1","resourceVersion":"0","labels":{"kubernetes.io/service-name":%[1]q}},`+
		`"addressType":"IPv4","ports":[{"port":443,"protocol":"TCP"}],"endpoints":[{"addresses":[%[2]q]}]}`, service, address)
}

// Discovery and Gateway API have one watch of EndpointSlices together, and both learn of each change,
// also when the kinds of Gateway API were installed long after the start.
func TestOneWatchOfEndpointSlices(t *testing.T) {
	for _, late := range []bool{false, true} {
		t.Run(fmt.Sprintf("Gateway API late: %t", late), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				a := newAPI()
				a.missing(late)
				a.add("services", service("web"))
				a.add("endpointslices", slice("web", "10.1.0.1"))
				updates := map[string]int{}
				last := a.begin(t, Object{}, slog.New(slog.DiscardHandler), func(u registry.Update) { updates[u.Source]++ })
				time.Sleep(time.Minute)
				synctest.Wait()
				a.missing(false)
				a.add("tlsroutes", route("web"))
				time.Sleep(10 * time.Minute)
				if got, n := endpointsOf(last); got != "10.1.0.1 10.1.0.1" {
					t.Fatalf("got endpoints %q by name and by route, want 10.1.0.1 by both; %d listeners", got, n)
				}
				before := updates["gateway-api"]
				a.add("endpointslices", slice("web", "10.1.0.2"))
				time.Sleep(time.Second)
				if got, _ := endpointsOf(last); got != "10.1.0.2 10.1.0.2" {
					t.Errorf("got endpoints %q by name and by route after a change, want 10.1.0.2 by both", got)
				}
				if n := updates["gateway-api"] - before; n != 1 {
					t.Errorf("the change reached routes %d times, want once", n)
				}
				if all, _ := a.asked(); all["endpointslices"] > 3 { // a streamed list, which it cannot do, a list and a watch
					t.Errorf("EndpointSlices were asked for %d times, want one list and one watch", all["endpointslices"])
				}
			})
		})
	}
}

// endpointsOf returns the addresses of the service and of the backend of the route, and how many
// listeners there are.
func endpointsOf(last func(string) registry.Update) (addresses string, listeners int) {
	services, gateways := last("cluster/west"), last("gateway-api")
	if len(services.Services) == 1 && len(services.Services[0].Endpoints) == 1 {
		addresses = services.Services[0].Endpoints[0].Addr.String()
	}
	if len(gateways.Listeners) == 1 && len(gateways.Listeners[0].Sections[0].Rules) == 1 {
		if s := gateways.Listeners[0].Sections[0].Rules[0].Backends[0].Service; s != nil && len(s.Endpoints) == 1 {
			addresses += " " + s.Endpoints[0].Addr.String()
		}
	}
	return addresses, len(gateways.Listeners)
}
