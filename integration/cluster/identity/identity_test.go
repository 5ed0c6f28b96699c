// Package identity_test has gateways of two clusters decide by who asks: by the tokens of the
// clusters' ServiceAccounts, and by the certificates of each other's gateways.
package identity_test

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"culvert.dev/integration/cluster"
	"culvert.dev/internal/testca"
	"culvert.dev/tunnel"
)

func TestMain(m *testing.M) { cluster.Main(m) }

const (
	soon   = time.Minute // on two cores that others use, too
	issuer = "https://10.244.0.1:6443"
	target = "echo.shop.svc.west.mesh.internal:80"
	system = "culvert-system"
)

// A site is a cluster, the certificates of its trust domain, and its gateway.
type site struct {
	*cluster.Cluster
	ca      *testca.CA
	dir     string
	admin   string // of the gateway
	gateway *cluster.Process
}

// TestIdentity has two clusters that know nothing of each other but what their gateways are told.
// Both call themselves by the same issuer of tokens, that of the first one, as clusters with the
// usual name do.
func TestIdentity(t *testing.T) {
	west, east := start(t, "west"), start(t, "east")
	if got := west.APIServer; got != issuer {
		t.Fatalf("the API server of the west is %s, want %s", got, issuer)
	}
	west.RunEcho(t, cluster.Echo{Namespace: "shop", Exposed: true})
	west.WaitReady(t, cluster.PodTime, "shop")
	w := &world{west: west, east: east, north: authority(t, "north.example")}
	w.run(t)
	t.Run("gateways of clusters", w.federation)
	t.Run("tokens", w.tokens)
}

func authority(t *testing.T, domain string) *testca.CA {
	t.Helper()
	ca, err := testca.New(domain, nil)
	if err != nil {
		t.Fatal(err)
	}
	return ca
}

// start starts a cluster, and gives a gateway its rights there.
func start(t *testing.T, name string) *site {
	t.Helper()
	s := &site{
		Cluster: cluster.Start(t, cluster.Options{Name: name, GatewayAddresses: 1, TokenIssuer: issuer}),
		ca:      authority(t, name+".example"), dir: t.TempDir(),
	}
	s.admin = "unix:" + filepath.Join(s.dir, "admin.sock")
	s.Apply(t, cluster.Manifests(t, "cluster: "+name+"\ndiscovery: {clusters: "+system+"}\nauthorizationPolicies: {enabled: true}\ngateway: {enabled: false}\n"))
	return s
}

// write writes a file of the gateway's.
func (s *site) write(t *testing.T, name, text string) {
	t.Helper()
	if err := os.WriteFile(filepath.Join(s.dir, name), []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

// A world is two clusters, and the CA of a third one.
type world struct {
	west, east *site
	north      *testca.CA
	machine    *cluster.Machine // that the gateway of the east runs on
}

// run starts both gateways. That of the east is on a host of its own, from where it reaches no pod.
func (w *world) run(t *testing.T) {
	t.Helper()
	w.machine = w.east.NewMachine(t)
	for _, s := range []*site{w.west, w.east} {
		pair, err := s.ca.Issue(testca.Options{SPIFFEID: "spiffe://" + s.ca.TrustDomain + "/ns/" + system + "/sa/culvert", DNSNames: []string{"gw." + s.ca.TrustDomain}})
		if err != nil {
			t.Fatal(err)
		}
		if err := pair.Save(s.dir, "gw"); err != nil {
			t.Fatal(err)
		}
		for _, ca := range []*testca.CA{w.west.ca, w.east.ca, w.north} {
			s.write(t, ca.TrustDomain+".pem", string(ca.CertPEM))
		}
	}
	w.west.write(t, "token", w.west.Token(t, system, "culvert", nil))
	w.west.write(t, "culvert.yaml", fmt.Sprintf(`
cluster: west
network: west
admin: %[1]q
networks: [{name: east, cidrs: [%[2]s/32]}]
identity:
  tokens: [{issuer: %[3]q, audience: [culvert], kubernetes: true, caFile: %[4]s, tokenFile: token}]
listeners:
  - {address: "127.0.0.1:3128", protocols: [connect, connect-h2, websocket], auth: {issuers: [%[3]q]}}
  - {address: "127.0.0.1:18080", protocols: [websocket], auth: {issuers: [%[3]q]}, loadBalancer: {from: [127.0.0.1/32]}}
  - address: "%[5]s:443"
    tls:
      certificateFile: gw.crt
      keyFile: gw.key
      protocols: [connect, connect-h2]
      clientCAFile: {west.example: west.example.pem, east.example: east.example.pem, north.example: north.example.pem}
kubernetes:
  kubeconfig: %[6]s
  discovery: {}
  authorizationPolicies: {}
`, w.west.admin, w.machine.Addr, issuer, w.west.CAFile(), w.west.GatewayAddresses[0], w.west.ServiceAccountKubeconfig(t, system, "culvert")))
	w.east.write(t, "culvert.yaml", fmt.Sprintf(`
cluster: east
network: east
admin: %[1]q
networks: [{name: east, cidrs: [172.16.0.0/12]}] # with the sandbox, where its clients are
listeners: [{address: "%[2]s:3128", protocols: [connect]}]
kubernetes:
  kubeconfig: %[3]s
  discovery:
    clusters: %[4]s
    gatewayTransport: {certificateFile: gw.crt, keyFile: gw.key, caFile: west.example.pem, serverName: gw.west.example}
`, w.east.admin, w.machine.Addr, w.east.ServiceAccountKubeconfig(t, system, "culvert"), system))
	w.entrance(t, "connect-h2")
	w.secret(t)
	w.west.gateway = w.west.RunCulvert(t, "gateway", "--config", filepath.Join(w.west.dir, "culvert.yaml"))
	w.east.gateway = w.machine.RunCulvert(t, "gateway", "--config", filepath.Join(w.east.dir, "culvert.yaml"))
	t.Cleanup(func() {
		if t.Failed() {
			for _, s := range []*site{w.west, w.east} {
				t.Logf("the gateway of the %s:\n%s", s.Name, s.gateway.Tail(40))
			}
		}
	})
}

// ask asks for the echo by a Dialer, and returns the pod that answers.
func ask(ctx context.Context, d tunnel.Dialer) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	conn, err := d.DialContext(ctx, "tcp", target)
	if err != nil {
		return "", err
	}
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(20 * time.Second))
	e, err := cluster.AskEcho(conn)
	return e.Pod, err
}

// A caller is how somebody asks for the echo.
type caller struct {
	name string
	ask  func(context.Context) (string, error)
}

// wantServed waits until a caller gets a pod.
func (s *site) wantServed(t *testing.T, step string, c caller) {
	t.Helper()
	s.Wait(t, soon, func(ctx context.Context) error {
		pod, err := c.ask(ctx)
		if err == nil && !strings.HasPrefix(pod, "echo-") {
			err = fmt.Errorf("answered by %q", pod)
		}
		if err != nil {
			return fmt.Errorf("%s: %s: %w, want a pod", step, c.name, err)
		}
		return nil
	})
}

// wantRefused waits until a caller is refused for a reason.
func (s *site) wantRefused(t *testing.T, step string, c caller, want tunnel.Reason) {
	t.Helper()
	s.Wait(t, soon, func(ctx context.Context) error {
		pod, err := c.ask(ctx)
		if err == nil {
			return fmt.Errorf("%s: %s gets the pod %q, want the refusal %q", step, c.name, pod, want)
		}
		if got := tunnel.ReasonOf(err); got != want {
			return fmt.Errorf("%s: %s: %w with the reason %q, want %q", step, c.name, err, got, want)
		}
		return nil
	})
}

// logged reports whether a line of the gateway's log has all of some texts.
func (s *site) logged(texts ...string) bool {
	for line := range strings.Lines(s.gateway.Output()) {
		if !slices.ContainsFunc(texts, func(text string) bool { return !strings.Contains(line, text) }) {
			return true
		}
	}
	return false
}

// wantLog waits for a line of the gateway's log that has all of some texts.
func (s *site) wantLog(t *testing.T, texts ...string) {
	t.Helper()
	s.Wait(t, soon, func(context.Context) error {
		if !s.logged(texts...) {
			return fmt.Errorf("the gateway of the %s has logged no line with %q", s.Name, texts)
		}
		return nil
	})
}

// explain has the running gateway say what a request by its listener would meet; more are further
// flags.
func (s *site) explain(ctx context.Context, listener string, from netip.Addr, as string, more ...string) string {
	args := append([]string{"explain", target, "--admin", s.admin, "--listener", listener, "--from", from.String(), "--as", as}, more...)
	out, err := exec.CommandContext(ctx, cluster.Program("culvert"), args...).CombinedOutput()
	if exit := (*exec.ExitError)(nil); err != nil && !errors.As(err, &exit) {
		return err.Error()
	}
	return string(out)
}

// policy applies a policy of the west; kind is AuthorizationPolicy or ClusterAuthorizationPolicy.
func (w *world) policy(t *testing.T, kind, name, spec string) {
	t.Helper()
	w.west.Apply(t, policyText(kind, name, spec))
}

func (w *world) noPolicy(t *testing.T, kind, name string) {
	t.Helper()
	w.west.Delete(t, policyText(kind, name, "{enforcementLevel: Network}"))
}

func policyText(kind, name, spec string) string {
	meta := "{name: " + name + ", namespace: shop}"
	if strings.HasPrefix(kind, "Cluster") {
		meta = "{name: " + name + "}"
	}
	return fmt.Sprintf("apiVersion: policy.culvert.dev/v1alpha1\nkind: %s\nmetadata: %s\nspec: %s\n", kind, meta, spec)
}

// annotate sets an annotation of the echo's Service; "" removes it.
func (w *world) annotate(t *testing.T, key, value string) {
	t.Helper()
	patch := fmt.Sprintf(`{"metadata":{"annotations":{%q:null}}}`, key)
	if value != "" {
		patch = fmt.Sprintf(`{"metadata":{"annotations":{%q:%q}}}`, key, value)
	}
	if _, err := w.west.Client.CoreV1().Services("shop").Patch(t.Context(), "echo", mergePatch, []byte(patch), metav1.PatchOptions{}); err != nil {
		t.Fatal(err)
	}
}
