package cluster

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/client-go/discovery/cached/memory"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/restmapper"
)

// Options say what differs from the usual cluster; the zero value is that.
type Options struct {
	// Name is that of the cluster in logs: "cluster1", "cluster2", if empty.
	Name string
	// Nodes of the cluster, one if empty.
	Nodes []Node
	// Images says what runs for the last word of an image's repository, beside
	// echo-basic, coredns and culvert.
	Images map[string]Image
	// GatewayAddresses is how many addresses of the sandbox a gateway out of
	// the cluster may bind, 250 at most; they are in Cluster.GatewayAddresses.
	GatewayAddresses int
	// Proxy makes the addresses of Services lead to their pods, as kube-proxy
	// does, for IPv4 and with the program nft: ClusterIPs, externalIPs, those of
	// load balancers, and NodePorts. Who comes from a pod is seen as the sandbox.
	Proxy bool
	// ClusterDNS is the name server of the pods with dnsPolicy ClusterFirst, if
	// it is set.
	ClusterDNS netip.Addr
	// NoCRDs leaves out the resources of the Gateway API and of multi-cluster
	// services.
	NoCRDs bool
	// TokenIssuer is the issuer of ServiceAccount tokens; "" means a name of the
	// cluster's own that leads nowhere in the sandbox. Clients find the keys by
	// the URL of an API server.
	TokenIssuer string
	// APIServerFlags are given to kube-apiserver beside the harness' own.
	APIServerFlags []string
}

// A Node is a place for pods. All of them share the cluster's one network.
type Node struct {
	Name   string            // node1, node2 if empty
	Zone   string            // the label topology.kubernetes.io/zone
	Labels map[string]string // further labels
}

// An Image is what a container runs instead of one.
type Image struct {
	Path string   // the program on this machine, static; the container has it as /NAME
	Args []string // its arguments when the pod gives neither command nor args
	UID  int64    // of the image's USER, 0 for root
}

// A Cluster is a control plane and pods, all in the sandbox of Main.
type Cluster struct {
	Name string
	Dir  string // with the logs and kubeconfig files

	// PodCIDR and ServiceCIDR are 10.244.0.0/16 and 10.96.0.0/16 in the first
	// cluster, 10.245 and 10.97 in the second. The other ones are of IPv6.
	PodCIDR, ServiceCIDR   netip.Prefix
	PodCIDR6, ServiceCIDR6 netip.Prefix

	// APIServer is the server's URL, the same after a restart.
	APIServer string
	// GatewayAddresses can be bound in the sandbox, and reached from pods.
	GatewayAddresses []netip.Addr

	// REST, Client and Dynamic are of the administrator, without limits of rate.
	REST    *rest.Config
	Client  kubernetes.Interface
	Dynamic dynamic.Interface

	opts    Options
	index   int
	bridge  string
	ca      []byte
	token   string
	mapper  *restmapper.DeferredDiscoveryRESTMapper
	stop    context.CancelFunc // of what the harness itself runs
	agents  sync.WaitGroup
	kubelet *kubelet

	mu         sync.Mutex // guards the following
	tokenKeys  []string   // files; the first one signs tokens of ServiceAccounts
	etcd       *Process
	apiserver  *Process
	controller *Process
	others     []*Process // of RunCulvert and Run
}

// taken are the numbers of the clusters that run.
var (
	takenMu sync.Mutex
	taken   []int
)

// Start runs a cluster until the test ends, and returns when its API server and
// controllers serve and its resources are known. The test fails at once if it
// doesn't start. Logs are kept when the test has failed, and it says where.
func Start(t testing.TB, opts Options) *Cluster {
	t.Helper()
	if os.Getenv(inside) == "" {
		t.Fatal("cluster: TestMain must call cluster.Main")
	}
	c := &Cluster{opts: opts, index: takeIndex()}
	c.Name = opts.Name
	if c.Name == "" {
		c.Name = fmt.Sprintf("cluster%d", c.index+1)
	}
	t.Cleanup(func() { c.close(t) })
	if err := c.start(t.Context()); err != nil {
		t.Fatalf("cluster %s: %v", c.Name, err)
	}
	return c
}

func takeIndex() int {
	takenMu.Lock()
	defer takenMu.Unlock()
	n := 0
	for slices.Contains(taken, n) {
		n++
	}
	taken = append(taken, n)
	return n
}

// start makes the network and then what runs in it.
func (c *Cluster) start(ctx context.Context) error {
	var err error
	if c.Dir, err = os.MkdirTemp("", "culvert-cluster-"); err != nil {
		return err
	}
	for _, d := range []string{c.logs(), c.scratch()} {
		if err := os.Mkdir(d, 0o755); err != nil {
			return err
		}
	}
	if err := unix.Mount("tmpfs", c.scratch(), "tmpfs", 0, "mode=755"); err != nil {
		return fmt.Errorf("mounting %s: %w", c.scratch(), err)
	}
	i := byte(c.index)
	c.PodCIDR = netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 244 + i}), 16)
	c.ServiceCIDR = netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 96 + i}), 16)
	c.PodCIDR6 = netip.MustParsePrefix(fmt.Sprintf("fd00:10:%d::/64", 244+int(i)))
	c.ServiceCIDR6 = netip.MustParsePrefix(fmt.Sprintf("fd00:10:%d::/112", 96+int(i)))
	c.bridge = fmt.Sprintf("pods%d", c.index+1)
	host, host6 := nth(c.PodCIDR, 1), nth(c.PodCIDR6, 1)
	if err := newBridge(c.bridge, netip.PrefixFrom(host, 16), netip.PrefixFrom(host6, 64)); err != nil {
		return err
	}
	for n := range c.opts.GatewayAddresses {
		a := nth(c.PodCIDR, 255<<8+1+n)
		if err := ip(fmt.Sprintf("addr add %s/32 dev lo", a)); err != nil {
			return err
		}
		c.GatewayAddresses = append(c.GatewayAddresses, a)
	}
	c.APIServer = fmt.Sprintf("https://%s", netip.AddrPortFrom(host, 6443))
	if c.ca, c.token, err = writeCredentials(c.Dir, host, host6, nth(c.ServiceCIDR, 1)); err != nil {
		return err
	}
	c.REST = c.config(c.token)
	if c.Client, err = kubernetes.NewForConfig(c.REST); err != nil {
		return err
	}
	if c.Dynamic, err = dynamic.NewForConfig(c.REST); err != nil {
		return err
	}
	c.mapper = restmapper.NewDeferredDiscoveryRESTMapper(memory.NewMemCacheClient(c.Client.Discovery()))
	c.tokenKeys = []string{filepath.Join(c.Dir, "sa.key")}
	if err := c.startControlPlane(ctx); err != nil {
		return err
	}
	agents, stop := context.WithCancel(context.WithoutCancel(ctx))
	c.stop = stop
	if err := c.startKubelet(agents); err != nil {
		return err
	}
	if c.opts.Proxy {
		if err := c.startProxy(agents); err != nil {
			return err
		}
	}
	if c.opts.NoCRDs {
		return nil
	}
	return c.installCRDs(ctx)
}

// config is a client's configuration for a bearer token.
func (c *Cluster) config(token string) *rest.Config {
	return &rest.Config{
		Host:            c.APIServer,
		BearerToken:     token,
		TLSClientConfig: rest.TLSClientConfig{CAData: c.ca},
		QPS:             -1,
		UserAgent:       "culvert-cluster-harness",
	}
}

func (c *Cluster) logs() string { return filepath.Join(c.Dir, "logs") }

// scratch is in memory, and so is gone with the sandbox.
func (c *Cluster) scratch() string { return filepath.Join(c.Dir, "scratch") }

// close ends everything and gives the number back.
func (c *Cluster) close(t testing.TB) {
	c.mu.Lock()
	others := c.others
	c.others = nil
	c.mu.Unlock()
	for _, p := range others {
		p.Stop(5 * time.Second)
	}
	if c.stop != nil {
		c.stop()
		c.agents.Wait()
	}
	for _, p := range []*Process{c.controller, c.apiserver, c.etcd} {
		if p != nil {
			p.Kill()
		}
	}
	_ = unix.Unmount(c.scratch(), unix.MNT_DETACH)
	if c.bridge != "" {
		if err := ip("link del " + c.bridge); err != nil {
			t.Error(err)
		}
	}
	for _, a := range c.GatewayAddresses {
		_ = ip(fmt.Sprintf("addr del %s/32 dev lo", a))
	}
	takenMu.Lock()
	taken = slices.DeleteFunc(taken, func(n int) bool { return n == c.index })
	takenMu.Unlock()
	if t.Failed() {
		t.Logf("cluster %s: the logs are in %s", c.Name, c.logs())
		for _, p := range []*Process{c.apiserver, c.controller} {
			if p != nil && p.ExitCode() != 137 {
				t.Logf("%s ended by itself:\n%s", p.Name, p.Tail(20))
			}
		}
		return
	}
	if err := os.RemoveAll(c.Dir); err != nil {
		t.Error(err)
	}
}
