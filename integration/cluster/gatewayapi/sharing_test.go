package gatewayapi_test

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// listenerSays waits until each condition of a Gateway's only listener is as wanted,
// "True/Programmed", and returns the listener's status.
func (b *bench) listenerSays(name string, want map[string]string) map[string]any {
	b.t.Helper()
	var listener map[string]any
	b.Wait(b.t, settled, func(ctx context.Context) error {
		o, err := b.object(ctx, "gateways", name)
		if err != nil {
			return err
		}
		ls, _, _ := unstructured.NestedSlice(o.Object, "status", "listeners")
		if len(ls) != 1 {
			return fmt.Errorf("Gateway %s has %d listeners in its status", name, len(ls))
		}
		listener = ls[0].(map[string]any)
		for kind, want := range want {
			if got := condition(listener["conditions"].([]any), kind, o.GetGeneration()); got != want {
				return fmt.Errorf("listener of Gateway %s: %s is %s, want %s", name, kind, got, want)
			}
		}
		return nil
	})
	return listener
}

// Two Gateways are at one address and port, each with names of its own. The port stays
// open, and tunnels stand, when the one that was there first goes and comes back.
func TestGatewaysThatShareAPort(t *testing.T) {
	b := start(t)
	p := issue(t, 1, "*.one.example.com", "*.two.example.com")
	cert, err := tls.X509KeyPair([]byte(p.cert), []byte(p.key))
	if err != nil {
		t.Fatal(err)
	}
	b.serve("one", &tls.Config{Certificates: []tls.Certificate{cert}})
	b.serve("two", &tls.Config{Certificates: []tls.Certificate{cert}})
	ip := b.GatewayAddresses[0].String()
	gateway := func(name, host string) string {
		return fmt.Sprintf(`
---
apiVersion: gateway.networking.k8s.io/v1
kind: Gateway
metadata: {name: %s}
spec:
  gatewayClassName: culvert
  addresses: [{value: %q}]
  listeners: [{name: tls, port: 443, protocol: TLS, hostname: %q, tls: {mode: Passthrough}}]
`, name, ip, host)
	}
	to := func(name, host, service string) string {
		return strings.Replace(route(name, host, service), "{name: edge}", "{name: "+name+"}", 1)
	}
	b.Apply(t, gateway("one", "*.one.example.com")+to("one", "a.one.example.com", "one"))
	if got := b.address("one"); got != ip {
		t.Fatalf("Gateway one is at %s, want %s", got, ip)
	}
	// The route of two names what is one's, too, and does not get it.
	b.Apply(t, gateway("two", "*.two.example.com")+strings.Replace(to("two", "a.two.example.com", "two"), "hostnames: [", `hostnames: ["b.one.example.com", `, 1))
	if got := b.address("two"); got != ip {
		t.Fatalf("Gateway two is at %s, want %s", got, ip)
	}
	at := ip + ":443"
	b.waitAnswer(at, "a.one.example.com", "one a.one.example.com hello")
	b.waitAnswer(at, "a.two.example.com", "two a.two.example.com hello")
	b.waitRefused(at, "b.one.example.com")
	for _, name := range []string{"one", "two"} {
		l := b.listenerSays(name, map[string]string{"Accepted": "True/Accepted", "Programmed": "True/Programmed", "Conflicted": "False/NoConflicts"})
		if l["attachedRoutes"] != int64(1) {
			t.Errorf("Gateway %s says %v attached routes, want 1", name, l["attachedRoutes"])
		}
	}

	kept := map[string]*tls.Conn{}
	for _, name := range []string{"one", "two"} {
		c, err := tunnel(at, "a."+name+".example.com")
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		kept[name] = c
	}
	stand := func() {
		t.Helper()
		for name, c := range kept {
			if got, err := say(c, "still"); err != nil || got != name+" a."+name+".example.com still" {
				t.Errorf("the open tunnel of Gateway %s says %q, %v", name, got, err)
			}
		}
	}
	stop, refused := make(chan struct{}), make(chan error, 1)
	go func() { // the port must not be closed for a moment
		for {
			select {
			case <-stop:
				refused <- nil
				return
			default:
			}
			if got, err := ask(at, "a.two.example.com"); err != nil || got != "two a.two.example.com hello" {
				refused <- fmt.Errorf("got %q, %w", got, errors.Join(err, errors.New("while the other Gateway went or came")))
				return
			}
		}
	}()
	if err := b.Dynamic.Resource(schema.GroupVersionResource{Group: "gateway.networking.k8s.io", Version: "v1", Resource: "gateways"}).Namespace("default").
		Delete(t.Context(), "one", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	b.waitRefused(at, "a.one.example.com")
	stand()
	b.Apply(t, gateway("one", "*.one.example.com"))
	b.waitAnswer(at, "a.one.example.com", "one a.one.example.com hello")
	stand()
	close(stop)
	if err := <-refused; err != nil {
		t.Error(err)
	}

	// A third with a name that the first has is told who has it.
	b.Apply(t, gateway("three", "*.two.example.com"))
	l := b.listenerSays("three", map[string]string{"Accepted": "False/HostnameConflict", "Programmed": "False/HostnameConflict", "Conflicted": "True/HostnameConflict"})
	if text := fmt.Sprint(l["conditions"]); !strings.Contains(text, `Gateway default/two has hostname "*.two.example.com" at port 443`) {
		t.Errorf("the third is told %s", text)
	}
	b.waitAnswer(at, "a.two.example.com", "two a.two.example.com hello")
}
