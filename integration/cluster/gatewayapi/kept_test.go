package gatewayapi_test

import (
	"context"
	"crypto/tls"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"culvert.dev/integration/cluster"
)

const (
	proxy = "127.0.0.1:8080" // in the sandbox, as admin
	admin = "127.0.0.1:9090"
)

// connect asks for a discovered service, for one line.
func connect(ctx context.Context, name string) (string, error) {
	c, err := cluster.Tunnel(ctx, proxy, name)
	if err != nil {
		return "", err
	}
	defer c.Close()
	return say(c, "hello")
}

// waitReadyz waits for a status, and for text in it, or without for there being no
// word of age.
func (b *bench) waitReadyz(status int, text string) {
	b.t.Helper()
	b.Wait(b.t, settled, func(ctx context.Context) error {
		got, said, err := cluster.Get(ctx, "http://"+admin+"/readyz")
		if err != nil {
			return err
		}
		if got != status || !strings.Contains(said, text) || text == "" && strings.Contains(said, " old:") {
			return fmt.Errorf("readyz says %d %q, want %d and %q", got, said, status, text)
		}
		return nil
	})
}

// A gateway that is killed and started again while the API server is away serves
// what it did, but for what needs a key; one that never knew anything is not ready.
func TestAStartWithoutAnAPIServer(t *testing.T) {
	c := cluster.Start(t, cluster.Options{GatewayAddresses: 4})
	manifests, err := os.ReadFile("../conformance/manifests.yaml")
	if err != nil {
		t.Fatal(err)
	}
	c.Apply(t, string(manifests))
	b := &bench{Cluster: c, t: t, backend: c.GatewayAddresses[3]}
	kubeconfig := c.ServiceAccountKubeconfig(t, "culvert-system", "culvert")
	dir := t.TempDir()
	run := func(state string) {
		file := filepath.Join(dir, state+".yaml")
		if err := os.WriteFile(file, fmt.Appendf(nil, `
cluster: west
admin: %q
listeners: [{address: %q, protocols: [connect]}]
kubernetes:
  kubeconfig: %s
  leader: culvert-system/culvert
  state: %s
  discovery: {}
  gatewayAPI:
    addresses: [%s, %s, %s]
`, admin, proxy, kubeconfig, state, c.GatewayAddresses[0], c.GatewayAddresses[1], c.GatewayAddresses[2]), 0o600); err != nil {
			t.Fatal(err)
		}
		b.culvert = c.RunCulvert(t, "gateway", "--config", file)
	}
	run("state")
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("culvert's last words:\n%s", b.culvert.Tail(40))
		}
	})

	server := issue(t, 1, "a.pass.example.com")
	cert, err := tls.X509KeyPair([]byte(server.cert), []byte(server.key))
	if err != nil {
		t.Fatal(err)
	}
	b.secret("edge", issue(t, 2, "*.end.example.com"))
	b.serve("secure", &tls.Config{Certificates: []tls.Certificate{cert}})
	b.serve("plain", nil)
	b.serve("found", nil)
	if _, err := b.Client.CoreV1().Services("default").Patch(t.Context(), "found", types.MergePatchType, []byte(`{"metadata":{"annotations":{"culvert.dev/expose":"true"}}}`), metav1.PatchOptions{}); err != nil {
		t.Fatal(err)
	}
	b.Apply(t, gateway+route("pass", "a.pass.example.com", "secure")+route("end", "b.end.example.com", "plain"))
	address := b.address("edge") + ":443"
	const found = "found.default.svc.west.mesh.internal:443"
	waitFound := func() {
		t.Helper()
		b.Wait(t, settled, func(ctx context.Context) error {
			got, err := connect(ctx, found)
			if err == nil && got != "found none hello" {
				err = fmt.Errorf("got %q", got)
			}
			return err
		})
	}
	b.waitAnswer(address, "a.pass.example.com", "secure a.pass.example.com hello")
	b.waitAnswer(address, "b.end.example.com", "plain none hello")
	waitFound()
	b.Wait(t, settled, func(context.Context) error { // for it to be written
		for name, want := range map[string]string{"state.gateway-api": `"a.pass.example.com"`, "state.discovery": `"Service":"found"`} {
			data, err := os.ReadFile(filepath.Join(dir, name))
			if err != nil {
				return err
			}
			if strings.Contains(string(data), "PRIVATE KEY") {
				t.Fatalf("%s has a key", name)
			}
			if !strings.Contains(string(data), want) {
				return fmt.Errorf("%s does not have %s yet", name, want)
			}
		}
		return nil
	})

	b.StopAPIServer(t)
	b.culvert.Kill()
	run("state")
	b.waitReadyz(http.StatusOK, " old: source ")
	if got, err := ask(address, "a.pass.example.com"); err != nil || got != "secure a.pass.example.com hello" {
		t.Errorf("TLS that passes: got %q, %v", got, err)
	}
	if got, err := connect(t.Context(), found); err != nil || got != "found none hello" {
		t.Errorf("a discovered service: got %q, %v", got, err)
	}
	b.waitRefused(address, "b.end.example.com")
	b.culvert.Kill()

	run("nothing")
	b.waitReadyz(http.StatusServiceUnavailable, "no source has sent its configuration; source ")
	if got, err := connect(t.Context(), found); err == nil {
		t.Errorf("a first start without an API server serves: %q", got)
	}
	b.culvert.Kill()

	run("state")
	b.waitReadyz(http.StatusOK, " old: source ")
	b.StartAPIServer(t)
	b.waitAnswer(address, "b.end.example.com", "plain none hello")
	b.waitReadyz(http.StatusOK, "")
	b.Apply(t, route("new", "c.end.example.com", "found"))
	b.waitAnswer(address, "c.end.example.com", "found none hello")
	waitFound()

	// A role that was made anew with less is nothing to be believed either.
	roles := b.Client.RbacV1().ClusterRoles()
	role, err := roles.Get(t.Context(), "culvert", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	less := role.DeepCopy()
	for i := range less.Rules {
		less.Rules[i].Resources = without(without(less.Rules[i].Resources, "gateways"), "backendtlspolicies")
	}
	if _, err := roles.Update(t.Context(), less, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	b.culvert.Kill()
	run("less")
	const denied = "may not list gateways.gateway.networking.k8s.io: "
	b.waitReadyz(http.StatusServiceUnavailable, denied)
	b.culvert.Kill()
	run("state")
	b.waitReadyz(http.StatusOK, denied)
	if got, err := ask(address, "a.pass.example.com"); err != nil || got != "secure a.pass.example.com hello" {
		t.Errorf("without rights: got %q, %v", got, err)
	}
	b.waitParent("tlsroutes", "pass", "Accepted", "True/Accepted")
	if data, err := os.ReadFile(filepath.Join(dir, "state.gateway-api")); err != nil || !strings.Contains(string(data), `"a.pass.example.com"`) {
		t.Errorf("what was kept is gone: %d bytes, %v", len(data), err)
	}
	if role, err = roles.Get(t.Context(), "culvert", metav1.GetOptions{}); err != nil {
		t.Fatal(err)
	}
	for i := range role.Rules {
		if len(role.Rules[i].APIGroups) == 1 && role.Rules[i].APIGroups[0] == "gateway.networking.k8s.io" && role.Rules[i].Verbs[len(role.Rules[i].Verbs)-1] == "watch" {
			role.Rules[i].Resources = append(role.Rules[i].Resources, "gateways", "backendtlspolicies")
		}
	}
	if _, err := roles.Update(t.Context(), role, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	b.Wait(t, 90*time.Second, func(context.Context) error {
		got, err := ask(address, "b.end.example.com")
		if err == nil && got != "plain none hello" {
			err = fmt.Errorf("got %q", got)
		}
		return err
	})
	b.waitReadyz(http.StatusOK, "")
}
