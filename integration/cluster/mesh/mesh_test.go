package mesh_test

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"encoding/pem"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"culvert.dev/integration/cluster"
	"culvert.dev/internal/testca"
)

func TestMain(m *testing.M) { cluster.Main(m) }

const (
	name     = "web.shop.svc.clusterset.local"
	patience = 60 * time.Second // until what must come has come, on a busy machine
)

// A pod of the east reaches a service that the west exports, by the name it has
// in the cluster set: the east's gateway asks the west's, which knows the pods.
// The certificates are those of the client and of the service. A gateway in its
// cluster, as the chart installs it, and one out of it do the same.
func TestExportedServiceIsReachedFromTheOtherCluster(t *testing.T) {
	for _, inside := range []string{"west", "east"} {
		t.Run("gateway of the "+inside+" in its cluster", func(t *testing.T) {
			ca, err := testca.New("mesh.test", nil)
			if err != nil {
				t.Fatal(err)
			}
			west := start(t, "west", inside == "west")
			east := start(t, "east", inside == "east")
			west.RunEcho(t, cluster.Echo{Namespace: "shop", Name: "web", Replicas: 2, CA: ca, Hosts: []string{name}})
			west.Apply(t, export)
			west.WaitReady(t, patience, "shop")
			west.run(t)
			east.knows(t, west)
			east.run(t)
			east.Apply(t, client)
			east.WaitReady(t, patience, "shop")
			pods, err := east.Pods(t.Context(), "shop", "app=client")
			if err != nil || len(pods) != 1 {
				t.Fatalf("pods of the client: %v, %v", pods, err)
			}
			c := newCaller(t, ca, east, &pods[0])

			// The name means the west's gateway there, and the east's leads on to it.
			c.wants(t, "asked by DNS", func() (string, error) {
				at, err := c.lookup(t.Context(), east.gateway())
				if err != nil {
					return "", err
				}
				if at != west.gateway() {
					return "", fmt.Errorf("%s is %s, want the west's gateway %s", name, at, west.gateway())
				}
				return c.call(t.Context(), at)
			})
			c.wants(t, "through both gateways", func() (string, error) { return c.call(t.Context(), east.gateway()) })

			// Pods come and go; what they have in common is the name.
			for _, pod := range west.pods(t, "app=web") {
				if err := west.Client.CoreV1().Pods("shop").Delete(t.Context(), pod.Name, metav1.DeleteOptions{}); err != nil {
					t.Fatal(err)
				}
			}
			west.WaitReady(t, patience, "shop")
			c.wants(t, "after its pods were replaced", func() (string, error) { return c.call(t.Context(), east.gateway()) })

			// What is no longer exported is no longer there.
			west.Delete(t, export)
			west.Wait(t, patience, func(ctx context.Context) error {
				var none *net.DNSError
				if at, err := c.lookup(ctx, east.gateway()); !errors.As(err, &none) || !none.IsNotFound {
					return fmt.Errorf("%s is still %s after its export ended (%v)", name, at, err)
				}
				if got, err := c.call(ctx, east.gateway()); err == nil {
					return fmt.Errorf("%s is still served after its export ended: %s", name, got)
				}
				return nil
			})
		})
	}
}

// A side is a cluster and its gateway.
type side struct {
	*cluster.Cluster
	inside bool
}

func start(t *testing.T, name string, inside bool) *side {
	return &side{Cluster: cluster.Start(t, cluster.Options{Name: name, GatewayAddresses: 1}), inside: inside}
}

func (s *side) gateway() netip.Addr { return s.GatewayAddresses[0] }

func (s *side) pods(t *testing.T, selector string) []corev1.Pod {
	t.Helper()
	pods, err := s.Pods(t.Context(), "shop", selector)
	if err != nil {
		t.Fatal(err)
	}
	return pods
}

// run installs the gateway by the chart, or its rights alone and starts it out of
// the cluster.
func (s *side) run(t *testing.T) {
	t.Helper()
	values := fmt.Sprintf(`
cluster: %[1]s
discovery: {podCIDRs: true, clusters: culvert-system, exportedTo: ["*"]}
multiCluster: {enabled: true}
gateway:
  enabled: %[3]t
  replicas: 1
  hostNetwork: true
  listeners: [{address: "%[2]s:443", protocols: [sni, connect]}]
  service: {enabled: false}
  config:
    dns: {listen: ["udp://%[2]s:53"]}
`, s.Name, s.gateway(), s.inside)
	s.Apply(t, cluster.Manifests(t, values))
	s.Apply(t, fmt.Sprintf(entrance, s.Name, s.gateway()))
	if s.inside {
		s.WaitReady(t, patience, "culvert-system")
		return
	}
	config := fmt.Sprintf(`
cluster: %[1]s
network: %[1]s
listeners: [{address: "%[2]s:443", protocols: [sni, connect]}]
dns: {listen: ["udp://%[2]s:53"]}
kubernetes:
  kubeconfig: %[3]s
  discovery: {podCIDRs: true, clusters: culvert-system, exportedTo: ["*"]}
  multiCluster: true
`, s.Name, s.gateway(), s.ServiceAccountKubeconfig(t, "culvert-system", "culvert"))
	file := filepath.Join(t.TempDir(), "culvert.yaml")
	if err := os.WriteFile(file, []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	p := s.RunCulvert(t, "gateway", "--config", file)
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("culvert of the %s:\n%s", s.Name, p.Tail(60))
		}
	})
}

// knows gives s the right to look at another cluster.
func (s *side) knows(t *testing.T, other *side) {
	t.Helper()
	kubeconfig, err := os.ReadFile(other.ServiceAccountKubeconfig(t, "culvert-system", "culvert"))
	if err != nil {
		t.Fatal(err)
	}
	s.Apply(t, fmt.Sprintf(`
apiVersion: v1
kind: Namespace
metadata: {name: culvert-system}
---
apiVersion: v1
kind: Secret
metadata: {name: %[1]s, namespace: culvert-system, labels: {culvert.dev/cluster: %[1]s}}
data: {kubeconfig: %[2]s}
`, other.Name, base64.StdEncoding.EncodeToString(kubeconfig)))
}

// entrance says where a cluster is entered.
const entrance = `
apiVersion: v1
kind: Service
metadata: {name: entrance, namespace: culvert-system, annotations: {culvert.dev/gateway: "%[1]s"}}
spec:
  selector: {app.kubernetes.io/name: culvert}
  ports: [{name: tls, port: 443}]
  externalIPs: ["%[2]s"]
`

const export = `
apiVersion: multicluster.x-k8s.io/v1beta1
kind: ServiceExport
metadata: {name: web, namespace: shop}
`

const client = `
apiVersion: v1
kind: Namespace
metadata: {name: shop}
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: client, namespace: shop}
spec:
  selector: {matchLabels: {app: client}}
  template:
    metadata: {labels: {app: client}}
    spec: {containers: [{name: client, image: echo-basic}]}
`

// A caller is a pod that asks for the service.
type caller struct {
	in  *side
	pod *corev1.Pod
	tls *tls.Config
	t   *testing.T
}

func newCaller(t *testing.T, ca *testca.CA, in *side, pod *corev1.Pod) *caller {
	t.Helper()
	pair, err := ca.Issue(testca.Options{SPIFFEID: "spiffe://mesh.test/ns/shop/sa/client", Usage: testca.ClientOnly})
	if err != nil {
		t.Fatal(err)
	}
	cfg := pair.ClientConfig(name)
	cfg.MinVersion = tls.VersionTLS13
	return &caller{in: in, pod: pod, t: t, tls: cfg}
}

// wants waits until a call is answered by a pod of web.
func (c *caller) wants(t *testing.T, what string, call func() (string, error)) {
	t.Helper()
	c.in.Wait(t, patience, func(context.Context) error {
		pod, err := call()
		if err == nil && !strings.HasPrefix(pod, "web-") {
			err = fmt.Errorf("answered by pod %q, want one of web", pod)
		}
		if err != nil {
			return fmt.Errorf("%s: %w", what, err)
		}
		return nil
	})
}

// lookup asks the DNS server at an address for the service's.
func (c *caller) lookup(ctx context.Context, server netip.Addr) (found netip.Addr, err error) {
	conn, err := c.dial(ctx, "udp", netip.AddrPortFrom(server, 53))
	if err != nil {
		return found, err
	}
	defer conn.Close()
	r := net.Resolver{PreferGo: true, Dial: func(context.Context, string, string) (net.Conn, error) { return conn, nil }}
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	addrs, err := r.LookupNetIP(ctx, "ip4", name+".")
	if err != nil {
		return found, err
	}
	return addrs[0].Unmap(), nil
}

// dial opens a connection from the pod's network.
func (c *caller) dial(ctx context.Context, network string, to netip.AddrPort) (conn net.Conn, err error) {
	err = c.in.InPod(c.t, c.pod, func() error {
		var d net.Dialer
		ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
		defer cancel()
		conn, err = d.DialContext(ctx, network, to.String())
		return err
	})
	return conn, err
}

// call asks for the service at an address and returns which pod has answered. That
// saw the client's own certificate.
func (c *caller) call(ctx context.Context, at netip.Addr) (pod string, err error) {
	raw, err := c.dial(ctx, "tcp", netip.AddrPortFrom(at, 443))
	if err != nil {
		return "", err
	}
	defer raw.Close()
	answer, err := cluster.AskEcho(tls.Client(raw, c.tls))
	if err != nil {
		return "", err
	}
	for _, text := range answer.TLS.PeerCertificates {
		if shown, err := certificate(text); err == nil && shown.Equal(c.tls.Certificates[0].Leaf) {
			return answer.Pod, nil
		}
	}
	return "", fmt.Errorf("the service did not see the client's certificate: %+v", answer)
}

// certificate reads one of those that the service says it saw.
func certificate(text string) (*x509.Certificate, error) {
	block, _ := pem.Decode([]byte(text))
	if block == nil {
		return nil, errors.New("no PEM")
	}
	return x509.ParseCertificate(block.Bytes)
}
