package conformance_test

import (
	"context"
	"crypto/tls"
	"fmt"
	"io/fs"
	"net"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/gateway-api/conformance"
	"sigs.k8s.io/gateway-api/conformance/utils/kubernetes"

	"culvert.dev/integration/cluster"
)

const infra = "gateway-conformance-infra"

// The pods that all tests of the suite begin with are what the harness has to
// be able to run, gateway or not.
func TestPodsOfTheSuite(t *testing.T) {
	c := cluster.Start(t, cluster.Options{})
	base, err := fs.ReadFile(conformance.Manifests, "base/manifests.yaml")
	if err != nil {
		t.Fatal(err)
	}
	c.Apply(t, strings.ReplaceAll(string(base), "{GATEWAY_CLASS_NAME}", class))

	// As in the suite, what the pods mount comes after them.
	_, ca, key := kubernetes.MustCreateCACertConfigMap(t, infra, "ca")
	for _, s := range []struct{ namespace, name string }{
		{infra, "tls-checks-certificate"},
		{infra, "tls-passthrough-checks-certificate"},
		{"gateway-conformance-app-backend", "tls-passthrough-checks-certificate"},
	} {
		secret := kubernetes.MustCreateCASignedCertSecret(t, s.namespace, s.name, []string{"abc.example.com"}, ca, key)
		if _, err := c.Client.CoreV1().Secrets(s.namespace).Create(t.Context(), secret, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	configMap, _, _ := kubernetes.MustCreateCACertConfigMap(t, infra, "tls-checks-ca-certificate")
	if _, err := c.Client.CoreV1().ConfigMaps(infra).Create(t.Context(), configMap, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}

	const want = 23
	c.Wait(t, cluster.PodTime, func(ctx context.Context) error {
		pods, err := c.Pods(ctx, "", "")
		if err != nil {
			return err
		}
		var waiting []string
		for i := range pods {
			if !cluster.Ready(&pods[i]) {
				waiting = append(waiting, fmt.Sprintf("%s: %+v", pods[i].Name, pods[i].Status.Conditions))
			}
		}
		if len(pods) != want || len(waiting) > 0 {
			return fmt.Errorf("%d of %d pods are there; not ready: %s", len(pods), want, strings.Join(waiting, "\n"))
		}
		return nil
	})
	askTLS(t, onlyPod(t, c, "app=tls-backend"))
}

func onlyPod(t *testing.T, c *cluster.Cluster, selector string) *corev1.Pod {
	t.Helper()
	pods, err := c.Pods(t.Context(), infra, selector)
	if err != nil || len(pods) != 1 {
		t.Fatalf("pods %s: %d, %v; want 1", selector, len(pods), err)
	}
	return &pods[0]
}

// askTLS asks the echo server of a pod, with its certificate from a Secret and
// its name from a field of the pod.
func askTLS(t *testing.T, pod *corev1.Pod) {
	t.Helper()
	dialer := &net.Dialer{Timeout: 5 * time.Second}
	conn, err := tls.DialWithDialer(dialer, "tcp", net.JoinHostPort(pod.Status.PodIP, "8443"), &tls.Config{InsecureSkipVerify: true, ServerName: "abc.example.com"})
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if names := conn.ConnectionState().PeerCertificates[0].DNSNames; len(names) != 1 || names[0] != "abc.example.com" {
		t.Errorf("the certificate is for %q, want abc.example.com", names)
	}
	answer, err := cluster.AskEcho(conn)
	if err != nil {
		t.Fatal(err)
	}
	if answer.Pod != pod.Name || answer.Namespace != infra {
		t.Errorf("echo is of pod %s/%s, want %s/%s", answer.Namespace, answer.Pod, infra, pod.Name)
	}
}
