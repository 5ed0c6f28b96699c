package cluster

import (
	"bytes"
	"cmp"
	"context"
	"crypto/rand"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"sigs.k8s.io/mcs-api/config/crd"
)

// startTime is how long a program of the control plane may take to serve. Each
// takes about three seconds on an idle machine.
const startTime = 2 * time.Minute

// controllers that are needed for pods, their endpoints and their accounts. The
// scheduler's and the kubelet's part is the harness' own.
var controllers = []string{
	"deployment-controller", "replicaset-controller", "daemonset-controller", "statefulset-controller", "job-controller",
	"endpointslice-controller", "endpointslice-mirroring-controller", "namespace-controller", "garbage-collector-controller",
	"serviceaccount-controller", "root-ca-certificate-publisher-controller", "disruption-controller",
}

func (c *Cluster) startControlPlane(ctx context.Context) error {
	if err := c.startEtcd(ctx); err != nil {
		return err
	}
	if err := c.startAPIServer(ctx); err != nil {
		return err
	}
	return c.startControllers()
}

// etcdURL leads to etcd of this cluster, which nobody else may use.
func (c *Cluster) etcdURL() string { return fmt.Sprintf("http://127.0.0.1:%d", 2379+2*c.index) }

// Etcd is the URL of the cluster's etcd, for tests that write more objects than the
// API server takes in their time.
func (c *Cluster) Etcd() string { return c.etcdURL() }

func (c *Cluster) startEtcd(ctx context.Context) error {
	peer := fmt.Sprintf("http://127.0.0.1:%d", 2380+2*c.index)
	p, err := c.controlPlane("etcd",
		"--name=etcd",
		"--data-dir="+filepath.Join(c.scratch(), "etcd"),
		"--listen-client-urls="+c.etcdURL(),
		"--advertise-client-urls="+c.etcdURL(),
		"--listen-peer-urls="+peer,
		"--initial-advertise-peer-urls="+peer,
		"--initial-cluster=etcd="+peer,
		"--unsafe-no-fsync", // nothing survives the machine anyway
		"--log-level=warn",
	)
	if err != nil {
		return err
	}
	c.etcd = p
	return serves(ctx, p, func(ctx context.Context) error {
		return c.etcdCall(ctx, "kv/range", map[string]any{"key": b64("health")}, nil)
	})
}

func (c *Cluster) startAPIServer(ctx context.Context) error {
	in := func(file string) string { return filepath.Join(c.Dir, file) }
	host := nth(c.PodCIDR, 1).String()
	c.mu.Lock()
	keys := slices.Clone(c.tokenKeys)
	c.mu.Unlock()
	args := append([]string{
		"--etcd-servers=" + c.etcdURL(),
		"--bind-address=" + host,
		"--advertise-address=" + host,
		"--secure-port=6443",
		"--tls-cert-file=" + in("apiserver.crt"),
		"--tls-private-key-file=" + in("apiserver.key"),
		"--token-auth-file=" + in("tokens.csv"),
		"--authorization-mode=RBAC",
		"--service-account-issuer=" + cmp.Or(c.opts.TokenIssuer, "https://kubernetes.default.svc.cluster.local"),
		"--service-account-signing-key-file=" + keys[0],
		fmt.Sprintf("--service-cluster-ip-range=%s,%s", c.ServiceCIDR, c.ServiceCIDR6),
		"--endpoint-reconciler-type=none",
		"--allow-privileged",
		"--profiling=false",
	}, c.opts.APIServerFlags...)
	for _, key := range keys {
		args = append(args, "--service-account-key-file="+key)
	}
	p, err := c.controlPlane("kube-apiserver", args...)
	if err != nil {
		return err
	}
	c.mu.Lock()
	c.apiserver = p
	c.mu.Unlock()
	return serves(ctx, p, func(ctx context.Context) error {
		return c.Client.Discovery().RESTClient().Get().AbsPath("/readyz").Do(ctx).Error()
	})
}

func (c *Cluster) startControllers() error {
	kubeconfig, err := c.writeKubeconfig("controllers", c.token, "")
	if err != nil {
		return err
	}
	c.controller, err = c.controlPlane("kube-controller-manager",
		"--kubeconfig="+kubeconfig,
		"--secure-port=0",
		"--leader-elect=false",
		"--controllers="+strings.Join(controllers, ","),
		"--root-ca-file="+filepath.Join(c.Dir, "ca.crt"),
		"--endpointslice-updates-batch-period=0",
		"--kube-api-qps=500", "--kube-api-burst=500",
	)
	return err
}

func (c *Cluster) controlPlane(name string, args ...string) (*Process, error) {
	return startProcess(name, c.logs(), nil, exec.Command(Program("controlplane"), append([]string{name}, args...)...))
}

// serves waits until ask has no error.
func serves(ctx context.Context, p *Process, ask func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, startTime)
	defer cancel()
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for {
		err := ask(ctx)
		if err == nil {
			return nil
		}
		select {
		case <-p.Done():
			return fmt.Errorf("%s ended with status %d:\n%s", p.Name, p.ExitCode(), p.Tail(20))
		case <-ctx.Done():
			return fmt.Errorf("%s doesn't serve after %v: %w\n%s", p.Name, startTime, err, p.Tail(20))
		case <-tick.C:
		}
	}
}

// StopAPIServer kills the API server: connections break, new ones are refused.
func (c *Cluster) StopAPIServer(t testing.TB) {
	t.Helper()
	c.mu.Lock()
	p := c.apiserver
	c.mu.Unlock()
	p.Kill()
}

// RotateTokenKey restarts the API server with a new key for tokens of ServiceAccounts. It
// still verifies those that the keys of before have signed, if keep says so; if not, all of
// them are invalid, and so is a kubeconfig of ServiceAccountKubeconfig.
func (c *Cluster) RotateTokenKey(t testing.TB, keep bool) {
	t.Helper()
	c.mu.Lock()
	file := filepath.Join(c.Dir, rand.Text()+".key")
	_, err := newKey(file)
	if !keep {
		c.tokenKeys = nil
	}
	c.tokenKeys = append([]string{file}, c.tokenKeys...)
	c.mu.Unlock()
	if err != nil {
		t.Fatal(err)
	}
	c.StopAPIServer(t)
	c.StartAPIServer(t)
}

// StartAPIServer starts it again, on the same address and with all it knew, and
// returns when it is ready.
func (c *Cluster) StartAPIServer(t testing.TB) {
	t.Helper()
	if err := c.startAPIServer(t.Context()); err != nil {
		t.Fatalf("cluster %s: %v", c.Name, err)
	}
}

// PauseAPIServer stops the process: connections stay, and nothing is answered
// until ResumeAPIServer.
func (c *Cluster) PauseAPIServer(t testing.TB) { c.signalAPIServer(t, syscall.SIGSTOP) }

// ResumeAPIServer ends what PauseAPIServer began.
func (c *Cluster) ResumeAPIServer(t testing.TB) { c.signalAPIServer(t, syscall.SIGCONT) }

func (c *Cluster) signalAPIServer(t testing.TB, s syscall.Signal) {
	t.Helper()
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := c.apiserver.Signal(s); err != nil {
		t.Fatal(err)
	}
}

// ExpireWatches restarts the API server with its history forgotten: every watch
// that is resumed is answered with 410 Gone, and must list again.
func (c *Cluster) ExpireWatches(t testing.TB) {
	t.Helper()
	c.StopAPIServer(t)
	// The revision moves on, or the clients' last one would still be the newest.
	var put struct {
		Header struct {
			Revision string `json:"revision"`
		} `json:"header"`
	}
	for range 2 {
		if err := c.etcdCall(t.Context(), "kv/put", map[string]any{"key": b64("culvert"), "value": b64("expired")}, &put); err != nil {
			t.Fatal(err)
		}
	}
	if err := c.etcdCall(t.Context(), "kv/compaction", map[string]any{"revision": put.Header.Revision, "physical": true}, nil); err != nil {
		t.Fatal(err)
	}
	c.StartAPIServer(t)
}

func b64(s string) string { return base64.StdEncoding.EncodeToString([]byte(s)) }

// etcdCall uses etcd's JSON gateway: https://etcd.io/docs/v3.6/dev-guide/api_grpc_gateway/
func (c *Cluster) etcdCall(ctx context.Context, method string, in, out any) error {
	body, err := json.Marshal(in)
	if err != nil {
		return err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, c.etcdURL()+"/v3/"+method, bytes.NewReader(body))
	if err != nil {
		return err
	}
	req.Close = true
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer res.Body.Close()
	answer, err := io.ReadAll(res.Body)
	if err != nil {
		return err
	}
	if res.StatusCode != http.StatusOK {
		return fmt.Errorf("etcd: %s: %s: %s", method, res.Status, answer)
	}
	if out == nil {
		return nil
	}
	return json.Unmarshal(answer, out)
}

// installCRDs applies the experimental channel of the Gateway API, and
// ServiceExport and ServiceImport.
func (c *Cluster) installCRDs(ctx context.Context) error {
	files, err := filepath.Glob(filepath.Join(os.Getenv(gatewayAPIDir), "config/crd/experimental/gateway.*.yaml"))
	if err != nil || len(files) == 0 {
		return fmt.Errorf("no resources of the Gateway API in %q: %w", os.Getenv(gatewayAPIDir), err)
	}
	docs := [][]byte{crd.ServiceExportCRD, crd.ServiceImportCRD}
	for _, f := range files {
		b, err := os.ReadFile(f)
		if err != nil {
			return err
		}
		docs = append(docs, b)
	}
	for _, d := range docs {
		if err := c.apply(ctx, d); err != nil {
			return err
		}
	}
	return c.established(ctx)
}
