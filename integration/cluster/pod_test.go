package cluster_test

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"culvert.dev/integration/cluster"
)

const inspected = `
apiVersion: v1
kind: Namespace
metadata: {name: strict, labels: {pod-security.kubernetes.io/enforce: restricted}}
---
apiVersion: v1
kind: ServiceAccount
metadata: {name: reader, namespace: strict}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata: {name: reader, namespace: strict}
rules: [{apiGroups: [""], resources: [configmaps], verbs: [list]}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {name: reader, namespace: strict}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: Role, name: reader}
subjects: [{kind: ServiceAccount, name: reader, namespace: strict}]
---
apiVersion: v1
kind: Pod
metadata: {name: inspect, namespace: strict, labels: {app: inspect}}
spec:
  serviceAccountName: reader
  terminationGracePeriodSeconds: 10
  securityContext: {runAsNonRoot: true, runAsUser: 1234, runAsGroup: 5678, fsGroup: 99, seccompProfile: {type: RuntimeDefault}}
  initContainers:
  - name: init
    image: inspect
    command: [/inspect, init, /scratch/init]
    securityContext: &restricted {allowPrivilegeEscalation: false, capabilities: {drop: [ALL]}, readOnlyRootFilesystem: true}
    volumeMounts: [{name: scratch, mountPath: /scratch}]
  containers:
  - name: inspect
    image: example.com/inspect:v1@sha256:0000000000000000000000000000000000000000000000000000000000000000
    securityContext: *restricted
    ports: [{name: http, containerPort: 8080}]
    readinessProbe: {httpGet: {path: /ready, port: http}, periodSeconds: 1, failureThreshold: 1}
    env:
    - {name: DRAIN, value: 4s}
    - {name: WHERE, valueFrom: {fieldRef: {fieldPath: spec.nodeName}}}
    - {name: WORD, valueFrom: {secretKeyRef: {name: words, key: word}}}
    - {name: BOTH, value: "$(WHERE)/$(WORD)/$(NOTHING)"}
    - {name: MEMORY, valueFrom: {resourceFieldRef: {resource: limits.memory, divisor: 1Mi}}}
    resources: {limits: {memory: 64Mi}}
    volumeMounts:
    - {name: words, mountPath: /words, readOnly: true}
    - {name: scratch, mountPath: /scratch}
  volumes:
  - {name: words, secret: {secretName: words, defaultMode: 0400}}
  - {name: scratch, emptyDir: {}}
`

const words = `
apiVersion: v1
kind: Secret
metadata: {name: words, namespace: strict}
stringData: {word: %s}
`

func TestPodsFindWhatTheyExpect(t *testing.T) {
	c := cluster.Start(t, cluster.Options{NoCRDs: true, Nodes: []cluster.Node{{Name: "left", Zone: "a"}, {Name: "right", Zone: "b"}}})
	c.Apply(t, inspected)
	c.Apply(t, fmt.Sprintf(words, "first")) // a pod waits for its volumes
	pod := waitPod(t, c, "inspect", cluster.Ready)
	ask := func(path string) string { return askPod(t, pod, path) }

	for _, tt := range []struct{ path, want string }{
		{"/who", "1234 5678 inspect"},
		{"/file?name=/words/word", "first"},
		{"/file?name=/scratch/init", "init was here"},
		{"/write?name=/scratch/file", ""},
		{"/file?name=/scratch", "file\ninit"},
		{"/write?name=/file", "read-only file system"},
		{"/api?path=/api/v1/namespaces/default/configmaps", "403 {"},
		{"/api?path=/api/v1/namespaces/strict/configmaps", "200 {"},
	} {
		if got := ask(tt.path); !strings.Contains(got, tt.want) {
			t.Errorf("%s: %q, want %q in it", tt.path, got, tt.want)
		}
	}
	env := "\n" + ask("/env") + "\n"
	for _, want := range []string{"WHERE=" + pod.Spec.NodeName, "WORD=first", "BOTH=" + pod.Spec.NodeName + "/first/$(NOTHING)", "MEMORY=64", "HOSTNAME=inspect"} {
		if !strings.Contains(env, "\n"+want+"\n") {
			t.Errorf("no variable %s in %s", want, env)
		}
	}
	c.Apply(t, fmt.Sprintf(words, "second"))
	c.Wait(t, cluster.PodTime, func(context.Context) error {
		if got := ask("/file?name=/words/word"); got != "second" {
			return fmt.Errorf("the secret's file is %q, want second", got)
		}
		return nil
	})

	ask("/unready")
	waitPod(t, c, "inspect", func(p *corev1.Pod) bool { return !cluster.Ready(p) })
}

func TestContainersAreStartedAgain(t *testing.T) {
	c := cluster.Start(t, cluster.Options{NoCRDs: true})
	c.Apply(t, inspected)
	c.Apply(t, fmt.Sprintf(words, "first"))
	pod := waitPod(t, c, "inspect", cluster.Ready)
	askPod(t, pod, "/exit?code=3")
	pod = waitPod(t, c, "inspect", func(p *corev1.Pod) bool { return cluster.Ready(p) && p.Status.ContainerStatuses[0].RestartCount == 1 })
	if last := pod.Status.ContainerStatuses[0].LastTerminationState.Terminated; last == nil || last.ExitCode != 3 {
		t.Errorf("the last end is %+v, want exit code 3", last)
	}
}

func TestPodsTerminateWithGrace(t *testing.T) {
	c := cluster.Start(t, cluster.Options{NoCRDs: true})
	c.Apply(t, inspected)
	c.Apply(t, fmt.Sprintf(words, "first"))
	pod := waitPod(t, c, "inspect", cluster.Ready)
	pods := c.Client.CoreV1().Pods("strict")
	begin := time.Now()
	if err := pods.Delete(t.Context(), "inspect", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	if got := askPod(t, pod, "/who"); got != "1234 5678 inspect" {
		t.Errorf("while it terminates the pod says %q", got)
	}
	c.Wait(t, cluster.PodTime, func(ctx context.Context) error {
		_, err := pods.Get(ctx, "inspect", metav1.GetOptions{})
		if !apierrors.IsNotFound(err) {
			return fmt.Errorf("the pod is still there (%v)", err)
		}
		return nil
	})
	if d := time.Since(begin); d < 4*time.Second {
		t.Errorf("the pod was gone after %v, want its own 4 seconds of draining", d)
	}
}

func TestWhatCanNotRunSaysWhy(t *testing.T) {
	c := cluster.Start(t, cluster.Options{NoCRDs: true})
	c.Apply(t, `
apiVersion: v1
kind: Pod
metadata: {name: unknown}
spec: {containers: [{name: a, image: example.com/nobody:v1}]}
---
apiVersion: v1
kind: Pod
metadata: {name: root}
spec: {securityContext: {runAsNonRoot: true}, containers: [{name: a, image: inspect}]}
`)
	for name, want := range map[string]string{"unknown": "nobody:v1", "root": "runAsNonRoot"} {
		c.Wait(t, cluster.PodTime, func(ctx context.Context) error {
			pod, err := c.Client.CoreV1().Pods("default").Get(ctx, name, metav1.GetOptions{})
			if err != nil {
				return err
			}
			if len(pod.Status.ContainerStatuses) != 1 || pod.Status.ContainerStatuses[0].State.Waiting == nil ||
				!strings.Contains(pod.Status.ContainerStatuses[0].State.Waiting.Message, want) {
				return fmt.Errorf("the state of pod %s is %+v, want %q in it", name, pod.Status.ContainerStatuses, want)
			}
			return nil
		})
	}
}

func waitPod(t *testing.T, c *cluster.Cluster, name string, is func(*corev1.Pod) bool) *corev1.Pod {
	t.Helper()
	var pod *corev1.Pod
	c.Wait(t, cluster.PodTime, func(ctx context.Context) (err error) {
		if pod, err = c.Client.CoreV1().Pods("strict").Get(ctx, name, metav1.GetOptions{}); err == nil && !is(pod) {
			err = fmt.Errorf("pod %s is not as expected: %+v", name, pod.Status)
		}
		return err
	})
	return pod
}

// askPod is what the program inspect answers, an error included.
func askPod(t *testing.T, pod *corev1.Pod, path string) string {
	t.Helper()
	dialer := net.Dialer{Timeout: 20 * time.Second}
	client := &http.Client{Timeout: 20 * time.Second, Transport: &http.Transport{DisableKeepAlives: true, DialContext: dialer.DialContext}}
	res, err := client.Get("http://" + net.JoinHostPort(pod.Status.PodIP, "8080") + path)
	if err != nil {
		return err.Error()
	}
	defer res.Body.Close()
	b, err := io.ReadAll(res.Body)
	if err != nil {
		return err.Error()
	}
	return strings.TrimSpace(string(b))
}
