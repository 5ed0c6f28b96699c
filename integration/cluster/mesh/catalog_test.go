package mesh_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"culvert.dev/integration/cluster"
	"culvert.dev/internal/testca"
)

// One gateway of the east has a kubeconfig of the west's cluster and keeps ServiceImports. Another
// one has the catalog of the west's gateway instead, and no access to its cluster. Both know the
// same services, with the same ports, and answer DNS alike, as services come and go.
func TestCatalogsAndImportsAgree(t *testing.T) {
	west := &side{Cluster: cluster.Start(t, cluster.Options{Name: "west", GatewayAddresses: 1})}
	east := &side{Cluster: cluster.Start(t, cluster.Options{Name: "east", GatewayAddresses: 2})}
	for _, s := range []*side{west, east} {
		s.Apply(t, cluster.Manifests(t, fmt.Sprintf("cluster: %s\ndiscovery: {clusters: culvert-system}\nmultiCluster: {enabled: true}\ngateway: {enabled: false}\n", s.Name)))
		s.Apply(t, client)
	}
	west.Apply(t, fmt.Sprintf(entrance, west.Name, west.gateway()))
	east.knows(t, west)
	offer := func(s *side, name, spec string, annotations string, ready bool) {
		s.Apply(t, fmt.Sprintf(offered, name, annotations, spec))
		if ready {
			port := "{name: https, port: 8443}"
			if strings.Contains(spec, "metrics") {
				port += ", {name: metrics, port: 9090}"
			}
			s.Apply(t, fmt.Sprintf(slice, name, nth(s.PodCIDR.Addr(), 9), port))
		}
	}
	const https = "ports: [{name: https, port: 443, targetPort: 8443}]"
	offer(west, "web", "{"+https+"}", "{}", true)
	offer(west, "several", "{ports: [{name: https, port: 443}, {name: metrics, port: 9090}, {name: dns, port: 53, protocol: UDP}]}", "{}", true)
	offer(west, "members", "{clusterIP: None, "+https+"}", "{}", true)
	offer(west, "idle", "{"+https+"}", "{}", false)
	offer(west, "both", "{"+https+"}", "{}", true)
	offer(east, "both", "{"+https+"}", "{}", true)
	offer(west, "inner", "{"+https+"}", "{culvert.dev/networks: west}", true) // is for the west alone
	offer(west, "secret", "{"+https+"}", "{}", true)                          // is hidden from the east by a policy
	offer(west, "external", "{type: ExternalName, externalName: example.com}", "{}", false)

	dir := t.TempDir()
	credentials(t, dir)
	west.culvert(t, dir, "gateway", fmt.Sprintf(`
cluster: west
network: west
listeners:
  - address: %[1]s:443
    protocols: [sni, connect]
    tls: {names: [gw.west.example], key: gw-west, trust: [east.example], protocols: [connect-h2]}
admin: unix:%[3]s/gateway.sock
identity:
  keys: {gw-west: {certificateFile: %[3]s/gw-west.crt, keyFile: %[3]s/gw-west.key}}
  trust: {east.example: {caFile: %[3]s/east/ca.crt}}
networks: [{name: east, cidrs: ["%[1]s/32"]}] # the gateways of the east come from this machine
kubernetes:
  kubeconfig: %[2]s
  discovery: {exportedTo: [east]}
  multiCluster: true
  leader: culvert-system/culvert
peers: [{name: east, ids: ["spiffe://east.example/gw/*"], zones: ["*.svc.east.mesh.internal"]}]
policies:
  - {name: all-but-secret, verb: catalog, tier: baseline, action: allow, rules: [{sources: [{trustDomains: [east.example]}]}]}
  - {name: secret, verb: catalog, action: deny, targets: {names: [secret.shop.svc.clusterset.local]}, rules: [{sources: [{trustDomains: [east.example]}]}]}
`, west.gateway(), west.ServiceAccountKubeconfig(t, "culvert-system", "culvert"), dir))

	byImports := &view{name: "imports", in: east, at: east.GatewayAddresses[0], admin: dir + "/imports.sock"}
	byCatalog := &view{name: "catalog", in: east, at: east.GatewayAddresses[1], admin: dir + "/catalog.sock"}
	const configuration = `
cluster: east
network: east
networks: [{name: east, cidrs: ["%[5]s"]}]
listeners: [{address: "%[1]s:443", protocols: [sni]}]
dns: {listen: ["udp://%[1]s:53"]}
admin: unix:%[2]s
kubernetes:
  kubeconfig: %[3]s
  discovery: {%[4]s}
  multiCluster: true
  leader: culvert-system/culvert
`
	kubeconfig := east.ServiceAccountKubeconfig(t, "culvert-system", "culvert")
	east.culvert(t, dir, byImports.name, fmt.Sprintf(configuration, byImports.at, byImports.admin, kubeconfig, "clusters: culvert-system", east.PodCIDR))
	east.Wait(t, patience, func(ctx context.Context) error { // it leads, and writes the imports
		_, err := east.Dynamic.Resource(serviceImports).Namespace("shop").Get(ctx, "web", metav1.GetOptions{})
		return err
	})
	east.culvert(t, dir, byCatalog.name, fmt.Sprintf(configuration, byCatalog.at, byCatalog.admin, kubeconfig, "", east.PodCIDR)+fmt.Sprintf(`
identity:
  keys: {gw-east: {certificateFile: %[2]s/gw-east.crt, keyFile: %[2]s/gw-east.key}}
  trust: {west.example: {caFile: %[2]s/west/ca.crt}}
peers:
  - name: west
    gateways:
      - address: %[1]s:443
        transports: [{protocol: sni}, {protocol: connect-h2, tls: true, key: gw-east, serverName: gw.west.example}]
    ids: ["spiffe://west.example/gw/*"]
    exposedTo: [east]
    zones: ["*.svc.west.mesh.internal", "*.svc.clusterset.local"]
`, west.gateway(), dir))

	east.WaitReady(t, patience, "shop")
	byImports.pod, byCatalog.pod = &east.pods(t, "app=client")[0], &east.pods(t, "app=client")[0]
	agree := func(when string, want map[string]entry) {
		t.Helper()
		east.Wait(t, patience, func(ctx context.Context) error {
			imports, err := importsOf(ctx, east)
			if err != nil {
				return err
			}
			for _, v := range []*view{byImports, byCatalog} {
				services, err := v.services(ctx)
				if err != nil {
					return err
				}
				for name, w := range want {
					known, answer := w.kind, w.answer
					if w.hidden || v == byCatalog && w.notOffered {
						known, answer = "", ""
					}
					if v == byImports && w.idle {
						answer = ""
					}
					got, err := v.answer(ctx, t, name)
					switch {
					case err != nil:
						return fmt.Errorf("%s: the gateway with the %s is asked for %s: %w", when, v.name, name, err)
					case imports[name] != w.kind:
						return fmt.Errorf("%s: %s has the ServiceImport %q, want %q", when, name, imports[name], w.kind)
					case services[name] != known:
						return fmt.Errorf("%s: %s is %q for the gateway with the %s, want %q", when, name, services[name], v.name, known)
					case got != answer:
						return fmt.Errorf("%s: DNS of the gateway with the %s says %q of %s, want %q", when, v.name, got, name, answer)
					}
				}
			}
			return nil
		})
	}
	there := west.gateway().String() + " https=443"
	want := map[string]entry{
		"web":      {kind: "ClusterSetIP 443", answer: there},
		"several":  {kind: "ClusterSetIP 443 9090", answer: there + " metrics=443"},
		"members":  {kind: "Headless 443", answer: there},
		"idle":     {kind: "ClusterSetIP 443", answer: there, idle: true},
		"both":     {kind: "ClusterSetIP 443", answer: nth(east.PodCIDR.Addr(), 9).String() + " https=8443"},
		"inner":    {kind: "ClusterSetIP 443", hidden: true},
		"secret":   {kind: "ClusterSetIP 443", answer: there, notOffered: true},
		"external": {},
		"late":     {},
	}
	agree("at first", want)

	// One is no longer exported, one is deleted, one is new, one is opened to the east, and one
	// gets a port.
	west.Delete(t, "apiVersion: multicluster.x-k8s.io/v1beta1\nkind: ServiceExport\nmetadata: {name: members, namespace: shop}\n")
	west.Delete(t, fmt.Sprintf(offered, "several", "{}", "{}"))
	offer(west, "late", "{clusterIP: None, "+https+"}", "{}", true)
	west.annotate(t, "shop", "inner", "culvert.dev/networks", "west,east")
	offer(west, "web", "{ports: [{name: https, port: 443}, {name: metrics, port: 9090}]}", "{}", true)
	want["members"], want["several"] = entry{}, entry{}
	want["late"] = entry{kind: "Headless 443", answer: there}
	want["inner"] = entry{kind: "ClusterSetIP 443", answer: there}
	want["web"] = entry{kind: "ClusterSetIP 443 9090", answer: there + " metrics=443"}
	agree("after changes", want)
}

// An entry is a service of the cluster set.
type entry struct {
	kind       string // and its TCP ports: of the ServiceImport, and for both gateways
	answer     string // of both DNS servers
	hidden     bool   // the Service is not for this network: the ServiceImport leads nowhere
	notOffered bool   // a policy keeps it out of the catalog; a kubeconfig shows it all the same
	idle       bool   // it has no endpoints, which the catalog does not tell
}

// importsOf returns what the ServiceImports of a cluster say.
func importsOf(ctx context.Context, s *side) (map[string]string, error) {
	list, err := s.Dynamic.Resource(serviceImports).Namespace("shop").List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, err
	}
	all := map[string]string{}
	for i := range list.Items {
		spec, _, _ := unstructured.NestedMap(list.Items[i].Object, "spec")
		text := fmt.Sprint(spec["type"])
		ports, _, _ := unstructured.NestedSlice(spec, "ports")
		for _, p := range ports {
			if m, _ := p.(map[string]any); m["protocol"] == "TCP" { // gateways carry no other between clusters
				text += fmt.Sprintf(" %v", m["port"])
			}
		}
		all[list.Items[i].GetName()] = text
	}
	return all, nil
}

const offered = `
apiVersion: v1
kind: Service
metadata: {name: %[1]s, namespace: shop, annotations: %[2]s}
spec: %[3]s
---
apiVersion: multicluster.x-k8s.io/v1beta1
kind: ServiceExport
metadata: {name: %[1]s, namespace: shop}
`

const slice = `
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: %[1]s, namespace: shop, labels: {kubernetes.io/service-name: %[1]s}}
addressType: IPv4
endpoints: [{addresses: [%[2]s], hostname: first, conditions: {ready: true}}]
ports: [%[3]s]
`

// nth returns the address n after a.
func nth(a netip.Addr, n int) netip.Addr {
	for range n {
		a = a.Next()
	}
	return a
}

// credentials makes the CA of each site in dir, and the key of its gateway.
func credentials(t *testing.T, dir string) {
	t.Helper()
	for _, site := range []string{"west", "east"} {
		ca, err := testca.New(site+".example", nil)
		if err == nil {
			err = ca.Save(filepath.Join(dir, site))
		}
		if err != nil {
			t.Fatal(err)
		}
		pair, err := ca.Issue(testca.Options{SPIFFEID: "spiffe://" + site + ".example/gw/1", DNSNames: []string{"gw." + site + ".example"}})
		if err == nil {
			err = pair.Save(dir, "gw-"+site)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
}

// culvert runs a gateway out of the cluster.
func (s *side) culvert(t *testing.T, dir, name, config string) {
	t.Helper()
	file := filepath.Join(dir, name+".yaml")
	if err := os.WriteFile(file, []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	p := s.RunCulvert(t, "gateway", "--config", file)
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("culvert %s of the %s:\n%s", name, s.Name, p.Tail(60))
		}
	})
}

// A view is what one gateway knows of the cluster set.
type view struct {
	name  string
	in    *side
	pod   *corev1.Pod
	at    netip.Addr // of its DNS server
	admin string     // its socket
}

// services returns what the gateway knows of the cluster set, as importsOf has it: what its own
// clients may reach.
func (v *view) services(ctx context.Context) (map[string]string, error) {
	out, err := exec.CommandContext(ctx, cluster.Program("culvert"), "registry", "ls", "--admin", "unix:"+v.admin, "-o", "json").CombinedOutput()
	if err != nil {
		return nil, fmt.Errorf("%w: %s", err, out)
	}
	all := map[string]string{}
	for dec := json.NewDecoder(bytes.NewReader(out)); dec.More(); {
		var e struct {
			Service struct {
				Name               string
				Exported, Headless bool
				ExposedTo          []string
				Ports              []int
			}
		}
		if err := dec.Decode(&e); err != nil {
			return nil, err
		}
		s := &e.Service
		if !s.Exported || len(s.ExposedTo) > 0 && !slices.Contains(s.ExposedTo, v.in.Name) {
			continue
		}
		text := "ClusterSetIP"
		if s.Headless {
			text = "Headless"
		}
		for _, p := range s.Ports {
			text += fmt.Sprintf(" %d", p)
		}
		name, _, _ := strings.Cut(s.Name, ".")
		all[name] = text
	}
	return all, nil
}

// answer is what the gateway's DNS server tells a pod of a service: its addresses, and which
// ports it has by the name "https" and "metrics"; "" where there is no such name.
func (v *view) answer(ctx context.Context, t *testing.T, name string) (string, error) {
	r := net.Resolver{PreferGo: true, Dial: func(ctx context.Context, _, _ string) (conn net.Conn, err error) {
		inPod := v.in.InPod(t, v.pod, func() error {
			conn, err = (&net.Dialer{}).DialContext(ctx, "udp", netip.AddrPortFrom(v.at, 53).String())
			return err
		})
		return conn, inPod
	}}
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	name += ".shop.svc.clusterset.local."
	var none *net.DNSError
	addrs, err := r.LookupHost(ctx, name)
	if errors.As(err, &none) && none.IsNotFound {
		return "", nil
	}
	if err != nil {
		return "", err
	}
	slices.Sort(addrs)
	for _, port := range []string{"https", "metrics"} {
		_, records, err := r.LookupSRV(ctx, port, "tcp", name)
		if err != nil && (!errors.As(err, &none) || !none.IsNotFound) {
			return "", err
		}
		for _, s := range records {
			addrs = append(addrs, fmt.Sprintf("%s=%s%d", port, strings.TrimSuffix(s.Target, name), s.Port))
		}
	}
	return strings.Join(addrs, " "), nil
}
