package identity_test

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	"culvert.dev/integration/cluster"
	"culvert.dev/internal/testca"
)

// A pod with the agent as the guide has it, in a namespace that admits restricted pods only, reaches
// a service at a port of loopback, and the gateway knows its ServiceAccount. So it is in one where
// programs are captured.
func TestAgentIsASidecar(t *testing.T) {
	guide, err := os.ReadFile("../../../docs/guides/agent.md")
	if err != nil {
		t.Fatal(err)
	}
	_, after, _ := strings.Cut(string(guide), "\n## In a pod\n")
	_, after, _ = strings.Cut(after, "```yaml\n")
	manifests, _, ok := strings.Cut(after, "```")
	if !ok {
		t.Fatal("the guide has no manifest")
	}
	s := &site{Cluster: cluster.Start(t, cluster.Options{NoCRDs: true, GatewayAddresses: 1, TokenIssuer: issuer}), ca: authority(t, "sidecar.example"), dir: t.TempDir()}
	s.Apply(t, "apiVersion: v1\nkind: Namespace\nmetadata: {name: culvert-system}\n---\napiVersion: v1\nkind: ServiceAccount\nmetadata: {name: culvert, namespace: culvert-system}\n")
	s.RunEcho(t, cluster.Echo{Namespace: "back"})
	s.WaitReady(t, cluster.PodTime, "back")
	pods, err := s.Pods(t.Context(), "back", "app=echo")
	if err != nil || len(pods) == 0 {
		t.Fatalf("%d pods of the service: %v", len(pods), err)
	}
	pair, err := s.ca.Issue(testca.Options{SPIFFEID: "spiffe://sidecar.example/ns/culvert-system/sa/culvert", IPs: []net.IP{s.GatewayAddresses[0].AsSlice()}})
	if err != nil {
		t.Fatal(err)
	}
	if err := pair.Save(s.dir, "gw"); err != nil {
		t.Fatal(err)
	}
	s.write(t, "token", s.Token(t, "culvert-system", "culvert", nil))
	s.write(t, "culvert.yaml", fmt.Sprintf(`
identity:
  tokens: [{issuer: %[1]q, audience: [culvert], kubernetes: true, caFile: %[2]s, tokenFile: token}]
listeners:
  - address: "%[3]s:443"
    auth: {issuers: [%[1]q]}
    tls: {certificateFile: gw.crt, keyFile: gw.key, protocols: [connect, connect-h2]}
services: [{name: echo.shop.example, ports: [80], endpoints: ["%[4]s:3000"]}]
`, issuer, s.CAFile(), s.GatewayAddresses[0], pods[0].Status.PodIP))
	s.gateway = s.RunCulvert(t, "gateway", "--config", filepath.Join(s.dir, "culvert.yaml"))
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("the gateway:\n%s", s.gateway.Tail(40))
		}
	})
	ca := strings.ReplaceAll(string(s.ca.CertPEM), "\n", "\n    ")
	s.Apply(t, `
apiVersion: v1
kind: Namespace
metadata: {name: shop, labels: {pod-security.kubernetes.io/enforce: restricted}}
---
apiVersion: v1
kind: ServiceAccount
metadata: {name: client, namespace: shop}
---
apiVersion: v1
kind: ConfigMap
metadata: {name: culvert-ca, namespace: shop}
data:
  ca.crt: |
    `+ca+"\n---\n"+strings.ReplaceAll(manifests, "gw.example:443", s.GatewayAddresses[0].String()+":443"))
	s.WaitReady(t, 2*cluster.PodTime, "shop")
	client, err := s.Client.CoreV1().Pods("shop").Get(t.Context(), "client", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	s.Wait(t, cluster.PodTime, func(ctx context.Context) error {
		return s.InPod(t, client, func() error {
			conn, err := (&net.Dialer{Timeout: 5 * time.Second}).DialContext(ctx, "tcp", "127.0.0.1:8080")
			if err != nil {
				return err
			}
			defer conn.Close()
			answer, err := cluster.AskEcho(conn)
			if err == nil && answer.Pod != pods[0].Name {
				err = fmt.Errorf("pod %q answers, want %q", answer.Pod, pods[0].Name)
			}
			return err
		})
	})
	s.wantLog(t, "peer=system:serviceaccount:shop:client", "peer_method=jwt", "target=echo.shop.example:80")

	// A pod whose programs are captured is refused there, and starts where NET_ADMIN is allowed. What
	// connects to the address of a service reaches it, and no other one of the captured addresses.
	_, after, _ = strings.Cut(string(guide), "\n### Without a proxy setting\n")
	_, after, _ = strings.Cut(after, "```yaml\n")
	containers, after, _ := strings.Cut(after, "```")
	_, after, _ = strings.Cut(after, "```yaml\n")
	captures, _, ok := strings.Cut(after, "```")
	if !ok {
		t.Fatal("the guide has no manifest of a pod that captures")
	}
	const mounts = `volumeMounts: [{name: agent, mountPath: /etc/culvert, readOnly: true}, {name: token, mountPath: /var/run/secrets/culvert, readOnly: true}]
      startupProbe: {httpGet: {path: /readyz, port: 9091}, periodSeconds: 1, failureThreshold: 60}
      `
	containers = strings.Replace(containers, "restartPolicy: Always\n      ", "restartPolicy: Always\n      "+mounts, 1)
	for from, to := range map[string]string{
		"gw.example:443": s.GatewayAddresses[0].String() + ":443", "caFile: ca.crt": "caFile: /etc/culvert/ca.crt", "gw.token": "/var/run/secrets/culvert/token",
		"db.shop.example": "echo.shop.example", "5432": "80",
	} {
		if !strings.Contains(captures, from) {
			t.Fatalf("the guide's configuration has no %q:\n%s", from, captures)
		}
		captures = strings.ReplaceAll(captures, from, to)
	}
	indented := strings.ReplaceAll(strings.TrimSpace(captures), "\n", "\n    ")
	pod := `
apiVersion: v1
kind: Pod
metadata: {name: captured, namespace: NAMESPACE}
spec:
  serviceAccountName: client
  securityContext: {fsGroup: 65532, seccompProfile: {type: RuntimeDefault}}
` + strings.TrimRight(containers, "\n") + `
  volumes:
    - name: agent
      configMap: {name: agent}
    - name: token
      projected: {sources: [{serviceAccountToken: {audience: culvert, expirationSeconds: 3600, path: token}}]}
`
	var refused corev1.Pod
	if err := yaml.Unmarshal([]byte(strings.ReplaceAll(pod, "NAMESPACE", "shop")), &refused); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Client.CoreV1().Pods("shop").Create(t.Context(), &refused, metav1.CreateOptions{}); err == nil || !strings.Contains(err.Error(), "NET_ADMIN") {
		t.Errorf("a namespace of restricted pods, with a pod that captures: %v", err)
	}
	s.Apply(t, `
apiVersion: v1
kind: Namespace
metadata: {name: bank, labels: {pod-security.kubernetes.io/enforce: privileged}}
---
apiVersion: v1
kind: ServiceAccount
metadata: {name: client, namespace: bank}
---
apiVersion: v1
kind: ConfigMap
metadata: {name: agent, namespace: bank}
data:
  ca.crt: |
    `+ca+`
  culvert.yaml: |
    `+indented+"\n---\n"+strings.ReplaceAll(pod, "NAMESPACE", "bank"))
	s.WaitReady(t, 2*cluster.PodTime, "bank")
	captured, err := s.Client.CoreV1().Pods("bank").Get(t.Context(), "captured", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	ask := func(ctx context.Context, addr string) error {
		return s.InPod(t, captured, func() error {
			conn, err := (&net.Dialer{Timeout: 5 * time.Second}).DialContext(ctx, "tcp", addr)
			if err != nil {
				return err
			}
			defer conn.Close()
			answer, err := cluster.AskEcho(conn)
			if err == nil && answer.Pod != pods[0].Name {
				err = fmt.Errorf("pod %q answers, want %q", answer.Pod, pods[0].Name)
			}
			return err
		})
	}
	s.Wait(t, cluster.PodTime, func(ctx context.Context) error { return ask(ctx, "240.0.0.7:80") })
	if err := ask(t.Context(), "240.0.0.8:80"); err == nil {
		t.Error("an address of no service answers")
	}
	s.wantLog(t, "peer=system:serviceaccount:bank:client", "peer_method=jwt", "target=echo.shop.example:80")
}
