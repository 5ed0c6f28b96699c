package cluster

import (
	"context"
	"encoding/base64"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// AdminKubeconfig is a kubeconfig file of one who may do everything.
func (c *Cluster) AdminKubeconfig(t testing.TB) string {
	t.Helper()
	file, err := c.writeKubeconfig("admin", c.token, "")
	if err != nil {
		t.Fatal(err)
	}
	return file
}

// ServiceAccountKubeconfig is a kubeconfig file with a token of a
// ServiceAccount, which must be there, and so with exactly its rights.
func (c *Cluster) ServiceAccountKubeconfig(t testing.TB, namespace, name string) string {
	t.Helper()
	file, err := c.writeKubeconfig(namespace+"."+name, c.Token(t, namespace, name, nil), namespace)
	if err != nil {
		t.Fatal(err)
	}
	return file
}

// Token returns a token of a ServiceAccount for a day, as a pod has it by a projected volume:
// for these audiences, or for the API server if there are none, and bound to that pod, unless
// it is nil.
func (c *Cluster) Token(t testing.TB, namespace, name string, pod *corev1.Pod, audiences ...string) string {
	t.Helper()
	seconds := int64(24 * 60 * 60)
	spec := authenticationv1.TokenRequestSpec{ExpirationSeconds: &seconds, Audiences: audiences}
	if pod != nil {
		spec.BoundObjectRef = &authenticationv1.BoundObjectReference{Kind: "Pod", APIVersion: "v1", Name: pod.Name, UID: pod.UID}
	}
	r, err := c.Client.CoreV1().ServiceAccounts(namespace).CreateToken(t.Context(), name, &authenticationv1.TokenRequest{Spec: spec}, metav1.CreateOptions{})
	if err != nil {
		t.Fatalf("cluster %s: a token for %s/%s: %v", c.Name, namespace, name, err)
	}
	return r.Status.Token
}

// CAFile is a file with the CA of the API server.
func (c *Cluster) CAFile() string { return filepath.Join(c.Dir, "ca.crt") }

// TokenKeyFile is the file with the key that signs tokens of ServiceAccounts.
func (c *Cluster) TokenKeyFile() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.tokenKeys[0]
}

func (c *Cluster) writeKubeconfig(name, token, namespace string) (string, error) {
	file := filepath.Join(c.Dir, name+".kubeconfig")
	return file, os.WriteFile(file, []byte(c.kubeconfig(name, token, namespace, c.APIServer)), 0o600)
}

func (c *Cluster) kubeconfig(user, token, namespace, server string) string {
	return fmt.Sprintf(`apiVersion: v1
kind: Config
clusters:
- name: %[1]q
  cluster: {server: %[2]q, certificate-authority-data: %[3]s, tls-server-name: kubernetes}
users:
- name: %[4]q
  user: {token: %[5]q}
contexts:
- name: %[1]q
  context: {cluster: %[1]q, user: %[4]q, namespace: %[6]q}
current-context: %[1]q
`, c.Name, server, base64.StdEncoding.EncodeToString(c.ca), user, token, namespace)
}

// RunCulvert starts culvert in the sandbox, beside the cluster: it reaches the
// API server and all pods, and may bind Cluster.GatewayAddresses. The cluster
// stops it when it ends.
func (c *Cluster) RunCulvert(t testing.TB, args ...string) *Process {
	t.Helper()
	return c.Run(t, nil, Program("culvert"), args...)
}

// Manifests returns what Helm makes of the chart with values, in YAML, and with
// further flags of integration/deploy/render. It applies nothing.
func Manifests(t testing.TB, values string, args ...string) string {
	t.Helper()
	root, err := repository()
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "values.yaml")
	if err := os.WriteFile(file, []byte(values), 0o600); err != nil {
		t.Fatal(err)
	}
	return output(t, "render", append([]string{"--root", root, "--values", file}, args...)...)
}

// Installed returns what "culvert install" prints for its flags, with the
// Namespace. It applies nothing.
func Installed(t testing.TB, args ...string) string {
	t.Helper()
	return output(t, "culvert", append([]string{"install", "--dry-run", "--create-namespace"}, args...)...)
}

func output(t testing.TB, program string, args ...string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	var stderr strings.Builder
	cmd := exec.CommandContext(ctx, Program(program), args...)
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%s %q: %v\n%s", program, args, err, stderr.String())
	}
	return string(out)
}

// Get asks for a URL of plain HTTP, on a connection of its own, and for 20 seconds
// at most.
func Get(ctx context.Context, url string) (status int, body string, err error) {
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return 0, "", err
	}
	req.Close = true
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		return 0, "", err
	}
	defer res.Body.Close()
	b, err := io.ReadAll(res.Body)
	return res.StatusCode, string(b), err
}

// Run starts any program in the network of a pod, or in the sandbox's if pod is
// nil. The cluster stops it when it ends.
func (c *Cluster) Run(t testing.TB, pod *corev1.Pod, path string, args ...string) *Process {
	t.Helper()
	ns, err := c.podNetwork(pod)
	if err != nil {
		t.Fatal(err)
	}
	return c.runIn(t, ns, path, args...)
}

func (c *Cluster) runIn(t testing.TB, ns *network, path string, args ...string) *Process {
	t.Helper()
	p, err := startProcess(filepath.Base(path), c.logs(), ns, exec.Command(path, args...))
	if err != nil {
		t.Fatal(err)
	}
	c.mu.Lock()
	c.others = append(c.others, p)
	c.mu.Unlock()
	return p
}

// InPod calls f on a thread that is in the network of a pod, of the sandbox if
// pod is nil: what it dials and listens on is there. A dialer of package net
// does so on its caller's thread, a client of net/http does not.
func (c *Cluster) InPod(t testing.TB, pod *corev1.Pod, f func() error) error {
	t.Helper()
	ns, err := c.podNetwork(pod)
	if err != nil {
		return err
	}
	return ns.do(f)
}

// podNetwork is nil for no pod, and for one with the network of its node.
func (c *Cluster) podNetwork(pod *corev1.Pod) (*network, error) {
	if pod == nil {
		return nil, nil
	}
	w := c.kubelet.worker(pod.UID)
	if w == nil {
		return nil, fmt.Errorf("cluster %s: pod %s/%s doesn't run", c.Name, pod.Namespace, pod.Name)
	}
	return w.network(), nil
}

// Pods lists the pods that a selector finds and that are not being deleted.
func (c *Cluster) Pods(ctx context.Context, namespace, selector string) ([]corev1.Pod, error) {
	list, err := c.Client.CoreV1().Pods(namespace).List(ctx, metav1.ListOptions{LabelSelector: selector})
	if err != nil {
		return nil, err
	}
	var pods []corev1.Pod
	for _, p := range list.Items {
		if p.DeletionTimestamp == nil {
			pods = append(pods, p)
		}
	}
	return pods, nil
}

// PodLog is what a container of the pod has written since it was last started,
// the first container if the name is empty.
func (c *Cluster) PodLog(pod *corev1.Pod, container string) string {
	w := c.kubelet.worker(pod.UID)
	if w == nil {
		return ""
	}
	return w.log(container)
}

// Connect lets the pods of clusters reach each other, and each other's nodes,
// as networks of one organisation may; else only the sandbox reaches all.
func Connect(t testing.TB, clusters ...*Cluster) { connect(t, true, clusters) }

// Disconnect ends Connect.
func Disconnect(t testing.TB, clusters ...*Cluster) { connect(t, false, clusters) }

func connect(t testing.TB, yes bool, clusters []*Cluster) {
	t.Helper()
	for _, c := range clusters {
		err := error(nil)
		if c.opts.Proxy {
			err = (&proxy{c: c}).apart(!yes)
		} else {
			err = forward(c.bridge, yes)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
}

// PodTime is a usual limit for pods to become ready; they need two seconds.
const PodTime = time.Minute
