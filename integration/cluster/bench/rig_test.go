package bench

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	gwclient "sigs.k8s.io/gateway-api/pkg/client/clientset/versioned"

	"culvert.dev/integration/cluster"
)

func TestMain(m *testing.M) { cluster.Main(m) }

const (
	home   = "bench" // namespace of what is changed
	admin  = "127.0.0.1:9090"
	spares = 8 // addresses for Gateways that come and go
)

// A rig is a cluster, culvert, and the servers behind it.
type rig struct {
	*cluster.Cluster
	t       testing.TB
	core    kubernetes.Interface // speaks protobuf
	gw      gwclient.Interface
	ids     map[netip.Addr]byte // what each server says that it is
	tls     *client
	audit   string // file of the API server: what culvert has asked
	config  string // file of culvert's
	culvert *cluster.Process
	rights  string // a kubeconfig, with culvert's
}

// auditPolicy writes down the requests of culvert, and of nobody else.
const auditPolicy = `
apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
- {level: Metadata, users: ["system:serviceaccount:culvert-system:culvert"]}
- {level: None}
`

// The addresses: the gateway's own listener, the Gateway of all routes, those of
// further Gateways, and two servers.
func (r *rig) listener() netip.AddrPort { return netip.AddrPortFrom(r.GatewayAddresses[0], 443) }
func (r *rig) gateway() netip.AddrPort  { return netip.AddrPortFrom(r.GatewayAddresses[1], 443) }
func (r *rig) spare(i int) netip.AddrPort {
	return netip.AddrPortFrom(r.GatewayAddresses[2+i%spares], 443)
}
func (r *rig) server(i int) netip.Addr { return r.GatewayAddresses[2+spares+i%2] }
func (r *rig) meshName(service string) string {
	return service + "." + home + ".svc.west.mesh.internal"
}

// newRig starts all but culvert.
func newRig(t testing.TB) *rig {
	t.Helper()
	dir := t.TempDir()
	policy := filepath.Join(dir, "audit.yaml")
	if err := os.WriteFile(policy, []byte(auditPolicy), 0o600); err != nil {
		t.Fatal(err)
	}
	r := &rig{t: t, audit: filepath.Join(dir, "audit.log"), config: filepath.Join(dir, "culvert.yaml"), ids: map[netip.Addr]byte{}}
	r.Cluster = cluster.Start(t, cluster.Options{Name: "west", GatewayAddresses: 2 + spares + 2, APIServerFlags: []string{
		"--audit-policy-file=" + policy, "--audit-log-path=" + r.audit, "--audit-log-mode=blocking",
	}})
	rc := rest.CopyConfig(r.REST)
	var err error
	if r.gw, err = gwclient.NewForConfig(rc); err != nil {
		t.Fatal(err)
	}
	rc.ContentType = "application/vnd.kubernetes.protobuf"
	if r.core, err = kubernetes.NewForConfig(rc); err != nil {
		t.Fatal(err)
	}
	r.Apply(t, cluster.Manifests(t, `
cluster: west
discovery: {podCIDRs: true}
gatewayAPI: {enabled: true}
gateway: {enabled: false}
`))
	r.Apply(t, "apiVersion: v1\nkind: Namespace\nmetadata: {name: "+home+"}\n")
	r.rights = r.ServiceAccountKubeconfig(t, "culvert-system", "culvert")
	r.serve()
	r.writeConfig()
	return r
}

func (r *rig) writeConfig() {
	var b strings.Builder
	fmt.Fprintf(&b, `
admin: %s
cluster: west
network: west
listeners: [{address: "%s", protocols: [sni]}]
kubernetes:
  kubeconfig: %s
  discovery: {podCIDRs: true}
  leader: culvert-system/culvert
  gatewayAPI:
    controllerName: culvert.dev/gateway
    addresses:
`, admin, r.listener(), r.rights)
	for _, a := range r.GatewayAddresses[1 : 2+spares] {
		fmt.Fprintf(&b, "    - {address: %s}\n", a)
	}
	b.WriteString("limits: {connectionRatePerClient: -1, maxPendingPerClient: -1, maxConnectionsPerClient: -1}\n")
	if err := os.WriteFile(r.config, []byte(b.String()), 0o600); err != nil {
		r.t.Fatal(err)
	}
}

// start runs culvert, and returns when that began.
func (r *rig) start() time.Time {
	r.t.Helper()
	began := time.Now()
	r.culvert = r.RunCulvert(r.t, "gateway", "--config", r.config)
	return began
}

// stop ends it.
func (r *rig) stop() {
	if r.culvert != nil {
		r.culvert.Stop(10 * time.Second)
	}
}

// wait asks again and again, every few milliseconds, until f has no error.
func (r *rig) wait(timeout time.Duration, f func(context.Context) error) time.Time {
	r.t.Helper()
	return r.waitAll(timeout, f)[0]
}

// waitAll waits for several at once, and returns when each had no error.
func (r *rig) waitAll(timeout time.Duration, all ...func(context.Context) error) []time.Time {
	r.t.Helper()
	at, errs := make([]time.Time, len(all)), make([]error, len(all))
	var wg sync.WaitGroup
	for i, f := range all {
		wg.Go(func() { at[i], errs[i] = r.await(timeout, f) })
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		r.t.Fatalf("%v\n%s", err, r.culvert.Tail(40))
	}
	return at
}

func (r *rig) await(timeout time.Duration, f func(context.Context) error) (time.Time, error) {
	ctx, cancel := context.WithTimeout(r.t.Context(), timeout)
	defer cancel()
	tick := time.NewTicker(3 * time.Millisecond)
	defer tick.Stop()
	for {
		err := f(ctx)
		if err == nil {
			return time.Now(), nil
		}
		select {
		case <-r.culvert.Done():
			return time.Time{}, fmt.Errorf("culvert ended with status %d", r.culvert.ExitCode())
		case <-ctx.Done():
			return time.Time{}, fmt.Errorf("after %v: %w", timeout, err)
		case <-tick.C:
		}
	}
}

// ask gets a page of the admin server.
func (r *rig) ask(ctx context.Context, path string) ([]byte, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+admin+path, nil)
	if err != nil {
		return nil, err
	}
	req.Close = true
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		return nil, err
	}
	defer res.Body.Close()
	body, err := io.ReadAll(res.Body)
	if err == nil && res.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %s: %s", path, res.Status, bytes.TrimSpace(body))
	}
	return body, err
}

// A request is one of culvert's, as the API server saw it.
type request struct {
	Verb      string
	Stage     string
	ObjectRef struct{ Resource, Subresource, Name string }
	At        time.Time `json:"stageTimestamp"`
}

func (q request) what() string {
	s := q.ObjectRef.Resource
	if q.ObjectRef.Subresource != "" {
		s += "/" + q.ObjectRef.Subresource
	}
	return q.Verb + " " + s
}

// requests are those since a time. A watch counts when it begins.
func (r *rig) requests(since time.Time) []request {
	r.t.Helper()
	f, err := os.Open(r.audit)
	if err != nil {
		r.t.Fatal(err)
	}
	defer f.Close()
	var out []request
	lines := bufio.NewScanner(f)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		var q request
		if err := json.Unmarshal(lines.Bytes(), &q); err != nil {
			continue // the line that is being written
		}
		if q.At.After(since) && (q.Verb == "watch") == (q.Stage == "ResponseStarted") {
			out = append(out, q)
		}
	}
	return out
}

// counts sums up requests, the most frequent first.
func counts(requests []request) string {
	n := map[string]int{}
	for _, q := range requests {
		n[q.what()]++
	}
	var names []string
	for name := range n {
		names = append(names, name)
	}
	slices.SortFunc(names, func(a, b string) int {
		if n[a] != n[b] {
			return n[b] - n[a]
		}
		return strings.Compare(a, b)
	})
	for i, name := range names {
		names[i] = fmt.Sprintf("%d %s", n[name], name)
	}
	return strings.Join(names, ", ")
}
