package gatewayapi_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
)

// routes is how many one listener has in TestThousandsOfRoutes.
const routes = 5000

var tlsRoutes = schema.GroupVersionResource{Group: "gateway.networking.k8s.io", Version: "v1", Resource: "tlsroutes"}

// One listener has thousands of routes: they are served at once, each gets its
// status, and a change is in force soon. The log has the figures.
func TestThousandsOfRoutes(t *testing.T) {
	b := start(t)
	b.secret("edge", issue(t, 1, "*.end.example.com"))
	b.serve("one", nil)
	b.serve("two", nil)
	b.Apply(t, gateway)
	address := b.address("edge") + ":443"

	began := time.Now()
	var wg sync.WaitGroup
	next := make(chan int)
	for range 8 {
		wg.Go(func() {
			for i := range next {
				o := &unstructured.Unstructured{Object: map[string]any{
					"apiVersion": "gateway.networking.k8s.io/v1", "kind": "TLSRoute",
					"metadata": map[string]any{"name": fmt.Sprint("r", i)},
					"spec": map[string]any{
						"parentRefs": []any{map[string]any{"name": "edge"}},
						"hostnames":  []any{fmt.Sprintf("r%d.end.example.com", i)},
						"rules":      []any{map[string]any{"backendRefs": []any{map[string]any{"name": "one", "port": int64(443)}}}},
					},
				}}
				if _, err := b.Dynamic.Resource(tlsRoutes).Namespace("default").Create(t.Context(), o, metav1.CreateOptions{}); err != nil {
					t.Error(err)
				}
			}
		})
	}
	for i := range routes {
		next <- i
	}
	close(next)
	wg.Wait()
	made := time.Since(began)
	b.waitAnswer(address, fmt.Sprintf("r%d.end.example.com", routes-1), "one none hello")
	served := time.Since(began)
	b.Wait(t, 3*time.Minute, func(ctx context.Context) error {
		l, err := b.Dynamic.Resource(tlsRoutes).Namespace("default").List(ctx, metav1.ListOptions{ResourceVersion: "0"})
		if err != nil {
			return err
		}
		for _, o := range l.Items {
			if ps, _, _ := unstructured.NestedSlice(o.Object, "status", "parents"); len(ps) == 0 {
				return fmt.Errorf("%s has no status", o.GetName())
			}
		}
		o, err := b.object(ctx, "gateways", "edge")
		if err != nil {
			return err
		}
		ls, _, _ := unstructured.NestedSlice(o.Object, "status", "listeners")
		for _, l := range ls {
			if m := l.(map[string]any); m["name"] == "end" && m["attachedRoutes"] != int64(routes) {
				return fmt.Errorf("%v routes are attached", m["attachedRoutes"])
			}
		}
		return nil
	})
	t.Logf("%d routes: made in %v, the last one served after %v, all with status after %v", routes, made.Round(time.Millisecond), served.Round(time.Millisecond), time.Since(began).Round(time.Millisecond))

	// From a change to the first connection that goes the new way.
	var took []time.Duration
	for i := range 40 {
		name, to := fmt.Sprint("r", i), []string{"two", "one"}[i%2]
		if to == "one" {
			name = fmt.Sprint("r", i-1)
		}
		patch := fmt.Sprintf(`[{"op":"replace","path":"/spec/rules/0/backendRefs/0/name","value":%q}]`, to)
		at := time.Now()
		if _, err := b.Dynamic.Resource(tlsRoutes).Namespace("default").Patch(t.Context(), name, types.JSONPatchType, []byte(patch), metav1.PatchOptions{}); err != nil {
			t.Fatal(err)
		}
		for {
			got, err := ask(address, name+".end.example.com")
			if err == nil && strings.HasPrefix(got, to) {
				break
			}
			if time.Since(at) > settled {
				t.Fatalf("after %v the answer is %q, %v", settled, got, err)
			}
		}
		took = append(took, time.Since(at))
	}
	slices.Sort(took)
	t.Logf("from a change to the first connection of it: p50 %v, p99 %v", took[len(took)/2].Round(time.Millisecond), took[len(took)-1].Round(time.Millisecond))
}
