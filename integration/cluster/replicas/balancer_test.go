package replicas

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"time"

	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"culvert.dev/integration/cluster"
)

// delay is how long a change of endpoints takes to reach a load balancer.
const delay = time.Second

// A balancer leads new connections to the pods that are ready endpoints of the
// gateway's Service, one after the other, as kube-proxy does: what stands is left
// alone, and what is not ready any more is found out a little late.
type balancer struct {
	port uint16

	mu    sync.Mutex // guards the following
	to    []netip.Addr
	out   map[netip.Addr]bool      // found dead by checks of its own
	ended map[netip.Addr]time.Time // since when an endpoint terminates
	turn  int
}

// balance follows the endpoints until the test ends.
func balance(t *testing.T, c *cluster.Cluster, namespace, service string, port uint16) *balancer {
	b := &balancer{port: port, out: map[netip.Addr]bool{}, ended: map[netip.Addr]time.Time{}}
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	var running sync.WaitGroup
	t.Cleanup(func() {
		cancel()
		running.Wait()
	})
	running.Go(func() {
		for ctx.Err() == nil {
			b.follow(ctx, c, namespace, service)
			select {
			case <-ctx.Done():
			case <-time.After(200 * time.Millisecond):
			}
		}
	})
	return b
}

// follow watches until the API server goes away. What was known holds then.
func (b *balancer) follow(ctx context.Context, c *cluster.Cluster, namespace, service string) {
	api := c.Client.DiscoveryV1().EndpointSlices(namespace)
	opts := metav1.ListOptions{LabelSelector: discoveryv1.LabelServiceName + "=" + service}
	list, err := api.List(ctx, opts)
	if err != nil {
		return
	}
	known := map[string]*discoveryv1.EndpointSlice{}
	for i := range list.Items {
		known[list.Items[i].Name] = &list.Items[i]
	}
	b.learn(known)
	opts.ResourceVersion = list.ResourceVersion
	w, err := api.Watch(ctx, opts)
	if err != nil {
		return
	}
	defer w.Stop()
	for e := range w.ResultChan() {
		s, ok := e.Object.(*discoveryv1.EndpointSlice)
		if !ok {
			return
		}
		if e.Type == "DELETED" {
			delete(known, s.Name)
		} else {
			known[s.Name] = s
		}
		b.learn(known)
	}
}

func (b *balancer) learn(known map[string]*discoveryv1.EndpointSlice) {
	var to []netip.Addr
	now := time.Now()
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, s := range known {
		if s.AddressType != discoveryv1.AddressTypeIPv4 {
			continue
		}
		for _, e := range s.Endpoints {
			a, err := netip.ParseAddr(e.Addresses[0])
			if err != nil {
				continue
			}
			if e.Conditions.Ready == nil || *e.Conditions.Ready {
				to = append(to, a)
			}
			if e.Conditions.Terminating != nil && *e.Conditions.Terminating && b.ended[a].IsZero() {
				b.ended[a] = now
			}
		}
	}
	slices.SortFunc(to, netip.Addr.Compare)
	time.AfterFunc(delay, func() {
		b.mu.Lock()
		defer b.mu.Unlock()
		b.to = to
	})
}

// refuse has nothing more sent to a pod, or again, as a load balancer does that
// checks health by itself.
func (b *balancer) refuse(a netip.Addr, refused bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.out[a] = refused
}

// targets are the pods that get connections now.
func (b *balancer) targets() (to []netip.Addr) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, a := range b.to {
		if !b.out[a] {
			to = append(to, a)
		}
	}
	return to
}

// terminating is since when a pod has been, zero for one that is not.
func (b *balancer) terminating(a netip.Addr) time.Time {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.ended[a]
}

// dial opens a connection to the next pod.
func (b *balancer) dial(ctx context.Context) (net.Conn, netip.Addr, error) {
	to := b.targets()
	if len(to) == 0 {
		return nil, netip.Addr{}, fmt.Errorf("the load balancer has no pod to send to")
	}
	b.mu.Lock()
	b.turn++
	a := to[b.turn%len(to)]
	b.mu.Unlock()
	var d net.Dialer
	conn, err := d.DialContext(ctx, "tcp", netip.AddrPortFrom(a, b.port).String())
	return conn, a, err
}
