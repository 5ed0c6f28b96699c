package bench

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"time"

	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"
)

// late is when a change is given up.
const late = 30 * time.Second

// pause is from what one change did to the next one.
func pause() { time.Sleep(50*time.Millisecond + rand.N(100*time.Millisecond)) }

// newRoute measures from the creation of a TLSRoute to its first connection. All
// times are from before the request that makes a change.
func (r *rig) newRoute(n int) (took []time.Duration) {
	for i := range n {
		name := fmt.Sprintf("new-%d", i)
		host, want := name+".bench.test", r.server(i)
		began := time.Now()
		if err := r.putRoute(r.t.Context(), route(home, name, host, "all", []string{"one", "two"}[i%2])); err != nil {
			r.t.Fatal(err)
		}
		took = append(took, r.wait(late, r.reaches(r.gateway(), host, want)).Sub(began))
		pause()
		r.deleteRoute(name)
		pause()
	}
	return took
}

// newBackend measures from the change of a TLSRoute's backend to its first connection.
func (r *rig) newBackend(n int) (took []time.Duration) {
	for i := range n {
		to := i + 1 // it was of the first
		began := time.Now()
		r.turn("one", to)
		took = append(took, r.wait(late, r.reaches(r.gateway(), "one.bench.test", r.server(to))).Sub(began))
		pause()
	}
	r.turn("one", 0)
	r.wait(late, r.reaches(r.gateway(), "one.bench.test", r.server(0)))
	return took
}

// turn changes a route's backend.
func (r *rig) turn(name string, to int) {
	patch := fmt.Sprintf(`[{"op":"replace","path":"/spec/rules/0/backendRefs/0/name","value":%q}]`, []string{"one", "two"}[to%2])
	if _, err := r.gw.GatewayV1().TLSRoutes(home).Patch(r.t.Context(), name, types.JSONPatchType, []byte(patch), metav1.PatchOptions{}); err != nil {
		r.t.Fatal(err)
	}
}

// newEndpoint measures from the change of an EndpointSlice to the first connection
// by a route, and by the service's own name.
func (r *rig) newEndpoint(n int) (byRoute, byName []time.Duration) {
	for i := range n {
		to := r.server(i + 1)
		began := time.Now()
		r.move("moves", to)
		at := r.waitAll(late, r.reaches(r.gateway(), "moves.bench.test", to), r.reaches(r.listener(), r.meshName("moves"), to))
		byRoute, byName = append(byRoute, at[0].Sub(began)), append(byName, at[1].Sub(began))
		pause()
	}
	r.move("moves", r.server(0))
	r.wait(late, r.reaches(r.gateway(), "moves.bench.test", r.server(0)))
	r.wait(late, r.reaches(r.listener(), r.meshName("moves"), r.server(0)))
	return byRoute, byName
}

// move changes where a service is.
func (r *rig) move(name string, to netip.Addr) {
	s := slice(home, name)
	s.Endpoints = []discoveryv1.Endpoint{pod(s, 0, to.String())}
	if _, err := r.core.DiscoveryV1().EndpointSlices(home).Update(r.t.Context(), s, metav1.UpdateOptions{}); err != nil {
		r.t.Fatal(err)
	}
}

// newGateway measures from the creation of a Gateway to its first connection, and
// to its status.
func (r *rig) newGateway(n int) (first, programmed []time.Duration) {
	ctx, cancel := context.WithCancel(r.t.Context())
	defer cancel()
	w, err := r.gw.GatewayV1().Gateways(home).Watch(ctx, metav1.ListOptions{})
	if err != nil {
		r.t.Fatal(err)
	}
	defer w.Stop()
	for i := range n {
		name, at := fmt.Sprintf("gateway-%d", i), r.spare(i)
		host, want := name+".bench.test", r.server(i)
		if err := r.putRoute(ctx, route(home, name, host, name, []string{"one", "two"}[i%2])); err != nil {
			r.t.Fatal(err)
		}
		pause()
		said := make(chan time.Time, 1)
		go func() {
			for e := range w.ResultChan() {
				if g, ok := e.Object.(*gwv1.Gateway); ok && g.Name == name && meta.IsStatusConditionTrue(g.Status.Conditions, string(gwv1.GatewayConditionProgrammed)) {
					said <- time.Now()
					return
				}
			}
		}()
		began := time.Now()
		if err := r.putGateway(ctx, name, at.Addr().String()); err != nil {
			r.t.Fatal(err)
		}
		first = append(first, r.wait(late, r.reaches(at, host, want)).Sub(began))
		select {
		case now := <-said:
			programmed = append(programmed, now.Sub(began))
		case <-time.After(late):
			r.t.Fatalf("Gateway %s is not Programmed after %v\n%s", name, late, r.culvert.Tail(40))
		}
		pause()
		if err := r.gw.GatewayV1().Gateways(home).Delete(ctx, name, metav1.DeleteOptions{}); err != nil {
			r.t.Fatal(err)
		}
		r.deleteRoute(name)
		pause()
	}
	return first, programmed
}
