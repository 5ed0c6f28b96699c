package gatewayapi_test

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
)

const gateway = `
apiVersion: gateway.networking.k8s.io/v1
kind: Gateway
metadata: {name: edge}
spec:
  gatewayClassName: culvert
  listeners:
  - {name: pass, port: 443, protocol: TLS, hostname: "*.pass.example.com", tls: {mode: Passthrough}}
  - {name: end, port: 443, protocol: TLS, hostname: "*.end.example.com", tls: {mode: Terminate, certificateRefs: [{name: edge}]}}
  - {name: exact, port: 444, protocol: TLS, hostname: abc.example.com, tls: {mode: Passthrough}}
`

func route(name, host, service string) string {
	return fmt.Sprintf(`
---
apiVersion: gateway.networking.k8s.io/v1
kind: TLSRoute
metadata: {name: %s}
spec:
  parentRefs: [{name: edge}]
  hostnames: [%q]
  rules: [{backendRefs: [{name: %s, port: 443}]}]
`, name, host, service)
}

// What the suite of v1.7 asks beyond that of v1.6.
func TestNextConformance(t *testing.T) {
	b := start(t)
	server := issue(t, 1, "abc.example.com")
	cert, err := tls.X509KeyPair([]byte(server.cert), []byte(server.key))
	if err != nil {
		t.Fatal(err)
	}
	b.secret("edge", issue(t, 2, "*.end.example.com"))
	b.serve("plain", nil)
	b.serve("secure", &tls.Config{Certificates: []tls.Certificate{cert}})
	b.serve("other", &tls.Config{Certificates: []tls.Certificate{cert}})
	b.Apply(t, gateway+route("plain", "plain.end.example.com", "plain")+route("secure", "secure.end.example.com", "secure"))
	address := b.address("edge") + ":443"

	t.Run("BackendTLSPolicyTLSRouteTerminate", func(t *testing.T) {
		b := b.of(t)
		b.waitAnswer(address, "plain.end.example.com", "plain none hello")
		b.Apply(t, fmt.Sprintf(`
apiVersion: v1
kind: ConfigMap
metadata: {name: ca}
data:
  ca.crt: |
    %s
---
apiVersion: gateway.networking.k8s.io/v1
kind: BackendTLSPolicy
metadata: {name: secure}
spec:
  targetRefs: [{group: "", kind: Service, name: secure}]
  validation: {hostname: abc.example.com, caCertificateRefs: [{group: "", kind: ConfigMap, name: ca}]}
`, strings.ReplaceAll(strings.TrimSpace(server.cert), "\n", "\n    ")))
		b.waitAnswer(address, "secure.end.example.com", "secure abc.example.com hello")
		b.waitParent("backendtlspolicies", "secure", "Accepted", "True/Accepted")

		// An option that can't be used fails the connection.
		options := func(list string) {
			t.Helper()
			policies := b.Dynamic.Resource(schema.GroupVersionResource{Group: "gateway.networking.k8s.io", Version: "v1", Resource: "backendtlspolicies"}).Namespace("default")
			if _, err := policies.Patch(t.Context(), "secure", types.MergePatchType, []byte(`{"spec":{"options":{`+list+`}}}`), metav1.PatchOptions{}); err != nil {
				t.Fatal(err)
			}
		}
		options(`"culvert.dev/min-version":"1.1"`)
		b.waitParent("backendtlspolicies", "secure", "Accepted", "False/Invalid")
		b.waitRefused(address, "secure.end.example.com")
		options(`"culvert.dev/min-version":"1.3"`)
		b.waitParent("backendtlspolicies", "secure", "Accepted", "True/Accepted")
		b.waitAnswer(address, "secure.end.example.com", "secure abc.example.com hello")

		// Without its CA it is refused, and not spoken to in the clear.
		if err := b.Client.CoreV1().ConfigMaps("default").Delete(t.Context(), "ca", metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		b.waitParent("backendtlspolicies", "secure", "Accepted", "False/NoValidCACertificate")
		b.waitRefused(address, "secure.end.example.com")
	})

	t.Run("foreign conditions and ancestors stay", func(t *testing.T) {
		b := b.of(t)
		foreign := `{"type":"special.io/SomeField","status":"True","reason":"Because","message":"","lastTransitionTime":"2020-01-01T00:00:00Z"}`
		res := func(resource string) schema.GroupVersionResource {
			return schema.GroupVersionResource{Group: "gateway.networking.k8s.io", Version: "v1", Resource: resource}
		}
		patch := func(resource, name, body string, sub ...string) {
			t.Helper()
			if _, err := b.Dynamic.Resource(res(resource)).Namespace("default").Patch(t.Context(), name, types.JSONPatchType, []byte(body), metav1.PatchOptions{}, sub...); err != nil {
				t.Fatal(err)
			}
		}
		patch("gateways", "edge", `[{"op":"add","path":"/status/conditions/0","value":`+foreign+`}]`, "status")
		patch("backendtlspolicies", "secure", `[{"op":"add","path":"/status/ancestors/0","value":{"ancestorRef":{"name":"else"},"controllerName":"other.io/x","conditions":[`+foreign+`]}}]`, "status")
		patch("gateways", "edge", `[{"op":"add","path":"/spec/listeners/-","value":{"name":"more","port":445,"protocol":"TCP"}}]`)
		b.address("edge")
		o, err := b.object(t.Context(), "gateways", "edge")
		if err != nil {
			t.Fatal(err)
		}
		conds, _, _ := unstructured.NestedSlice(o.Object, "status", "conditions")
		if first := conds[0].(map[string]any); first["type"] != "special.io/SomeField" || first["lastTransitionTime"] != "2020-01-01T00:00:00Z" {
			t.Errorf("the Gateway's first condition is %v, want the foreign one", first)
		}
		patch("backendtlspolicies", "secure", `[{"op":"replace","path":"/spec/validation/hostname","value":"abd.example.com"}]`)
		b.waitParent("backendtlspolicies", "secure", "Accepted", "False/NoValidCACertificate")
		if o, err = b.object(t.Context(), "backendtlspolicies", "secure"); err != nil {
			t.Fatal(err)
		}
		as, _, _ := unstructured.NestedSlice(o.Object, "status", "ancestors")
		if len(as) != 2 || as[0].(map[string]any)["controllerName"] != "other.io/x" {
			t.Errorf("ancestors are %v, want the foreign one first", as)
		}
	})

	t.Run("a Service that is told who calls", func(t *testing.T) { b.of(t).forwardIdentity() })

	t.Run("GatewayNameMaximumLength", func(t *testing.T) {
		b := b.of(t)
		name := strings.Repeat(strings.Repeat("g", 61)+".", 4) + "edge1"
		b.Apply(t, strings.ReplaceAll(gateway, "{name: edge}", "{name: "+name+"}"))
		if len(name) != 253 {
			t.Fatalf("the name has %d characters", len(name))
		}
		b.address(name)
	})

	t.Run("routes rank by their own hostname", func(t *testing.T) {
		b := b.of(t)
		b.Apply(t, route("wide", "*.example.com", "secure"))
		b.waitAnswer(strings.Replace(address, ":443", ":444", 1), "abc.example.com", "secure abc.example.com hello")
		b.Apply(t, route("narrow", "abc.example.com", "other"))
		b.waitAnswer(strings.Replace(address, ":443", ":444", 1), "abc.example.com", "other abc.example.com hello")
	})
}

// What serves goes on serving, and what changes is in force afterwards.
func TestFaults(t *testing.T) {
	b := start(t)
	first := issue(t, 1, "*.end.example.com")
	b.secret("edge", first)
	b.serve("one", nil)
	b.serve("two", nil)
	b.Apply(t, gateway+route("r", "r.end.example.com", "one"))
	address := b.address("edge") + ":443"
	b.waitAnswer(address, "r.end.example.com", "one none hello")

	kept, err := tunnel(address, "r.end.example.com")
	if err != nil {
		t.Fatal(err)
	}
	defer kept.Close()
	stands := func(t *testing.T) {
		t.Helper()
		if got, err := say(kept, "still"); err != nil || got != "one none still" {
			t.Fatalf("the tunnel that was open says %q, %v", got, err)
		}
	}

	t.Run("no API server", func(t *testing.T) {
		b := b.of(t)
		b.StopAPIServer(t)
		for range 10 {
			if got, err := ask(address, "r.end.example.com"); err != nil || got != "one none hello" {
				t.Errorf("got %q, %v", got, err)
			}
		}
		b.StartAPIServer(t)
		b.Apply(t, route("r", "r.end.example.com", "two"))
		b.waitAnswer(address, "r.end.example.com", "two none hello")
		stands(t)
	})
	t.Run("an API server that says nothing", func(t *testing.T) {
		b := b.of(t)
		b.PauseAPIServer(t)
		if got, err := ask(address, "r.end.example.com"); err != nil || got != "two none hello" {
			t.Errorf("got %q, %v", got, err)
		}
		b.Wait(t, 30*time.Second, func(context.Context) error {
			if log := b.culvert.Tail(40); !strings.Contains(log, "API server is unreachable; serving the last known Gateways") {
				return errors.New("it has not been noticed")
			}
			return nil
		})
		if got, err := ask(address, "r.end.example.com"); err != nil || got != "two none hello" {
			t.Errorf("got %q, %v when it has been noticed", got, err)
		}
		b.ResumeAPIServer(t)
		b.Apply(t, route("r", "r.end.example.com", "one"))
		b.waitAnswer(address, "r.end.example.com", "one none hello")
		stands(t)
	})
	t.Run("watches that have expired", func(t *testing.T) {
		b := b.of(t)
		b.ExpireWatches(t)
		b.Apply(t, route("r", "r.end.example.com", "two"))
		b.waitAnswer(address, "r.end.example.com", "two none hello")
		b.Apply(t, route("r", "r.end.example.com", "one"))
		b.waitAnswer(address, "r.end.example.com", "one none hello")
		stands(t)
	})
	t.Run("certificates", func(t *testing.T) {
		b := b.of(t)
		b.secret("edge", issue(t, 77, "*.end.example.com"))
		b.Wait(t, settled, func(context.Context) error {
			c, err := tunnel(address, "r.end.example.com")
			if err != nil {
				return err
			}
			defer c.Close()
			if n := c.ConnectionState().PeerCertificates[0].SerialNumber.Int64(); n != 77 {
				return fmt.Errorf("the certificate is number %d, want 77", n)
			}
			return nil
		})
		// Halves of two pairs are a slip: what was there before goes on.
		b.secret("edge", pair{issue(t, 78, "*.end.example.com").cert, issue(t, 79, "*.end.example.com").key})
		b.Wait(t, settled, func(ctx context.Context) error {
			o, err := b.object(ctx, "gateways", "edge")
			if err != nil {
				return err
			}
			ls, _, _ := unstructured.NestedSlice(o.Object, "status", "listeners")
			for _, l := range ls {
				m := l.(map[string]any)
				if m["name"] != "end" {
					continue
				}
				refs, programmed := condition(m["conditions"].([]any), "ResolvedRefs", o.GetGeneration()), condition(m["conditions"].([]any), "Programmed", o.GetGeneration())
				if refs != "False/InvalidCertificateRef" || programmed != "True/Programmed" {
					return fmt.Errorf("ResolvedRefs is %s and Programmed %s", refs, programmed)
				}
				return nil
			}
			return errors.New("listener end has no status")
		})
		if got, err := ask(address, "r.end.example.com"); err != nil || got != "one none hello" {
			t.Errorf("after a slip: got %q, %v", got, err)
		}
		if err := b.Client.CoreV1().Secrets("default").Delete(t.Context(), "edge", metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		b.waitRefused(address, "r.end.example.com")
		stands(t)
		b.secret("edge", first)
		b.waitAnswer(address, "r.end.example.com", "one none hello")
	})
	t.Run("a route that leads back", func(t *testing.T) {
		b := b.of(t)
		b.Apply(t, fmt.Sprintf(`
apiVersion: v1
kind: Service
metadata: {name: back}
spec: {ports: [{port: 443}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: back-1, labels: {kubernetes.io/service-name: back}}
addressType: IPv4
ports: [{port: 443, protocol: TCP}]
endpoints: [{addresses: ["%s"]}]
`, strings.TrimSuffix(address, ":443"))+route("back", "back.pass.example.com", "back"))
		b.waitParent("tlsroutes", "back", "ResolvedRefs", "False/Loop")
		b.waitRefused(address, "back.pass.example.com")
		stands(t)
	})
	t.Run("a class that is deleted, and made again", func(t *testing.T) {
		b := b.of(t)
		programmed := func(want string) {
			t.Helper()
			b.Wait(t, settled, func(ctx context.Context) error {
				o, err := b.object(ctx, "gateways", "edge")
				if err != nil {
					return err
				}
				cs, _, _ := unstructured.NestedSlice(o.Object, "status", "conditions")
				if got := condition(cs, "Programmed", o.GetGeneration()); got != want {
					return fmt.Errorf("Programmed is %s, want %s", got, want)
				}
				return nil
			})
		}
		classes := b.Dynamic.Resource(schema.GroupVersionResource{Group: "gateway.networking.k8s.io", Version: "v1", Resource: "gatewayclasses"})
		class, err := classes.Get(t.Context(), "culvert", metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		if err := classes.Delete(t.Context(), "culvert", metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		programmed("False/Invalid")
		stands(t)
		again := &unstructured.Unstructured{Object: map[string]any{"apiVersion": class.GetAPIVersion(), "kind": class.GetKind(), "metadata": map[string]any{"name": "culvert"}, "spec": class.Object["spec"]}}
		if _, err := classes.Create(t.Context(), again, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		programmed("True/Programmed")
		b.waitAnswer(address, "r.end.example.com", "one none hello")
	})
	t.Run("a right that is taken away and given back", func(t *testing.T) {
		b := b.of(t)
		roles := b.Client.RbacV1().ClusterRoles()
		role, err := roles.Get(t.Context(), "culvert", metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		less := role.DeepCopy()
		for i := range less.Rules {
			less.Rules[i].Resources = without(less.Rules[i].Resources, "tlsroutes")
		}
		if _, err := roles.Update(t.Context(), less, metav1.UpdateOptions{}); err != nil {
			t.Fatal(err)
		}
		b.ExpireWatches(t)
		b.Wait(t, time.Minute, func(context.Context) error {
			if log := b.culvert.Output(); !strings.Contains(log, "tlsroutes.gateway.networking.k8s.io: ") {
				return fmt.Errorf("nobody says what is forbidden")
			}
			return nil
		})
		if got, err := ask(address, "r.end.example.com"); err != nil || got != "one none hello" {
			t.Errorf("got %q, %v", got, err)
		}
		if role, err = roles.Get(t.Context(), "culvert", metav1.GetOptions{}); err != nil {
			t.Fatal(err)
		}
		for i := range role.Rules {
			if len(role.Rules[i].APIGroups) == 1 && role.Rules[i].APIGroups[0] == "gateway.networking.k8s.io" && role.Rules[i].Verbs[len(role.Rules[i].Verbs)-1] == "watch" {
				role.Rules[i].Resources = append(role.Rules[i].Resources, "tlsroutes")
			}
		}
		if _, err := roles.Update(t.Context(), role, metav1.UpdateOptions{}); err != nil {
			t.Fatal(err)
		}
		b.Apply(t, route("r", "r.end.example.com", "two"))
		b.Wait(t, 90*time.Second, func(context.Context) error {
			got, err := ask(address, "r.end.example.com")
			if err == nil && got != "two none hello" {
				err = fmt.Errorf("got %q of the old route", got)
			}
			return err
		})
		stands(t)
	})
}

func without(list []string, one string) []string {
	var out []string
	for _, s := range list {
		if s != one {
			out = append(out, s)
		}
	}
	return out
}

// of is the same bench for a part of its test.
func (b *bench) of(t *testing.T) *bench {
	c := *b
	c.t = t
	return &c
}
