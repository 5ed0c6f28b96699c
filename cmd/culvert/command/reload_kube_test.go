//go:build !nokube

package command

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"culvert.dev/connect"
	"culvert.dev/internal/kube"
	"culvert.dev/internal/testnet"
	"culvert.dev/tunnel"
)

// An apiServer is an API server whose objects, by their resources, do not change.
type apiServer map[string]string

// start returns the path of its kubeconfig.
func (a apiServer) start(t *testing.T) (kubeconfig string) {
	t.Helper()
	s := httptest.NewServer(a)
	s.Config.SetKeepAlivesEnabled(false) // connections that are kept are no leak
	t.Cleanup(s.Close)
	kubeconfig = filepath.Join(t.TempDir(), "kubeconfig")
	text := fmt.Sprintf(`
apiVersion: v1
kind: Config
current-context: c
clusters: [{name: c, cluster: {server: %q}}]
users: [{name: u, user: {token: t}}]
contexts: [{name: c, context: {cluster: c, user: u}}]
`, s.URL)
	if err := os.WriteFile(kubeconfig, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return kubeconfig
}

func (a apiServer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	q := r.URL.Query()
	switch {
	case r.Method != http.MethodGet || strings.Contains(r.URL.Path, "/leases/"):
		w.WriteHeader(http.StatusForbidden)
		_, _ = io.WriteString(w, `{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"Forbidden","code":403}`)
	case q.Get("sendInitialEvents") == "true":
		w.WriteHeader(http.StatusUnprocessableEntity)
		_, _ = io.WriteString(w, `{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"Invalid","code":422}`)
	case q.Get("watch") == "true":
		w.(http.Flusher).Flush()
		<-r.Context().Done()
	default:
		_, _ = fmt.Fprintf(w, `{"metadata":{"resourceVersion":"1"},"items":[%s]}`, a[path.Base(r.URL.Path)])
	}
}

// While the cluster, its zones and networks, ports and virtual IPs and all of Kubernetes
// change under open tunnels and new ones, no tunnel ends, nothing that the configurations
// before and after know is refused, and nothing of the earlier ones is left.
func TestReloadsOfKubernetesEndNoTunnel(t *testing.T) {
	const tunnels, before, reloads = 20, 4, 100
	kube.Logs(slog.New(slog.DiscardHandler))
	backend := testnet.Serve(t, func(c net.Conn) { _, _ = io.Copy(c, c) })
	kubeconfig := apiServer{
		"services": `{"metadata":{"namespace":"a","name":"web","uid":"1","resourceVersion":"1","annotations":{"culvert.dev/expose":"true","culvert.dev/names":"web.apps.test"}},
			"spec":{"ports":[{"port":443,"protocol":"TCP"}]}}`,
	}.start(t)
	yaml := func(i int) string {
		return fmt.Sprintf(`
cluster: c%[1]d
zone: z%[2]d.test
network: n%[3]d
topologyZone: t%[3]d
listeners: [{address: "127.0.0.1:1", protocols: [connect]}]
log: {level: error}
kubernetes:
  kubeconfig: %[7]s
  leader: a/culvert
  discovery: {network: n%[3]d, suffixes: [apps.test], deny: [b/denied%[4]d]}
%[5]s
services:
  - {name: svc.test, ports: [443], endpoints: ["%[6]s"]}
`, i%3, i%2, i%4, i, []string{"", "vips: {ranges: [240.0.0.0/8], state: vips.json}",
			"servicePorts: {range: 20000-20010, address: 127.0.0.9, state: ports.json}", "vips: {state: other.json}"}[i%4], backend.Addr(), kubeconfig)
	}
	r := startFile(t, map[string]string{"culvert.yaml": yaml(0)})
	d := &connect.Dialer{Proxy: r.addrs[0]}
	// What is known is refused only as it has no endpoint.
	known := func(ctx context.Context, name string) error {
		c, err := d.DialContext(ctx, "tcp", name+":443")
		if err == nil {
			_ = c.Close()
			return fmt.Errorf("%s is carried", name)
		}
		if tunnel.ReasonOf(err) != tunnel.NoEndpoint {
			return err
		}
		return nil
	}
	takenUp := func(i int) func() bool {
		return func() bool {
			s := r.Status()
			has := []bool{s.VIPs == nil && s.ServicePorts == nil, s.VIPs != nil, s.ServicePorts != nil, s.VIPs != nil && len(s.VIPs.Ranges) > 1}[i%4]
			k, ok := s.Kubernetes.(*kube.Status)
			return has && ok && k.Clusters[0].Cluster == fmt.Sprintf("c%d", i%3) && known(t.Context(), fmt.Sprintf("web.a.svc.c%d.z%d.test", i%3, i%2)) == nil
		}
	}
	testnet.Eventually(t, patience, takenUp(0), "the first file is taken up")
	var open []net.Conn
	for range tunnels {
		c, err := d.DialContext(t.Context(), "tcp", "svc.test:443")
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		open = append(open, c)
	}
	reload := func(i int) {
		r.write(t, "culvert.yaml", yaml(i))
		r.source.Reload()
		testnet.Eventually(t, patience, takenUp(i), "file %d is taken up", i)
	}
	for i := range before { // what is opened once is open then
		reload(1 + i)
	}
	goroutines, descriptors := runtime.NumGoroutine(), openDescriptors(t)
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	var asked atomic.Int64
	var clients sync.WaitGroup
	clients.Go(func() {
		for ctx.Err() == nil {
			if err := known(ctx, "web.apps.test"); err != nil && ctx.Err() == nil {
				t.Errorf("a service of Kubernetes: %v", err)
				return
			}
			c, err := d.DialContext(ctx, "tcp", "svc.test:443")
			if err == nil {
				_ = c.Close()
			} else if ctx.Err() == nil {
				t.Errorf("a new tunnel: %v", err)
				return
			}
			asked.Add(1)
		}
	})
	for i := range reloads {
		reload(1 + before + i)
	}
	stop()
	clients.Wait()
	if asked.Load() == 0 {
		t.Error("nothing was asked for meanwhile")
	}
	for i, c := range open {
		if _, err := io.WriteString(c, "x"); err != nil {
			t.Fatalf("tunnel %d: %v", i, err)
		}
		if _, err := io.ReadFull(c, make([]byte, 1)); err != nil {
			t.Fatalf("tunnel %d: %v", i, err)
		}
	}
	if s := r.Status().Restart; len(s) > 0 {
		t.Errorf("a restart is needed for %+v", s)
	}
	testnet.Eventually(t, patience, func() bool { return openDescriptors(t) <= descriptors }, "descriptors are given back")
	testnet.Eventually(t, patience, func() bool { return runtime.NumGoroutine() <= goroutines }, "goroutines end")

	// Without Kubernetes its services are gone, and what the file serves stays.
	without, rest, _ := strings.Cut(yaml(0), "kubernetes:")
	_, rest, _ = strings.Cut(rest, "services:")
	r.write(t, "culvert.yaml", strings.Replace(without, "network: n0\n", "", 1)+"services:"+rest)
	r.source.Reload()
	testnet.Eventually(t, patience, func() bool { return tunnel.ReasonOf(known(t.Context(), "web.apps.test")) == tunnel.NoRoute }, "the services of Kubernetes are gone")
	if k := r.Status().Kubernetes; k != nil {
		t.Errorf("the status has %v of Kubernetes", k)
	}
}
