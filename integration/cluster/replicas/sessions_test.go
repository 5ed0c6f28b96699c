package replicas

import (
	"context"
	"crypto/tls"
	"encoding/base64"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/miekg/dns"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"culvert.dev/integration/cluster"
	"culvert.dev/internal/testca"
)

const exposed = "cam.edge.test"

// Two replicas share the sessions of connectors, as the chart has it: a connector has one session,
// requests come to both. When a replica is killed, and when both are replaced, no request fails
// that begins after that was noticed.
func TestReplicasShareSessions(t *testing.T) {
	ca, err := testca.New("replicas.test", nil)
	if err != nil {
		t.Fatal(err)
	}
	server := netip.MustParseAddr("10.244.255.1")
	s := &site{Cluster: cluster.Start(t, cluster.Options{GatewayAddresses: 1, ClusterDNS: server})}
	if s.GatewayAddresses[0] != server {
		t.Fatalf("the name server of pods is %s, and this machine's address is %s", server, s.GatewayAddresses[0])
	}
	s.answersForReplicas(t, server)
	s.Apply(t, cluster.Manifests(t, fmt.Sprintf(shared, port)))
	gw := issue(t, ca, testca.Options{SPIFFEID: "spiffe://replicas.test/gw", DNSNames: []string{"gw.test", "culvert-replicas.culvert-system.svc"}})
	text := base64.StdEncoding.EncodeToString
	s.Apply(t, fmt.Sprintf("apiVersion: v1\nkind: Secret\nmetadata: {name: gw, namespace: %s}\ndata: {tls.crt: %s, tls.key: %s, ca.crt: %s}\n",
		system, text(gw.CertPEM), text(gw.KeyPEM), text(ca.CertPEM)))
	t.Cleanup(func() {
		if t.Failed() {
			for _, p := range s.gateways(t) {
				t.Logf("pod %s:\n%s", p.Name, s.PodLog(&p, ""))
			}
		}
	})
	s.WaitReady(t, patience, system)
	s.lb = balance(t, s.Cluster, system, "culvert", port)
	s.clients = newClients(t, ca, s.lb, exposed)

	cam := issue(t, ca, testca.Options{SPIFFEID: "spiffe://replicas.test/cam", DNSNames: []string{exposed}})
	service := httptest.NewUnstartedServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	service.TLS = &tls.Config{Certificates: []tls.Certificate{cam.TLS}}
	service.StartTLS()
	t.Cleanup(service.Close)
	dir := t.TempDir()
	edge := issue(t, ca, testca.Options{SPIFFEID: "spiffe://replicas.test/edge"})
	for file, content := range map[string][]byte{"ca.pem": ca.CertPEM, "edge.crt": edge.CertPEM, "edge.key": edge.KeyPEM} {
		if err := os.WriteFile(filepath.Join(dir, file), content, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	connector := s.RunCulvert(t, "expose", exposed, "--to", service.Listener.Addr().String(), "--via", s.lb.listen(t), "--server-name", "gw.test",
		"--cert", dir+"/edge.crt", "--key", dir+"/edge.key", "--ca", dir+"/ca.pem")
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("the connector:\n%s", connector.Tail(40))
		}
	})

	// One session, and both replicas serve.
	s.Wait(t, patience, func(ctx context.Context) error {
		if got := len(s.lb.targets()); got != 2 {
			return fmt.Errorf("the load balancer has %d pods, want 2", got)
		}
		for range 2 {
			if at, err := s.clients.once(ctx, exposed); err != nil {
				return fmt.Errorf("by pod %s: %w", at, err)
			}
		}
		return nil
	})
	s.clients.load(t, 4)
	time.Sleep(calm)
	s.wantsNoFailure(t)

	// The replica with the session is killed, or the other one.
	for _, p := range s.gateways(t) {
		at := address(&p)
		s.kill(t, &p)
		s.lb.refuse(at, true)
		killed := time.Now()
		s.restarted(t, &p)
		time.Sleep(calm)
		s.lb.refuse(at, false)
		time.Sleep(calm)
		s.noFailureSince(t, killed.Add(noticed))
	}

	patch := fmt.Sprintf(`{"spec":{"template":{"metadata":{"annotations":{"kubectl.kubernetes.io/restartedAt":%q}}}}}`, time.Now().Format(time.RFC3339))
	began := time.Now()
	if _, err := s.Client.AppsV1().Deployments(system).Patch(t.Context(), "culvert", types.StrategicMergePatchType, []byte(patch), metav1.PatchOptions{}); err != nil {
		t.Fatal(err)
	}
	s.Wait(t, patience, func(ctx context.Context) error {
		d, err := s.Client.AppsV1().Deployments(system).Get(ctx, "culvert", metav1.GetOptions{})
		if err == nil && !rolledOut(d) {
			err = fmt.Errorf("the rollout is at %+v", d.Status)
		}
		return err
	})
	time.Sleep(delay + calm)
	s.noFailureSince(t, began)
}

const shared = `
drain: {delay: 3, timeout: 10}
gateway:
  service: {type: ClusterIP, ports: [{name: tls, port: %[1]d}]}
  listeners:
    - address: ":%[1]d"
      protocols: [sni]
      tls: {names: [gw.test, culvert-replicas.culvert-system.svc], key: gw, trust: replicas.test, protocols: [connect, connect-h2]}
  sharedSessions: {enabled: true, port: %[1]d, key: gw, trust: replicas.test, ids: ["spiffe://replicas.test/gw"]}
  extraVolumes: [{name: keys, secret: {secretName: gw}}]
  extraVolumeMounts: [{name: keys, mountPath: /keys, readOnly: true}]
  config:
    identity:
      keys: {gw: {certificateFile: /keys/tls.crt, keyFile: /keys/tls.key}}
      trust: {replicas.test: {caFile: /keys/ca.crt}}
    policies:
      - {name: edge, verb: register, action: allow, targets: {names: ["*.edge.test"]}, rules: [{sources: [{spiffe: ["spiffe://replicas.test/edge"]}]}]}
`

func issue(t *testing.T, ca *testca.CA, o testca.Options) *testca.Pair {
	t.Helper()
	pair, err := ca.Issue(o)
	if err != nil {
		t.Fatal(err)
	}
	return pair
}

// noFailureSince fails the test for each connection that began later and has failed, and unless
// each pod has served some.
func (s *site) noFailureSince(t *testing.T, when time.Time) {
	t.Helper()
	made, failed := s.clients.take()
	for _, f := range failed {
		if f.began.After(when) {
			t.Errorf("a connection by pod %s failed, %v later: %v", f.pod, f.began.Sub(when), f.err)
		}
	}
	for _, a := range s.lb.targets() {
		if made[a] == 0 {
			t.Errorf("pod %s has served none of %v", a, made)
		}
	}
	t.Logf("connections served, by pod: %v; %d failed", made, len(failed))
}

// listen opens a port of loopback that leads where the balancer does.
func (b *balancer) listen(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	var running sync.WaitGroup
	running.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			running.Go(func() {
				defer c.Close()
				to, _, err := b.dial(ctx)
				if err != nil {
					return
				}
				defer to.Close()
				defer context.AfterFunc(ctx, func() { _ = to.Close() })()
				running.Go(func() {
					_, _ = io.Copy(to, c)
					_ = to.Close()
				})
				_, _ = io.Copy(c, to)
			})
		}
	})
	t.Cleanup(func() {
		cancel()
		_ = l.Close()
		running.Wait()
	})
	return l.Addr().String()
}

// answersForReplicas is the cluster's DNS server, as far as the headless Service of the replicas
// goes.
func (s *site) answersForReplicas(t *testing.T, at netip.Addr) {
	t.Helper()
	started := make(chan struct{})
	server := &dns.Server{Addr: netip.AddrPortFrom(at, 53).String(), Net: "udp", NotifyStartedFunc: func() { close(started) }}
	server.Handler = dns.HandlerFunc(func(w dns.ResponseWriter, query *dns.Msg) {
		reply := new(dns.Msg).SetReply(query)
		ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), answerTime)
		defer cancel()
		list, err := s.Client.DiscoveryV1().EndpointSlices(system).List(ctx, metav1.ListOptions{LabelSelector: discoveryv1.LabelServiceName + "=culvert-replicas"})
		q := query.Question[0]
		switch {
		case err != nil:
			reply.Rcode = dns.RcodeServerFailure
		case !strings.EqualFold(q.Name, "culvert-replicas."+system+".svc.cluster.local."): // culvert mixes the case of letters
			reply.Rcode = dns.RcodeNameError
		default:
			for _, slice := range list.Items {
				for _, e := range slice.Endpoints {
					if a := net.ParseIP(e.Addresses[0]).To4(); a != nil && q.Qtype == dns.TypeA && (e.Conditions.Ready == nil || *e.Conditions.Ready) {
						reply.Answer = append(reply.Answer, &dns.A{Hdr: dns.RR_Header{Name: q.Name, Rrtype: dns.TypeA, Class: dns.ClassINET, Ttl: 5}, A: a})
					}
				}
			}
		}
		_ = w.WriteMsg(reply)
	})
	failed := make(chan error, 1)
	go func() { failed <- server.ListenAndServe() }()
	select {
	case err := <-failed:
		t.Fatal(err)
	case <-started:
	}
	t.Cleanup(func() {
		_ = server.Shutdown()
		<-failed
	})
}
