// Package cluster runs real Kubernetes clusters for tests, without containers:
// etcd, kube-apiserver and kube-controller-manager as processes, and pods as
// processes, each with a network namespace and a root directory of its own.
//
//	func TestMain(m *testing.M) { cluster.Main(m) }
//
//	func TestEcho(t *testing.T) {
//		c := cluster.Start(t, cluster.Options{})
//		c.Apply(t, manifests)                      // Deployments, Services, any YAML
//		c.WaitReady(t, time.Minute, "default")     // or c.Wait for anything else
//		c.RunCulvert(t, "gateway", "--kubeconfig", c.ServiceAccountKubeconfig(t, "default", "culvert"))
//		c.ExpireWatches(t)                         // or StopAPIServer and StartAPIServer
//	}
//
// # Where it runs
//
// Main runs the tests as a child in network, mount and process namespaces of
// their own, the sandbox: the machine's network is not touched, and nothing
// outlives the tests, however they end. It needs root and ip(8). The sandbox
// has no way out: programs are built, and modules loaded, before it is entered.
// In it, the test itself is where a gateway on a virtual machine would be: it
// reaches the API servers and the pods of all clusters, at their addresses. A
// Machine is a place that does not reach the pods.
//
// The first run builds Kubernetes, which takes minutes; Go's cache keeps it.
//
// # Pods
//
// What a container runs is chosen by the last word of its image's repository:
// echo-basic is the server of the Gateway API's conformance suite (RunEcho makes
// a Deployment and a Service of it), coredns a small DNS server, inspect a server
// that tells of the pod it is in, culvert this tree's culvert, and Options.Images
// adds more.
// Containers get their volumes (Secrets and ConfigMaps follow their objects),
// variables, user, host name, read-only root, init containers, probes, preStop
// hooks and grace; ServiceAccount tokens are real and bound to the pod. A pod
// without a readiness probe is ready when its ports are bound. Container images
// don't matter otherwise, and neither do resources, capabilities or seccomp.
//
// Nodes are objects only: their pods share one network, and their addresses are
// the sandbox's. ClusterIPs lead somewhere only with Options.Proxy, and nothing
// enforces NetworkPolicies. Pods reach the API server by the variables that
// client-go reads, and have no DNS but what dnsConfig or Options.ClusterDNS says.
//
// # Several clusters
//
// Each has addresses of its own: 10.244.0.0/16 for the pods of the first and
// 10.245.0.0/16 of the second. Their pods don't reach each other unless Connect
// lets them.
package cluster
