// Package gatewayapi_test has what the conformance suite does not ask of a
// gateway on a real control plane: what the next version of it will, and faults.
package gatewayapi_test

import (
	"bufio"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"culvert.dev/integration/cluster"
)

func TestMain(m *testing.M) { cluster.Main(m) }

// answerTime is far more than an answer takes on a busy machine.
const answerTime = 10 * time.Second

// settled is the limit for a change to be in force.
const settled = time.Minute

// A bench is a cluster with a gateway out of it. Backends are servers of the
// test, at the last of the gateway's addresses.
type bench struct {
	*cluster.Cluster
	t       *testing.T
	culvert *cluster.Process
	backend netip.Addr
}

// start runs both, the gateway with further lines of configuration: the first of
// them are below kubernetes.
func start(t *testing.T, lines ...string) *bench {
	t.Helper()
	c := cluster.Start(t, cluster.Options{GatewayAddresses: 4})
	manifests, err := os.ReadFile("../conformance/manifests.yaml")
	if err != nil {
		t.Fatal(err)
	}
	c.Apply(t, string(manifests))
	b := &bench{Cluster: c, t: t, backend: c.GatewayAddresses[3]}
	var config strings.Builder
	fmt.Fprintf(&config, "kubernetes:\n  kubeconfig: %s\n  gatewayAPI:\n    controllerName: culvert.dev/gateway\n    addresses:\n", c.ServiceAccountKubeconfig(t, "culvert-system", "culvert"))
	for _, a := range c.GatewayAddresses[:3] {
		fmt.Fprintf(&config, "      - {address: %s}\n", a)
	}
	config.WriteString("  leader: culvert-system/culvert\n" + strings.Join(lines, "\n"))
	file := filepath.Join(t.TempDir(), "gateway.yaml")
	if err := os.WriteFile(file, []byte(config.String()), 0o600); err != nil {
		t.Fatal(err)
	}
	b.culvert = c.RunCulvert(t, "gateway", "--config", file)
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("culvert's last words:\n%s", b.culvert.Tail(40))
		}
	})
	return b
}

// object gets one of Gateway API.
func (b *bench) object(ctx context.Context, resource, name string) (*unstructured.Unstructured, error) {
	return b.Dynamic.Resource(schema.GroupVersionResource{Group: "gateway.networking.k8s.io", Version: "v1", Resource: resource}).Namespace("default").Get(ctx, name, metav1.GetOptions{})
}

// address waits for a Gateway to be programmed for its newest generation.
func (b *bench) address(name string) string {
	b.t.Helper()
	var address string
	b.Wait(b.t, settled, func(ctx context.Context) error {
		o, err := b.object(ctx, "gateways", name)
		if err != nil {
			return err
		}
		conds, _, _ := unstructured.NestedSlice(o.Object, "status", "conditions")
		for _, kind := range []string{"Accepted", "Programmed"} {
			if got := condition(conds, kind, o.GetGeneration()); !strings.HasPrefix(got, "True") {
				return fmt.Errorf("Gateway %.40s is not %s: %s", name, kind, got)
			}
		}
		as, _, _ := unstructured.NestedSlice(o.Object, "status", "addresses")
		if len(as) != 1 {
			return fmt.Errorf("Gateway %.40s has addresses %v", name, as)
		}
		address = as[0].(map[string]any)["value"].(string)
		return nil
	})
	return address
}

// condition is "True/Reason", or says why there is none.
func condition(conds []any, kind string, generation int64) string {
	for _, c := range conds {
		m := c.(map[string]any)
		if m["type"] != kind {
			continue
		}
		if g, _ := m["observedGeneration"].(int64); g != generation {
			return fmt.Sprintf("of generation %d, not %d", g, generation)
		}
		return fmt.Sprintf("%v/%v", m["status"], m["reason"])
	}
	return "missing"
}

// waitParent waits for what the only parent of a route says.
func (b *bench) waitParent(resource, name, kind, want string) {
	b.t.Helper()
	b.Wait(b.t, settled, func(ctx context.Context) error {
		o, err := b.object(ctx, resource, name)
		if err != nil {
			return err
		}
		ps, _, _ := unstructured.NestedSlice(o.Object, "status", map[string]string{"backendtlspolicies": "ancestors"}[resource])
		if resource != "backendtlspolicies" {
			ps, _, _ = unstructured.NestedSlice(o.Object, "status", "parents")
		}
		for _, p := range ps {
			m := p.(map[string]any)
			if m["controllerName"] != "culvert.dev/gateway" {
				continue
			}
			if got := condition(m["conditions"].([]any), kind, o.GetGeneration()); got != want {
				return fmt.Errorf("%s %s: %s is %s, want %s", resource, name, kind, got, want)
			}
			return nil
		}
		return fmt.Errorf("%s %s has no entry of ours", resource, name)
	})
}

// A pair is a certificate with its key in PEM.
type pair struct{ cert, key string }

// issue makes a certificate that is its own CA.
func issue(t *testing.T, serial int64, names ...string) pair {
	t.Helper()
	k, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	tmpl := &x509.Certificate{
		SerialNumber: big.NewInt(serial), Subject: pkix.Name{CommonName: names[0]}, DNSNames: names, IsCA: true, BasicConstraintsValid: true,
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
	}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, k.Public(), k)
	if err != nil {
		t.Fatal(err)
	}
	kder, err := x509.MarshalPKCS8PrivateKey(k)
	if err != nil {
		t.Fatal(err)
	}
	return pair{string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})), string(pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: kder}))}
}

// secret writes a pair to the cluster.
func (b *bench) secret(name string, p pair) {
	b.t.Helper()
	s := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: name}, Type: corev1.SecretTypeTLS, StringData: map[string]string{"tls.crt": p.cert, "tls.key": p.key}}
	_, err := b.Client.CoreV1().Secrets("default").Create(b.t.Context(), s, metav1.CreateOptions{})
	if err != nil {
		_, err = b.Client.CoreV1().Secrets("default").Update(b.t.Context(), s, metav1.UpdateOptions{})
	}
	if err != nil {
		b.t.Fatal(err)
	}
}

// serve answers each line with name and what is known of the connection, and
// makes the Service of that name lead there. cfg may be nil.
func (b *bench) serve(name string, cfg *tls.Config) {
	b.t.Helper()
	l, err := net.Listen("tcp", netip.AddrPortFrom(b.backend, 0).String())
	if err != nil {
		b.t.Fatal(err)
	}
	done := make(chan struct{})
	b.t.Cleanup(func() { l.Close(); <-done })
	go func() {
		defer close(done)
		var open []net.Conn
		for {
			c, err := l.Accept()
			if err != nil {
				for _, c := range open {
					c.Close()
				}
				return
			}
			open = append(open, c)
			go answer(c, name, cfg)
		}
	}()
	port := l.Addr().(*net.TCPAddr).Port
	b.Apply(b.t, fmt.Sprintf(`
apiVersion: v1
kind: Service
metadata: {name: %[1]s}
spec: {ports: [{name: tls, port: 443, targetPort: %[2]d}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: %[1]s-1, labels: {kubernetes.io/service-name: %[1]s}}
addressType: IPv4
ports: [{name: tls, port: %[2]d, protocol: TCP}]
endpoints: [{addresses: ["%[3]s"], conditions: {ready: true}}]
`, name, port, b.backend))
}

func answer(c net.Conn, name string, cfg *tls.Config) {
	defer c.Close()
	sni := "none"
	if cfg != nil {
		t := tls.Server(c, cfg)
		if t.Handshake() != nil {
			return
		}
		c, sni = t, t.ConnectionState().ServerName
	}
	r := bufio.NewReader(c)
	for {
		line, err := r.ReadString('\n')
		if err != nil {
			return
		}
		if _, err := fmt.Fprintf(c, "%s %s %s\n", name, sni, strings.TrimSpace(line)); err != nil {
			return
		}
	}
}

// tunnel opens a connection to sni by TLS.
func tunnel(address, sni string) (*tls.Conn, error) {
	d := &tls.Dialer{Config: &tls.Config{ServerName: sni, InsecureSkipVerify: true}}
	ctx, cancel := context.WithTimeout(context.Background(), answerTime)
	defer cancel()
	c, err := d.DialContext(ctx, "tcp", address)
	if err != nil {
		return nil, err
	}
	return c.(*tls.Conn), nil
}

// say sends a line, and returns the answer.
func say(c net.Conn, line string) (string, error) {
	if err := c.SetDeadline(time.Now().Add(answerTime)); err != nil {
		return "", err
	}
	if _, err := fmt.Fprintln(c, line); err != nil {
		return "", err
	}
	got, err := bufio.NewReader(c).ReadString('\n')
	return strings.TrimSpace(got), err
}

// ask is a tunnel for one line.
func ask(address, sni string) (string, error) {
	c, err := tunnel(address, sni)
	if err != nil {
		return "", err
	}
	defer c.Close()
	return say(c, "hello")
}

// waitAnswer waits for an answer.
func (b *bench) waitAnswer(address, sni, want string) {
	b.t.Helper()
	b.Wait(b.t, settled, func(context.Context) error {
		got, err := ask(address, sni)
		if err == nil && got != want {
			err = fmt.Errorf("got %q, want %q", got, want)
		}
		return err
	})
}

// waitRefused waits until there is no answer, and the connection ended by the
// gateway all the same.
func (b *bench) waitRefused(address, sni string) {
	b.t.Helper()
	b.Wait(b.t, settled, func(context.Context) error {
		got, err := ask(address, sni)
		var timeout net.Error
		switch {
		case err == nil:
			return fmt.Errorf("got %q, want a refusal", got)
		case errors.As(err, &timeout) && timeout.Timeout():
			return err
		case errors.Is(err, io.EOF), strings.Contains(err.Error(), "reset"):
			return nil
		}
		return err
	})
}
